"""Times ``sample_pyramid`` against one call of ``sample_trilinear`` per level, in one run.

    python benchmarks/pyramid.py [--device cpu|cuda] [--threads N] [--quick] [--only SUBSTRING] [--json PATH]

Five float32 levels of 4 channels (16^3 to 256^3 on a GPU, 8^3 to 128^3 on a CPU) are sampled at the same points. In
"concat" their channels are concatenated: the alternatives are separate calls with ``torch.cat``, and the calls alone,
which leave five tensors. In "sum" they are added: the alternative is separate calls and additions.

- The forward pass runs without a graph. The backward pass is ``torch.autograd.grad`` with respect to the five grids
  only, on a retained graph; it includes allocating and zeroing the gradients, and the backward pass of ``torch.cat``
  and the additions.
- Values and gradients of all alternatives are compared in the run, and ours with float64 as well.
- The point sets and the floor are those of benchmarks/trilinear.py, with points read and output written once for all
  levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from _alternatives import Inputs, Pass, Prepared, gradients, prepare
from _compare import Case, Errors, Results, backward_error, forward_error, grid_floor, run_benchmark
from _points import POINT_SETS
from torch import Tensor

from voxelfield.ops import sample_pyramid, sample_trilinear

CHANNELS = 4

Reduction = Literal["concat", "sum"]

RATIOS = {"concat": "calls alone / ours", "sum": "calls / ours"}


def make(op: str, resolutions: Sequence[int], points: str, count: int, device: torch.device) -> Inputs:
    """Makes random levels, points, and the gradient of their values."""
    grids = tuple(torch.randn(n, n, n, CHANNELS, device=device) for n in resolutions)
    columns = CHANNELS * (len(resolutions) if op == "concat" else 1)
    return Inputs(grids, POINT_SETS[points](count, device), torch.randn(count, columns, device=device))


def pyramid(reduce: Reduction, *grids_and_points: Tensor) -> Tensor:
    """Samples all levels with one op."""
    *grids, points = grids_and_points
    return sample_pyramid(grids, points, reduce=reduce)


def separate(*grids_and_points: Tensor) -> list[Tensor]:
    """Samples each level with a separate call."""
    *grids, points = grids_and_points
    return [sample_trilinear(grid, points) for grid in grids]


def separate_concat(*grids_and_points: Tensor) -> Tensor:
    """Samples each level with a separate call and concatenates the channels."""
    return torch.cat(separate(*grids_and_points), dim=1)


def separate_sum(*grids_and_points: Tensor) -> Tensor:
    """Samples each level with a separate call and adds the results."""
    first, *others = separate(*grids_and_points)
    for other in others:
        first = first + other
    return first


def prepare_separate(inputs: Inputs) -> Prepared:
    """Prepares the calls alone, each with its own contiguous gradient."""
    sources = [source.detach().requires_grad_() for source in inputs.sources]
    forward = partial(separate, *sources, inputs.points)
    values = [part.contiguous() for part in inputs.values.split(CHANNELS, dim=1)]
    return {
        "forward": Pass(forward, lambda levels: (torch.cat(levels, dim=1),)),
        "backward": Pass(partial(gradients, forward(), sources, values)),
    }


def concat_errors(inputs: Inputs, results: dict[str, Results]) -> Errors:
    """Compares concatenated channels with float64."""
    columns = range(0, CHANNELS * len(inputs.sources), CHANNELS)
    return {
        "forward": forward_error(inputs, results["forward"][0], partial(torch.cat, dim=1)),
        "backward": backward_error(inputs, results["backward"], columns),
    }


def sum_errors(inputs: Inputs, results: dict[str, Results]) -> Errors:
    """Compares summed levels with float64; each level receives the whole gradient."""
    return {
        "forward": forward_error(inputs, results["forward"][0], lambda rows: torch.stack(rows).sum(0)),
        "backward": backward_error(inputs, results["backward"], [0] * len(inputs.sources)),
    }


def cases(device: torch.device) -> Iterator[Case]:
    """Yields every case for a device."""
    on_gpu = device.type == "cuda"
    resolutions = (16, 32, 64, 128, 256) if on_gpu else (8, 16, 32, 64, 128)
    count = 1 << (20 if on_gpu else 18)
    comparisons: dict[Reduction, tuple[dict[str, Callable[[Inputs], Prepared]], str, Callable[..., Errors]]] = {
        "concat": (
            {"five calls, cat": partial(prepare, separate_concat), "five calls": prepare_separate},
            "five calls",
            concat_errors,
        ),
        "sum": ({"five calls, sum": partial(prepare, separate_sum)}, "five calls, sum", sum_errors),
    }
    size = f"{resolutions[0]}^3..{resolutions[-1]}^3 x {CHANNELS}"
    for op, (others, rival, errors) in comparisons.items():
        for points in POINT_SETS:
            yield Case(
                op,
                size,
                points,
                partial(make, op, resolutions, points, count, device),
                {"sample_pyramid": partial(prepare, partial(pyramid, op)), **others},
                (rival,),
                partial(grid_floor, device),
                errors,
            )


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, runs the cases, and prints the tables last."""
    run_benchmark("pyramid", __doc__, cases, RATIOS, arguments)


if __name__ == "__main__":
    main()
