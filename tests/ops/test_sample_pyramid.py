"""sample_pyramid: several grids at once are what they are one by one."""

from __future__ import annotations

import itertools

import pytest
import torch
from op_testing import (
    DTYPES,
    NON_FINITE,
    OpRecorder,
    assert_all_match,
    every_linear_lookup,
    every_lookup,
    keywords,
    leaves,
    points_off_faces,
    saved_for_backward,
)
from reference import sample_grid, sample_grid_with_gradient
from tolerances import arithmetic, assert_matches

from voxelfield.ops import sample_pyramid, sample_trilinear

RESOLUTIONS = [(2, 3, 4), (5, 4, 7), (9, 2, 3)]

both_reductions = pytest.mark.parametrize("reduce", ["concat", "sum"])


def make(device, dtype=torch.float64, channels=(3, 1, 4), count=30, resolutions=RESOLUTIONS, batch=()):
    """Grids, and points that are clear of the faces of all of them in every alignment."""
    grids = [
        torch.randn(*batch, *resolution, c, device=device, dtype=dtype)
        for resolution, c in zip(resolutions, channels, strict=True)
    ]
    candidates = points_off_faces(400 * count, device, resolution=(3, 3, 3))
    clear = torch.ones(len(candidates), dtype=torch.bool, device=device)
    for resolution in resolutions:
        sizes = torch.tensor(resolution, device=device)
        for u in (candidates * (sizes - 1), candidates * sizes):
            twice = 2 * u
            clear &= ((twice - twice.round()).abs() > 0.02).all(dim=1) | (sizes == 1).all()
    points = candidates[clear][: count * max(batch[0] if batch else 1, 1)].to(arithmetic(dtype))
    return grids, points.view(*batch, count, 3)


def one_by_one(sample, grids, points, reduce):
    results = [sample(grid, points) for grid in grids]
    return torch.cat(results, dim=-1) if reduce == "concat" else torch.stack(results).sum(dim=0)


def channels_for(reduce):
    return (3, 1, 4) if reduce == "concat" else (2, 2, 2)


# --- values and derivatives


@pytest.mark.covering("dtype lookup")
@every_lookup
@both_reductions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_value_and_gradients_match_reference(device, dtype, reduce, lookup):
    grids, points = make(device, dtype, channels_for(reduce))
    actual_inputs = leaves(*grids, points)
    expected_inputs = leaves(*(x.double() for x in (*grids, points)))
    actual = sample_pyramid(actual_inputs[:-1], actual_inputs[-1], reduce=reduce, **keywords(lookup))
    expected = one_by_one(lambda g, p: sample_grid(g, p, *lookup), expected_inputs[:-1], expected_inputs[-1], reduce)
    assert actual.dtype == dtype
    assert_matches(actual.detach(), expected.detach())
    grad = torch.randn_like(actual)
    gradients = torch.autograd.grad(actual, actual_inputs, grad)
    assert [x.dtype for x in gradients] == [dtype] * 3 + [points.dtype]
    assert_all_match(
        gradients,
        torch.autograd.grad(expected, expected_inputs, grad.double(), allow_unused=True, materialize_grads=True),
    )


def assert_sampled_as_by(sample, grids, points, reduce):
    """Fails unless values and gradients are those of ``sample``, a function of all grids and the points."""
    inputs = leaves(*grids, points)
    values = sample_pyramid(inputs[:-1], inputs[-1], reduce=reduce), sample(inputs[:-1], inputs[-1])
    grad = torch.randn_like(values[0])
    assert_all_match(*((value, *torch.autograd.grad(value, inputs, grad)) for value in values))


@both_reductions
@pytest.mark.parametrize("levels", [1, 2, 16])
def test_any_number_of_levels(device, levels, reduce):
    # Both sides are ours and see the same coordinates: no need to stay clear of faces.
    grids = [torch.randn(2 + i % 5, 3, 2 + i % 3, 2, device=device, dtype=torch.float64) for i in range(levels)]
    points = torch.rand(30, 3, device=device, dtype=torch.float64) * 1.4 - 0.2
    assert_sampled_as_by(lambda g, p: one_by_one(sample_trilinear, g, p, reduce), grids, points, reduce)


@both_reductions
def test_a_batch_is_many_calls(device, reduce):
    grids, points = make(device, channels=channels_for(reduce), batch=(2,))

    def many_calls(grids, points):
        return torch.stack([sample_pyramid([grid[b] for grid in grids], points[b], reduce=reduce) for b in range(2)])

    assert_sampled_as_by(many_calls, grids, points, reduce)


