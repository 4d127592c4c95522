"""Tensors that are divided over the processes that train together: rows that are read by index, and shards of grids."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield import processes
from voxelfield.foundation import constants
from voxelfield.grids.sparse_grid import SparseGrid

_COLUMNS = 5


@dataclass(eq=False)
class Shard:
    """This process's planes of one grid (X, Y, Z, C).

    Attributes:
        grid: The parameter of the whole grid.
        copy: The working copy of the whole grid, which is the grid itself in float32.
        bounds: The first plane along x of each process, followed by the number of planes.
        begin: The first local plane.
        end: The end of the local planes.
        planes: The local planes of the whole grid.
        in_stored: The local planes of ``stored`` and ``sums``.
        low: The first plane of ``stored``. Those before the local planes, and those after them, are a halo.
        high: The end of the planes of ``stored``.
        stored: The float32 masters of the local planes and of the halo.
        local: The local planes of ``stored``.
        sparse: The sparse grid whose atlas this is, if it is one.
        shared: Of an atlas, the vertices with several copies (:meth:`SparseGrid.shared_by`).
        state: The state of Adam for ``local``, by the names that :class:`GridAdam` uses.
        sums: The gradient of ``stored``, whose local planes are the ``grad`` of ``local``; see :meth:`start_sums`.
        written: The tensors that receive the rounded values of ``local``.
        tiles: The ids (N, K) of the active tiles of each process, -1 where there are fewer; None: all are updated.
        local_tiles: The ids (K,) of this process's active tiles within ``local``.
        count: The number (1,) of these, int32.
        touched: The table of the vertices of ``reached`` with a gradient (:func:`touched_vertices`), by local tiles;
            None if nothing needs it.
    """

    grid: nn.Parameter
    copy: Tensor
    bounds: Sequence[int]
    low: int
    high: int
    stored: Tensor
    local: nn.Parameter
    sparse: SparseGrid | None
    shared: tuple[Tensor, Tensor] | None
    state: dict[str, Tensor]
    sums: Tensor = field(default_factory=lambda: torch.empty(0))
    written: list[Tensor] = field(default_factory=list)
    tiles: Tensor | None = None
    local_tiles: Tensor | None = None
    count: Tensor | None = None
    touched: Tensor | None = None

    def __post_init__(self) -> None:
        self.begin, self.end = self.bounds[processes.rank() : processes.rank() + 2]
        self.planes = slice(self.begin, self.end)
        self.in_stored = slice(self.begin - self.low, self.end - self.low)
        self._plane = self.grid.shape[1] * self.grid.shape[2]

    @property
    def reached(self) -> Tensor:
        """The planes of ``sums`` to which samples add: the local ones, and of an atlas also the halo."""
        return self.sums if self.sparse is not None else self.sums[self.in_stored]

    def start_sums(self) -> None:
        """Makes the gradient zero, in new memory."""
        self.sums = torch.zeros_like(self.stored)
        self.local.grad = self.sums[self.in_stored]

    def drop_sums(self) -> None:
        """Frees the gradient."""
        self.local.grad, self.sums = None, self.sums.new_empty(0)

    @property
    def local_touched(self) -> Tensor | None:
        """The rows of ``touched`` for the local planes, which are whole blocks of an atlas and therefore whole rows."""
        if self.sparse is None or self.touched is None:
            return self.touched
        return self.touched[self._rows_for(self.in_stored.start) : self._rows_for(self.in_stored.stop)]

    def rows(self) -> int:
        """Returns the largest number of tiles of a process: listed ones, or 128 vertices each."""
        if self.tiles is not None:
            return self.tiles.shape[1]
        return self._rows_for(max(end - begin for begin, end in pairwise(self.bounds)))

    def tiles_of(self, process: int) -> dict[str, Any]:
        """Returns the arguments of :func:`pack_vertices` that describe the tiles of a process."""
        if self.tiles is not None:
            return {"ids": self.tiles[process]}
        return {"first": self.bounds[process] * self._plane}

    def add_table(self) -> None:
        """Makes ``touched`` an empty table for the present tiles."""
        rows = self._rows_for(len(self.reached)) if self.local_tiles is None else len(self.local_tiles)
        self.touched = new_table(rows, self.sums.device)

    def _rows_for(self, planes: int) -> int:
        return -(-planes * self._plane // tile_vertices())


def new_table(rows: int, device: torch.device) -> Tensor:
    """Returns an empty table of touched vertices (:func:`touched_vertices`), with a row for each tile."""
    return torch.zeros(rows, _COLUMNS, dtype=torch.int32, device=device)


def tile_vertices() -> int:
    """Returns the number of vertices of a tile."""
    return constants.TILE_X * constants.TILE_Y * constants.TILE_Z


def row_slabs(local: Tensor, bounds: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
    """Yields a process, the index of the first of some of its rows, and these rows, until all processes' rows are read.

    A collective call, and so is each step of the iteration. Each process gives its ``local`` rows (R, ...), and the
    ``bounds``: the first row of each process among the rows of all, followed by their number.
    """
    row, longest = local.shape[1:], max(end - begin for begin, end in pairwise(bounds))
    at_once = max(1, processes.SLAB_ELEMENTS // (processes.count() * max(math.prod(row), 1)))
    for first in range(0, longest, at_once):
        some = min(at_once, longest - first)
        sent = local.new_zeros(some, *row)
        slab = local[first : first + some]
        sent[: len(slab)] = slab
        received = local.new_empty(processes.count() * some, *row)
        processes.gather_later(received, sent)()
        for process, (begin, end) in enumerate(pairwise(bounds)):
            rows = min(some, end - begin - first)
            if rows > 0:
                yield process, begin + first, received[process * some : process * some + rows]


def collect_rows(local: Tensor, bounds: Sequence[int], out: Tensor, low: int = 0) -> None:
    """Writes rows of all processes, from row ``low`` on, into a tensor on any device; each process may ask for others.

    A collective call with arguments as for :func:`row_slabs`.
    """
    for _, first, rows in row_slabs(local, bounds):
        begin, end = max(first, low), min(first + len(rows), low + len(out))
        if begin < end:
            out[begin - low : end - low] = rows[begin - first : end - first]


def rows_between(local: Tensor, bounds: Sequence[int], low: int, high: int) -> Tensor:
    """Returns the rows from ``low`` to ``high``; a collective call with arguments as for :func:`row_slabs`."""
    rows = local.new_empty(high - low, *local.shape[1:])
    collect_rows(local.detach(), bounds, rows, low)
    return rows


class DividedRows:
    """The rows of all processes, in the order of ranks, of which each process stores some (R, ...); read by index.

    Making it and reading from it are collective calls; reading does not synchronise with the device.
    """

    def __init__(self, local: Tensor) -> None:
        counts = processes.row_counts(local)
        self._first, self._count, self._total = sum(counts[: processes.rank()]), len(local), sum(counts)
        self._local = local if len(local) > 0 else local.new_zeros(1, *local.shape[1:])

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: Tensor) -> Tensor:
        """Returns rows by their indices (P,), which must be the same in all processes."""
        local = index - self._first
        elsewhere = (local < 0) | (local >= self._count)
        rows = self._local[local.masked_fill_(elsewhere, 0)]
        rows = rows.masked_fill_(elsewhere.view(-1, *[1] * (rows.dim() - 1)), 0)
        # Bytes, of which each comes from one process: exact for every dtype.
        return processes.sum_of(rows.view(torch.uint8)).view(rows.dtype)

    def of_each(self, index: Tensor) -> Tensor:
        """Returns rows by indices (P, ...), of which each process may have different ones, and any number."""
        local = index.flatten()
        counts = processes.row_counts(local)
        first = sum(counts[: processes.rank()])
        rows = self[processes.gather_rows(local, counts)]
        return rows[first : first + index.numel()].unflatten(0, index.shape)
