"""Times interpolation, splatting and B-splines against the packages that people use for them, in one run.

    python benchmarks/interpolation.py [--device cpu|cuda] [--threads N] [--quick] [--only SUBSTRING] [--json PATH]

- "sample": one grid of one, two or three dimensions at points, next to ``scipy.ndimage.map_coordinates`` (one channel,
  on a CPU, single-threaded, without gradients), ``grid_pull`` of torch-interpol, the B-spline grids of
  torch-cubic-spline-grids, and ``F.grid_sample``. "cubic" is a B-spline of degree 3 whose coefficients are given;
  "prefilter" computes them in the timed call. A complex64 grid is two channels for ``F.grid_sample``.
- "splat": the adjoint, next to ``index_add_`` and ``index_put_(accumulate=True)`` of torch, with indices and weights
  computed in the timed call as they are in programs that do so, and ``grid_push`` of torch-interpol.
- "image": 4-D ``F.grid_sample`` in torch's own layout, with its three modes.

Every alternative computes the same function of the same new random inputs: values and gradients are compared in the
run, and ours with float64 as well. The forward pass runs without a graph. The backward pass is the gradient with
respect to the grid (or the splatted values) and the points, on a retained graph. Inputs are in each package's own
layout before the clock starts. A package that is not installed is named in the output.

- Point sets: ``warp`` is one point for each vertex, displaced by a smooth field of at most three voxels, in the order
  of the vertices, as in registration; ``random`` is as many uniform points, but at least 65,536
  on a CPU and 1,048,576 on a GPU. Both keep two voxels away from the faces, where the packages have different rules,
  and 0.01 voxels from the faces of cells, where slopes of linear interpolation jump, so that rounding decides.
- The floor is the time to move the required bytes at the copy bandwidth measured in the same run: points and values
  once, and every touched sector of the grid once (backward: once more for its gradient).
- "L2" is a floor for grids whose touched sectors fit in a GPU's L2 cache: the sectors that each 32 consecutive points
  gather or add to (8 vertices of a cell of a volume, 64 of a cubic kernel), at the bandwidth measured within L2.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import _floors
import _harness as harness
import torch
import torch.nn.functional as F
from _alternatives import OURS, Inputs, Pass, Prepared, as_tuple, gradients
from _compare import Case, Errors, Results, installed, name_missing, run_benchmark
from torch import Tensor

from voxelfield import ops

# Packages to compare with: their modules, and what pip calls them.
PACKAGES = {
    "scipy": "scipy",
    "interpol": "torch-interpol==0.3.0",
    "torch_cubic_spline_grids": "torch-cubic-spline-grids==0.6.0",
}
# Titles of each table's ratio column.
RATIOS = {"sample": "best of others / ours", "splat": "best of others / ours", "image": "grid_sample / ours"}
# Distances of points, in voxels, to the faces of the grid and of its cells.
MARGIN, MARGIN_OF_CELLS = 2, 0.01
LEAST_COUNT = {"cpu": 1 << 16, "cuda": 1 << 20}  # of random points
_CHECKED = 4096

Operation = Callable[[Tensor, Tensor], Tensor]
ToOurs = Callable[[Any], Results]


# --- the formula ----------------------------------------------------------------------------------------------------


def stencil(points: Tensor, resolution: Sequence[int], cubic: bool) -> tuple[Tensor, Tensor]:
    """Returns the rows (N, K) of the vertices around points (N, D) in the flattened grid, and their weights (N, K)."""
    index = torch.zeros(len(points), 1, dtype=torch.long, device=points.device)
    weight = torch.ones_like(points[:, :1])
    for axis, size in enumerate(resolution):
        u = points[:, axis] * (size - 1)
        lower = u.detach().floor()
        f = u - lower
        if cubic:
            along = ((1 - f) ** 3, 3 * f**3 - 6 * f**2 + 4, -3 * f**3 + 3 * f**2 + 3 * f + 1, f**3)
            weights = torch.stack(along, dim=1) / 6
        else:
            weights = torch.stack((1 - f, f), dim=1)
        steps = torch.arange(weights.shape[1], device=points.device) - int(cubic)
        index = (index[:, :, None] * size + (lower.long()[:, None] + steps)[:, None]).flatten(1)
        weight = (weight[:, :, None] * weights[:, None]).flatten(1)
    return index, weight


def sample_by_formula(cubic: bool, grid: Tensor, points: Tensor) -> Tensor:
    """Samples a grid (..., C) at points (N, D) by one gather of all vertices."""
    index, weight = stencil(points, grid.shape[:-1], cubic)
    return (weight[:, :, None] * grid.flatten(0, -2)[index]).sum(1)


def splat_by_formula(add: str, resolution: Sequence[int], cubic: bool, values: Tensor, points: Tensor) -> Tensor:
    """Splats values (N, C) by one scatter of all products, with the method ``add`` of a tensor."""
    index, weight = stencil(points, resolution, cubic)
    products = (weight[:, :, None] * values[:, None]).flatten(0, 1)
    total = values.new_zeros(math.prod(resolution), values.shape[1])
    if add == "index_add":
        total = total.index_add(0, index.flatten(), products)
    else:
        total = total.index_put((index.flatten(),), products, accumulate=True)
    return total.unflatten(0, tuple(resolution))


# --- preparing alternatives -----------------------------------------------------------------------------------------


def passes(
    op: Operation,
    tensors: Sequence[Tensor],
    values: Tensor,
    forward_to_ours: ToOurs = as_tuple,
    backward_to_ours: ToOurs = as_tuple,
) -> Prepared:
    """Prepares the forward pass of an op, and the gradients with respect to its two arguments."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    forward = partial(op, *leaves)
    backward = partial(gradients, forward(), leaves, values)
    return {"forward": Pass(forward, forward_to_ours), "backward": Pass(backward, backward_to_ours)}


