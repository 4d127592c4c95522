"""Time trilinear sampling, forward and backward, against F.grid_sample in the same run."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
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
    names: dict[str, Any] = {
        "grid": grid,
        "points": points,
        "volume": volume,
        "sites": sites,
        "grad": torch.autograd.grad,
    }
    names |= {"ours": ops.sample_trilinear, "theirs": functools.partial(F.grid_sample, align_corners=True)}
    names |= {"out": ops.sample_trilinear(grid, points), "out_of_torch": names["theirs"](volume, sites)}
    rows = {
        "forward": ("ours(grid, points)", "theirs(volume, sites)"),
        "backward": (
            "grad(out, grid, torch.ones_like(out), retain_graph=True)",
            "grad(out_of_torch, volume, torch.ones_like(out_of_torch), retain_graph=True)",
        ),
    }
    print(f"{resolution}^3 x {CHANNELS}, {count} random positions, {device}; medians")  # noqa: T201
    print(f"{'':9} {'voxelfield':>12} {'grid_sample':>12} {'ratio':>7}")  # noqa: T201
    for name, calls in rows.items():
        own, other = (
            Timer(call, globals=names, num_threads=torch.get_num_threads())
            .blocked_autorange(min_run_time=SECONDS)
            .median
            for call in calls
        )
        print(f"{name:9} {1e3 * own:9.3f} ms {1e3 * other:9.3f} ms {other / own:6.2f}x")  # noqa: T201
