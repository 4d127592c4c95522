from __future__ import annotations

import math

import pytest
import torch

from voxelfield.foundation.optimizers import exponential_decay
from voxelfield.grids.voxel_grid import cubic_voxels
from voxelfield.models.settings import stage_at
from voxelfield.settings import StageConfig, TrainerConfig


def test_exponential_decay_of_a_step_on_a_device_stays_there(device):
    step = torch.zeros((), dtype=torch.int64, device=device)
    factors = [exponential_decay(step.fill_(number), 7, 0.3) for number in range(8)]
    assert all(factor.device.type == device.type and factor.dtype == torch.float32 for factor in factors)
    expected = [0.3 ** (number / 7) for number in range(8)]
    assert torch.stack(factors).tolist() == pytest.approx(expected, rel=1e-6)


def test_rates_fall_to_zero_over_the_last_steps():
    factors = torch.stack([exponential_decay(torch.tensor(number), 10, 0.3, 0.4) for number in range(11)])
    expected = [0.3 ** (number / 10) * min(1, (10 - number) / 4) for number in range(11)]
    assert factors.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_stage_lasts_until_the_next_one_starts():
    stages = [StageConfig(0, 8), StageConfig(3, 16), StageConfig(4, 32)]
    assert [stage_at(stages, step) for step in range(7)] == [0, 0, 0, 1, 2, 2, 2]
    assert [stage_at(stages[:1], step) for step in (0, 1000)] == [0, 0]


def test_batches_are_small_early():
    shares = [TrainerConfig(steps=12, small_batches=0.5).batch_share(step) for step in range(12)]
    assert shares == [1 / 4] * 2 + [1 / 2] * 4 + [1] * 6
    assert TrainerConfig(steps=12, small_batches=0).batch_share(0) == 1


@pytest.mark.parametrize("resolution", [32, 100, 256])
@pytest.mark.parametrize("extent", [(2.0, 1.0, 4.0), (0.3, 0.7, 0.5), (10.0, 10.0, 1.0)])
def test_voxels_are_cubes_and_their_number_does_not_depend_on_the_box(extent, resolution):
    low = torch.tensor([-3.0, 1.0, 20.0])
    counts = cubic_voxels(torch.stack((low, low + torch.tensor(extent))), resolution)
    edges = [e / count for e, count in zip(extent, counts, strict=True)]
    # each count is rounded by at most a half
    slack = sum(0.5 / count for count in counts)
    assert max(edges) / min(edges) <= 1 + 2 * slack
    assert math.prod(counts) == pytest.approx(resolution**3, rel=1.5 * slack)
    order = sorted(range(3), key=lambda axis: extent[axis])
    assert [counts[axis] for axis in order] == sorted(counts)


def test_counts_follow_the_extents_exactly_where_they_can():
    assert cubic_voxels(torch.tensor([[0.0, 0.0, 0.0], [4.0, 2.0, 1.0]]), 16) == (32, 16, 8)


def test_the_thinnest_box_keeps_two_vertices():
    counts = cubic_voxels(torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1e-4]]), 8)
    assert counts[2] == 2