def sample_ours(cubic: bool, prefilter: bool, grid: Tensor, points: Tensor) -> Tensor:
    """Samples with our ops."""
    if prefilter:
        grid = ops.bspline_prefilter(grid, points.shape[1], padding="periodic")
    return ops.sample_cubic(grid, points, padding="periodic") if cubic else ops.sample_trilinear(grid, points)


def prepare(op: Operation, inputs: Inputs) -> Prepared:
    """Prepares an op of our layout."""
    return passes(op, (inputs.sources[0], inputs.points), inputs.values)


def prepare_scipy(cubic: bool, prefilter: bool, inputs: Inputs) -> Prepared:
    """Prepares ``scipy.ndimage.map_coordinates``, which has no gradient."""
    ndimage = importlib.import_module("scipy.ndimage")
    grid = inputs.sources[0][..., 0].numpy()
    where = voxels(inputs.points, grid.shape).T.contiguous().numpy()
    order = 3 if cubic else 1
    call = partial(ndimage.map_coordinates, grid, where, order=order, mode="grid-wrap", prefilter=prefilter)
    return {"forward": Pass(call, lambda output: (torch.from_numpy(output)[:, None],))}


def voxels(points: Tensor, resolution: Sequence[int]) -> Tensor:
    """Returns points of the unit cube in voxels: vertex i lies at i."""
    return points * (torch.tensor(resolution, device=points.device) - 1)


def channels_first(grid: Tensor) -> Tensor:
    """Returns a contiguous copy (1, C, ...) of a grid (..., C)."""
    return grid.detach().movedim(-1, 0)[None].contiguous()


def prepare_interpol(cubic: bool, prefilter: bool, inputs: Inputs) -> Prepared:
    """Prepares ``grid_pull`` of torch-interpol."""
    pull = importlib.import_module("interpol").grid_pull
    (grid,), points, values = inputs
    resolution, dimensions = grid.shape[:-1], points.shape[1]
    line = [1] * (dimensions - 1)
    op = partial(pull, interpolation=3 if cubic else 1, bound="dft", extrapolate=True, prefilter=prefilter)
    return passes(
        op,
        (channels_first(grid), voxels(points, resolution).view(1, -1, *line, dimensions)),
        values.T.contiguous().view(1, values.shape[1], -1, *line),
        lambda output: (output.flatten(1).view(values.shape[1], -1).T,),
        lambda result: (result[0][0].movedim(0, -1), voxels(result[1].view_as(points), resolution)),
    )


