"""Measures the host time of one call, independent of the size of its input, next to ``F.grid_sample``.

    python benchmarks/host.py [--device cpu|cuda] [--quick] [--only SUBSTRING] [--json PATH]

Inputs are tiny (8^3 vertices of 4 channels, 64 points), so that only the host's own time remains: Python, torch's
dispatcher, allocation and kernel launches. On a GPU this is the time until the call returns; synchronisation takes
place between batches of calls, outside the timed region.

- "forward": under ``torch.no_grad()``. "recorded": with an input that requires a gradient. "backward":
  ``torch.autograd.grad`` on a retained graph. A dash marks an op without such an input.
- "empty Function" is a ``torch.autograd.Function`` that returns a view of its input: a lower bound for any operator
  written in Python with its own derivative. "dispatch alone" is the raw operator without a derivative.
- Rows alternate in rounds, so that a change of the clock frequency during a run affects all of them; figures are
  medians over the rounds' medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import parser, start, table
from torch import Tensor
from torch.nn import functional as F

from voxelfield import VoxelGrid, ops

RESOLUTION, CHANNELS, POINTS = 8, 4, 64
BATCH = 50
PASSES = ("forward", "recorded", "backward")

Row = dict[str, Callable[[], object]]


class Empty(torch.autograd.Function):
    """Does nothing, differentiably."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns a view of the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Returns the incoming gradient unchanged."""
        return grad


def row(function: Callable[..., Tensor], inputs: tuple[Any, ...], trained: list[Tensor]) -> Row:
    """Returns the three passes of a function whose ``trained`` inputs require a gradient."""

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    result = function(*inputs)
    grad = torch.ones_like(result)
    return {
        "forward": forward,
        "recorded": lambda: function(*inputs),
        "backward": lambda: torch.autograd.grad(result, trained, grad, retain_graph=True),
    }


def rows(device: torch.device) -> Iterator[tuple[str, Row]]:
    """Yields the rows of the table."""
    # Networks run in float16 on CUDA.
    half = torch.float16 if device.type == "cuda" else torch.float32
    grid = torch.randn(RESOLUTION, RESOLUTION, RESOLUTION, CHANNELS, device=device, requires_grad=True)
    points = torch.rand(POINTS, 3, device=device)
    volume = torch.randn(1, CHANNELS, RESOLUTION, RESOLUTION, RESOLUTION, device=device, requires_grad=True)
    where = (2 * points - 1).view(1, 1, 1, POINTS, 3)
    module = VoxelGrid(RESOLUTION, CHANNELS, ((-1, -1, -1), (1, 1, 1)), init_std=1.0, device=device)
    density = torch.rand(POINTS, device=device, requires_grad=True)
    rgb = torch.rand(POINTS, 3, device=device, requires_grad=True)
    t, dt = torch.linspace(0, 1, POINTS, device=device), torch.full((POINTS,), 0.1, device=device)
    offsets = torch.tensor([0, POINTS], device=device)
    features = torch.rand(POINTS, 32, device=device).to(half)
    weights = [torch.randn(size, device=device).requires_grad_() for size in ((16, 32), (16, 16))]

    def composited(*inputs: Tensor) -> Tensor:
        return ops.composite(*inputs).rgb

    def torch_layers(x: Tensor, layers: list[Tensor]) -> Tensor:
        return F.linear(F.linear(x, layers[0].to(half)).relu(), layers[1].to(half))

    def sampled_by_torch(volume: Tensor, where: Tensor) -> Tensor:
        return F.grid_sample(volume, where, align_corners=True)

    yield "empty Function", row(Empty.apply, (grid,), [grid])
    yield "F.grid_sample", row(sampled_by_torch, (volume, where), [volume])
    yield "ops.sample_trilinear", row(ops.sample_trilinear, (grid, points), [grid])
    yield "  dispatch alone", {"forward": dispatch_alone(grid.detach(), points)}
    yield "VoxelGrid.forward", row(module, (points,), [module.features])
    yield "ops.composite", row(composited, (density, rgb, t, dt, offsets), [density, rgb])
    yield "ops.mlp", row(ops.mlp, (features, weights), weights)
    yield "the same by torch.nn.functional.linear", row(torch_layers, (features, weights), weights)


def dispatch_alone(grid: Tensor, points: Tensor) -> Callable[[], object]:
    """Returns a call of the raw operator without autograd."""
    raw = torch.ops.voxelfield.sample_trilinear.default

    def call() -> object:
        with torch.inference_mode():
            return raw((grid,), points, 0, True, False, False, False)

    return call


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Returns the median time of a batch of calls."""
    times = []
    if device.type == "cuda":
        torch.cuda.synchronize()
    for _ in range(BATCH):
        started = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - started)
        del result
    return 1e6 * statistics.median(times)


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__).parse_args()
    session = start(options)
    session.announce()
    selected = [(name, passes) for name, passes in rows(session.device) if options.only in name]
    rounds: dict[tuple[str, str], list[float]] = {}
    for turn in range(8 if options.quick else 40):
        for name, passes in selected:
            for what, call in passes.items():
                elapsed = microseconds(call, session.device)
                if turn > 0:  # the first round is a warm-up
                    rounds.setdefault((name, what), []).append(elapsed)
    medians = {key: statistics.median(values) for key, values in rounds.items()}
    cells = [[name, *(f"{medians[name, p]:.1f}" if p in passes else "-" for p in PASSES)] for name, passes in selected]
    print("\nmicroseconds of the host for one call\n" + table(["", *PASSES], cells))
    if options.json is not None:
        figures = [{"row": name.strip(), "pass": what, "microseconds": m} for (name, what), m in medians.items()]
        session.write(options.json, "host", None, figures)


if __name__ == "__main__":
    main()