@every_linear_lookup
@both_reductions
def test_with_gradient_matches_reference(device, reduce, lookup):
    grids, points = make(device, channels=channels_for(reduce))
    actual_inputs, expected_inputs = leaves(*grids, points), leaves(*grids, points)
    actual = sample_pyramid(
        actual_inputs[:-1], actual_inputs[-1], reduce=reduce, **keywords(lookup), with_gradient=True
    )
    pairs = [sample_grid_with_gradient(grid, expected_inputs[-1], *lookup) for grid in expected_inputs[:-1]]
    values, slopes = zip(*pairs, strict=True)
    if reduce == "concat":
        expected = torch.cat(values, dim=1), torch.cat(slopes, dim=1)
    else:
        expected = sum(values), sum(slopes)
    assert_all_match(actual, expected, ("value", "gradient"))
    grads = [torch.randn_like(x) for x in actual]
    assert_all_match(
        torch.autograd.grad(actual, actual_inputs, grads), torch.autograd.grad(expected, expected_inputs, grads)
    )


def test_sums_of_16_bit_levels_are_rounded_once(device):
    # 256 + 1 == 256 in bfloat16; 16 levels of 1 beside one of 256 would be lost one by one.
    grids = [torch.full((2, 2, 2, 1), value, device=device, dtype=torch.bfloat16) for value in [256.0] + [1.0] * 15]
    value = sample_pyramid(grids, torch.full((1, 3), 0.5, device=device), reduce="sum")
    assert value.item() == torch.tensor(271.0).bfloat16().item()


# --- what is computed and kept


@both_reductions
def test_only_requested_gradients_are_computed(device, reduce):
    grids, points = make(device, channels=channels_for(reduce))
    for wanted in itertools.product([False, True], repeat=4):
        inputs = [x.detach().requires_grad_(want) for x, want in zip((*grids, points), wanted, strict=True)]
        if not any(wanted):
            continue
        with saved_for_backward() as saved:
            value = sample_pyramid(inputs[:-1], inputs[-1], reduce=reduce)
        assert all((grid.data_ptr() in saved) == wanted[-1] for grid in inputs[:-1])
        with OpRecorder() as recorder:
            value.square().sum().backward()
        expected = ["splat_trilinear"] * any(wanted[:-1]) + ["point_gradient_trilinear"] * wanted[-1]
        assert recorder.names == expected
        # The sums of levels whose gradients are not requested are not even computed.
        assert [x.grad is not None for x in inputs] == list(wanted)
        alone = leaves(*inputs)
        sample_pyramid(alone[:-1], alone[-1], reduce=reduce).square().sum().backward()
        for x, y, want in zip(inputs, alone, wanted, strict=True):
            if want:
                assert_matches(x.grad, y.grad)


# --- empty, strided and non-finite input


@both_reductions
@pytest.mark.parametrize(("count", "channels"), [(0, (2, 2)), (5, (0, 0)), (0, (0, 0))])
def test_empty_input(device, count, channels, reduce):
    grids = [torch.randn(2, 3, 2, c, device=device, requires_grad=True) for c in channels]
    points = torch.rand(count, 3, device=device, requires_grad=True)
    value = sample_pyramid(grids, points, reduce=reduce)
    assert value.shape == (count, sum(channels) if reduce == "concat" else channels[0])
    for x, gradient in zip((*grids, points), torch.autograd.grad(value.sum(), (*grids, points)), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


def test_a_level_without_channels(device):
    grids = [torch.randn(2, 3, 2, c, device=device, requires_grad=True) for c in (2, 0, 3)]
    points = torch.rand(7, 3, device=device, requires_grad=True)
    value = sample_pyramid(grids, points)
    expected = torch.cat([sample_trilinear(grids[0], points), sample_trilinear(grids[2], points)], dim=1)
    assert torch.equal(value, expected)
    for actual, wanted in zip(
        torch.autograd.grad(value.sum(), (grids[0], grids[2], points)),
        torch.autograd.grad(expected.sum(), (grids[0], grids[2], points)),
        strict=True,
    ):
        assert_matches(actual, wanted.double())


def test_non_finite_points_read_and_write_nothing(device):
    bad = torch.full((9, 3), 0.4, device=device)
    for row in range(9):
        bad[row, row % 3] = NON_FINITE[row // 3]
    inputs = leaves(*(torch.full((4, 3, 2, 4), float("nan"), device=device) for _ in range(2)), bad)
    value = sample_pyramid(inputs[:-1], inputs[-1])
    assert not value.any()
    for gradient in torch.autograd.grad(value, inputs, torch.full_like(value, float("nan"))):
        assert not gradient.any()
