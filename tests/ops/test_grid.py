"""sample_trilinear and trilinear_interpolate, and the ops beneath them; test_contracts has more."""

from __future__ import annotations

import itertools
import math
import re
from functools import partial

import pytest
import torch
from op_testing import (
    CHANNELS,
    DTYPES,
    LOOKUPS,
    NON_FINITE,
    RESOLUTION,
    TORCH_LOOKUPS,
    OpRecorder,
    assert_all_match,
    both_paddings,
    by_grid_sample,
    every_linear_lookup,
    every_lookup,
    keywords,
    leaves,
    make,
    saved_for_backward,
    threads,
    value_and_gradients,
)
from reference import interpolate_cells, sample_grid, sample_grid_with_gradient
from tolerances import arithmetic, assert_matches
from torch.utils._pytree import tree_map_only

from voxelfield import _library
from voxelfield.ops import sample_trilinear, trilinear_interpolate
from voxelfield.ops._grids import PADDINGS


def make_cells(device, dtype=torch.float64, channels=3, count=40, **_):
    """Cells, and points inside and beyond them: the interpolant is continued linearly, smooth everywhere."""
    feats = torch.randn(count, 8, channels, device=device, dtype=dtype)
    return feats, torch.rand(count, 3, device=device, dtype=arithmetic(dtype)) * 4 - 2


