"""Measures compositing of packed rays next to the same formula on dense tensors (R, S) in plain PyTorch.

    python benchmarks/compositing.py [--device cpu|cuda] [--quick] [--only SUBSTRING] [--json PATH]

Every ray has the same number of samples, which is the only case that dense tensors cover without padding; haze lets some
light through to the last sample of each ray, and with walls most rays end half-way. There are two dense forms: a
cumulative sum of optical thickness with sums of products, and a cumulative product of transmittances with a batched
matrix product. The ratio is that of the faster one. The last column is the share of the memory bandwidth that is used
for the bytes that have to be read and written once.

Rows alternate in rounds, so that other load on the machine affects all of them; figures are medians over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from _harness import Effort, check, measure, parser, relative_error, start, table
from torch import Tensor

from voxelfield import ops

ROUNDS = 9


@dataclass(frozen=True)
class Case:
    """Inputs of R rays of S samples, as dense tensors."""

    density: Tensor
    rgb: Tensor
    t: Tensor
    dt: Tensor

    @property
    def packed(self) -> tuple[Tensor, ...]:
        """The same inputs as packed samples."""
        rays, samples = self.density.shape
        offsets = torch.arange(rays + 1, device=self.density.device) * samples
        return self.density.flatten(), self.rgb.flatten(0, 1), self.t.flatten(), self.dt.flatten(), offsets


def make(rays: int, samples: int, channels: int, walls: bool, device: torch.device) -> Case:
    """Returns rays with a mean optical thickness of 2, and a wall half-way in three of four if ``walls``."""
    t = torch.linspace(2, 6, samples + 1, device=device)
    density = torch.rand(rays, samples, device=device)
    if walls:
        density[torch.rand(rays, device=device) < 0.75, samples // 2] = 1e4
    dt = t.diff().expand(rays, samples).contiguous()
    return Case(density, torch.rand(rays, samples, channels, device=device), t[:-1].expand_as(dt).contiguous(), dt)


def dense_sum(density: Tensor, rgb: Tensor, t: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
    """Composites by a cumulative sum."""
    thickness = density * dt
    weights = torch.exp(thickness - thickness.cumsum(1)) * (1 - torch.exp(-thickness))
    return (weights[..., None] * rgb).sum(1), weights.sum(1), (weights * t).sum(1), weights


def dense_product(density: Tensor, rgb: Tensor, t: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
    """Composites by a cumulative product."""
    passing = torch.exp(-density * dt)
    ahead = torch.cat([torch.ones_like(passing[:, :1]), passing[:, :-1]], dim=1)
    weights = ahead.cumprod(1) * (1 - passing)
    return (weights[:, None] @ rgb)[:, 0], weights.sum(1), (weights * t).sum(1), weights


def rows(device: torch.device) -> Iterator[tuple[str, int, dict[str, Callable[[], object]], Callable[[], None]]]:
    """Yields label, bytes, the calls by name with ours first, and a check of their results."""
    total = 1 << (21 if device.type == "cuda" else 19)
    for samples, channels, walls in ((64, 3, False), (512, 3, False), (64, 3, True), (512, 3, True), (64, 16, False)):
        case = make(total // samples, samples, channels, walls, device)
        dense = case.density, case.rgb, case.t, case.dt
        label = f"{samples} samples, {channels} channels, {'walls' if walls else 'haze'}"
        for op, passes in (("composite", 2), ("ray_weights", 2)):
            for trained in range(passes):
                yield _row(op, label, case, dense, channels, bool(trained))


def _row(
    op: str, label: str, case: Case, dense: tuple[Tensor, ...], channels: int, trained: bool
) -> tuple[str, int, dict[str, Callable[[], object]], Callable[[], None]]:
    packed = case.packed
    weights_only = op == "ray_weights"

    def ours(density: Tensor, rgb: Tensor) -> tuple[Tensor, ...]:
        if weights_only:
            return (ops.ray_weights(density, packed[3], packed[4], min_transmittance=0.0),)
        return ops.composite(density, rgb, *packed[2:], min_transmittance=0.0)[:4]

    def theirs(form: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def call(density: Tensor, rgb: Tensor) -> tuple[Tensor, ...]:
            if weights_only:
                thickness = density * dense[3]
                if form is dense_sum:
                    return (torch.exp(thickness - thickness.cumsum(1)) * (1 - torch.exp(-thickness)),)
                passing = torch.exp(-thickness)
                ahead = torch.cat([torch.ones_like(passing[:, :1]), passing[:, :-1]], dim=1)
                return (ahead.cumprod(1) * (1 - passing),)
            return form(density, rgb, *dense[2:])

        return call

    calls: dict[str, Callable[[], object]] = {}
    results: list[Tensor] = []
    alternatives = {
        "voxelfield": (ours, packed[:2]),
        "dense, sum": (theirs(dense_sum), dense[:2]),
        "dense, product": (theirs(dense_product), dense[:2]),
    }
    for name, (function, inputs) in alternatives.items():
        leaves = [x.clone().requires_grad_(trained) for x in inputs[: 1 if weights_only else 2]]
        both = leaves if len(leaves) == 2 else [*leaves, inputs[1]]

        def call(function=function, leaves=leaves, both=both) -> object:
            outputs = function(*both)
            if not trained:
                return outputs
            # As in training, where a loss on weights is rare.
            losses = outputs if weights_only else outputs[:3]
            return torch.autograd.grad(losses, leaves, [torch.ones_like(x) for x in losses])

        calls[name] = call
        results.append(torch.cat([x.flatten() for x in call()]))  # type: ignore[attr-defined]

    def compare() -> None:
        for name, other in zip(calls, results, strict=True):
            check(f"{op}, {label}: {name}", relative_error(other, results[0]), 1e-4)

    samples = case.density.numel()
    per_sample = 12 if weights_only else 16 + 4 * channels
    if trained:  # the inputs again, and gradients of density and colours
        per_sample += 16 if weights_only else 16 + 8 * channels
    return f"{op}, {label}, {'forward + backward' if trained else 'forward'}", samples * per_sample, calls, compare


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, measures, and prints the table last."""
    options = parser(__doc__).parse_args(arguments)
    session = start(options)
    how = Effort(session.how.seconds / ROUNDS, 1)
    figures, lines = [], []
    for label, moved, calls, compare in rows(session.device):
        if options.only not in label:
            continue
        compare()
        rounds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                rounds[name].append(measure([call], session.device, how).median)
        medians = {name: statistics.median(times) for name, times in rounds.items()}
        ours, *others = medians.values()
        reached = moved / (1e-3 * ours) / session.bandwidth
        figures.append({"row": label, "ms": medians, "ratio": min(others) / ours, "fraction_of_bandwidth": reached})
        lines.append([label, *(f"{m:.3f}" for m in medians.values()), f"{min(others) / ours:.2f}x", f"{reached:.0%}"])
    session.announce()
    header = ["ms", "voxelfield", "dense, sum", "dense, product", "faster", "of bandwidth"]
    print("\n" + table(header, lines))
    if options.json is not None:
        session.write(options.json, "compositing", __doc__, figures)


if __name__ == "__main__":
    main()
