"""The reduction of a training step over the processes that share its batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class Reduction:
    """Combines the results of a step over all processes; this class is for a single process and changes nothing.

    A subclass for several processes overrides all methods. They are called within the CUDA graph of a step, in the same
    order in each process, and must not synchronise with the host.
    """

    def gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replaces gradients by their means over the processes; parameters without a gradient are skipped."""

    def count(self, sums: Tensor) -> Tensor:
        """Returns the sums (N,) of values over the processes."""
        return sums

    def finite(self, flag: Tensor) -> Tensor:
        """Returns whether a flag () is true in all processes."""
        return flag
