"""Alternative implementations of grid sampling, each with inputs in its own layout, so that only the op is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

OURS = "voxelfield"
LAYOUTS = {"grid_sample NCDHW": torch.contiguous_format, "grid_sample channels-last": torch.channels_last_3d}

Outputs = Tensor | Sequence[Tensor]


class Inputs(NamedTuple):
    """One set of inputs: the sampled grids or cells, the points, and the incoming gradient."""

    sources: tuple[Tensor, ...]
    points: Tensor
    values: Tensor


def as_tuple(result: Outputs) -> tuple[Tensor, ...]:
    """Returns one tensor or several as a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


class Pass(NamedTuple):
    """A timed call, a view of its result in our layout without a copy, and whether it is bit-for-bit reproducible."""

    call: Callable[[], Outputs]
    to_ours: Callable[[Any], tuple[Tensor, ...]] = as_tuple
    repeatable: bool = False


Prepared = dict[str, Pass]


def gradients(outputs: Outputs, sources: Sequence[Tensor], values: Outputs) -> tuple[Tensor, ...]:
    """Returns the gradients with respect to the sources only; the graph is retained."""
    return torch.autograd.grad(outputs, sources, values, retain_graph=True)


def prepare(op: Callable[..., Tensor], inputs: Inputs) -> Prepared:
    """Prepares both passes of an alternative that takes our own layout: first the sources, then the points."""
    sources = [source.detach().requires_grad_() for source in inputs.sources]
    forward = partial(op, *sources, inputs.points)
    backward = partial(gradients, forward(), sources, inputs.values)
    return {"forward": Pass(forward), "backward": Pass(backward)}


def prepare_grid_sample(memory_format: torch.memory_format, inputs: Inputs) -> Prepared:
    """Prepares ``F.grid_sample``: x, y, z of our grid are its D, H, W, which it addresses in reverse order."""
    (grid,) = inputs.sources
    volume = grid.detach().permute(3, 0, 1, 2).unsqueeze(0)
    volume = volume.contiguous(memory_format=memory_format).requires_grad_()
    coordinates = (2 * inputs.points - 1).flip(1).view(1, 1, 1, -1, 3)
    values = inputs.values.t().contiguous().view(1, -1, 1, 1, inputs.points.shape[0])
    forward = partial(F.grid_sample, volume, coordinates, mode="bilinear", padding_mode="border", align_corners=True)
    backward = partial(gradients, forward(), [volume], values)
    return {
        "forward": Pass(forward, lambda output: (output[0, :, 0, 0].t(),)),
        "backward": Pass(backward, lambda result: (result[0][0].permute(1, 2, 3, 0),)),
    }
