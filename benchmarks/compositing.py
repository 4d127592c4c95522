"""Measures compositing of packed rays next to the same formula on dense tensors (R, S) in plain PyTorch.

    python benchmarks/compositing.py [--device cpu|cuda] [--quick] [--only SUBSTRING] [--json PATH]

Every ray has the same number of samples, which is the only case that dense tensors cover without padding. Haze lets
some light through to the last sample of each ray; with walls, three of four rays end half-way. There are two dense
forms: a cumulative sum of optical thickness with sums of products, and a cumulative product of transmittances with
batched matrix products. The ratio is to the faster one. The last column is the share of the memory bandwidth that is
used for the bytes that have to be read and written once.

"backward" is a forward pass followed by the gradients in densities and colours, or in densities alone for
`ray_weights`. Rows alternate in rounds, so that other load on the machine affects all of them; figures are medians over
the rounds. `--threads 1` is less sensitive to other load.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _harness import Effort, check, measure, parser, relative_error, start, table
from torch import Tensor

from voxelfield import ops

ROUNDS = 9
FLOAT = 4  # bytes
CASES = ((64, 3, False), (512, 3, False), (64, 3, True), (512, 3, True), (64, 16, False))

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        label: Name of the op, its inputs and the pass.
        calls: The call of each alternative, ours first.
        moved: Bytes that have to be read and written once.
    """

    label: str
    calls: dict[str, Callable[[], Results]]
    moved: int


def make(rays: int, samples: int, channels: int, walls: bool, device: torch.device) -> Results:
    """Returns density, rgb, t and dt of rays with a mean optical thickness of 2, as dense tensors."""
    edges = torch.linspace(2, 6, samples + 1, device=device)
    density = torch.rand(rays, samples, device=device)
    if walls:
        density[torch.rand(rays, device=device) < 0.75, samples // 2] = 1e4
    t, dt = (x.expand(rays, samples).contiguous() for x in (edges[:-1], edges.diff()))
    return density, torch.rand(rays, samples, channels, device=device), t, dt


def weights_by_sum(density: Tensor, dt: Tensor) -> Tensor:
    """Returns weights by a cumulative sum."""
    thickness = density * dt
    return torch.exp(thickness - thickness.cumsum(1)) * (1 - torch.exp(-thickness))


def weights_by_product(density: Tensor, dt: Tensor) -> Tensor:
    """Returns weights by a cumulative product."""
    passing = torch.exp(-density * dt)
    ahead = torch.cat([torch.ones_like(passing[:, :1]), passing[:, :-1]], dim=1).cumprod(1)
    return ahead * (1 - passing)


def composite_by_sum(density: Tensor, rgb: Tensor, t: Tensor, dt: Tensor) -> Results:
    """Composites with sums of products."""
    weights = weights_by_sum(density, dt)
    return (weights[..., None] * rgb).sum(1), weights.sum(1), (weights * t).sum(1)


def composite_by_product(density: Tensor, rgb: Tensor, t: Tensor, dt: Tensor) -> Results:
    """Composites with batched matrix products."""
    weights = weights_by_product(density, dt)
    return (weights[:, None] @ rgb)[:, 0], weights.sum(1), (weights * t).sum(1)


def composite_packed(offsets: Tensor, density: Tensor, rgb: Tensor, t: Tensor, dt: Tensor) -> Results:
    """Composites by our op."""
    return ops.composite(density, rgb, t, dt, offsets, min_transmittance=0.0)[:3]


def weights_packed(offsets: Tensor, density: Tensor, dt: Tensor) -> Results:
    """Returns weights by our op."""
    return (ops.ray_weights(density, dt, offsets, min_transmittance=0.0),)


def forward(function: Callable[..., Results], inputs: Results) -> Results:
    """Runs a forward pass."""
    with torch.no_grad():
        return function(*inputs)


def backward(function: Callable[..., Results], inputs: Results) -> Results:
    """Runs a forward pass and returns gradients."""
    results = function(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    return torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results])


def rows(device: torch.device, only: str) -> Iterator[Row]:
    """Yields the rows whose label contains ``only``."""
    count = 1 << (21 if device.type == "cuda" else 18)
    for samples, channels, walls in CASES:
        density, rgb, t, dt = make(count // samples, samples, channels, walls, device)
        density.requires_grad_()
        rgb.requires_grad_()
        offsets = torch.arange(0, count + 1, samples, device=device)
        packed, packed_rgb = density.detach().flatten().requires_grad_(), rgb.detach().flatten(0, 1).requires_grad_()
        alternatives: dict[str, dict[str, tuple[Callable[..., Any], Results]]] = {
            "composite": {
                "voxelfield": (partial(composite_packed, offsets), (packed, packed_rgb, t.flatten(), dt.flatten())),
                "dense, sums": (composite_by_sum, (density, rgb, t, dt)),
                "dense, products": (composite_by_product, (density, rgb, t, dt)),
            },
            "ray_weights": {
                "voxelfield": (partial(weights_packed, offsets), (packed, dt.flatten())),
                "dense, sums": (lambda *x: (weights_by_sum(*x),), (density, dt)),
                "dense, products": (lambda *x: (weights_by_product(*x),), (density, dt)),
            },
        }
        read = {"composite": 3 + channels, "ray_weights": 2}
        written = {"composite": 1, "ray_weights": 1}
        trained = {"composite": 1 + channels, "ray_weights": 2}  # with the incoming gradient of weights
        for op, functions in alternatives.items():
            for run in (forward, backward):
                label = f"{op}, {samples} samples, {channels} channels, {'walls' if walls else 'haze'}, {run.__name__}"
                numbers = read[op] + written[op] + (read[op] + trained[op] if run is backward else 0)
                calls: dict[str, Callable[[], Results]] = {
                    name: partial(run, *call) for name, call in functions.items()
                }
                if only in label:
                    yield Row(label, calls, FLOAT * count * numbers)


def compare(row: Row) -> None:
    """Exits if the alternatives do not agree."""
    flat = {name: torch.cat([x.flatten() for x in call()]) for name, call in row.calls.items()}
    ours = flat["voxelfield"]
    for name, other in flat.items():
        check(f"{row.label}: {name}", relative_error(other, ours), 1e-4)


def medians(calls: dict[str, Callable[[], Results]], device: torch.device, how: Effort) -> dict[str, float]:
    """Returns milliseconds of each call, measured in turn."""
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            rounds[name].append(measure([call], device, how).median)
    return {name: statistics.median(times) for name, times in rounds.items()}


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, measures, and prints the table last."""
    options = parser(__doc__).parse_args(arguments)
    session = start(options)
    how = Effort(session.how.seconds / ROUNDS, 1)
    figures, lines = [], []
    for row in rows(session.device, options.only):
        compare(row)
        times = medians(row.calls, session.device, how)
        ours, *others = times.values()
        ratio, reached = min(others) / ours, row.moved / (1e-3 * ours) / session.bandwidth
        figures.append({"row": row.label, "ms": times, "ratio": ratio, "fraction_of_bandwidth": reached})
        lines.append([row.label, *(f"{m:.3f}" for m in times.values()), f"{ratio:.2f}x", f"{reached:.0%}"])
    session.announce()
    header = ["ms", "voxelfield", "dense, sums", "dense, products", "ratio", "of bandwidth"]
    print("\n" + table(header, lines))
    if options.json is not None:
        session.write(options.json, "compositing", __doc__, figures)


if __name__ == "__main__":
    main()
