from __future__ import annotations

import pytest
import torch

from voxelfield import VoxelGrid
from voxelfield.decoders import DensityActivation, MLPDecoder, SHDecoder
from voxelfield.fields import RadianceField
from voxelfield.training.config import OptimizerConfig
from voxelfield.training.optimizer import make_optimizer, scale_learning_rates

CONFIG = OptimizerConfig(grid_lr=0.2, network_lr=0.002, final_lr=0.1, betas=(0.8, 0.95), eps=1e-12)


def make_field(kind: str, device="cpu") -> RadianceField:
    density = DensityActivation(200.0, 0.1)
    decoder = MLPDecoder(4, 8, 1, 1, density) if kind == "mlp" else SHDecoder(1, density)
    return RadianceField(VoxelGrid(4, decoder.channels, ((0, 0, 0), (1, 1, 1)), init_std=0.1), decoder).to(device)


def test_grid_and_network_have_their_own_rates():
    field = make_field("mlp")
    optimizer = make_optimizer(field, CONFIG)
    grid, network = optimizer.param_groups
    assert [id(p) for p in grid["params"]] == [id(field.grid.features)]
    assert [id(p) for p in network["params"]] == [id(p) for p in field.decoder.parameters()]
    assert (grid["lr"], network["lr"]) == (0.2, 0.002)
    for group in optimizer.param_groups:
        assert group["betas"] == (0.8, 0.95)
        assert group["eps"] == 1e-12


def test_every_parameter_is_trained_once():
    field = make_field("mlp")
    held = [id(p) for group in make_optimizer(field, CONFIG).param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in field.parameters())


def test_a_decoder_without_parameters_has_no_group():
    field = make_field("sh")
    (group,) = make_optimizer(field, CONFIG).param_groups
    assert group["params"][0] is field.grid.features


def test_scaling_starts_from_the_undecayed_rates():
    optimizer = make_optimizer(make_field("mlp"), CONFIG)
    for factor in (0.5, 0.25, 1.0):
        scale_learning_rates(optimizer, factor)
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.2 * factor, 0.002 * factor])


def test_the_first_step_moves_by_the_scaled_rate(device):
    field = make_field("mlp", device)
    optimizer = make_optimizer(field, CONFIG)
    before = field.grid.features.detach().clone()
    bias = field.decoder.network[-1].bias.detach().clone()
    scale_learning_rates(optimizer, 0.5)
    (field.grid.features.sum() - field.decoder.network[-1].bias.sum()).backward()
    optimizer.step()
    # Adam's first step is the rate times the gradient's sign
    torch.testing.assert_close(field.grid.features.detach() - before, torch.full_like(before, -0.1))
    torch.testing.assert_close(field.decoder.network[-1].bias.detach() - bias, torch.full_like(bias, 0.001))


def test_the_undecayed_rates_survive_a_checkpoint():
    optimizer = make_optimizer(make_field("mlp"), CONFIG)
    scale_learning_rates(optimizer, 0.01)
    resumed = make_optimizer(make_field("mlp"), CONFIG)
    resumed.load_state_dict(optimizer.state_dict())
    scale_learning_rates(resumed, 1.0)
    assert [group["lr"] for group in resumed.param_groups] == [0.2, 0.002]
