"""Optimizers: rates of its own for grid and network, on the device, and the same steps after a checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from grid_models import model_of, optimizers_of

from voxelfield import VoxelGrid, VoxelPyramid
from voxelfield.components.exposure import AffineExposure
from voxelfield.fields.decoders import ColorMLPDecoder, SHDecoder
from voxelfield.fields.density import DensityActivation
from voxelfield.fields.field import RadianceField
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.settings import OptimizerConfig, RatesConfig
from voxelfield.training import optimizer as optimizer_module

BOX = ((0, 0, 0), (1, 1, 1))
RATES = RatesConfig(grid=1.0, network=1.0, betas=(0.8, 0.95))


def make_config(**changes) -> OptimizerConfig:
    settings = {"grid_lr": 0.2, "network_lr": 0.002, "eps": 1e-12, "grid_weight_decay": 0.0, "skip_untouched": False}
    return OptimizerConfig(**{**settings, **changes})


def make_field(kind: str, device="cpu") -> RadianceField:
    density = DensityActivation(200.0, 0.1)
    decoder = ColorMLPDecoder(4, 8, 1, 1, density) if kind == "dense" else SHDecoder(1, density)
    return RadianceField(VoxelGrid(4, decoder.channels, BOX, init_std=0.1), decoder).to(device)


def give_gradients(field: RadianceField) -> None:
    (field.grid.features.sum() - field.decoder.network[-1].bias.sum()).backward()


def values(field: RadianceField) -> tuple[torch.Tensor, torch.Tensor]:
    return field.grid.features.detach().clone(), field.decoder.network[-1].bias.detach().clone()


def test_grid_and_network_have_their_own_settings():
    field = make_field("dense")
    optimizers = optimizers_of(
        model_of(field), make_config(grid_weight_decay=0.3, network_weight_decay=0.01, skip_untouched=True), RATES
    )
    (grid,), (network,) = optimizers.grid.param_groups, optimizers.networks["network"].param_groups
    (matrices,) = optimizers.networks["matrices"].param_groups
    (hidden, *others) = field.decoder.parameters()
    assert [id(p) for p in grid["params"]] == [id(field.grid.features)]
    assert [id(p) for p in matrices["params"]] == [id(hidden)]
    assert [id(p) for p in network["params"]] == [id(p) for p in others]
    assert optimizers.rates() == {"grid": pytest.approx(0.2), "network": pytest.approx(0.002)}
    assert (matrices["momentum"], matrices["weight_decay"]) == (0.8, 0.01)
    for group in (grid, network):
        assert group["betas"] == (0.8, 0.95)
        assert group["eps"] == 1e-12
    assert (grid["weight_decay"], network["weight_decay"]) == (0.3, 0.01)
    assert grid["skip_untouched"] is True


def test_a_run_multiplies_the_rates_of_its_field():
    optimizers = optimizers_of(model_of(make_field("dense")), make_config(), RatesConfig(grid=1.5, network=2.0))
    assert optimizers.rates() == {"grid": pytest.approx(0.3), "network": pytest.approx(0.004)}


@pytest.mark.parametrize("kind", ["dense", "sh"])
def test_exposures_have_a_rate_of_their_own_and_are_updated(device, kind):
    field, exposure = make_field(kind, device), AffineExposure(torch.eye(4).repeat(2, 1, 1)).to(device)
    parameters = list(exposure.parameters())
    groups = {"exposure": (parameters, 0.25)}
    optimizers = optimizers_of(
        model_of(field), make_config(network_weight_decay=0.5), RatesConfig(network=2.0), **groups
    )
    assert optimizers.rates()["exposure"] == 0.25
    optimizers.scale(0.5)
    (field.grid.features.sum() + exposure.log_gain[0].sum() - exposure.offset[1].sum()).backward()
    optimizers.step()
    expected = torch.tensor([-0.125, 0.0], device=device)[:, None].expand(2, 3)
    torch.testing.assert_close(exposure.log_gain.detach(), expected)
    torch.testing.assert_close(exposure.offset.detach(), -expected.flip(0))
    assert exposure.offset.grad is None
    again = optimizers_of(model_of(field), make_config(), RATES, exposure=(parameters, 0.75))
    again.load_state_dict(copy.deepcopy(optimizers.state_dict()))
    assert again.rates()["exposure"] == 0.75
    assert float(again.others["exposure"].state[exposure.offset]["step"]) == 1


def test_a_decoder_without_parameters_has_no_optimizer():
    optimizers = optimizers_of(model_of(make_field("sh")), make_config(), RATES)
    assert optimizers.networks == {}
    assert list(optimizers.rates()) == ["grid"]
    assert optimizers.state_dict()["network"] is None
    assert set(optimizers.state_dict()) == {"grid", "network"}


def test_the_first_step_moves_by_the_scaled_rate_and_clears_gradients(device):
    field = make_field("dense", device)
    optimizers = optimizers_of(model_of(field), make_config(), RATES)
    before = values(field)
    optimizers.scale(0.1)
    optimizers.scale(torch.tensor(0.5, device=device))  # of the undecayed rates, not of the present ones
    give_gradients(field)
    optimizers.step()
    # Adam's first step is the rate times the gradient's sign
    for after, old, change in zip(values(field), before, (-0.1, 0.001), strict=True):
        torch.testing.assert_close(after - old, torch.full_like(old, change))
    assert not field.grid.features.grad.any()
    assert all(parameter.grad is None for parameter in field.decoder.parameters())


def test_weight_decay_is_decoupled(device):
    field = make_field("dense", device)
    optimizers = optimizers_of(model_of(field), make_config(grid_weight_decay=0.5, network_weight_decay=10.0), RATES)
    with torch.no_grad():
        field.decoder.network[-1].bias.fill_(1.0)
    before = values(field)
    give_gradients(field)
    optimizers.step()
    for after, old, keep, change in zip(
        values(field), before, (1 - 0.2 * 0.5, 1 - 0.002 * 10), (-0.2, 2e-3), strict=True
    ):
        torch.testing.assert_close(after, keep * old + change)


def test_harmonics_beyond_the_constant_one_learn_at_a_share_of_the_rate(device):
    field = make_field("sh", device)
    optimizers = optimizers_of(model_of(field), make_config(view_lr_factor=0.25, grid_weight_decay=0.5), RATES)
    optimizers.scale(0.5)
    before = field.grid.features.detach().clone()
    field.grid.features.sum().backward()
    optimizers.step()
    # density, then for each colour the constant harmonic and three of the first band
    rates = 0.1 * torch.tensor([1.0, *[1.0, 0.25, 0.25, 0.25] * 3], device=device)
    torch.testing.assert_close(field.grid.features.detach(), before * (1 - 0.5 * rates) - rates)


def test_levels_without_view_dependence_learn_at_the_full_rate(device):
    decoder = SHDecoder(1, DensityActivation(200.0, 0.1))
    stored = (0, 1, 5, 9)
    grid = VoxelPyramid((2, 4), 13, BOX, reduce="sum", level_channels=[None, stored], device=device)
    field, config = RadianceField(grid, decoder).to(device), {"grid_weight_decay": 0.0}
    optimizers = optimizers_of(model_of(field), make_config(view_lr_factor=0.25, **config), RATES)

    def step_with(optimizers):
        before = [level.detach().clone() for level in grid.levels]
        sum(level.sum() for level in grid.levels).backward()
        optimizers.step()
        return [old - level.detach() for old, level in zip(before, grid.levels, strict=True)]

    for factor, following in ((0.25, optimizers), (0.5, None)):
        if following is None:
            following = optimizers_of(model_of(field), make_config(view_lr_factor=factor, **config), RATES)
            following.load_state_dict(copy.deepcopy(optimizers.state_dict()))
        coarse, fine = step_with(following)
        rates = 0.2 * torch.tensor([1.0, *[1.0, factor, factor, factor] * 3], device=device)
        torch.testing.assert_close(coarse, rates.expand_as(coarse))
        torch.testing.assert_close(fine, torch.full_like(fine, 0.2))


def test_a_checkpoint_leaves_the_share_of_harmonics_as_configured(device):
    field = make_field("sh", device)
    optimizers = optimizers_of(model_of(field), make_config(view_lr_factor=0.25), RATES)
    field.grid.features.sum().backward()
    optimizers.step()
    for view_lr_factor in (1.0, 0.5):
        resumed = optimizers_of(model_of(field), make_config(view_lr_factor=view_lr_factor), RATES)
        resumed.load_state_dict(copy.deepcopy(optimizers.state_dict()))
        before = field.grid.features.detach().clone()
        field.grid.features.sum().backward()
        resumed.step()
        rates = 0.2 * torch.tensor([1.0, *[1.0, view_lr_factor, view_lr_factor, view_lr_factor] * 3], device=device)
        torch.testing.assert_close(field.grid.features.detach(), before - rates)


def test_a_share_is_refused_where_no_channel_is_for_the_direction_alone():
    expected = (
        "optimizer.view_lr_factor must be 1 for this ColorMLPDecoder, which has no channels for the viewing "
        "direction alone"
    )
    with pytest.raises(ValueError, match=f"{expected}, got 0.5"):
        optimizers_of(model_of(make_field("dense")), make_config(view_lr_factor=0.5), RATES)


def test_a_checkpoint_carries_moments_and_leaves_rates_as_configured(device):
    whole = make_field("dense", device)
    optimizers = optimizers_of(model_of(whole), make_config(), RATES)
    give_gradients(whole)
    optimizers.step()
    parts = copy.deepcopy(whole)
    state = copy.deepcopy(optimizers.state_dict())
    resumed = optimizers_of(model_of(parts), make_config(grid_lr=0.4, network_lr=0.004), RATES)
    resumed.load_state_dict(state)
    assert resumed.rates() == {"grid": pytest.approx(0.4), "network": pytest.approx(0.004)}
    for field, either, factor in ((whole, optimizers, 0.5), (parts, resumed, 0.25)):
        either.scale(factor)
        give_gradients(field)
        either.step()
    assert all(torch.equal(a, b) for a, b in zip(values(whole), values(parts), strict=True))
    assert float(resumed.grid.state[parts.grid.features]["step"]) == 2


def test_large_grids_are_updated_where_space_is_occupied(device):
    decoder = SHDecoder(0, DensityActivation(1.0, 0.1))
    field = RadianceField(VoxelGrid(51, decoder.channels, BOX), decoder).to(device)
    occupancy = OccupancyGrid(8, BOX).to(device)
    occupancy.occupied.zero_()
    occupancy.occupied[0, 0, 0] = True
    optimizers = optimizers_of(model_of(field, occupancy=occupancy), make_config(), RATES)
    optimizers.attach()
    features = field.grid.features

    def step():
        features.grad += 1
        optimizers.step()

    step()
    assert (features[:5, :5, :5] != 0).all()
    assert not features[16:].any()
    # What waited outside must not count when space there becomes occupied.
    assert features.grad[16:].any()
    occupancy.occupied.fill_(True)
    optimizers.restrict()
    assert not features.grad.any()
    step()
    assert (features != 0).all()


def test_small_grids_are_updated_whole(device):
    field = make_field("sh", device)
    occupancy = OccupancyGrid(8, BOX).to(device)
    occupancy.occupied.zero_()
    optimizers = optimizers_of(model_of(field, occupancy=occupancy), make_config(), RATES)
    optimizers.attach()
    before = field.grid.features.detach().clone()
    field.grid.features.grad += 1
    optimizers.step()
    assert (field.grid.features != before).all()


def test_copies_follow_the_grid(device):
    field = make_field("sh", device)
    optimizers = optimizers_of(model_of(field), make_config(), RATES, copies=torch.float16)
    optimizers.attach()
    points = torch.rand(20, 3, device=device)
    assert field.grid(points).dtype == torch.float16
    before = field.grid(points)
    field.grid.features.grad += 1
    optimizers.step()
    torch.testing.assert_close(field.grid(points), before - 0.2, rtol=0, atol=2e-3)


def test_total_variation_is_added_where_large_levels_are_updated(device, monkeypatch):
    monkeypatch.setattr(optimizer_module, "_WORTH_LISTING", 0)
    pyramid = VoxelPyramid((24,), 2, ((0, 0, 0), (1, 1, 1)), init_range=1.0, device=device)
    decoder = ColorMLPDecoder(1, 8, 1, 1, DensityActivation(200.0, 0.1))
    occupancy = OccupancyGrid(4, ((0, 0, 0), (1, 1, 1))).to(device)
    occupancy.occupied.zero_()
    occupancy.occupied[0, 0, 0] = True
    model = model_of(RadianceField(pyramid, decoder).to(device), occupancy=occupancy)
    copies = torch.float16 if device.type == "cuda" else torch.float32
    optimizers = optimizers_of(model, make_config(), RATES, copies=copies)
    optimizers.attach()
    (level,) = pyramid.levels
    loss = sum(level.diff(dim=axis).square().sum() for axis in range(3))
    (expected,) = torch.autograd.grad(loss, level)
    optimizers.add_total_variation(1.0)
    near, far = level.grad[:6, :6, :6], level.grad[16:, 16:, 16:]
    torch.testing.assert_close(near, expected[:6, :6, :6])
    assert not far.any()


def test_total_variation_is_a_sum_over_the_dense_levels(device):
    pyramid = VoxelPyramid((3, 6), 2, ((0, 0, 0), (1, 2, 1)), sparse_resolutions=(21,), init_range=1.0, device=device)
    pyramid.allocate(21, torch.ones(1, 1, 1, dtype=torch.bool, device=device), pyramid.aabb)
    pyramid.activate(21)
    decoder = ColorMLPDecoder(pyramid.channels - 1, 8, 1, 1, DensityActivation(200.0, 0.1))
    optimizers = optimizers_of(model_of(RadianceField(pyramid, decoder).to(device)), make_config(), RATES)
    dense, sparse = pyramid.levels[:2], pyramid.levels[2]
    for level in pyramid.levels:
        torch.nn.init.normal_(level)
    loss = sum(level.diff(dim=axis).square().sum() for level in dense for axis in range(3))
    expected = torch.autograd.grad(0.3 * loss, dense)
    dense[0].grad = torch.ones_like(dense[0])
    optimizers.add_total_variation(0.3)
    torch.testing.assert_close(dense[0].grad, 1 + expected[0])
    torch.testing.assert_close(dense[1].grad, expected[1])
    assert sparse.grad is None
