"""accumulate_trilinear_: what autograd would give, added to what is there."""

from __future__ import annotations

import itertools

import op_testing
import pytest
import torch
from op_testing import DTYPES, NON_FINITE, assert_all_match
from tolerances import arithmetic, assert_matches

from voxelfield.ops import sample_pyramid
from voxelfield.ops._internal.stencil import accumulate_trilinear_

SHAPES = [(3, 4, 5), (9, 2, 6), (1, 1, 1), (16, 17, 18)]


def make(device, dtype, channels=(4, 3, 1, 8), count=300):
    sums = [
        torch.randn(*shape, c, device=device, dtype=arithmetic(dtype))
        for shape, c in zip(SHAPES, channels, strict=True)
    ]
    points = torch.rand(count, 3, device=device, dtype=arithmetic(dtype)) * 1.4 - 0.2
    values = torch.randn(count, sum(channels), device=device).to(dtype)
    return sums, values, points


def expected_sums(sums, values, points, **options):
    """The same through the gradient of sample_pyramid, in float64."""
    grids = [torch.zeros_like(x, dtype=torch.float64, requires_grad=True) for x in sums]
    sampled = sample_pyramid(grids, points.double(), **options)
    gradients = torch.autograd.grad(sampled, grids, values.double())
    return [x.double() + gradient for x, gradient in zip(sums, gradients, strict=True)]


def assert_added(sums, values, points, given=None, column=0, **options):
    """Fails unless the op makes of the sums what is expected, exact to their own dtype, whatever that of the values."""
    expected = expected_sums(sums, values, points, **options)
    accumulate_trilinear_(sums, values if given is None else given, points, column=column, **options)
    assert_all_match(sums, expected, [f"level {level}" for level in range(len(sums))])


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", ["border", "zeros", "reflection"])
@pytest.mark.parametrize("align_corners", [True, False])
def test_adds_the_gradient_of_sampling(device, dtype, padding, align_corners):
    assert_added(*make(device, dtype), padding=padding, align_corners=align_corners)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 4, 9])
def test_values_may_have_other_columns(device, dtype, column, deterministic):
    sums, values, points = make(device, dtype)
    wide = torch.full((len(values), values.shape[1] + 12), torch.nan, dtype=values.dtype, device=device)
    wide[:, column : column + values.shape[1]] = values
    assert_added(sums, values, points, wide, column)


def test_columns_that_are_missing_are_refused(device):
    total, points = torch.zeros(5, 4, 4, 3, device=device), torch.rand(10, 3, device=device)
    for columns, column in ((2, 0), (5, 3), (5, -1)):
        with pytest.raises(RuntimeError, match="values must have 3 columns from"):
            accumulate_trilinear_([total], torch.ones(10, columns, device=device), points, column=column)


@pytest.fixture(params=[False, True], ids=["any order", "deterministic"])
def deterministic(request):
    with op_testing.deterministic(request.param):
        yield request.param


@pytest.mark.covering("dtype channels deterministic")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 3, 4, 28])
@pytest.mark.parametrize("padding", ["border", "zeros"])
def test_every_grid_of_a_sum_takes_all_values(device, dtype, channels, padding, deterministic):
    sums, values, points = make(device, dtype, (channels,) * 4)
    assert_added(sums, values[:, :channels], points, reduce="sum", padding=padding, align_corners=False)


def test_what_no_point_is_near_keeps_its_bits(device):
    total = torch.randn(20, 20, 20, 4, device=device)
    before = total.clone()
    accumulate_trilinear_([total], torch.ones(50, 4, device=device), torch.rand(50, 3, device=device) * 0.2)
    assert torch.equal(total[6:], before[6:])
    assert not torch.equal(total[:5], before[:5])


@pytest.mark.parametrize("value", NON_FINITE)
def test_points_that_are_not_finite_add_nothing(device, value):
    total = torch.randn(4, 4, 4, 2, device=device)
    before = total.clone()
    points = torch.full((9, 3), 0.5, device=device)
    points[:, 1] = value
    accumulate_trilinear_([total], torch.ones(9, 2, device=device), points)
    assert torch.equal(total, before)


# --- slabs


def slab_of(total, first, last):
    """Planes first to last - 1 of a grid, in their own memory."""
    return total[first:last].clone()


def assert_same_slab(total, whole):
    # The CPU adds the terms of a vertex in the order of the points; atomics add them in any order.
    if total.is_cuda:
        assert_matches(total, whole.double(), "slab")
    else:
        assert torch.equal(total, whole)


