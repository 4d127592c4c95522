"""Interpolation by separable kernels along one to three axes: sampling, sums, prefilter, complex numbers, sizes."""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from op_testing import NON_FINITE, deterministic, points_off_faces, threads
from reference import bspline_coefficients, sample_separable, splat_separable, with_slopes
from tolerances import arithmetic, assert_matches

from voxelfield import ops

SIZES = [(5,), (1,), (4, 7), (2, 1), (6, 3, 5), (1, 2, 9)]
PADDINGS = ["border", "zeros", "reflection", "periodic"]
CUBIC = ["bspline", "convolution"]
EVERY = [
    (size, kernel, padding, aligned)
    for size, kernel, padding, aligned in itertools.product(
        SIZES, ["nearest", "linear", *CUBIC], PADDINGS, [True, False]
    )
    if kernel in CUBIC or len(size) < 3  # test_grid.py has the others
]
every_kernel = pytest.mark.parametrize(("size", "kernel", "padding", "aligned"), EVERY, ids=str)


def sample(grid, points, kernel, padding="border", aligned=True, **options):
    options |= {"padding": padding, "align_corners": aligned}
    if kernel in CUBIC:
        return ops.sample_cubic(grid, points, kernel, **options)
    return ops.sample_trilinear(grid, points, mode=kernel, **options)


def splat(values, points, size, kernel, padding="border", aligned=True, **options):
    options |= {"padding": padding, "align_corners": aligned}
    if kernel in CUBIC:
        return ops.splat_cubic(values, points, size, kernel, **options)
    return ops.splat_trilinear(values, points, size, mode=kernel, **options)


def off_vertices(count, size, device, dtype=torch.float64, aligned=True):
    """Points up to three cells outside of a grid of any number of axes."""
    full = (*size, *[2] * (3 - len(size)))
    return points_off_faces(count, device, dtype, full, aligned)[:, : len(size)].contiguous()


# --- values and derivatives


@every_kernel
@pytest.mark.parametrize("channels", [1, 9])
def test_values_and_gradients(device, size, kernel, padding, aligned, channels):
    """Against the plain reference, and the sums as the adjoint, also with the points' gradient from the same pass."""
    grid = torch.randn(*size, channels, dtype=torch.float64, device=device, requires_grad=True)
    points = off_vertices(60, size, device, aligned=aligned).requires_grad_()
    sampled, expected = (
        sample(grid, points, kernel, padding, aligned),
        sample_separable(grid.cpu(), points.cpu(), kernel, padding, aligned),
    )
    assert_matches(sampled.cpu(), expected)
    grads = torch.randn_like(sampled)
    found = torch.autograd.grad(sampled, (grid, points), grads)
    wanted = torch.autograd.grad(expected, (grid, points), grads.cpu(), materialize_grads=True, allow_unused=True)
    for actual, reference in zip(found, wanted, strict=True):
        assert_matches(actual.cpu(), reference.cpu())
    if kernel != "nearest":
        value, slopes = sample(grid, points, kernel, padding, aligned, with_gradient=True)
        assert_matches(value.cpu(), expected)
        of_reference = with_slopes(lambda p: sample_separable(grid.cpu(), p, kernel, padding, aligned), points.cpu())
        assert_matches(slopes.cpu(), of_reference[1])
    values = grads.clone().requires_grad_()
    total = splat(values, points, size, kernel, padding, aligned)
    assert_matches(total.cpu(), splat_separable(values.cpu(), points.cpu(), size, kernel, padding, aligned))
    torch.testing.assert_close(torch.autograd.grad(total, values, grid)[0], sampled)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", ["linear", *CUBIC])
