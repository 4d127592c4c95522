"""The reduction of a training step over the processes that share its batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from voxelfield import processes
from voxelfield.models.training import PositionDensity


class Reduction:
    """Combines the results of a step over all processes; this class is for a single process and changes nothing.

    A subclass for several processes overrides all methods. They are called within the CUDA graph of a step, in the same
    order in each process, and must not synchronise with the host.
    """

    processes = 1
    """Number of processes."""

    def rows(self, total: int) -> slice:
        """Returns which rows of a batch this process takes."""
        return slice(0, total)

    def share(self, kept: Tensor) -> Tensor | None:
        """Returns this process's share () of the rays that are kept, of which it keeps ``kept`` (); None for all.

        Losses are means over a process's rays. Weighted by these shares, they add up to the mean over all rays.
        """
        return None

    def gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replaces gradients by their sums over the processes; parameters without a gradient are skipped."""

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sums (N,) of values over the processes."""
        return values

    def finite(self, flag: Tensor) -> Tensor:
        """Returns whether a flag () is true in all processes."""
        return flag

    def samples(self, count: int) -> int:
        """Returns the number of samples of all processes, of which this one has ``count``; not called on CUDA."""
        return count

    def align_random_numbers(self) -> None:
        """Lets all processes draw the same random numbers from here on; not called on CUDA.

        There, the same kernels of the same sizes draw them in each process.
        """


class GroupReduction(Reduction):
    """The reduction over the processes of torch.distributed's default group, see :class:`Reduction`."""

    def __init__(self) -> None:
        self.processes = processes.count()

    def rows(self, total: int) -> slice:
        """Returns one of equal parts, up to one row."""
        return processes.rows(total)

    def share(self, kept: Tensor) -> Tensor:
        """Divides by the sum over the processes, at least 1."""
        return kept / processes.sum_of(kept.float()).clamp(min=1)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Adds up all gradients of one dtype in one flat tensor."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            some = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = processes.sum_of(torch.cat([gradient.flatten() for gradient in some]))
            parts = flat.split([gradient.numel() for gradient in some])
            torch._foreach_copy_(some, [part.view_as(own) for part, own in zip(parts, some, strict=True)])

    def sum(self, values: Tensor) -> Tensor:
        """Adds in the dtype of the values."""
        return processes.sum_of(values)

    def finite(self, flag: Tensor) -> Tensor:
        """Counts the processes in which it is not."""
        return processes.sum_of((~flag).to(torch.int32)) == 0

    def samples(self, count: int) -> int:
        """Adds the counts on the host."""
        return sum(processes.gather_counts(count))

    def align_random_numbers(self) -> None:
        """Takes over the state of process 0's generator."""
        torch.set_rng_state(processes.of_first(torch.get_rng_state()))


def reduction() -> Reduction:
    """Returns the reduction over the processes that there are."""
    return GroupReduction() if processes.count() > 1 else Reduction()


def divided_density(density: PositionDensity) -> PositionDensity:
    """Returns a function of the same values, of which each process evaluates a part.

    All processes therefore have exactly the same occupied cells, whatever their devices round differently.
    """
    if processes.count() == 1:
        return density

    def divided(points: Tensor) -> Tensor:
        total = len(points)
        parts = [processes.rows(total, process) for process in range(processes.count())]
        own = density(points[processes.rows(total)])
        return processes.gather_rows(own, [part.stop - part.start for part in parts])

    return divided