@pytest.mark.covering("padding align_corners span")
@pytest.mark.parametrize("channels", [1, 3, 4, 28])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", ["border", "zeros", "reflection", "periodic"])
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("span", [(0, 1), (0, 4), (5, 6), (3, 7), (8, 9), (6, 9), (0, 9), (4, 4)], ids=str)
def test_a_slab_receives_what_its_planes_would(device, channels, dtype, padding, align_corners, span, deterministic):
    whole = torch.randn(9, 6, 5, channels, device=device, dtype=arithmetic(dtype))
    slab = slab_of(whole, *span)
    points = torch.rand(2000, 3, device=device, dtype=arithmetic(dtype)) * 1.4 - 0.2
    points[:200, 0] = torch.randint(-1, 10, (200,), device=device) / 8  # on planes
    points[200:300, 1] = float("nan")
    values = torch.randn(2000, channels, device=device).to(dtype)
    options = {"padding": padding, "align_corners": align_corners}
    accumulate_trilinear_([slab], values, points, slabs=[(span[0], 9)], **options)
    accumulate_trilinear_([whole], values, points, **options)
    assert_same_slab(slab, whole[slice(*span)])


@pytest.mark.parametrize("reduce", ["concat", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_level_has_its_own_slab(device, reduce, dtype, deterministic):
    channels = (4, 3, 1, 8) if reduce == "concat" else (4,) * 4
    sums, values, points = make(device, dtype, channels, count=3000)
    values = values[:, : sum(channels) if reduce == "concat" else 4]
    spans = [(1, 3), (2, 3), (0, 0), (5, 16)]
    slabs = [slab_of(total, *span) for total, span in zip(sums, spans, strict=True)]
    planes = [(first, total.shape[0]) for total, (first, _) in zip(sums, spans, strict=True)]
    accumulate_trilinear_(slabs, values, points, reduce=reduce, slabs=planes)
    accumulate_trilinear_(sums, values, points, reduce=reduce)
    for slab, total, span in zip(slabs, sums, spans, strict=True):
        assert_same_slab(slab, total[slice(*span)])


def test_slabs_that_tile_a_grid_receive_all_of_it(device):
    """More points than vertices, and more than one vector of channels, take the other kernels of CUDA."""
    for resolution, count in (((40, 20, 24), 5000), ((12, 4, 3), 20_000)):
        whole = torch.zeros(*resolution, 12, device=device)
        points, values = torch.rand(count, 3, device=device), torch.randn(count, 12, device=device)
        accumulate_trilinear_([whole], values, points)
        cuts = [0, 1, resolution[0] // 3, resolution[0] // 2, resolution[0]]
        for first, last in itertools.pairwise(cuts):
            slab = torch.zeros_like(whole[first:last])
            accumulate_trilinear_([slab], values, points, slabs=[(first, resolution[0])])
            assert_same_slab(slab, whole[first:last])


def test_a_slab_without_points_keeps_its_bits(device):
    slab = torch.randn(3, 4, 4, 2, device=device)
    before = slab.clone()
    for points in (torch.rand(0, 3, device=device), torch.rand(100, 3, device=device) * 0.4):
        accumulate_trilinear_([slab], torch.ones(len(points), 2, device=device), points, slabs=[(6, 9)])
        assert torch.equal(slab, before)


@pytest.mark.parametrize(
    ("slabs", "error", "message"),
    [
        ([], ValueError, "slabs must be one for each of 1 sums, got 0"),
        ([(7, 9)], RuntimeError, "slabs must lie within their grids, got 3 planes from 7 of 9"),
        ([(-1, 9)], RuntimeError, "slabs must lie within their grids, got 3 planes from -1 of 9"),
        ([(0, 2)], RuntimeError, "slabs must lie within their grids, got 3 planes from 0 of 2"),
        ([(0, 2**40)], RuntimeError, "grid must have 1 to 2\\^30 vertices along each axis"),
        ([(0, 3, 4)], RuntimeError, "slabs must be two numbers for each of 1 grids, got 3"),
    ],
    ids=str,
)
def test_unfit_slabs_are_refused(device, slabs, error, message):
    slab, points = torch.zeros(3, 4, 4, 2, device=device), torch.rand(10, 3, device=device)
    with pytest.raises(error, match=message):
        accumulate_trilinear_([slab], torch.ones(10, 2, device=device), points, slabs=slabs)
