"""``voxelfield bench``: how fast the sampling op is on this machine, beside torch's own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield import ops
from voxelfield.cli.errors import in_one_line
from voxelfield.devices import choose_device
from voxelfield.training.clock import synchronized_time

CHANNELS = 4
ROUNDS = 7


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and measures; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="voxelfield bench",
        description="Time trilinear sampling, forward and backward, against F.grid_sample in the same run.",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    parser.add_argument("--resolution", type=int, help="vertices along each axis (default: 256 on a GPU, else 128)")
    parser.add_argument("--points", type=int, help="number of random positions (default: 2^20 on a GPU, else 2^17)")
    options = parser.parse_args(arguments)
    return in_one_line(lambda: bench(options))


def bench(options: argparse.Namespace) -> None:
    """Measures as the command line asks, and prints a table.

    Raises:
        ValueError: A number is below 2, or the device is not there.
    """
    device = choose_device(options.device)
    large = device.type == "cuda"
    resolution = options.resolution if options.resolution is not None else 256 if large else 128
    points = options.points if options.points is not None else 1 << (20 if large else 17)
    for name, value in (("--resolution", resolution), ("--points", points)):
        if value < 2:
            raise ValueError(f"{name} must be at least 2, got {value}")
    grid = torch.randn(resolution, resolution, resolution, CHANNELS, device=device, requires_grad=True)
    where = torch.rand(points, 3, device=device)
    volume = grid.detach().permute(3, 2, 1, 0)[None].contiguous().requires_grad_()
    sites = (2 * where - 1).view(1, 1, 1, -1, 3)

    def ours() -> Tensor:
        return ops.sample_trilinear(grid, where)

    def torchs() -> Tensor:
        return F.grid_sample(volume, sites, align_corners=True)

    print(f"{resolution}^3 x {CHANNELS}, {points} random positions, {device}; medians of {ROUNDS} rounds")  # noqa: T201
    print(f"{'':9} {'voxelfield':>12} {'grid_sample':>12} {'ratio':>7}")  # noqa: T201
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward": (ours, torchs),
        "backward": (backward_of(ours, grid), backward_of(torchs, volume)),
    }
    for name, calls in pairs.items():
        times = measure(calls, device)
        own, other = (median(row) for row in times)
        print(f"{name:9} {1e3 * own:9.3f} ms {1e3 * other:9.3f} ms {other / own:6.2f}x")  # noqa: T201


def backward_of(sample: Callable[[], Tensor], grid: Tensor) -> Callable[[], object]:
    """Returns a call of the backward pass alone."""
    result = sample()
    grad = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, grid, grad, retain_graph=True)


def measure(calls: Sequence[Callable[[], object]], device: torch.device) -> list[list[float]]:
    """Returns the seconds of each call in each round; calls take turns, after one round that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(ROUNDS + 1):
        for call, row in zip(calls, times, strict=True):
            began = synchronized_time(device)
            call()
            seconds = synchronized_time(device) - began
            if round_ > 0:
                row.append(seconds)
    return times