@pytest.mark.parametrize("size", [(9,), (6, 7), (5, 4, 6)], ids=str)
@pytest.mark.parametrize("channels", [1, 2, 4, 7, 8, 16])
def test_dtypes_and_channels(device, dtype, kernel, size, channels):
    if kernel == "linear" and len(size) == 3:
        return
    grid = torch.randn(*size, channels, device=device).to(dtype).requires_grad_()
    points = off_vertices(300, size, device, torch.float32).requires_grad_()
    sampled = sample(grid, points, kernel)
    assert sampled.dtype == dtype
    exact = [x.detach().cpu().double().requires_grad_() for x in (grid, points)]
    expected = sample_separable(*exact, kernel)
    assert_matches(sampled.cpu(), expected)
    grads = torch.randn_like(sampled)
    found = torch.autograd.grad(sampled, (grid, points), grads)
    wanted = torch.autograd.grad(expected, exact, grads.cpu().double())
    assert found[0].dtype == dtype
    for actual, reference, terms in zip(found, wanted, (8, 1), strict=True):
        eps = torch.finfo(arithmetic(actual.dtype)).eps
        tolerance = {"rtol": torch.finfo(actual.dtype).eps, "atol": 128 * eps * terms * reference.abs().max().item()}
        torch.testing.assert_close(actual.cpu().double(), reference, **tolerance)


@pytest.mark.parametrize("kernel", ["linear", *CUBIC])
@pytest.mark.parametrize("size", [(40,), (20, 30), (12, 10, 16)], ids=str)
def test_sums_are_the_adjoint(device, kernel, size):
    """<S g, v> = <g, S* v> to a millionth in float32."""
    grid = torch.rand(*size, 3, device=device)
    points, values = torch.rand(5000, len(size), device=device), torch.rand(5000, 3, device=device)
    sampled, total = sample(grid, points, kernel), splat(values, points, size, kernel)
    one, other = (sampled.double() * values).sum(), (grid.double() * total).sum()
    assert abs(one - other) <= 1e-6 * abs(one)


@pytest.mark.parametrize("kernel", ["linear", *CUBIC])
@pytest.mark.parametrize("size", [(5,), (4, 3), (3, 4, 3)], ids=str)
@pytest.mark.parametrize("padding", PADDINGS)
def test_second_derivatives(device, kernel, size, padding):
    """Of sampling and of sums, in all arguments at once, by differences."""
    grid = torch.randn(*size, 2, dtype=torch.float64, device=device, requires_grad=True)
    points = off_vertices(4, size, device).requires_grad_()
    values, weights = (torch.randn(*shape, dtype=torch.float64, device=device) for shape in ((4, 2), (4,)))
    checks = {"nondet_tol": 0.0 if device.type == "cpu" else 1e-9}
    assert torch.autograd.gradcheck(lambda g, p: sample(g, p, kernel, padding), (grid, points), **checks)
    assert torch.autograd.gradgradcheck(lambda g, p: sample(g, p, kernel, padding), (grid, points), **checks)

    def total(values, points, weights):
        return splat(values, points, size, kernel, padding, weights=weights, with_weights=True)

    arguments = (values.requires_grad_(), points, weights.requires_grad_())
    assert torch.autograd.gradcheck(total, arguments, **checks)
    assert torch.autograd.gradgradcheck(total, arguments, **checks)


# --- B-splines


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("size", [(1,), (2,), (3,), (70,), (5, 33), (17, 2, 20)], ids=str)
def test_prefilter(device, padding, aligned, size):
    """The coefficients are those of a dense solution, and give the values at the vertices; the adjoint is right."""
    grid = torch.randn(2, *size, 3, dtype=torch.float64, device=device, requires_grad=True)
    options = {"padding": padding, "align_corners": aligned}
    coefficients = ops.bspline_prefilter(grid, len(size), **options)
    assert_matches(coefficients.cpu(), bspline_coefficients(grid.cpu(), len(size), padding, aligned))
    axes = [torch.arange(n, dtype=torch.float64, device=device) for n in size]
    axes = [i / max(len(i) - 1, 1) if aligned else (i + 0.5) / len(i) for i in axes]
    vertices = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).expand(2, *size, len(size))
    torch.testing.assert_close(ops.sample_cubic(coefficients, vertices, **options), grid)
    other = torch.randn_like(coefficients)
    (gradient,) = torch.autograd.grad(coefficients, grid, other, create_graph=True)
    torch.testing.assert_close((coefficients * other).sum(), (grid * gradient).sum())
    narrow = ops.bspline_prefilter(grid.detach().half(), len(size), **options)
    assert narrow.dtype == torch.float16
    assert_matches(narrow.cpu(), bspline_coefficients(grid.detach().half().cpu().double(), len(size), padding, aligned))


