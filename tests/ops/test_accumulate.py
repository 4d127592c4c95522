"""accumulate_trilinear_: what autograd would give, added to what is there."""

from __future__ import annotations

import pytest
import torch
from op_testing import DTYPES, NON_FINITE
from tolerances import arithmetic, assert_matches

from voxelfield.ops import sample_pyramid
from voxelfield.ops._internal import accumulate_trilinear_

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


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", ["border", "zeros", "reflection"])
@pytest.mark.parametrize("align_corners", [True, False])
def test_adds_the_gradient_of_sampling(device, dtype, padding, align_corners):
    sums, values, points = make(device, dtype)
    options = {"padding": padding, "align_corners": align_corners}
    expected = expected_sums(sums, values, points, **options)
    accumulate_trilinear_(sums, values, points, **options)
    for level, (total, want) in enumerate(zip(sums, expected, strict=True)):
        # the sums are exact to their own dtype, whatever that of the values
        assert_matches(total, want, f"level {level}")


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 8, 28])
def test_one_grid_of_any_width(device, channels):
    total = torch.zeros(7, 6, 5, channels, device=device)
    points = torch.rand(1000, 3, device=device)
    values = torch.randn(1000, channels, device=device)
    (expected,) = expected_sums([total], values, points)
    accumulate_trilinear_([total], values, points)
    assert_matches(total, expected, "sum")


@pytest.fixture(params=[False, True], ids=["any order", "deterministic"])
def deterministic(request):
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.covering("dtype channels deterministic")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 3, 4, 28])
@pytest.mark.parametrize("padding", ["border", "zeros"])
def test_every_grid_of_a_sum_takes_all_values(device, dtype, channels, padding, deterministic):
    sums, values, points = make(device, dtype, (channels,) * 4)
    values, options = values[:, :channels], {"reduce": "sum", "padding": padding, "align_corners": False}
    expected = expected_sums(sums, values, points, **options)
    accumulate_trilinear_(sums, values, points, **options)
    for level, (total, want) in enumerate(zip(sums, expected, strict=True)):
        assert_matches(total, want, f"level {level}")


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_anywhere_in_memory(device, offset, dtype):
    memory = torch.zeros(6 * 5 * 4 * 4 + 3, device=device)
    total = memory[offset : offset + 6 * 5 * 4 * 4].view(6, 5, 4, 4)
    points, values = torch.rand(100, 3, device=device), torch.randn(100, 4, device=device).to(dtype)
    (expected,) = expected_sums([total], values, points)
    accumulate_trilinear_([total], values, points)
    assert_matches(total, expected, "sum")


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


def test_no_points(device):
    total = torch.ones(4, 4, 4, 2, device=device)
    accumulate_trilinear_([total], torch.ones(0, 2, device=device), torch.rand(0, 3, device=device))
    assert torch.equal(total, torch.ones_like(total))


def test_the_same_bits_in_every_run_when_asked(device):
    sums, values, points = make(device, torch.float32, count=20_000)
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(5):
            copies = [x.clone() for x in sums]
            accumulate_trilinear_(copies, values, points)
            results.append(copies)
    finally:
        torch.use_deterministic_algorithms(False)
    for copies in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(copies, results[0], strict=True))