# Ours, the reference, and what makes features and points.
KINDS = {
    **{
        padding: (partial(sample_trilinear, padding=padding), partial(sample_grid, padding=padding), make)
        for padding in ("border", "zeros", "reflection")
    },
    "cells": (trilinear_interpolate, interpolate_cells, make_cells),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
grid_or_cells = pytest.mark.parametrize("kind", ["border", "cells"])


def assert_matches_reference(kind, features, points, grad=None):
    """Fails unless value and gradients are those of the reference in float64, in the right dtypes; returns them."""
    ours, reference, _ = KINDS[kind]
    if grad is None:
        grad = torch.randn(len(points), features.shape[-1], device=points.device).to(features.dtype)
    actual = value_and_gradients(ours, features, points, grad)
    assert [x.dtype for x in actual] == [features.dtype, features.dtype, points.dtype]
    assert_all_match(actual, value_and_gradients(reference, features.double(), points.double(), grad.double()))
    return actual


# --- values and first derivatives


@pytest.mark.covering("dtype channels", "kind channels")
@every_kind
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_value_and_gradients_match_reference(device, dtype, channels, kind):
    assert_matches_reference(kind, *KINDS[kind][2](device, dtype, channels))


@pytest.mark.covering("dtype channels depth")
@both_paddings
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("depth", [1, 4, 5, 8])
@pytest.mark.parametrize("channels", [7, 10, 12, 16, 28, 34, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_match_reference_wherever_they_begin(device, dtype, channels, depth, offset, padding):
    # Rows along z, and the grid itself, begin and end on words of 16 bytes or in the middle of one.
    shape = (3, 4, depth, channels)
    grid = torch.randn(offset + 12 * depth * channels, device=device, dtype=dtype)[offset:].view(shape)
    points = 1.6 * torch.rand(203, 3, device=device) - 0.3
    points[:3] = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [float("nan"), 0.5, 0.5]], device=device)
    value = sample_trilinear(grid, points, padding=padding)
    assert_matches(value, sample_grid(grid.double(), points.double(), padding))


def compiled_form(dtype, channels, lookup):
    padding, align_corners, mode = lookup
    plain = padding in ("border", "zeros") and align_corners and mode == "linear"
    return dtype, channels <= 3, math.gcd(channels, 8), plain


@pytest.mark.covering("dtype lookup", by=compiled_form)
@every_lookup
@pytest.mark.parametrize("channels", [1, 2, 3, 12])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_lookup_matches_reference(device, dtype, channels, lookup):
    grid, points = make(device, dtype, channels, count=200, align_corners=lookup[1])
    grad = torch.randn(len(points), channels, device=device, dtype=dtype)
    actual = value_and_gradients(lambda g, p: sample_trilinear(g, p, **keywords(lookup)), grid, points, grad)
    expected = leaves(grid.double(), points.double())
    value = sample_grid(*expected, *lookup)
    gradients = torch.autograd.grad(value, expected, grad.double(), allow_unused=True, materialize_grads=True)
    assert_all_match(actual, (value, *gradients))


@every_lookup
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_batch_is_many_calls(device, dtype, lookup):
    pairs = [make(device, dtype, count=50, align_corners=lookup[1]) for _ in range(3)]
    grids, points = (torch.stack(x) for x in zip(*pairs, strict=True))
    grad = torch.randn(3, 50, 3, device=device, dtype=dtype)

    def sample(g, p):
        return sample_trilinear(g, p, **keywords(lookup))

    results = value_and_gradients(sample, grids, points, grad)
    loop = [value_and_gradients(sample, *one) for one in zip(grids, points, grad, strict=True)]
    for together, alone in zip(results, zip(*loop, strict=True), strict=True):
        assert_matches(together, torch.stack(alone).double())


# --- value and gradient at once


@pytest.mark.covering("dtype channels")
@every_linear_lookup
@pytest.mark.parametrize("channels", [1, 2, 4, 5, 12, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_gradient_matches_reference(device, dtype, channels, lookup):
    grid, points = make(device, dtype, channels, align_corners=lookup[1])
    actual_inputs, expected_inputs = leaves(grid, points), leaves(grid.double(), points.double())
    actual = sample_trilinear(*actual_inputs, **keywords(lookup), with_gradient=True)
    expected = sample_grid_with_gradient(*expected_inputs, *lookup)
    assert [x.dtype for x in actual] == [dtype, dtype]
    assert_all_match(actual, expected, ("value", "gradient"))
    grads = [torch.randn_like(x) for x in actual]
    first = torch.autograd.grad(actual, actual_inputs, grads)
    assert_all_match(
        first, torch.autograd.grad(expected, expected_inputs, [x.double() for x in grads]), ("d grid", "d points")
    )


def test_unused_half_of_a_pair_is_free(device):
    for used in (0, 1):
        grid, points = leaves(*make(device))
        expected = leaves(grid, points)
        grad = torch.randn(40, 3, *(3,) * used, device=device, dtype=grid.dtype)
        actual = torch.autograd.grad(sample_trilinear(grid, points, with_gradient=True)[used], (grid, points), grad)
        reference = sample_grid_with_gradient(*expected)[used]
        assert_all_match(actual, torch.autograd.grad(reference, expected, grad))


@grid_or_cells
@pytest.mark.parametrize("channels", [256, 1027, 1100])
def test_more_channels_than_a_block_has_threads(device, channels, kind):
    assert_matches_reference(kind, *KINDS[kind][2](device, torch.float32, channels, resolution=(3, 2, 2)))


@pytest.mark.parametrize("resolution", [(300, 3, 2), (2, 3, 40)])
def test_many_points_on_long_and_short_grids(device, resolution):
    assert_matches_reference("border", *make(device, channels=2, count=20_000, resolution=resolution))


def test_many_terms_of_a_16_bit_gradient_are_not_lost(device):
    # 4096 + 1 == 4096 in float16 and 256 + 1 == 256 in bfloat16: sums kept in the grid's dtype would stall.
    points = torch.zeros(5000, 3, device=device)
    for dtype in (torch.float16, torch.bfloat16):
        grid = torch.zeros(2, 2, 2, 1, device=device, dtype=dtype, requires_grad=True)
        sample_trilinear(grid, points).sum().backward()
        torch.testing.assert_close(grid.grad[0, 0, 0, 0].item(), 5000.0, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(("padding", "z"), [("border", 1.0), ("border", 1.1), ("zeros", -0.1), ("zeros", 1.1)])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_an_infinite_gradient_stays_at_the_vertices_of_its_cell(device, channels, padding, z):
    grid = torch.zeros(4, 4, 4, channels, device=device, requires_grad=True)
    points = torch.tensor([[0.5, 0.5, z], [0.5, 0.5, 0.5]], device=device)
    grad = torch.tensor([[float("inf")], [1.0]], device=device).expand(2, channels).contiguous()
    (sums,) = torch.autograd.grad(sample_trilinear(grid, points, padding=padding), grid, grad)
    end = 0 if z < 0.5 else 3
    assert not sums[1:3, 1:3, end].isfinite().any()
    sums[1:3, 1:3, end] = 0
    assert_matches(sums.sum(), torch.tensor(float(channels), dtype=torch.float64, device=device))


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_points_far_from_a_periodic_grid_read_values_of_the_grid(device, dtype, align_corners):
    grid = torch.rand(5, 6, 7, 2, device=device, dtype=dtype, requires_grad=True)
    points = torch.cat([torch.randn(50, 3, dtype=torch.float64) * 10.0**k for k in range(-30, 39, 4)])
    value = sample_trilinear(
        grid, points.to(device, dtype).requires_grad_(), padding="periodic", align_corners=align_corners
    )
    assert value.min() >= 0
    assert value.max() <= 1 + 1e-5
    (sums,) = torch.autograd.grad(value.sum(), grid)
    torch.testing.assert_close(sums.sum().item(), float(value.numel()), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vertices_are_reproduced_exactly(device, dtype):
    resolution = (5, 3, 9)  # spacings that are powers of two: no coordinate is rounded
    grid = torch.randn(*resolution, 3, device=device, dtype=dtype)
    index = torch.cartesian_prod(*(torch.arange(size, device=device) for size in resolution))
    points = (index / (torch.tensor(resolution, device=device) - 1)).to(arithmetic(dtype))
    for padding in PADDINGS:
        assert torch.equal(sample_trilinear(grid, points, padding=padding), grid.flatten(0, 2))


# --- agreement with F.grid_sample


def special_coordinates(size, align_corners):
    """Coordinates in units of vertices: on vertices, half-way, on, inside and beyond both faces; as unit coordinates.

    All are dyadic and what they are divided by is a power of two: neither side rounds, so both see the same point.
    """
    if size == 1:
        return [-2.0, -0.5, 0.0, 0.5, 1.0, 3.0]
    last, tiny = size - 1, 2.0**-16
    inside = [*range(size), *(i + 0.5 for i in range(last)), tiny, last - tiny]
    outside = [-tiny, last + tiny, -0.5, last + 0.5, tiny - 1, last + 1 - tiny, last + 1, -1 - tiny, -1.5, last + 1.5]
    outside += [-last - 0.25, 2 * last + 0.75, 3 * last, 3 * last + 1, -2 * last]
    places = [*inside, *outside]
    return [u / last for u in places] if align_corners else [(u + 0.5) / size for u in places]


@pytest.mark.covering("resolution lookup")
@pytest.mark.parametrize("lookup", TORCH_LOOKUPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("resolution", [(5, 3, 2), (2, 5, 3), (1, 3, 2), (3, 2, 1), (2, 1, 1), (1, 1, 1)], ids=str)
def test_agrees_with_grid_sample_in_all_special_places(device, resolution, dtype, lookup):
    align_corners = lookup[1]
    if not align_corners:  # sizes, not distances between the outermost vertices, must be powers of two
        resolution = tuple(size - 1 if size in (3, 5) else size for size in resolution)
    grid = torch.randn(*resolution, 2, device=device, dtype=dtype)
    places = [special_coordinates(size, align_corners) for size in resolution]
    points = torch.cartesian_prod(*(torch.tensor(place, device=device, dtype=dtype) for place in places))
    grad = torch.randn(len(points), 2, device=device, dtype=dtype)
    actual = value_and_gradients(lambda g, p: sample_trilinear(g, p, **keywords(lookup)), grid, points, grad)
    assert_all_match(actual, value_and_gradients(lambda g, p: by_grid_sample(g, p, *lookup), grid, points, grad))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_agrees_with_grid_sample_exactly_one_cell_below_under_zeros(device, axis):
    # The value has just reached zero here; the slope is the one of the cell above, as at every other vertex.
    grid = torch.randn(5, 5, 5, 2, device=device, dtype=torch.float64)
    points = torch.full((1, 3), 0.6, device=device, dtype=torch.float64)
    points[0, axis] = -0.25
    grad = torch.ones(1, 2, device=device, dtype=torch.float64)
    actual = value_and_gradients(lambda g, p: sample_trilinear(g, p, padding="zeros"), grid, points, grad)
    assert_all_match(actual, value_and_gradients(lambda g, p: by_grid_sample(g, p, "zeros"), grid, points, grad))


# --- derivatives


@every_linear_lookup
@pytest.mark.parametrize("resolution", [(3, 4, 2), (1, 3, 2)], ids=str)
def test_gradcheck_and_gradgradcheck(device, resolution, lookup):
    inputs = leaves(*make(device, channels=2, count=8, resolution=resolution, align_corners=lookup[1]))

    def sample(g, p):
        return sample_trilinear(g, p, **keywords(lookup))

    # CUDA sums a grid's gradient in no fixed order.
    assert torch.autograd.gradcheck(sample, inputs, nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(sample, inputs, nondet_tol=1e-12)


@pytest.mark.covering("dtype channels")
@every_kind
@pytest.mark.parametrize("channels", [1, 4, 28])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_penalty_matches_reference(device, dtype, channels, kind):
    ours, reference, make = KINDS[kind]
    features, points = make(device, dtype, channels)
    weight = torch.randn(len(points), channels, device=device, dtype=dtype)

    def penalty_gradients(sample, features, points, weight):
        inputs = leaves(features, points)
        (slope,) = torch.autograd.grad(sample(*inputs), inputs[1], weight, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), inputs)

    actual = penalty_gradients(ours, features, points, weight)
    expected = penalty_gradients(reference, features.double(), points.double(), weight.double())
    assert_all_match(actual, expected, ("features", "points"))


@grid_or_cells
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)], ids=str)
def test_only_requested_gradients_are_computed(device, wanted, kind):
    ours, _, make = KINDS[kind]
    inputs = [x.requires_grad_(want) for x, want in zip(make(device), wanted, strict=True)]
    with saved_for_backward() as saved:
        value = ours(*inputs)
    # A grid is large, and only the gradient in the points needs it.
    assert (inputs[0].data_ptr() in saved) == wanted[1]
    with OpRecorder() as recorder:
        value.sum().backward()
    family = "cells" if kind == "cells" else "trilinear"
    expected = [name for name, want in zip(("splat", "point_gradient"), wanted, strict=True) if want]
    assert sorted(recorder.names) == sorted(f"{name}_{family}" for name in expected)
    assert tuple(x.grad is not None for x in inputs) == wanted


def test_nothing_is_kept_without_gradients(device):
    with saved_for_backward() as saved:
        value = sample_trilinear(*make(device))
    assert not saved
    assert not value.requires_grad


def test_cpu_gradient_is_the_same_bits_for_any_number_of_threads():
    for resolution, dtype in itertools.product([(33, 5, 6), (2, 3, 3)], [torch.float32, torch.bfloat16]):
        grid, points = make("cpu", dtype, channels=3, count=50_000, resolution=resolution)
        grad = torch.randn(len(points), 3, dtype=dtype)
        results = []
        for count in (1, 2):
            with threads(count):
                results.append(value_and_gradients(sample_trilinear, grid, points, grad))
        torch.testing.assert_close(*results, rtol=0, atol=0)


# --- registration: schemas, fakes, autograd, compile


NARROW = [torch.float16, torch.bfloat16]
CONVERTED = [(torch.float32, torch.float64), (torch.float64, torch.float32), *itertools.product(DTYPES, NARROW)]


@pytest.mark.parametrize(("grid_dtype", "points_dtype"), CONVERTED, ids=str)
def test_points_are_converted_to_the_dtype_of_the_arithmetic(device, grid_dtype, points_dtype):
    grid, points = make(device, grid_dtype)
    wide, points = points.dtype, points.to(points_dtype).requires_grad_()
    value = sample_trilinear(grid, points)
    assert torch.equal(value, sample_trilinear(grid, points.to(wide)))
    value.sum().backward()
    assert points.grad.dtype == points_dtype
    assert points.grad.any()


@pytest.mark.parametrize("lead", [(), (1,), (0,), (5,), (2, 5), (2, 0), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_points_have_any_leading_shape(device, lead, batch):
    grid = torch.randn(*batch, *RESOLUTION, 3, device=device, requires_grad=True)
    points = torch.rand(*batch, *lead, 3, device=device, requires_grad=True)
    rows = points.reshape(*batch, math.prod(lead), 3)
    value, slopes = sample_trilinear(grid, points, with_gradient=True)
    expected = sample_trilinear(grid, rows, with_gradient=True)
    assert value.shape == (*batch, *lead, 3)
    assert slopes.shape == (*batch, *lead, 3, 3)
    assert torch.equal(value.reshape(expected[0].shape), expected[0])
    assert torch.equal(slopes.reshape(expected[1].shape), expected[1])
    alone = sample_trilinear(grid, points)
    torch.testing.assert_close(alone, value)
    assert [x.shape for x in torch.autograd.grad(alone.sum(), (grid, points))] == [grid.shape, points.shape]


INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.covering("dtype")
@pytest.mark.parametrize("lookup", [lookup for lookup in LOOKUPS if lookup[2] == "nearest"], ids=str)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_copied_from_the_nearest_vertex(device, dtype, lookup):
    labels = torch.randint(-100, 100, (2, *RESOLUTION, 3), device=device).to(dtype)
    points = torch.rand(2, 7, 5, 3, device=device) * 3 - 1
    points[0, 0, 0, 1] = float("nan")
    points.requires_grad_()
    value = sample_trilinear(labels, points, **keywords(lookup))
    assert value.dtype == dtype
    assert not value.requires_grad
    assert torch.equal(value.float(), sample_trilinear(labels.float(), points, **keywords(lookup)))
    shared = sample_trilinear(labels[:1].expand(2, -1, -1, -1, -1), points, **keywords(lookup))
    assert torch.equal(shared[0], value[0])


def test_integers_beyond_the_precision_of_floats(device):
    labels = torch.tensor([2**62 + 1, -(2**62) - 1], device=device).view(2, 1, 1, 1)
    points = torch.tensor([[0.2, 0, 0], [0.8, 0, 0]], device=device)
    assert torch.equal(sample_trilinear(labels, points, mode="nearest"), labels.view(2, 1))
    mapped = torch.vmap(lambda p: sample_trilinear(labels, p, mode="nearest"))(points[:, None])
    assert torch.equal(mapped, labels.view(2, 1, 1))
    raw = torch.ops.voxelfield.sample_trilinear.default
    torch.library.opcheck(raw, ([labels], points, 0, True, True, False, False))


# --- a grid that is expanded over a batch


def expanded(grid):
    return grid[None].expand(3, -1, -1, -1, -1)


@pytest.mark.parametrize(
    "view",
    [
        expanded,
        lambda grid: expanded(grid.permute(2, 1, 0, 3)),
        lambda grid: expanded((2 * grid)[1:, ..., :2]),
        lambda grid: grid[:, :, None].expand(3, -1, -1, -1, -1)[0][None].expand(3, -1, -1, -1, -1),
    ],
    ids=["whole", "permuted", "part", "expanded twice"],
)
@every_linear_lookup
def test_a_grid_expanded_over_a_batch(device, view, lookup):
    grid, points = make(device, count=24, resolution=(3, 4, 3), align_corners=lookup[1])
    points = points.view(3, 8, 3)

    def together(grid, points):
        return sample_trilinear(view(grid), points, **keywords(lookup))

    def one_by_one(grid, points):
        return torch.stack(
            [sample_trilinear(g, p, **keywords(lookup)) for g, p in zip(view(grid), points, strict=True)]
        )

    results = []
    for sample in (together, one_by_one):
        inputs = leaves(grid, points)
        value = sample(*inputs)
        torch.manual_seed(0)
        first = torch.autograd.grad(value, inputs, torch.randn_like(value), create_graph=True)
        second = torch.autograd.grad(first[1].square().sum(), inputs)
        results.append((value, *first, *second))
    assert_all_match(*results)


def test_an_expanded_grid_is_neither_copied_nor_is_its_gradient(device):
    grid, points = make(device, torch.float32)
    grid.requires_grad_()
    points = points[None].repeat(3, 1, 1).requires_grad_()
    with saved_for_backward() as saved, OpRecorder() as recorder:
        value = sample_trilinear(expanded(grid), points)
        value.sum().backward()
    assert grid.data_ptr() in saved
    assert recorder.shapes["splat_trilinear"] == [grid.shape]


def test_each_repetition_of_an_expanded_grid_has_a_gradient_of_its_own(device):
    # It is asked for: the grid is a leaf, or keeps its gradient, or has a hook; and torch.func sees only the argument.
    grid, points = make(device)
    points = torch.stack([points, points.flip(1), 0.5 * points])
    copies = leaves(grid, grid, grid)
    loop = [torch.autograd.grad(sample_trilinear(g, p).sum(), g)[0] for g, p in zip(copies, points, strict=True)]
    expected = torch.stack(loop)
    leaf = expanded(grid).requires_grad_()
    sample_trilinear(leaf, points).sum().backward()
    assert_matches(leaf.grad, expected)
    (source,) = leaves(grid)
    kept = expanded(source)
    kept.retain_grad()
    sample_trilinear(kept, points).sum().backward()
    assert_matches(kept.grad, expected)
    assert_matches(source.grad, expected.sum(0))
    hooked, seen = expanded(source), []
    hooked.register_hook(seen.append)
    sample_trilinear(hooked, points).sum().backward()
    assert_matches(seen[0], expected)
    assert_matches(torch.func.grad(lambda g: sample_trilinear(g, points).sum())(expanded(grid)), expected)
    assert_matches(torch.func.grad(lambda g: sample_trilinear(expanded(g), points).sum())(grid), expected.sum(0))
    (source,) = leaves(grid)
    view = expanded(source)
    value = sample_trilinear(view, points).sum()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(value, view)


class Reversed(torch.autograd.Function):
    """Gradient reversal, which returns a view as many such Functions do."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


@pytest.mark.parametrize(
    "view", [lambda g: expanded(Reversed.apply(g)), lambda g: Reversed.apply(expanded(g))], ids=["before", "behind"]
)
def test_functions_between_a_grid_and_its_expansion_are_kept(device, view):
    grid, points = make(device)
    points = points[None].repeat(3, 1, 1)
    plain, turned = leaves(grid, grid)
    sample_trilinear(expanded(plain), points).sum().backward()
    sample_trilinear(view(turned), points).sum().backward()
    assert_matches(turned.grad, -plain.grad)


# --- empty, strided and non-finite input


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize(("count", "channels"), [(0, 3), (4, 0), (0, 0)])
def test_empty_input_and_its_derivatives(device, count, channels, with_gradient):
    grid, points = leaves(*make(device, torch.float32, channels, count))
    results = sample_trilinear(grid, points, with_gradient=with_gradient)
    results = results if with_gradient else (results,)
    assert [x.shape for x in results] == [(count, channels), (count, channels, 3)][: len(results)]
    for gradient in torch.autograd.grad([x.sum() for x in results], (grid, points)):
        assert not gradient.any()


@pytest.mark.covering
@every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_points_read_and_write_nothing(device, dtype, kind):
    ours, _, make = KINDS[kind]
    bad = [[*(value if a == axis else 0.4 for a in range(3))] for value in NON_FINITE for axis in range(3)]
    bad = torch.tensor([*bad, *itertools.permutations(NON_FINITE)], device=device, dtype=arithmetic(dtype))
    # Were any vertex read, or any value of the incoming gradient used, NaN would show.
    features = torch.full_like(make(device, dtype, channels=4, count=len(bad))[0], float("nan"))
    for result in value_and_gradients(ours, features, bad, features.new_full((len(bad), 4), float("nan"))):
        assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize("with_gradient", [False, True])
def test_further_derivatives_at_non_finite_points_are_zero(device, with_gradient):
    grid, points = leaves(*make(device))
    with torch.no_grad():
        points[::2, 1] = float("nan")
    if with_gradient:
        value, slopes = sample_trilinear(grid, points, with_gradient=True)
    else:
        value = sample_trilinear(grid, points)
        (slopes,) = torch.autograd.grad(value.square().sum(), points, create_graph=True)
    of_grid, of_points = torch.autograd.grad(value.sum() + slopes.square().sum(), (grid, points))
    assert of_grid.isfinite().all()
    for result in (value, slopes, of_points):
        assert result.isfinite().all()
        assert not result[::2].any()


@every_kind
def test_non_finite_points_leave_their_neighbours_alone(device, kind):
    features, points = KINDS[kind][2](device, count=300)
    bad = torch.arange(0, 300, 3, device=device)
    points[bad, bad % 3] = torch.tensor(NON_FINITE, device=device, dtype=points.dtype).repeat(34)[: len(bad)]
    clean = torch.ones(300, dtype=torch.bool, device=device)
    clean[bad] = False
    ours, reference, _ = KINDS[kind]
    grad = torch.randn(300, 3, device=device, dtype=torch.float64)
    value, of_features, of_points = value_and_gradients(ours, features, points, grad)
    assert not value[bad].any()
    assert not of_points[bad].any()
    if kind == "cells":
        features, of_features = features[clean], of_features[clean]
    expected = value_and_gradients(reference, features, points[clean], grad[clean])
    assert_all_match((value[clean], of_features, of_points[clean]), expected)


@both_paddings
def test_nan_in_the_grid_stays_in_its_cells(device, padding):
    grid, points = make(device, count=300)
    grid[2, 1, 3] = float("nan")
    touched = sample_grid(grid, points, padding).isnan().any(dim=1)
    assert 0 < touched.sum() < 300
    value = sample_trilinear(grid, points, padding=padding)
    assert torch.equal(value.isnan().any(dim=1), touched)
    assert_matches(value[~touched], sample_grid(grid, points, padding)[~touched])


@both_paddings
@pytest.mark.parametrize("huge", [1e30, 3e38])
def test_huge_finite_points_are_merely_outside(device, huge, padding):
    grid = torch.randn(*RESOLUTION, 3, device=device)
    points = torch.tensor([[huge, 0.0, 0.0], [0.0, -huge, 0.0], [huge, -huge, huge]], device=device)
    value = sample_trilinear(grid, points, padding=padding)
    vertices = torch.stack([grid[-1, 0, 0], grid[0, 0, 0], grid[-1, 0, -1]])
    assert torch.equal(value, vertices if padding == "border" else torch.zeros_like(vertices))


@pytest.mark.covering
@pytest.mark.parametrize("beyond", [0.0, 0.5])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    ("size", "channels", "dtype"),
    [(5, 2, torch.float64), (5, 4, torch.float32), (5, 12, torch.float16), (6, 12, torch.float16)],
    ids=str,
)
def test_agrees_with_grid_sample_at_the_upper_face_of_an_infinite_inside(device, size, channels, dtype, axis, beyond):
    # The last layer is weighted by one and no other is read. (At the lower face both meet 0 * inf from the second.)
    grid = torch.randn(size, size, size, channels, device=device, dtype=dtype)
    grid.transpose(0, axis)[1:-1] = float("inf")
    points = torch.full((1, 3), 0.7, device=device, dtype=arithmetic(dtype))
    points[0, axis] = 1 + beyond
    expected = by_grid_sample(grid.double(), points.double(), "border")
    assert expected.isfinite().all()
    assert_matches(sample_trilinear(grid, points), expected)


# --- malformed input


GRIDS, POINTS, VALUES = torch.zeros(1, 2, 2, 2, 3), torch.zeros(1, 5, 3), torch.zeros(1, 5, 3)
PLAIN, JET, ADD = (0, True, False, False, False), (0, True, False, False, True), (0, True, False, True, False)
SHAPE = [2, 2, 2, 3]
SEVERAL = "grids must be 1 to 16 tensors, got "
VERTICES = "must have 1 to 2^30 vertices along each axis, got"
# A raw op, its arguments, and what the error must say.
RAW_MISTAKES = [
    ("sample_trilinear", ([], POINTS, *PLAIN), SEVERAL + "0"),
    ("sample_trilinear", ([GRIDS] * 17, POINTS, *PLAIN), SEVERAL + "17"),
    ("sample_trilinear", ([GRIDS, GRIDS.double()], POINTS, *PLAIN), "grids[1] must be float32 as grids[0] is, got f"),
    ("sample_trilinear", ([GRIDS[0]], POINTS, *PLAIN), "points must have shape (N, 3), got (1, 5, 3)"),
    ("sample_trilinear", ([GRIDS[:, :, :0]], POINTS, *PLAIN), f"grid {VERTICES} shape (1, 2, 0, 2, 3)"),
    ("sample_trilinear", ([GRIDS.long()], POINTS, *PLAIN), "to be interpolated, got int64: convert it"),
    ("sample_trilinear", ([GRIDS, GRIDS[..., :2]], POINTS, *ADD), "grids[1] must have 3 channels to be added to the"),
    ("sample_in_box", (GRIDS[0], POINTS[0], torch.ones(2, 3), 5), "padding must be 0 to 4, got 5"),
    ("splat_trilinear", (VALUES[:, :4], POINTS, SHAPE, *PLAIN, 0), "values must have shape (1, 5, 3), got (1, 4, 3)"),
    ("splat_trilinear", (VALUES[0], POINTS, SHAPE, *PLAIN, 0), "values must have shape (1, 5, 3), got (5, 3)"),
    ("splat_trilinear", (VALUES, POINTS, SHAPE, *JET, 0), "values must have shape (4, 1, 5, 3), got (1, 5, 3)"),
    # The size of the batch has been put in front: a level of 1 x 2 x 2 vertices with 2 channels.
    ("splat_trilinear", (VALUES, POINTS, [2, 2, 2], *PLAIN, 0), "values must have shape (1, 5, 2), got (1, 5, 3)"),
    ("splat_trilinear", (VALUES, POINTS, [], *PLAIN, 0), "sizes must be X, Y, Z, C of each level, got 0 numbers"),
    ("splat_trilinear", (VALUES, POINTS, [2, 2, -2, 3], *PLAIN, 0), VERTICES),
    ("point_gradient_trilinear", (VALUES[..., :2], [GRIDS], POINTS, *PLAIN), "values must have shape (1, 5, 3), got"),
    ("point_gradient_trilinear", (VALUES, [GRIDS[0]], POINTS, *PLAIN), "points must have shape (N, 3), got (1, 5, 3)"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), RAW_MISTAKES)
def test_raw_ops_refuse_what_does_not_fit(device, name, arguments, message):
    _library.ensure_loaded(device.type)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        getattr(torch.ops.voxelfield, name)(*tree_map_only(torch.Tensor, lambda x: x.to(device), arguments))


# --- CUDA only


@pytest.mark.cuda
@grid_or_cells
def test_runs_on_the_current_stream(kind):
    ours, _, make = KINDS[kind]
    inputs = (*make("cuda", count=1000), torch.randn(1000, 3, device="cuda", dtype=torch.float64))
    expected = value_and_gradients(ours, *inputs)
    late = [torch.zeros_like(x) for x in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Work on any other stream would read the zeros.
        torch.cuda._sleep(100_000_000)
        for target, source in zip(late, inputs, strict=True):
            target.copy_(source)
        actual = value_and_gradients(ours, *late)
    stream.synchronize()
    assert_all_match(actual, expected)


@pytest.mark.cuda
@grid_or_cells
def test_captured_in_a_cuda_graph(kind):
    ours, reference, make = KINDS[kind]
    features, points = leaves(*make("cuda", count=1000))
    grad = torch.randn(1000, 3, device="cuda", dtype=torch.float64)

    def step():
        value = ours(features, points)
        return value.detach(), *torch.autograd.grad(value, (features, points), grad)

    warmup = torch.cuda.Stream()
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        step()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for target, source in zip((features, points), make("cuda", count=1000), strict=True):
            target.copy_(source)
    graph.replay()
    assert_all_match(captured, value_and_gradients(reference, features, points, grad))


@pytest.mark.cuda
def test_compiles_to_cuda_graphs():
    torch.compiler.reset()

    def loss(grid, points):
        return sample_trilinear(grid * 2, points * 0.5).square().sum()

    compiled = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # warm-up, recording, then replays with fresh data
        grid, points = make("cuda", count=64)
        grid.requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        value = compiled(grid, points)
        (gradient,) = torch.autograd.grad(value, grid)
        expected = loss(grid, points)
        assert_matches(value.detach().clone(), expected.detach())
        assert_matches(gradient.clone(), torch.autograd.grad(expected, grid)[0])


def test_values_and_gradient_can_be_changed_in_place(device):
    def changed(sample, change):
        inputs = leaves(*made)
        values, gradient = change(*sample(*inputs))
        return values, gradient, *torch.autograd.grad(values.sum() + gradient.square().sum(), inputs)

    made = make(device)
    actual = changed(lambda *inputs: sample_trilinear(*inputs, with_gradient=True), lambda v, g: (v.mul_(2), g.relu_()))
    expected = changed(sample_grid_with_gradient, lambda v, g: (v * 2, g.relu()))
    assert_all_match(actual, expected, ("value", "gradient", "d grid", "d points"))
