"""Time trilinear sampling, forward and backward, against F.grid_sample in the same run."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from voxelfield import ops
from voxelfield.devices import choose_device

CHANNELS = 4
SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    parser.add_argument("--resolution", type=int, help="vertices along each axis (default: 256 on a GPU, else 128)")
    parser.add_argument("--points", type=int, help="number of random positions (default: 2^20 on a GPU, else 2^17)")


def run(options: argparse.Namespace) -> None:
    """Measures, and prints a table."""
    device = choose_device(options.device)
    large = device.type == "cuda"
    resolution = (256 if large else 128) if options.resolution is None else options.resolution
    count = 1 << (20 if large else 17) if options.points is None else options.points
    for name, value in (("resolution", resolution), ("points", count)):
        if value < 2:
            raise ValueError(f"--{name} must be at least 2, got {value}")
    grid = torch.randn(resolution, resolution, resolution, CHANNELS, device=device, requires_grad=True)
    points = torch.rand(count, 3, device=device)
    volume = grid.detach().permute(3, 2, 1, 0)[None].contiguous().requires_grad_()
    sites = (2 * points - 1).view(1, 1, 1, -1, 3)
    grid_sample = functools.partial(F.grid_sample, align_corners=True)
    statements = {
        "forward": "op(grid, points)",
        "backward": "torch.autograd.grad(out, grid, torch.ones_like(out), retain_graph=True)",
    }
    print(f"{resolution}^3 x {CHANNELS}, {count} random positions, {device}; medians")  # noqa: T201
    print(f"{'':9} {'voxelfield':>12} {'grid_sample':>12} {'ratio':>7}")  # noqa: T201
    for name, statement in statements.items():
        ours = _median_ms(statement, ops.sample_trilinear, grid, points)
        theirs = _median_ms(statement, grid_sample, volume, sites)
        print(f"{name:9} {ours:9.3f} ms {theirs:9.3f} ms {theirs / ours:6.2f}x")  # noqa: T201


def _median_ms(statement: str, op: Callable[[Tensor, Tensor], Tensor], grid: Tensor, points: Tensor) -> float:
    """Returns the median duration of a statement about an op and its result ``out``, in milliseconds."""
    names = {"op": op, "grid": grid, "points": points, "out": op(grid, points)}
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=SECONDS).median