def prepare_interpol_push(resolution: Sequence[int], cubic: bool, inputs: Inputs) -> Prepared:
    """Prepares ``grid_push`` of torch-interpol, the adjoint of ``grid_pull``."""
    push = importlib.import_module("interpol").grid_push
    (values,), points, grid = inputs
    line = [1] * (points.shape[1] - 1)
    op = partial(push, shape=list(resolution), interpolation=3 if cubic else 1, bound="dft", extrapolate=True)
    return passes(
        op,
        (
            values.T.contiguous().view(1, values.shape[1], -1, *line),
            voxels(points, resolution).view(1, -1, *line, points.shape[1]),
        ),
        channels_first(grid),
        lambda output: (output[0].movedim(0, -1),),
        lambda result: (
            result[0].flatten(1).view(values.shape[1], -1).T,
            voxels(result[1].view_as(points), resolution),
        ),
    )


def prepare_spline_grid(inputs: Inputs) -> Prepared:
    """Prepares a B-spline grid of torch-cubic-spline-grids."""
    package = importlib.import_module("torch_cubic_spline_grids")
    (grid,), points, values = inputs
    module = getattr(package, f"CubicBSplineGrid{points.shape[1]}d").from_grid_data(channels_first(grid)[0])
    module.to(grid.device)
    where = points.detach().requires_grad_()
    forward = partial(module, where)
    backward = partial(gradients, forward(), [*module.parameters(), where], values)
    return {
        "forward": Pass(forward),
        "backward": Pass(backward, lambda result: (result[0].movedim(0, -1), result[1])),
    }


def prepare_grid_sample(inputs: Inputs) -> Prepared:
    """Prepares ``F.grid_sample`` on a grid of two or three dimensions; a complex one has two channels."""
    (grid,), points, values = inputs
    split = torch.view_as_real if grid.is_complex() else lambda tensor: tensor[..., None]
    joined = torch.view_as_complex if grid.is_complex() else lambda tensor: tensor[..., 0]
    line = [1] * (points.shape[1] - 1)
    op = partial(F.grid_sample, mode="bilinear", padding_mode="border", align_corners=True)
    rows = split(values).flatten(1)

    def joined_rows(tensor: Tensor) -> Tensor:
        return joined(tensor.unflatten(-1, (values.shape[1], -1)).contiguous())

    return passes(
        op,
        (channels_first(split(grid).flatten(-2)), (2 * points - 1).flip(1).view(1, *line, *points.shape)),
        rows.T.contiguous().view(1, rows.shape[1], *line, -1),
        lambda output: (joined_rows(output.view(rows.shape[1], -1).T),),
        lambda result: (joined_rows(result[0][0].movedim(0, -1)), 2 * result[1].view_as(points).flip(1)),
    )


# --- cases ----------------------------------------------------------------------------------------------------------


def warp_points(resolution: Sequence[int], device: torch.device) -> Tensor:
    """Returns a displaced point for each vertex, (N, D), in the order of the vertices."""
    axes = [torch.linspace(0, 1, size, device=device) for size in resolution]
    vertices = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    phases = 2 * math.pi * torch.rand(vertices.shape[1], device=device)
    displacement = torch.sin(2 * math.pi * vertices.roll(1, dims=1) + phases)
    return torch.stack([vertices[:, i] + 3 / size * displacement[:, i] for i, size in enumerate(resolution)], dim=1)


