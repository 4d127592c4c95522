"""Total variation: that of a VoxelGrid, with its derivatives, and its gradient in place, in tiles and by GridAdam."""

from __future__ import annotations

import math

import pytest
import torch
from grid_models import BOX
from test_adam import SHAPES, TILED_SHAPES, gradients, parameter, random_tiles, tile_mask
from tolerances import assert_matches
from torch import Tensor

from voxelfield import VoxelGrid
from voxelfield.grids.adam import GridAdam
from voxelfield.ops._internal.optim import grid_total_variation_grad_


def objective(grid: Tensor, weights=(1.0, 1.0, 1.0), delta=None) -> Tensor:
    """The mean penalty of neighbours along each axis that has any."""
    total = grid.sum() * 0
    for axis, weight in enumerate(weights):
        difference = grid.diff(dim=axis)
        if difference.numel():
            cost = difference.square()
            if delta is not None:
                cost = torch.where(difference.abs() > delta, 2 * delta * difference.abs() - delta**2, cost)
            total = total + weight * cost.mean()
    return total


def derivative(values: Tensor, *arguments) -> Tensor:
    leaf = values.detach().cpu().double().requires_grad_()
    return torch.autograd.grad(objective(leaf, *arguments), leaf)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 3.0, 7.0), (0.0, 0.0, 1.0)], ids=str)
@pytest.mark.parametrize("shape", [(4, 6, 5, 3), (1, 5, 1, 3), (1, 1, 1, 2)], ids=str)
def test_a_grids_is_the_formula(device, dtype, weights, shape):
    grid = VoxelGrid(shape[:3], shape[3], BOX, init_std=1.0, dtype=dtype, device=device)
    loss = grid.total_variation() if weights == (1.0, 1.0, 1.0) else grid.total_variation(weights)
    assert (loss.shape, loss.dtype) == ((), torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward()
    values = grid.features.detach().cpu().double()
    torch.testing.assert_close(loss.detach().cpu().double(), objective(values, weights), atol=1e-6, rtol=1e-5)
    tolerance = max(torch.finfo(dtype).eps * 4, 1e-6)
    assert grid.features.grad.dtype == dtype
    expected = derivative(values, weights)
    torch.testing.assert_close(grid.features.grad.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def test_a_grids_may_be_that_of_some_channels_and_overflows_no_16_bits(device):
    grid = VoxelGrid((4, 6, 5), 4, BOX, init_std=1.0, device=device)
    loss = grid.total_variation(channels=slice(0, 1))
    torch.testing.assert_close(loss, objective(grid.features[..., :1]))
    loss.backward()
    assert grid.features.grad[..., 1:].eq(0).all()
    assert grid.features.grad[..., 0].ne(0).all()
    grid.half().features.data.zero_()[::2] = 1000.0
    assert grid.total_variation().item() == pytest.approx(1e6)


def test_a_grids_has_second_derivatives():
    grid = VoxelGrid((3, 2, 4), 2, BOX, init_std=1.0).double()

    def loss(features: Tensor) -> Tensor:
        grid._parameters["features"] = features
        return grid.total_variation((0.5, 2.0, 3.0))

    features = grid.features.detach().requires_grad_()
    assert torch.autograd.gradcheck(loss, (features,))
    assert torch.autograd.gradgradcheck(loss, (features,))


@pytest.mark.parametrize("delta", [None, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_op_adds_the_gradient_of_the_formula(device, shape, delta):
    start, weights = gradients(shape, 1), (0.5, 2.0, 3.0)
    expected = start.double() + derivative(parameter(shape, "cpu"), weights, delta)
    for given in (weights, torch.tensor(weights, device=device)):
        grad = start.to(device, copy=True)
        grid_total_variation_grad_(grad, parameter(shape, device), given, delta=delta)
        assert_matches(grad.cpu(), expected)


@pytest.mark.parametrize("shape", TILED_SHAPES, ids=str)
def test_the_op_adds_it_in_listed_tiles_only(device, shape):
    ids, count = random_tiles(shape[:3], device)
    mask, start = tile_mask(ids, count, shape[:3]), gradients(shape, 1)
    grad = start.to(device, copy=True)
    grid_total_variation_grad_(grad, parameter(shape, device), 2.0, tiles=ids, tile_count=count)
    assert torch.equal(grad.cpu()[~mask], start[~mask])
    expected = start.double() + derivative(parameter(shape, "cpu"), (2.0, 2.0, 2.0))
    assert_matches(grad.cpu()[mask], expected[mask])


def test_the_optimizer_adds_it_where_it_is_active(device):
    param = parameter((9, 9, 17, 4), device)
    optimizer = GridAdam([param])
    occupied = torch.zeros(2, 2, 2, dtype=torch.bool, device=device)
    occupied[0, 0, 0] = True
    optimizer.set_active(param, occupied)
    param.grad = torch.zeros_like(param)
    optimizer.add_total_variation(param, (1.0, 2.0, 3.0), delta=0.3)
    mask = tile_mask(*optimizer.active_tiles(param), (9, 9, 17))
    assert_matches(param.grad.cpu(), derivative(param, (1.0, 2.0, 3.0), 0.3) * mask[..., None])


MEMORY, SIZE = torch.zeros(2 * 4 * 4 * 9 * 2), 4 * 4 * 9 * 2
FIRST, SHIFTED, LAST = (MEMORY[at : at + SIZE].view(4, 4, 9, 2) for at in (0, 4, SIZE))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda grid: grid.total_variation((1.0, 2.0)), ValueError, "finite numbers, three for x, y and z"),
        (lambda grid: grid.total_variation((1.0, 2.0, math.nan)), ValueError, "finite numbers, three for x, y and z"),
        (lambda grid: grid.total_variation(channels=slice(3, None)), ValueError, "at least one of 3"),
        (
            lambda _: grid_total_variation_grad_(FIRST, LAST, 1.0, delta=0.0),
            ValueError,
            "delta must be positive, got 0",
        ),
        (lambda _: grid_total_variation_grad_(FIRST, FIRST, 1.0), RuntimeError, "grad must not share memory"),
        (lambda _: grid_total_variation_grad_(FIRST, SHIFTED, 1.0), RuntimeError, "grad must not share memory"),
        (lambda _: grid_total_variation_grad_(SHIFTED, FIRST, 1.0), RuntimeError, "grad must not share memory"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(VoxelGrid(4, 3, BOX))
    grid_total_variation_grad_(FIRST, LAST, 1.0)
