"""Times the trilinear ops against the implementations that they replace, in one run.

    python benchmarks/trilinear.py [--device cpu|cuda] [--threads N] [--quick] [--only SUBSTRING] [--json PATH]

``sample_trilinear`` is compared with ``F.grid_sample`` (contiguous NCDHW grid, and channels-last-3d) and the plain
formula in torch (gather eight corners, weight, sum); ``trilinear_interpolate`` with the formula of the published
tutorial and a batched matrix product. "shared" is one grid that is expanded over a batch: its gradient is that of the
tensor that was expanded, so that ``F.grid_sample``, and autograd after it, store and add up one for each element of the
batch. 16-bit grids are compared with our own op on the same numbers in float32, and on
a GPU the methods of summing the gradient with each other. Every alternative computes the same function of the same new
random inputs: outputs and gradients are compared in the run, and ours with float64 as well.

- The forward pass runs without a graph. The backward pass is ``torch.autograd.grad`` with respect to the grid (or the
  features) only, on a retained graph, the same for every alternative; it includes allocating and zeroing its result.
  The summation methods are timed as the raw op instead, which selects one by number; the deterministic method must also
  give the same bits twice.
- ``F.grid_sample`` gets its coordinates already scaled to [-1, 1] and reversed; that conversion is not timed.
- Point sets: ``camera`` is rays x 256 samples, ordered along the ray between entry and exit of the unit cube, with
  origins on a sphere of radius 2 about its centre, aimed at uniformly distributed points inside it; ``random`` is
  uniform.
- The floor is the time to move the required bytes at the copy bandwidth measured in the same run: points read, output
  written and each touched sector of the grid (32 bytes on a GPU, 64 on a CPU) read once; backward: values and points
  read, the gradient written once in full. "two-pass" is the floor of a backward pass that first zeroes the gradient and
  then reads and writes its touched sectors. A copy on a CPU also reads the lines that it overwrites, which is not
  counted: a pass that mostly reads can be faster than the floor there.
- "L2" is a floor of the forward pass for grids whose touched sectors fit in a GPU's L2 cache: the sectors that each 32
  consecutive points touch, points and output, at the bandwidth measured within L2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import _floors
import _formula
import _harness as harness
import torch
import torch.nn.functional as F
from _alternatives import LAYOUTS, OURS, Inputs, Pass, Prepared, gradients, prepare, prepare_grid_sample
from _compare import Case, Errors, Results, backward_error, forward_error, grid_floor, run_benchmark
from _points import POINT_SETS
from torch import Tensor

from voxelfield.ops import grid_sample, sample_trilinear, trilinear_interpolate

SPLAT_METHODS = {"automatic": 0, "atomic": 1, "tiled": 2, "deterministic": 3}
SHORT_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Titles of each table's ratio column.
RATIOS = {
    "grid": "better grid_sample / ours",
    "shared": "grid_sample / ours",
    "16-bit": "float32 / ours",
    "splat": "deterministic / automatic",
    "cells": "better alternative / ours",
}


# --- sampling a grid ------------------------------------------------------------------------------------------------


def grid_inputs(resolution: int, channels: int, points: str, count: int, device: torch.device) -> Inputs:
    """Makes a random cubic grid, points, and the gradient of their values."""
    grid = torch.randn(resolution, resolution, resolution, channels, device=device)
    return Inputs((grid,), POINT_SETS[points](count, device), torch.randn(count, channels, device=device))


def narrow_inputs(
    dtype: torch.dtype, resolution: int, channels: int, points: str, count: int, device: torch.device
) -> Inputs:
    """Makes the same inputs with grid and gradient in 16 bits."""
    (grid,), coordinates, values = grid_inputs(resolution, channels, points, count, device)
    return Inputs((grid.to(dtype),), coordinates, values.to(dtype))


def widened(inputs: Inputs) -> Prepared:
    """Prepares our op on the same numbers in float32."""
    sources = tuple(source.float() for source in inputs.sources)
    return prepare(sample_trilinear, Inputs(sources, inputs.points, inputs.values.float()))


def prepare_splat(method: int, inputs: Inputs) -> Prepared:
    """Prepares the raw op that sums a gradient with the method of this number."""
    call = partial(
        torch.ops.voxelfield.splat_trilinear,
        inputs.values[None],
        inputs.points[None],
        list(inputs.sources[0].shape),
        0,
        True,
        False,
        False,
        False,
        method,
    )
    repeatable = method == SPLAT_METHODS["deterministic"]
    return {"backward": Pass(call, repeatable=repeatable)}


def grid_float64_errors(inputs: Inputs, results: dict[str, Results]) -> Errors:
    """Compares the existing passes with float64."""
    errors = {"backward": backward_error(inputs, results["backward"], [0])}
    if "forward" in results:
        errors["forward"] = forward_error(inputs, results["forward"][0], lambda rows: rows[0])
    return errors


def grid_case(resolution: int, channels: int, points: str, count: int, device: torch.device) -> Case:
    """Describes sampling a cubic float32 grid."""
    return Case(
        "grid",
        f"{resolution}^3 x {channels}",
        points,
        partial(grid_inputs, resolution, channels, points, count, device),
        {
            OURS: partial(prepare, sample_trilinear),
            **{name: partial(prepare_grid_sample, layout) for name, layout in LAYOUTS.items()},
            "formula": partial(prepare, _formula.sample),
        },
        tuple(LAYOUTS),
        partial(grid_floor, device),
        grid_float64_errors,
    )


def prepare_shared(batch: int, inputs: Inputs) -> Prepared:
    """Prepares our op on a grid that is expanded over a batch."""

    def op(grid: Tensor, points: Tensor) -> Tensor:
        return sample_trilinear(grid[None].expand(batch, -1, -1, -1, -1), points.view(batch, -1, 3)).flatten(0, 1)

    return prepare(op, inputs)


def prepare_shared_volume(op: Callable[..., Tensor], batch: int, inputs: Inputs) -> Prepared:
    """Prepares ``F.grid_sample``, or ours of that signature, on a volume that is expanded over a batch."""
    (grid,) = inputs.sources
    volume = grid.detach().permute(3, 0, 1, 2).clone(memory_format=torch.contiguous_format).requires_grad_()
    coordinates = (2 * inputs.points - 1).flip(1).view(batch, 1, 1, -1, 3)
    values = inputs.values.view(batch, 1, 1, -1, volume.shape[0]).movedim(-1, 1).contiguous()

    def forward() -> Tensor:
        expanded = volume[None].expand(batch, -1, -1, -1, -1)
        return op(expanded, coordinates, mode="bilinear", padding_mode="border", align_corners=True)

    backward = partial(gradients, forward(), [volume], values)
    return {
        "forward": Pass(forward, lambda output: (output.movedim(1, -1).flatten(0, 3),)),
        "backward": Pass(backward, lambda result: (result[0].permute(1, 2, 3, 0),)),
    }


def shared_case(resolution: int, channels: int, batch: int, count: int, device: torch.device) -> Case:
    """Describes sampling a cubic float32 grid that is expanded over a batch."""
    return Case(
        "shared",
        f"{batch} of {resolution}^3 x {channels}",
        "random",
        partial(grid_inputs, resolution, channels, "random", count, device),
        {
            OURS: partial(prepare_shared, batch),
            "ours NCDHW": partial(prepare_shared_volume, grid_sample, batch),
            "grid_sample NCDHW": partial(prepare_shared_volume, F.grid_sample, batch),
        },
        ("grid_sample NCDHW",),
        partial(grid_floor, device),
        grid_float64_errors,
    )


def narrow_case(
    dtype: torch.dtype, resolution: int, channels: int, points: str, count: int, device: torch.device
) -> Case:
    """Describes sampling a cubic 16-bit grid."""
    return Case(
        "16-bit",
        f"{resolution}^3 x {channels} {SHORT_NAMES[dtype]}",
        points,
        partial(narrow_inputs, dtype, resolution, channels, points, count, device),
        {OURS: partial(prepare, sample_trilinear), "in float32": widened},
        ("in float32",),
        partial(grid_floor, device),
        grid_float64_errors,
        # The result is rounded once, to nearest.
        tolerance=torch.finfo(dtype).eps,
    )


def splat_case(resolution: int, channels: int, points: str, count: int, device: torch.device) -> Case:
    """Describes the methods of summing the gradient of a cubic grid."""
    return Case(
        "splat",
        f"{resolution}^3 x {channels}",
        points,
        partial(grid_inputs, resolution, channels, points, count, device),
        {name: partial(prepare_splat, method) for name, method in SPLAT_METHODS.items()},
        ("deterministic",),
        partial(grid_floor, device),
        grid_float64_errors,
    )


# --- points with a cell of their own --------------------------------------------------------------------------------


def cell_inputs(count: int, channels: int, device: torch.device) -> Inputs:
    """Makes random cells, a point in each, and the gradient of their values."""
    feats = torch.randn(count, 8, channels, device=device)
    points = 2 * torch.rand(count, 3, device=device) - 1
    return Inputs((feats,), points, torch.randn(count, channels, device=device))


def cell_floor(inputs: Inputs) -> _floors.Floor:
    """Counts the bytes that interpolating cells must move."""
    return _floors.cells(inputs.sources[0], inputs.points, inputs.values)


def cell_fraction(points: Tensor) -> Tensor:
    """Returns the position in [0, 1] of points given in [-1, 1]."""
    return (points + 1) / 2


def interpolate_by_formula(feats: Tensor, points: Tensor) -> Tensor:
    """Interpolates cells with the formula of the published tutorial in torch."""
    u, v, w = cell_fraction(points).unsqueeze(2).unbind(1)
    a, b, c, d = (1 - v) * (1 - w), (1 - v) * w, v * (1 - w), v * w
    lower = a * feats[:, 0] + b * feats[:, 1] + c * feats[:, 2] + d * feats[:, 3]
    upper = a * feats[:, 4] + b * feats[:, 5] + c * feats[:, 6] + d * feats[:, 7]
    return (1 - u) * lower + u * upper


def interpolate_by_product(feats: Tensor, points: Tensor) -> Tensor:
    """Interpolates cells with one batched matrix product of weights and features."""
    return torch.bmm(_formula.corner_weights(cell_fraction(points)).unsqueeze(1), feats).squeeze(1)


def cell_float64_errors(inputs: Inputs, results: dict[str, Results]) -> Errors:
    """Compares some of our rows with float64."""
    some = torch.randint(len(inputs.points), (4096,), device=inputs.points.device)
    feats, points, values = (tensor[some].double() for tensor in (*inputs.sources, inputs.points, inputs.values))
    weights = _formula.corner_weights(cell_fraction(points))
    expected = {
        "forward": torch.einsum("nk,nkc->nc", weights, feats),
        "backward": weights.unsqueeze(2) * values.unsqueeze(1),
    }
    return {name: harness.relative_error(results[name][0][some].double(), right) for name, right in expected.items()}


def cell_case(count: int, channels: int, device: torch.device) -> Case:
    """Describes interpolating cells."""
    return Case(
        "cells",
        f"({count}, 8, {channels})",
        "",
        partial(cell_inputs, count, channels, device),
        {
            OURS: partial(prepare, trilinear_interpolate),
            "formula": partial(prepare, interpolate_by_formula),
            "bmm": partial(prepare, interpolate_by_product),
        },
        ("formula", "bmm"),
        cell_floor,
        cell_float64_errors,
    )


# --- the run --------------------------------------------------------------------------------------------------------


def cases(device: torch.device) -> Iterator[Case]:
    """Yields every case for a device."""
    on_gpu = device.type == "cuda"
    resolutions = [160, 256] if on_gpu else [128]
    channels = [1, 2, 3, 4, 12, 28]
    count = 1 << (20 if on_gpu else 18)
    sizes = list(itertools.product(resolutions, POINT_SETS, channels))
    if on_gpu:
        # Small enough for the L2 cache.
        sizes = [*itertools.product([64], POINT_SETS, [1, 2, 3, 4, 12]), *sizes]
    for resolution, points, width in sizes:
        yield grid_case(resolution, width, points, count, device)
    for width in (1, 3, 4):
        yield shared_case(resolutions[0], width, 16, count, device)
    for dtype, points, width in itertools.product(SHORT_NAMES, POINT_SETS, [4, 12, 28]):
        yield narrow_case(dtype, resolutions[-1], width, points, count, device)
    if on_gpu:
        for resolution, points, width in itertools.product(resolutions, POINT_SETS, [1, 2, 3, 4, 12, 28]):
            yield splat_case(resolution, width, points, count, device)
    for cells, width in ((1024, 256), (65536, 256), (1048576, 16)):
        yield cell_case(cells, width, device)


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, runs the cases, and prints the tables last."""
    run_benchmark("trilinear", __doc__, cases, RATIOS, arguments)


if __name__ == "__main__":
    main()