def test_the_default_of_dimensions_takes_five_for_a_batch_of_volumes():
    grid = torch.randn(2, 3, 4, 5, 1)
    each = torch.stack([ops.bspline_prefilter(volume) for volume in grid])
    assert torch.equal(ops.bspline_prefilter(grid), each)
    assert not torch.equal(ops.bspline_prefilter(grid[0], 2), each[0])


# --- batches, points that are not finite, complex numbers


@pytest.mark.parametrize("kernel", ["linear", *CUBIC])
def test_a_batch_is_its_elements_one_by_one(device, kernel):
    for size in [(7,), (5, 6)] + [(4, 5, 3)] * (kernel in CUBIC):
        grids = torch.randn(3, *size, 2, device=device)
        points = torch.rand(3, 4, 5, len(size), device=device)
        each = torch.stack([sample(g, p, kernel) for g, p in zip(grids, points, strict=True)])
        torch.testing.assert_close(sample(grids, points, kernel), each)
        shared = grids[:1].clone().requires_grad_()
        sampled = sample(shared.expand(3, *size, 2), points, kernel)
        torch.testing.assert_close(sampled[1], sample(shared[0], points[1], kernel))
        values = torch.randn(3, 20, 2, device=device)
        sums = splat(values, points.flatten(1, 2), size, kernel)
        for i in range(3):
            torch.testing.assert_close(sums[i], splat(values[i], points[i].flatten(0, 1), size, kernel))
        (gradient,) = torch.autograd.grad(sampled, shared, values.view(3, 4, 5, 2))
        torch.testing.assert_close(gradient[0], sums.sum(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kernel", ["nearest", "linear", *CUBIC])
def test_points_that_are_not_finite_read_zeros_and_add_nothing(device, kernel, padding):
    for axes in (1, 2, 3):
        grid = torch.full((4,) * axes + (2,), 3.0, device=device, requires_grad=True)
        points = torch.full((len(NON_FINITE), axes), 0.3, device=device)
        points[:, -1] = torch.tensor(NON_FINITE)
        points.requires_grad_()
        sampled = sample(grid, points, kernel, padding)
        assert not sampled.any()
        assert not any(x.any() for x in torch.autograd.grad(sampled.sum(), (grid, points)))
        assert not splat(torch.ones(len(points), 2, device=device), points, 4, kernel, padding).any()


def test_integers_along_two_axes_are_copied(device):
    labels = torch.randint(0, 99, (5, 6, 1), device=device)
    points = torch.rand(50, 2, device=device)
    expected = sample(labels.double(), points.double(), "nearest")
    assert torch.equal(sample(labels, points, "nearest"), expected.long())
    with pytest.raises(TypeError, match="grid must be float32"):
        sample(labels, points, "linear")


@pytest.mark.parametrize("kernel", ["linear", *CUBIC])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_are_sampled_and_summed_part_by_part(device, kernel, dtype):
    for size in [(7,), (5, 6), (4, 5, 3)]:
        grid = torch.randn(*size, 3, dtype=dtype, device=device, requires_grad=True)
        points = torch.rand(40, len(size), device=device, dtype=grid.real.dtype).requires_grad_()
        sampled = sample(grid, points, kernel)
        parts = [sample(part, points, kernel) for part in (grid.real, grid.imag)]
        torch.testing.assert_close(sampled, torch.complex(*parts))
        value, slopes = sample(grid, points, kernel, with_gradient=True)
        torch.testing.assert_close(value, sampled)
        each = [sample(part, points, kernel, with_gradient=True)[1] for part in (grid.real, grid.imag)]
        torch.testing.assert_close(slopes, torch.complex(*each))
        found = torch.autograd.grad(sampled.abs().square().sum(), (grid, points))
        wanted = torch.autograd.grad(sum(part.square().sum() for part in parts), (grid, points))
        torch.testing.assert_close(found, wanted)
        weights = torch.rand(40, device=device, dtype=points.dtype)
        sums, totals = splat(sampled, points, size, kernel, weights=weights, with_weights=True)
        of_parts = [splat(part, points, size, kernel, weights=weights) for part in parts]
        torch.testing.assert_close(sums, torch.complex(*of_parts))
        torch.testing.assert_close(totals, splat(weights[:, None], points, size, kernel)[..., 0])


def test_complex_images_and_coefficients(device):
    image, at = torch.randn(2, 3, 5, 6, dtype=torch.complex64, device=device), torch.rand(2, 4, 7, 2, device=device)
    for mode in ("nearest", "bilinear", "bicubic"):
        parts = [ops.grid_sample(part, at, mode, align_corners=False) for part in (image.real, image.imag)]
        torch.testing.assert_close(ops.grid_sample(image, at, mode, align_corners=False), torch.complex(*parts))
    parts = [ops.bspline_prefilter(part.contiguous(), 2) for part in (image.real, image.imag)]
    torch.testing.assert_close(ops.bspline_prefilter(image, 2), torch.complex(*parts))


# --- sums


def test_weighted_means(device):
    """Of a field that is the same everywhere, whatever the weights."""
    points, weights = torch.rand(4000, 3, device=device), torch.rand(4000, device=device) + 0.1
    values = torch.full((4000, 2), 0.7, device=device)
    for total, sums in (
        ops.splat_trilinear(values, points, 5, weights=weights, with_weights=True),
        ops.splat_cubic(values, points, (5, 4, 6), weights=weights, with_weights=True),
    ):
        torch.testing.assert_close(total / sums[..., None], torch.full_like(total, 0.7))
        torch.testing.assert_close(sums.sum(), weights.sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kernel", ["nearest", "linear", *CUBIC])
@pytest.mark.parametrize("size", [(50,), (9, 11), (8, 7, 9)], ids=str)
def test_the_same_bits(device, kernel, size):
    """With any number of threads on the CPU, and on CUDA where that is asked for: then the sums are also exact."""
    points = torch.rand(3000, len(size), device=device).requires_grad_()
    values = torch.randn(3000, 3, device=device)
    found = []
    for count in (1, 2, 2):
        with deterministic(device.type == "cuda"), threads(count):
            total = splat(values, points, size, kernel)
            slopes = torch.autograd.grad(total.square().sum(), points)[0]
            found.append((total.detach(), slopes))
    for total, slopes in found[1:]:
        assert torch.equal(total, found[0][0])
        assert torch.equal(slopes, found[0][1])
    expected = splat_separable(values.cpu().double(), points.detach().cpu().double(), size, kernel)
    torch.testing.assert_close(found[0][0].cpu().double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.cuda
def test_a_value_that_is_not_finite_shows_in_reproducible_sums():
    values = torch.tensor([[1.0], [math.inf]], device="cuda")
    with deterministic():
        total = ops.splat_cubic(values, torch.rand(2, 2, device="cuda"), 4)
        zeros = ops.splat_cubic(torch.zeros(2, 1, device="cuda"), torch.rand(2, 2, device="cuda"), 4)
    assert not total.isfinite().any()
    assert not zeros.any()


# --- grids that do not fit one call


def test_chunks_of_points_are_one_call(device):
    """Nothing but the arguments is kept for the backward pass, so that chunks need no checkpoints."""
    grid = torch.randn(9, 8, 7, 2, device=device, requires_grad=True)
    points = torch.rand(1000, 3, device=device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        whole = ops.sample_cubic(grid, points)
    assert {*kept} == {grid.data_ptr(), points.data_ptr()}
    chunks = torch.cat([ops.sample_cubic(grid, some) for some in points.split(300)])
    assert torch.equal(chunks, whole)
    grads = torch.randn_like(whole)
    for actual, expected in zip(
        torch.autograd.grad(chunks, (grid, points), grads),
        torch.autograd.grad(whole, (grid, points), grads),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def last_corner(device):
    """Points among the last vertices of 1300 along each axis, 2.2e9 in all, and where they are among the last 8."""
    points = 1 - torch.rand(100, 3, device=device) * (3 / 1299)
    return points, (points.cpu().double() * 1299 - 1292) / 7


def skip_without_memory(device, needed):
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else os.sysconf("SC_AVPHYS_PAGES") * 4096
    if free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of memory")


@pytest.mark.parametrize("kernel", ["linear", *CUBIC])
def test_samples_of_more_elements_than_32_bits_count(device, kernel):
    """Of memory that is reserved but, on the CPU, never touched beyond the last vertices."""
    if device.type == "cuda":
        skip_without_memory(device, 10e9)
    volume = torch.empty(1300, 1300, 1300, 1, device=device)
    volume[-8:, -8:, -8:] = torch.rand(8, 8, 8, 1, device=device)
    points, within = last_corner(device)
    corner = volume[-8:, -8:, -8:].cpu().double()
    sampled = sample(volume, points.requires_grad_(), kernel)
    expected = sample_separable(corner, within.requires_grad_(), kernel)
    torch.testing.assert_close(sampled.cpu().double(), expected, atol=1e-3, rtol=0)
    if kernel == "bspline":  # whose slope is continuous
        (slope,) = torch.autograd.grad(sampled.sum(), points)
        (wanted,) = torch.autograd.grad(expected.sum(), within)
        torch.testing.assert_close(slope.cpu().double() * 7 / 1299, wanted, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_sums_of_more_elements_than_32_bits_count(device):
    skip_without_memory(device, 11e9)
    points, within = last_corner(device)
    values = torch.rand(100, 1, device=device)
    volume = ops.splat_cubic(values, points, 1300)
    assert volume.numel() > 2**31
    expected = splat_separable(values.cpu().double(), within, (8, 8, 8), "bspline")
    torch.testing.assert_close(volume[-8:, -8:, -8:].cpu().double(), expected, atol=1e-3, rtol=0)


# --- refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g, p: ops.sample_cubic(g, p, "cubic"), "kernel must be one of"),
        (lambda g, p: ops.sample_cubic(g, p[:, :2]), r"points must have shape \(3, ..., 2\) for grid"),
        (lambda g, p: ops.sample_cubic(g, p, padding="wrap"), "padding must be one of"),
        (lambda g, p: ops.sample_cubic(g[:0], p), "grid must have 1 to 2"),
        (lambda g, p: ops.bspline_prefilter(g, 4), "dimensions must be 1, 2 or 3"),
        (lambda g, p: ops.bspline_prefilter(g[:0]), "grid must have 1 to 2"),
        (lambda g, p: ops.splat_cubic(p, p, (3, 3)), "resolution must be one int, or 3 for as many coordinates"),
        (lambda g, p: ops.splat_cubic(p, p, 0), "resolution must be an int of at least 1"),
        (lambda g, p: ops.splat_trilinear(p[:4], p, 3), r"points must have shape \(4, D\)"),
        (lambda g, p: ops.splat_trilinear(p[0], p, 3), r"values must have shape \(N, C\)"),
        (lambda g, p: ops.splat_trilinear(p, p, 3, weights=p), r"weights must have shape \(5\)"),
        (lambda g, p: ops.splat_trilinear(p, p, 3, mode="cubic"), "mode must be one of"),
        (lambda g, p: ops.splat_trilinear(p, p[:, :0], 3), "points must have 1 to 3 coordinates"),
        (lambda g, p: ops.splat_cubic(p.long(), p, 3), "values must be float32"),
        (lambda g, p: ops.bspline_prefilter(g.long()), "grid must be float32"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(torch.zeros(3, 3, 3, 1), torch.rand(5, 3))
