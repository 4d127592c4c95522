"""Reductions over processes that divide the batch of a training step: of gradients and of the weights of losses.

All of these are collective calls, which a CUDA graph of the step may contain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield import processes
from voxelfield.ops import PackedSamples


class SharedSampler:
    """A sampler whose processes add up how many rays they keep, while each evaluates its samples.

    Args:
        sampler: Places the samples (:data:`voxelfield.rendering.march.Sampler`).
    """

    def __init__(self, sampler: Callable[..., tuple[PackedSamples, Tensor | None]]) -> None:
        self._sampler = sampler
        self._kept: Tensor | None = None
        self._arrive: Callable[[], Tensor] | None = None

    def __call__(self, *arguments: Any, **options: Any) -> tuple[PackedSamples, Tensor | None]:
        """Places samples; a collective call."""
        samples, candidates = self._sampler(*arguments, **options)
        self._kept = samples.rays_kept
        self._arrive = processes.sum_later(self._kept.float())
        return samples, candidates

    def share_of_rays(self, kept: Tensor) -> Tensor:
        """Returns ``kept`` () divided by its sum over the processes, (); a collective call.

        Losses are means over the rays that a process keeps. Weighted by these fractions, they add up to the mean over
        all rays.
        """
        total = None if self._arrive is None else self._arrive()[0]
        if total is None or self._kept is None or self._kept.data_ptr() != kept.data_ptr():
            # The model has rendered without this sampler, or by several calls of it.
            total = processes.sum_of(kept.float())
        self._kept = self._arrive = None
        return kept / total.clamp(min=1)


def sum_gradients_later(parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Begins to sum gradients over the processes, one flat tensor a dtype; the device can do other work meanwhile.

    Parameters without a gradient are skipped.

    Returns:
        A function that waits for the sums, and replaces the gradients by them. It must be called before they are read.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    summed = []
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        some = [gradient for gradient in gradients if gradient.dtype == dtype]
        summed.append((some, processes.sum_later(torch.cat([gradient.flatten() for gradient in some]))))

    def finish() -> None:
        for some, arrive in summed:
            parts = arrive().split([gradient.numel() for gradient in some])
            torch._foreach_copy_(some, [part.view_as(local) for part, local in zip(parts, some, strict=True)])

    return finish


def divided_density(density: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns a density (M,) of points (M, 3) with the same values, whose points are divided over the processes.

    All processes therefore have exactly the same occupied cells, even if their devices round differently.
    """
    if processes.count() == 1:
        return density

    def divided(points: Tensor) -> Tensor:
        total = len(points)
        parts = [processes.rows(total, process) for process in range(processes.count())]
        local = density(points[processes.rows(total)])
        return processes.gather_rows(local, [part.stop - part.start for part in parts])

    return divided
