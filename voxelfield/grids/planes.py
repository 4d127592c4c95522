"""Collects and moves planes along x of tensors of which each process has some."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import Tensor

from voxelfield import processes
from voxelfield.grids.resampling import SLAB_ELEMENTS


def slabs(own: Tensor, bounds: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
    """Yields the planes of all processes, a few at a time; a collective call, and so is each step of the iteration.

    Args:
        own: (P, ...) this process's planes.
        bounds: The first plane of each process, followed by the number of planes.

    Yields:
        The process, the number of the first of some of its planes among those of all, and these planes. Those of one
        process are in order.
    """
    plane = own.shape[1:]
    count, most = processes.count(), max(end - begin for begin, end in pairwise(bounds))
    at_once = max(1, SLAB_ELEMENTS // (count * max(math.prod(plane), 1)))
    for first in range(0, most, at_once):
        some = min(at_once, most - first)
        sent = own.new_zeros(some, *plane)
        part = own[first : first + some]
        sent[: len(part)] = part
        received = own.new_empty(count * some, *plane)
        processes.gather_into(received, sent)
        for process, (begin, end) in enumerate(pairwise(bounds)):
            planes = min(some, end - begin - first)
            if planes > 0:
                yield process, begin + first, received[process * some : process * some + planes]


def collect(own: Tensor, bounds: Sequence[int], planes: Tensor, low: int = 0) -> None:
    """Writes planes of all processes into one tensor, on any device; a collective call.

    Args:
        own: As for :func:`slabs`.
        bounds: As for :func:`slabs`.
        planes: The tensor to write to.
        low: The first plane that it is to have.
    """
    for _, first, some in slabs(own, bounds):
        begin, end = max(first, low), min(first + len(some), low + len(planes))
        if begin < end:
            planes[begin - low : end - low] = some[begin - first : end - first]


def moved(own: Tensor, bounds: Sequence[int], low: int, high: int) -> Tensor:
    """Returns the planes from ``low`` to ``high``; a collective call with arguments as for :func:`slabs`."""
    planes = own.new_empty(high - low, *own.shape[1:])
    collect(own.detach(), bounds, planes, low)
    return planes