def points_of(name: str, resolution: Sequence[int], count: int, device: torch.device) -> Tensor:
    """Returns points (N, D) away from the faces and, for the sake of comparable slopes, from the faces of cells."""
    points = warp_points(resolution, device) if name == "warp" else torch.rand(count, len(resolution), device=device)
    columns = []
    for u, size in zip(voxels(points, resolution).unbind(1), resolution, strict=True):
        cell = u.floor().clamp(MARGIN, size - 2 - MARGIN)
        columns.append((cell + (u - cell).clamp(MARGIN_OF_CELLS, 1 - MARGIN_OF_CELLS)) / (size - 1))
    return torch.stack(columns, dim=1)


def sample_inputs(
    resolution: tuple[int, ...], channels: int, dtype: torch.dtype, points: str, device: torch.device
) -> Inputs:
    """Makes a random grid, points, and the gradient of their values."""
    where = points_of(points, resolution, max(math.prod(resolution), LEAST_COUNT[device.type]), device)
    grid = torch.randn(*resolution, channels, dtype=dtype, device=device)
    return Inputs((grid,), where, torch.randn(len(where), channels, dtype=dtype, device=device))


def splat_inputs(
    resolution: tuple[int, ...], channels: int, dtype: torch.dtype, points: str, device: torch.device
) -> Inputs:
    """Makes random values, their points, and the gradient of the grid."""
    (grid,), where, values = sample_inputs(resolution, channels, dtype, points, device)
    return Inputs((values,), where, grid)


