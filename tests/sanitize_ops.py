"""Runs every kernel of the trilinear ops once, small enough for compute-sanitizer.

    compute-sanitizer --tool memcheck|racecheck|initcheck python tests/sanitize_ops.py

It checks nothing itself: the tests do.
"""

from __future__ import annotations

import itertools

import torch

from voxelfield import _library

LEVELS = [(1,), (4,), (12,), (28,), (33,), (64,), (3, 1), (12, 8)]  # channels of each level
LOOKUPS = [(0, True, False, 1), (1, False, False, 2), (2, True, True, 1)]  # padding, align_corners, nearest, batch


def run_grid_ops(dtype: torch.dtype, channels: tuple[int, ...], weights: str, lookup: tuple[int, bool, bool, int]):
    """Samples, splats by every method, and differentiates in the points."""
    ops, device = torch.ops.voxelfield, torch.device("cuda")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    padding, align_corners, nearest, batch = lookup
    resolutions = [(13, 9, 18), (5, 1, 33)][: len(channels)]
    grids = [torch.randn(batch, *r, c, device=device, dtype=dtype) for r, c in zip(resolutions, channels, strict=True)]
    points = torch.rand(batch, 260, 3, device=device, dtype=wide) * 1.4 - 0.2
    points[:, 3] = float("nan")
    direction = torch.randn_like(points) if weights == "directional" else None
    sets = (4,) if weights == "jet" else ()
    values = torch.randn(*sets, batch, 260, sum(channels), device=device, dtype=dtype)
    options = padding, align_corners, nearest, False, weights == "jet"
    ops.sample_trilinear(grids, points, direction, *options)
    ops.point_gradient_trilinear(values, grids, points, direction, *options)
    sizes = [number for r, c in zip(resolutions, channels, strict=True) for number in (*r, c)]
    for method in (1, 2, 3):
        ops.splat_trilinear(values, points, direction, sizes, *options, method)


def run_crowded_tiles():
    """Splats so many points into one tile that it is split, and its entries are sorted by a block."""
    for count, channels in ((9000, 4), (5000, 12)):
        points = torch.rand(1, count, 3, device="cuda") * 0.02 + 0.4
        values = torch.randn(1, count, channels, device="cuda")
        for method in (0, 1, 2, 3):
            sizes = [20, 20, 20, channels]
            torch.ops.voxelfield.splat_trilinear(values, points, None, sizes, 0, True, False, False, False, method)


def run_cell_ops():
    """Runs the ops on points that bring their own cells."""
    ops = torch.ops.voxelfield
    for dtype in (torch.float32, torch.float16):
        feats = torch.randn(300, 8, 12, device="cuda", dtype=dtype)
        values = torch.randn(300, 12, device="cuda", dtype=dtype)
        points = torch.rand(300, 3, device="cuda") * 2 - 1
        for direction in (None, torch.randn(300, 3, device="cuda")):
            ops.interpolate_cells(feats, points, direction)
            ops.splat_cells(values, points, direction)
            ops.point_gradient_cells(values, feats, points, direction)


if __name__ == "__main__":
    _library.ensure_loaded("cuda")
    for arguments in itertools.product(
        (torch.float32, torch.float16, torch.float64), LEVELS, ("value", "directional", "jet"), LOOKUPS
    ):
        run_grid_ops(*arguments)
    run_crowded_tiles()
    run_cell_ops()
    torch.cuda.synchronize()
    print("every kernel ran")
