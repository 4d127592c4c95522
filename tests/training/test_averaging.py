"""The average of the weights over the last steps."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from grid_models import model_of

from voxelfield import VoxelPyramid
from voxelfield.components.averaging import WeightAverage
from voxelfield.fields.decoders import SHDecoder
from voxelfield.fields.density import DensityActivation
from voxelfield.fields.field import RadianceField
from voxelfield.settings import OptimizerConfig, RatesConfig
from voxelfield.training.optimizer import Optimizers


@pytest.fixture
def field(device):
    decoder = SHDecoder(0, DensityActivation(10.0, 0.1))
    pyramid = VoxelPyramid((2, 4), decoder.channels, ((0, 0, 0), (1, 1, 1)), reduce="sum", device=device)
    return RadianceField(pyramid, decoder)


def average_of(field: RadianceField, **settings: int) -> WeightAverage:
    model = model_of(field)
    model.begin_training(SimpleNamespace(optimizer=Optimizers(model, OptimizerConfig(), RatesConfig())))
    return WeightAverage(model, **settings)


def fill(field: RadianceField, value: float) -> None:
    with torch.no_grad():
        for weight in field.parameters():
            weight.fill_(value)


def train(average: WeightAverage, field: RadianceField, steps: dict[int, float]) -> None:
    """Gives all weights these values after these numbers of steps."""
    for step, value in steps.items():
        fill(field, value)
        average.step_done(step)


def check_filled(field: RadianceField, value: float) -> None:
    for weight in field.parameters():
        torch.testing.assert_close(weight, torch.full_like(weight, value))


def test_it_is_the_exponential_average_of_every_tenth_step_near_the_end(field):
    average = average_of(field, steps=400, time_constant=20)
    train(average, field, {step: float(step) for step in range(1, 401)})
    expected = 300.0  # five time constants before the end it begins
    for step in range(310, 401, 10):
        expected += (1 - math.exp(-10 / 20)) * (step - expected)
    average.finish()
    check_filled(field, expected)


def test_without_a_time_constant_weights_stay_as_they_are(field):
    average = average_of(field, steps=20, time_constant=0)
    train(average, field, {step: float(step) for step in range(1, 21)})
    average.finish()
    assert all((weight == 20).all() for weight in field.parameters())


def test_copies_that_are_read_follow(field):
    average = average_of(field, steps=20, time_constant=100)
    copies = field.grid.enable_copies(torch.float16)
    train(average, field, {10: 10.0, 20: 20.0})
    average.finish()
    for copy, weight in zip(copies, field.grid.levels, strict=True):
        assert 10 < float(weight.detach().max()) < 20
        torch.testing.assert_close(copy, weight.half())


def test_it_begins_anew_where_grids_change_their_shape(field):
    average = average_of(field, steps=40, time_constant=100)
    train(average, field, {10: 1.0})
    field.grid.refit(((0, 0, 0), (1, 1, 0.5)))
    average.stage_begun()
    train(average, field, {20: 3.0})
    average.finish()
    check_filled(field, 3.0)


def test_a_saved_average_goes_on(field):
    first, second = (average_of(field, steps=40, time_constant=100) for _ in range(2))
    train(first, field, {10: 1.0})
    second.load_state_dict(first.state_dict())
    train(second, field, {20: 2.0})
    second.finish()
    check_filled(field, 1 + (1 - math.exp(-10 / 100)))


@pytest.mark.parametrize("settings", [{"steps": 40, "time_constant": 0}, {"steps": 4000, "time_constant": 100}])
def test_an_average_that_this_run_would_not_have_begun_is_left_alone(field, settings):
    saved = average_of(field, steps=40, time_constant=100)
    train(saved, field, {10: 1.0})
    resumed = average_of(field, **settings)
    resumed.load_state_dict(saved.state_dict())
    train(resumed, field, {11: 2.0})
    resumed.finish()
    assert all((weight == 2).all() for weight in field.parameters())


def test_the_last_step_counts_whatever_its_number(field):
    average = average_of(field, steps=13, time_constant=1)
    train(average, field, {13: 5.0})
    fill(field, 6.0)
    average.finish()
    assert all((weight == 5).all() for weight in field.parameters())