def floor_of(cubic: bool, device: torch.device, grid: Tensor, points: Tensor, values: Tensor) -> _floors.Floor:
    """Counts the bytes that sampling or splatting must move."""
    granule = harness.granule(device)
    index, _ = stencil(points, grid.shape[:-1], cubic)
    vertex_bytes = grid.shape[-1] * grid.element_size()
    sectors = torch.zeros(-(-grid.nbytes // granule), dtype=torch.bool, device=device)
    requested = None
    for column in index.unbind(1):
        sectors[column * vertex_bytes // granule] = True
    if device.type == "cuda":
        first = (index * vertex_bytes // granule)[: len(index) // 32 * 32].view(len(index) // 32, -1)
        ordered = first.sort(dim=1).values
        requested = (ordered.shape[0] + int((ordered[:, 1:] != ordered[:, :-1]).sum())) * granule
    touched = int(sectors.sum()) * granule
    streams = points.nbytes + values.nbytes
    return _floors.Floor(
        streams + touched,
        2 * streams + 2 * touched,
        cached=None if requested is None else streams + requested,
        working_set=touched,
    )


def errors_of(cubic: bool, grid: Tensor, points: Tensor, values: Tensor, sampled: Results, splatted: Results) -> Errors:
    """Compares with float64: what is sampled at some points, and what is splatted at all of them."""
    wide = torch.complex128 if grid.is_complex() else torch.float64
    some = torch.randint(len(points), (_CHECKED,), device=points.device)
    where = points[some].double().requires_grad_()
    with torch.enable_grad():
        expected = sample_by_formula(cubic, grid.to(wide), where)
        (slope,) = torch.autograd.grad(expected, where, values[some].to(wide))
    total = torch.zeros(math.prod(grid.shape[:-1]), grid.shape[-1], dtype=wide, device=grid.device)
    for chunk in torch.arange(len(points), device=points.device).split(1 << 17):
        index, weight = stencil(points[chunk].double(), grid.shape[:-1], cubic)
        for row, factor in zip(index.unbind(1), weight.unbind(1), strict=True):
            total.index_add_(0, row, factor[:, None] * values[chunk].to(wide))
    return {
        "sampled": harness.relative_error(sampled[0][some].to(wide), expected.detach()),
        "slope": harness.relative_error(sampled[1][some].double(), slope),
        "splatted": harness.relative_error(splatted[0].flatten(0, -2).to(wide), total),
    }


def sample_errors(cubic: bool, inputs: Inputs, results: dict[str, Results]) -> Errors:
    """Compares our values and both gradients with float64."""
    (value,), (to_grid, to_points) = results["forward"], results["backward"]
    errors = errors_of(cubic, inputs.sources[0], inputs.points, inputs.values, (value, to_points), (to_grid,))
    return {"forward": errors["sampled"], "backward": max(errors["slope"], errors["splatted"])}


def splat_errors(cubic: bool, inputs: Inputs, results: dict[str, Results]) -> Errors:
    """Compares our grid and both gradients with float64."""
    (value,), (to_values, to_points) = results["forward"], results["backward"]
    errors = errors_of(cubic, inputs.values, inputs.points, inputs.sources[0], (to_values, to_points), (value,))
    return {"forward": errors["splatted"], "backward": max(errors["slope"], errors["sampled"])}


def prefilter_errors(inputs: Inputs, results: dict[str, Results]) -> Errors:
    """Compares ours in float32 with ours in float64, whose coefficients reproduce the grid at its vertices."""
    (grid,), points, values = Inputs((inputs.sources[0].double(),), *(x.double() for x in inputs[1:]))
    axes = [torch.linspace(0, 1, size, dtype=torch.float64, device=grid.device) for size in grid.shape[:-1]]
    vertices = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    at_vertices = sample_ours(True, True, grid, vertices)
    harness.check("the B-spline at the vertices", harness.relative_error(at_vertices, grid.flatten(0, -2)), 1e-10)
    with torch.enable_grad():
        exact = prepare(partial(sample_ours, True, True), Inputs((grid,), points, values))
    return {
        what: max(map(harness.relative_error, (x.double() for x in results[what]), as_tuple(exact[what].call())))
        for what in results
    }


def sample_case(
    resolution: tuple[int, ...],
    channels: int,
    points: str,
    device: torch.device,
    cubic: bool = False,
    prefilter: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Describes sampling one grid."""
    real, dimensions = dtype == torch.float32, len(resolution)
    others: dict[str, Callable[[Inputs], Prepared]] = {}
    if installed("scipy") and device.type == "cpu" and real and channels == 1:
        others["scipy"] = partial(prepare_scipy, cubic, prefilter)
    if installed("interpol") and real:
        others["torch-interpol"] = partial(prepare_interpol, cubic, prefilter)
    if installed("torch_cubic_spline_grids") and cubic and not prefilter and real:
        others["cubic-spline-grids"] = prepare_spline_grid
    if not cubic and dimensions > 1:
        others["grid_sample"] = prepare_grid_sample
    return Case(
        "sample",
        size_of(resolution, channels, dtype, "linear" if not cubic else "prefilter" if prefilter else "cubic"),
        points,
        partial(sample_inputs, resolution, channels, dtype, points, device),
        {OURS: partial(prepare, partial(sample_ours, cubic, prefilter)), **others},
        tuple(others),
        lambda inputs: floor_of(cubic, device, inputs.sources[0], inputs.points, inputs.values),
        prefilter_errors if prefilter else partial(sample_errors, cubic),
    )


def splat_case(
    resolution: tuple[int, ...],
    channels: int,
    points: str,
    device: torch.device,
    cubic: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Describes splatting into one grid."""

    def ours(values: Tensor, where: Tensor) -> Tensor:
        splat: Callable[..., Any] = ops.splat_cubic if cubic else ops.splat_trilinear
        summed: Tensor = splat(values, where, resolution)
        return summed

    others: dict[str, Callable[[Inputs], Prepared]] = {
        add: partial(prepare, partial(splat_by_formula, add, resolution, cubic)) for add in ("index_add", "index_put")
    }
    if installed("interpol") and dtype == torch.float32:
        others["torch-interpol"] = partial(prepare_interpol_push, resolution, cubic)
    return Case(
        "splat",
        size_of(resolution, channels, dtype, "cubic" if cubic else "linear"),
        points,
        partial(splat_inputs, resolution, channels, dtype, points, device),
        {OURS: partial(prepare, ours), **others},
        tuple(others),
        lambda inputs: floor_of(cubic, device, inputs.values, inputs.points, inputs.sources[0]),
        partial(splat_errors, cubic),
    )


def image_inputs(batch: int, channels: int, side: int, points: str, device: torch.device) -> Inputs:
    """Makes random images in torch's layout, as many points as pixels for each, and the gradient of their values."""
    where = torch.stack([points_of(points, (side, side), side**2, device) for _ in range(batch)])
    images = torch.randn(batch, channels, side, side, device=device)
    return Inputs((images,), (2 * where - 1).view(batch, side, side, 2), torch.randn_like(images))


def image_case(batch: int, channels: int, side: int, mode: str, points: str, device: torch.device) -> Case:
    """Describes sampling images with the interface of ``F.grid_sample``."""

    def prepared(op: Callable[..., Tensor], inputs: Inputs) -> Prepared:
        return prepare(partial(op, mode=mode, padding_mode="zeros", align_corners=False), inputs)

    def in_float64(inputs: Inputs, results: dict[str, Results]) -> Errors:
        wide = Inputs((inputs.sources[0].double(),), *(x.double() for x in inputs[1:]))
        with torch.enable_grad():
            exact = {what: as_tuple(timed.call()) for what, timed in prepared(F.grid_sample, wide).items()}
        pairs = {what: zip(results[what], exact[what], strict=True) for what in results}
        # The gradient of "nearest" with respect to the points is zero.
        return {
            what: max(harness.relative_error(ours.double(), right) for ours, right in each if right.any())
            for what, each in pairs.items()
        }

    def floor(inputs: Inputs) -> _floors.Floor:
        streams = inputs.points.nbytes + inputs.values.nbytes
        return _floors.Floor(streams + inputs.sources[0].nbytes, 2 * (streams + inputs.sources[0].nbytes))

    return Case(
        "image",
        f"{batch} x {channels} x {side}^2 {mode}",
        points,
        partial(image_inputs, batch, channels, side, points, device),
        {OURS: partial(prepared, ops.grid_sample), "F.grid_sample": partial(prepared, F.grid_sample)},
        ("F.grid_sample",),
        floor,
        in_float64,
    )


def size_of(resolution: tuple[int, ...], channels: int, dtype: torch.dtype, kernel: str) -> str:
    """Returns the size of a case as printed."""
    complex_values = " complex64" if dtype.is_complex else ""
    return f"{resolution[0]}^{len(resolution)} x {channels}{complex_values} {kernel}"


# --- the run --------------------------------------------------------------------------------------------------------


def cases(device: torch.device) -> Iterator[Case]:
    """Yields every case for a device."""
    on_gpu = device.type == "cuda"
    line, square, cube = (1024,), (1024 if on_gpu else 256,) * 2, (128 if on_gpu else 48,) * 3
    sets = ("warp", "random")
    for resolution, channels in itertools.product((line, square, cube), (1, 4)):
        yield sample_case(resolution, channels, "random", device)
        yield sample_case(resolution, channels, "random", device, cubic=True)
        yield sample_case(resolution, channels, "random", device, cubic=True, prefilter=True)
    for channels in (1, 4):
        yield sample_case(cube, channels, "warp", device)
        yield sample_case(cube, channels, "warp", device, cubic=True)
    for points in sets:
        yield sample_case(cube, 1, points, device, dtype=torch.complex64)
    for points, channels, cubic in itertools.product(sets, (1, 4), (False, True)):
        yield splat_case(cube, channels, points, device, cubic)
    for resolution in (line, square):
        yield splat_case(resolution, 1, "random", device)
    yield splat_case(cube, 32, "random", device)
    for points in sets:
        yield splat_case(cube, 1, points, device, dtype=torch.complex64)
    for points, channels, mode in itertools.product(sets, (1, 3, 32), ("bilinear", "nearest", "bicubic")):
        yield image_case(4, channels, square[0] // 2, mode, points, device)


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, runs the cases, and prints the tables last."""
    name_missing(PACKAGES)
    run_benchmark("interpolation", __doc__, cases, RATIOS, arguments)
    name_missing(PACKAGES)


if __name__ == "__main__":
    main()
