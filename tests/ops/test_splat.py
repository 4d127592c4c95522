"""splat_trilinear, the sum of a gradient into grids: by every method, and always the same bits where that is promised.

On CUDA the methods are different kernels; the CPU has one for all of them.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from op_testing import DTYPES, LINEAR_LOOKUPS, deterministic, points_off_faces
from reference import sample_grid, sample_grid_with_gradient
from tolerances import arithmetic
from torch.utils._python_dispatch import TorchDispatchMode

from voxelfield import _library
from voxelfield.ops import sample_pyramid, sample_trilinear
from voxelfield.ops._grids import PADDINGS

METHODS = {"automatic": 0, "atomic": 1, "tiled": 2, "deterministic": 3}
RUNS = 20

every_method = pytest.mark.parametrize("method", METHODS)


def splat(values, points, sizes, method, *, padding="border", align_corners=True, add=False, jet=False):
    """Calls the raw op: values (..., B, N, C), points (B, N, 3), sizes a list of (X, Y, Z, C)."""
    _library.ensure_loaded(values.device.type)
    periodic = padding == "periodic"
    flat = [number + periodic for size in sizes for number in size[:3]]
    flat = [number for i, size in enumerate(sizes) for number in (*flat[3 * i : 3 * i + 3], size[3])]
    # The raw op sums periodic grids with a further vertex along each axis, a copy of the first one.
    options = PADDINGS[padding] + periodic, align_corners, False, add, jet, METHODS[method]
    dtype, values = values.dtype, values.to(arithmetic(values.dtype)) if periodic else values
    sums = torch.ops.voxelfield.splat_trilinear(values, points, flat, *options)
    for axis in (-4, -3, -2) if periodic else ():
        for total in sums:
            total.select(axis, 0).add_(total.select(axis, -1))
        sums = [total.narrow(axis, 0, total.shape[axis] - 1) for total in sums]
    return [total.to(dtype) for total in sums]


def expected_sums(values, points, sizes, padding="border", align_corners=True, add=False):
    """The gradients of the plain reference, in float64."""
    values, points = values.double(), points.double()
    columns = [values] * len(sizes) if add else values.split([size[3] for size in sizes], dim=-1)
    sums = []
    for size, column in zip(sizes, columns, strict=True):
        grids = torch.zeros(len(points), *size, dtype=torch.float64, device=values.device, requires_grad=True)
        sampled = torch.stack([sample_grid(g, p, padding, align_corners) for g, p in zip(grids, points, strict=True)])
        sums.append(torch.autograd.grad(sampled, grids, column)[0])
    return sums


def assert_sums(actual, expected, terms=1):
    """As :func:`assert_matches`, for sums of up to ``terms`` values in any order."""
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        largest = max(e.abs().max().item(), 1.0) if e.numel() else 1.0
        eps = torch.finfo(arithmetic(a.dtype)).eps
        torch.testing.assert_close(
            a.double(), e, rtol=torch.finfo(a.dtype).eps, atol=64 * eps * largest * max(terms, 1) ** 0.5
        )


# --- the same sums by every method


def compiled_form(dtype, channels, method):
    return dtype, math.gcd(channels, 8), method


@pytest.mark.covering(by=compiled_form)
@every_method
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 8, 12, 16, 28, 33, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels(device, dtype, channels, method):
    size = (9, 6, 11, channels)
    points = points_off_faces(700, device, arithmetic(dtype), size[:3])[None]
    values = torch.randn(1, 700, channels, device=device, dtype=dtype)
    actual = splat(values, points, [size], method, padding="zeros")
    assert actual[0].dtype == dtype
    assert_sums(actual, expected_sums(values, points, [size], "zeros"), terms=8)


@pytest.mark.covering("resolution method")
@every_method
@pytest.mark.parametrize(
    "resolution",
    [
        (1, 1, 1),
        (2, 1, 3),
        (3, 4, 5),
        (8, 8, 8),
        (7, 9, 8),
        (17, 16, 15),
        (33, 2, 5),
        (1, 70, 2),
        (5, 3, 70),
        (70, 67, 6),
    ],
    ids=str,
)
@pytest.mark.parametrize("padding", ["border", "zeros", "reflection"])
def test_resolutions(device, resolution, padding, method):
    points = points_off_faces(3000, device, torch.float32, resolution)[None]
    values = torch.randn(1, 3000, 4, device=device)
    sizes = [(*resolution, 4)]
    actual = splat(values, points, sizes, method, padding=padding)
    # A single vertex takes all the points.
    terms = 3000 // max(resolution[0] * resolution[1] * resolution[2] // 8, 1)
    assert_sums(actual, expected_sums(values, points, sizes, padding), terms)


@functools.lru_cache(maxsize=1)  # the methods of one case follow each other
def many_points(channels, device):
    """So many points and vertices that levels are summed by different kernels, each of which sees some columns."""
    sizes = [(64, 64, 64, width) for width in channels]
    points = torch.rand(1, 1 << 15, 3, device=device)
    values = torch.randn(1, 1 << 15, sum(channels), device=device)
    return values, points, sizes, expected_sums(values, points, sizes)


@every_method
@pytest.mark.parametrize("channels", [(3, 1), (3, 2), (12, 8), (12, 4, 20), (2, 8, 2), (6, 4, 6)], ids=str)
def test_levels_of_different_widths(device, channels, method):
    *inputs, expected = many_points(channels, device)
    assert_sums(splat(*inputs, method), expected, terms=40)


@pytest.mark.covering
@every_method
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("padding", ["border", "zeros", "reflection"])
@pytest.mark.parametrize("channels", [(3, 1, 4, 2), 10], ids=["side by side", "added"])
def test_a_batch_of_several_levels(device, channels, padding, align_corners, method):
    add = channels == 10
    sizes = [(5, 4, 7), (12, 9, 10), (2, 2, 2), (16, 16, 16)]
    sizes = [(*size, c) for size, c in zip(sizes, (10,) * 4 if add else channels, strict=True)]
    points = torch.rand(3, 400, 3, device=device, dtype=torch.float64) * 1.6 - 0.3
    values = torch.randn(3, 400, 10, device=device, dtype=torch.float64)
    actual = splat(values, points, sizes, method, padding=padding, align_corners=align_corners, add=add)
    assert_sums(actual, expected_sums(values, points, sizes, padding, align_corners, add), terms=400)


@pytest.mark.covering("dtype method")
@every_method
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", ["border", "zeros"])
@pytest.mark.parametrize("add", [False, True])
def test_coarse_levels_beside_fine_ones(device, dtype, padding, add, method):
    sizes = [(r, r // 2 + 1, r // 2, 4) for r in (16, 64, 8, 40, 32)] + [(5, 1, 7, 4)]
    points = torch.rand(1, 6000, 3, device=device, dtype=arithmetic(dtype)) * 1.2 - 0.1
    points[:, 7::50, 1] = float("nan")
    values = torch.randn(1, 6000, 4 if add else 4 * len(sizes), device=device, dtype=dtype)
    finite = points.isfinite().all(dim=-1)[0]
    expected = expected_sums(values[:, finite], points[:, finite], sizes, padding, add=add)
    assert_sums(splat(values, points, sizes, method, padding=padding, add=add), expected, 6000)


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_crowd_beside_scattered_points(device, dtype, method):
    # Tiles that are split, tiles with a few points, and empty ones.
    sizes = [(64, 48, 40, 4), (16, 12, 10, 4)]
    points = torch.rand(1, 60_000, 3, device=device)
    points[:, 100:50_000] = points[:, 100:50_000] * 0.05 + 0.45
    values = torch.randn(1, 60_000, 8, device=device, dtype=dtype)
    assert_sums(splat(values, points, sizes, method), expected_sums(values, points, sizes), 50_000)


@pytest.mark.covering("dtype method")
@every_method
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 4, 12])
def test_many_points_in_one_cell(device, dtype, channels, method):
    # All of them meet in eight vertices of 64000.
    count, size = 20_000, (40, 40, 40, channels)
    local = 0.1 + 0.8 * torch.rand(1, count, 3, device=device, dtype=arithmetic(dtype))
    points = (local + torch.tensor([17.0, 4.0, 38.0], device=device, dtype=local.dtype)) / 39
    values = torch.randn(1, count, channels, device=device, dtype=dtype)
    assert_sums(splat(values, points, [size], method), expected_sums(values, points, [size]), count)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_grid_larger_than_the_cache(dtype):
    # What the automatic choice takes for large grids, outside of a CUDA graph and in one.
    device = torch.device("cuda")
    resolution = math.ceil((torch.cuda.get_device_properties(device).L2_cache_size * 2 / 16) ** (1 / 3))
    sizes = [(resolution, resolution, resolution, 4), (resolution // 8, 9, 9, 4)]
    count = resolution**3 // 30
    points = torch.rand(1, count, 3, device=device)
    values = torch.randn(1, count, 8, device=device, dtype=dtype)
    expected = expected_sums(values, points, sizes)
    assert_sums(splat(values, points, sizes, "automatic"), expected, count // 500)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = splat(values, points, sizes, "automatic")
    for total in captured:
        total.fill_(float("nan"))
    graph.replay()
    assert_sums(captured, expected, count // 500)


@pytest.mark.covering("dtype method")
@every_method
@pytest.mark.parametrize("lookup", LINEAR_LOOKUPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_with_gradient(device, dtype, lookup, method):
    padding, align_corners, _ = lookup
    size = (9, 6, 11, 5)
    points = points_off_faces(300, device, arithmetic(dtype), size[:3], align_corners)[None]
    jets = torch.randn(4, 1, 300, 5, device=device, dtype=dtype)
    options = {"padding": padding, "align_corners": align_corners}

    grid = torch.zeros(size, dtype=torch.float64, device=device, requires_grad=True)
    value, slopes = sample_grid_with_gradient(grid, points[0].double(), padding, align_corners)
    outputs = (value, *slopes.unbind(dim=-1))
    expected = torch.autograd.grad(outputs, grid, list(jets[:, 0].double()))
    assert_sums(splat(jets, points, [size], method, jet=True, **options), [expected[0][None]], 32)


@every_method
def test_points_that_are_not_finite_add_nothing(device, method):
    size = (9, 6, 11, 4)
    points = points_off_faces(300, device, torch.float32, size[:3])[None]
    values = torch.randn(1, 300, 4, device=device)
    expected = expected_sums(values[:, ::2], points[:, ::2], [size])
    points[:, 1::2, 1] = torch.tensor([float("nan"), float("inf"), -float("inf")], device=device).repeat(50)
    values[:, 1::2] = float("nan")
    assert_sums(splat(values, points, [size], method), expected, 8)


@every_method
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("channels", [1, 4, 7])
def test_values_that_are_not_finite_reach_only_the_nearest_vertex(device, method, channels, value):
    _library.ensure_loaded(device.type)
    size, vertex = torch.tensor([9, 10, 19]), torch.tensor([2, 5, 11])
    points = torch.rand(1, 300, 3)
    points[0, 7] = (vertex + 0.2) / (size - 1)
    values = torch.randn(1, 300, channels)
    values[0, 7] = value
    options = (PADDINGS["border"], True, True, False, False, METHODS[method])
    sizes = [*size.tolist(), channels]
    (sums,) = torch.ops.voxelfield.splat_trilinear(values.to(device), points.to(device), sizes, *options)
    reached = ~sums[0].isfinite()
    assert reached.nonzero().tolist() == [[*vertex.tolist(), channel] for channel in range(channels)]


@every_method
@pytest.mark.parametrize(("count", "channels"), [(0, 3), (4, 0), (0, 0)])
def test_empty_input(device, count, channels, method):
    sizes = [(3, 4, 5, channels), (2, 2, 2, channels)]
    values = torch.randn(2, count, 2 * channels, device=device)
    sums = splat(values, torch.rand(2, count, 3, device=device), sizes, method)
    assert [x.shape for x in sums] == [(2, *size) for size in sizes]
    assert not any(x.any() for x in sums)


# --- determinism


def scattered(device, count=20_000):
    """Points in random order, a third of them in three places and some outside."""
    points = torch.rand(1, count, 3, device=device) * 1.2 - 0.1
    points[:, : count // 3] = torch.rand(3, 3, device=device)[torch.randint(3, (1, count // 3), device=device)]
    return points[:, torch.randperm(count, device=device)]


@pytest.mark.parametrize("channels", [1, 3, 4, 12, 28])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_method_gives_the_same_bits(device, dtype, channels):
    sizes = [(40, 37, 21, channels), (8, 8, 8, channels)]
    points = scattered(device).to(arithmetic(dtype))
    values = torch.randn(1, points.shape[1], 2 * channels, device=device, dtype=dtype)
    first = splat(values, points, sizes, "deterministic")
    for _ in range(RUNS - 1):
        torch.testing.assert_close(splat(values, points, sizes, "deterministic"), first, rtol=0, atol=0)


class MethodRecorder(TorchDispatchMode):
    """Records the method of every splat."""

    def __init__(self):
        super().__init__()
        self.methods = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.voxelfield.splat_trilinear.default:
            self.methods.append(args[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_the_setting_counts_when_the_backward_pass_runs(device, wanted, with_gradient):
    grids = [torch.randn(4, 5, size, 2, device=device, requires_grad=True) for size in (6, 3)]
    points = torch.rand(10, 3, device=device, requires_grad=True)
    with deterministic(not wanted):
        results = torch.utils._pytree.tree_leaves(sample_pyramid(grids, points, with_gradient=with_gradient))
    with deterministic(wanted), MethodRecorder() as recorder:
        loss = sum(x.square().sum() for x in results)
        gradients = torch.autograd.grad(loss, (*grids, points), create_graph=not with_gradient)
        if not with_gradient:
            torch.autograd.grad(gradients[-1].square().sum(), grids)
    assert len(recorder.methods) > (not with_gradient)
    assert set(recorder.methods) == {METHODS["deterministic" if wanted else "automatic"]}


@every_method
def test_an_explicit_method_stays(device, method):
    _library.ensure_loaded(device.type)
    values = torch.randn(1, 10, 2, device=device, requires_grad=True)
    with MethodRecorder() as recorder:
        splat(values, torch.rand(1, 10, 3, device=device), [(4, 5, 6, 2)], method)
    assert recorder.methods == [METHODS[method]]


def test_compiled_backward_is_deterministic_when_asked_to(device):
    torch.compiler.reset()
    grid = torch.randn(4, 5, 6, 2, device=device, requires_grad=True)
    methods = []

    def backend(graph, inputs):
        def inspect(graph, inputs):
            methods.extend(
                node.args[-1]
                for node in graph.graph.nodes
                if node.target is torch.ops.voxelfield.splat_trilinear.default
            )
            return graph.forward

        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=inspect)(graph, inputs)

    compiled = torch.compile(lambda g, p: sample_trilinear(g, p).square().sum(), fullgraph=True, backend=backend)
    with deterministic():
        compiled(grid, torch.rand(10, 3, device=device)).backward()
    assert methods == [METHODS["deterministic"]]
