"""Grids whose float32 masters, moments and gradients are divided over the processes that train together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield import processes
from voxelfield.grids.adam import GridAdam, sum_weights
from voxelfield.grids.resampling import SLAB_ELEMENTS
from voxelfield.grids.sparse_grid import BLOCK_VERTICES, SparseGrid
from voxelfield.grids.working_copies import WorkingCopies
from voxelfield.ops import _constants
from voxelfield.ops._internal.tiles import (
    active_tiles,
    pack_vertices,
    tiles_along,
    touched_vertices,
    unpack_vertices,
)
from voxelfield.ops._internal.total_variation import grid_total_variation_grad_

# How many times as many vertices fit into an exchange as a step has changed at most, of late.
_SPARE = 1.25

# The room for an exchange shrinks once it has been too large during so many calls of :meth:`DividedGrids.restrict`.
_LISTS_PER_CAPACITY = 8

_VERTICES_PER_SAMPLE = 32

_COLUMNS = 5

# Buffers have the sizes of a geometric series with this ratio, so that the step is captured again only a few times
# while the occupied cells become fewer.
_SERIES = 0.8
# A list of tiles shrinks once it is this many times too long. Its unused entries cost little.
_LONGEST = 3.0


@dataclass(eq=False)
class _Part:
    """This process's part of one grid (X, Y, Z, C).

    Attributes:
        grid: The parameter of the whole grid.
        copy: The working copy of the whole grid, which is the grid itself in float32.
        bounds: The first plane along x of each process, followed by the number of planes.
        low: The first plane of ``stored``. Those before the own planes, and those after them, are a halo.
        high: The end of the planes of ``stored``.
        stored: The float32 masters of the own planes and of the halo.
        sums: The gradient of ``stored``.
        owned: The own planes of ``stored``, whose ``grad`` are those of ``sums``.
        sparse: The sparse grid whose atlas this is, if it is one.
        shared: Of an atlas, the vertices with several copies: arguments of :meth:`SparseGrid.share`.
        tiles: The ids (N, K) of the active tiles of each process, -1 where there are fewer; None: all are updated.
        own_tiles: The ids (K,) of this process's active tiles within ``owned``.
        count: The number (1,) of these, int32.
        touched: The table of the vertices of ``reached`` with a gradient (:func:`touched_vertices`), by the own tiles.
    """

    grid: nn.Parameter
    copy: Tensor
    bounds: Sequence[int]
    low: int
    high: int
    stored: Tensor
    sums: Tensor
    owned: nn.Parameter
    sparse: SparseGrid | None = None
    shared: tuple[Tensor, Tensor] | None = None
    tiles: Tensor | None = None
    own_tiles: Tensor | None = None
    count: Tensor | None = None
    touched: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.touched = self.new_table(self._rows_for(len(self.reached)))

    @property
    def begin(self) -> int:
        """The first own plane."""
        return self.bounds[processes.rank()]

    @property
    def end(self) -> int:
        """The end of the own planes."""
        return self.bounds[processes.rank() + 1]

    @property
    def reached(self) -> Tensor:
        """The planes of ``sums`` to which samples add: the own ones, and of an atlas also the halo."""
        return self.sums if self.sparse is not None else self.sums[self.begin - self.low : self.end - self.low]

    @property
    def own_touched(self) -> Tensor:
        """The rows of ``touched`` for the own planes, which are whole blocks of an atlas and therefore whole rows."""
        if self.sparse is None:
            return self.touched
        return self.touched[self._rows_for(self.begin - self.low) : self._rows_for(self.end - self.low)]

    def rows(self) -> int:
        """Returns the number of tiles that each process has at most: listed ones, or 128 vertices each."""
        if self.tiles is not None:
            return self.tiles.shape[1]
        return self._rows_for(max(end - begin for begin, end in pairwise(self.bounds)))

    def of_process(self, process: int) -> dict[str, Any]:
        """Returns the arguments that say to :func:`pack_vertices` and others which tiles a process has."""
        if self.tiles is not None:
            return {"ids": self.tiles[process]}
        return {"first": self.bounds[process] * self._plane}

    def new_table(self, rows: int) -> Tensor:
        """Returns a table of no vertices, for :func:`touched_vertices`."""
        return self.sums.new_zeros(rows, _COLUMNS, dtype=torch.int32)

    def _rows_for(self, planes: int) -> int:
        return -(-planes * self._plane // _tile_vertices())

    @property
    def _plane(self) -> int:
        return self.grid.shape[1] * self.grid.shape[2]


class DividedGrids:
    """Divides grids over processes, each of which owns a range of planes along x of each grid.

    Masters and moments are divided as in ZeRO (Rajbhandari et al. 2020), but no gradient of a grid is exchanged. A
    sample's contribution to the gradients of all levels follows from its position and from the gradient in its
    features, which are far fewer numbers than the vertices around it have. Each process therefore receives those of all
    samples and adds them to the vertices that it owns. After the update the processes exchange the working copies of
    the vertices that have changed; the copies are whole in each process.

    The parameters of grids with 16-bit copies have no memory meanwhile and read as NaN, until :meth:`show` or
    :meth:`gather`.

    Args:
        working: The working copies of all grids, which the field reads.
        whole: The optimizer of the whole grids. Its state moves to :attr:`adam` until :meth:`gather`.
        listed: For each grid, whether only active tiles are updated.
        occupied: (X, Y, Z) bool, the occupied cells, by whose number the planes are divided.
        samples: Largest number of samples of a step, of all processes.
        halo: Whether the total variation of dense grids will be added, which needs the planes beside the own ones.

    Attributes:
        adam: The optimizer of this process's parts.
        shown: Whether :meth:`show` has been called.
        layout: Number of times that tensors which a captured step refers to have been replaced.
    """

    def __init__(
        self,
        working: WorkingCopies,
        whole: GridAdam,
        listed: Sequence[bool],
        occupied: Tensor,
        *,
        samples: int,
        halo: bool,
    ) -> None:
        self._working, self._whole = working, whole
        self.layout = 0
        self.shown = False
        shapes = [grid.shape for grid, lists in zip(working.grids, listed, strict=True) if lists]
        tiles = iter(_listed_tiles(shapes, occupied))
        dense = len(working.grids) - len(working.sparse)
        self._parts: list[_Part] = []
        for index, (grid, lists) in enumerate(zip(working.grids, listed, strict=True)):
            sparse = None if index < dense else working.sparse[index - dense]
            if sparse is not None:
                costs, size = sparse.plane_costs(), BLOCK_VERTICES
            elif lists:
                size = _constants.TILE_X
                costs = torch.bincount(next(tiles) // _ids_along_x(), minlength=-(-grid.shape[0] // size))
            else:
                costs, size = grid.new_ones(grid.shape[0]), 1
            # Sums of costs may round differently on each device.
            bounds = processes.gather_objects(_balanced(costs, size, grid.shape[0]))[0]
            self._parts.append(self._part(index, grid, bounds, sparse, _constants.TILE_X if halo else 0))
        options = {key: value for key, value in whole.param_groups[0].items() if key not in ("params", "capturable")}
        self.adam = type(whole)([part.owned for part in self._parts], **options)
        self._skips = bool(options["skip_untouched"])
        for part in self._parts:
            self._move_state(part)
            if self._skips:
                self.adam.set_touched(part.owned, part.own_touched)
            if self._rounds:
                self.adam.set_working(part.owned, part.copy[part.begin : part.end])
        # Until it is known how many vertices a step changes: samples of a ray share most of theirs.
        reached = _VERTICES_PER_SAMPLE * samples // processes.count()
        self._capacity = self._most_rows() if halo or not self._skips else min(reached, self._most_rows())
        self._most_changed = torch.zeros(1, dtype=torch.int32, device=occupied.device)
        self._lists_seen = 0
        self._listed = [part for part, lists in zip(self._parts, listed, strict=True) if lists]
        self.restrict(occupied)
        working.division = self

    @property
    def _rounds(self) -> bool:
        return self._working.dtype != torch.float32

    def _part(
        self, index: int, grid: nn.Parameter, bounds: Sequence[int], sparse: SparseGrid | None, halo: int
    ) -> _Part:
        begin, end = bounds[processes.rank()], bounds[processes.rank() + 1]
        low, high, shared = max(0, begin - halo), min(grid.shape[0], end + halo), None
        if sparse is not None:
            low, high, shared = sparse.shared_by(begin, end)
        stored = grid.detach()[low:high]
        if self._rounds:
            stored = stored.clone()
        sums = torch.zeros_like(stored)
        owned = nn.Parameter(stored[begin - low : end - low])
        owned.grad = sums[begin - low : end - low]
        return _Part(grid, self._working.copies[index], bounds, low, high, stored, sums, owned, sparse, shared)

    def _move_state(self, part: _Part) -> None:
        """Moves this process's part of the moments to the optimizer of the parts, and frees the whole grid's memory."""
        state = self._whole.state.pop(part.grid, {})
        if state:
            self.adam.state[part.owned] = {
                key: value[part.begin : part.end].clone() if value.shape == part.grid.shape else value
                for key, value in state.items()
            }
        self._release(part)

    def _release(self, part: _Part) -> None:
        """Frees the memory of the whole grid, if it has a copy of its own."""
        part.grid.grad = None
        if self._rounds:
            # Whatever reads the parameter computes NaN, rather than values that have not been up to date for long.
            part.grid.data = part.grid.new_full((), math.nan).expand(part.grid.shape)

    def owned(self, grid: nn.Parameter) -> nn.Parameter | None:
        """Returns the parameter of this process's part of a grid; None for a parameter that is not divided."""
        part = self._part_of(grid)
        return None if part is None else part.owned

    def own_planes(self, grid: nn.Parameter, values: Tensor) -> Tensor:
        """Returns this process's planes of values that belong to a whole grid, or all values of another parameter."""
        part = self._part_of(grid)
        return values if part is None else values[part.begin : part.end].clone()

    def collected(self, grid: nn.Parameter, own: Tensor) -> Tensor | None:
        """Returns values of all planes in host memory to process 0, and None to others; a collective call.

        Args:
            grid: The parameter to which the values belong.
            own: Those of this process's planes; of a parameter that is not divided, all, which are returned.
        """
        part = self._part_of(grid)
        if part is None:
            return own
        return _collected(own, part.bounds, torch.device("cpu") if processes.is_first() else None)

    def _part_of(self, grid: nn.Parameter) -> _Part | None:
        return next((part for part in self._parts if part.grid is grid), None)

    # ------------------------------------------------------------------------------------------------ a step

    def receive(self, values: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients (N, F) and positions (N, 3) of the samples of all processes, in their order.

        In a captured graph, all processes must have the same number of samples.
        """
        capturing = points.is_cuda and torch.cuda.is_current_stream_capturing()
        counts = [len(points)] * processes.count() if capturing else processes.gather_counts(len(points))
        return processes.gather_rows(values, counts), processes.gather_rows(points, counts)

    def targets(self) -> tuple[list[Tensor], list[tuple[int, int]]]:
        """Returns the tensors to which gradients are added, and the first plane and the planes of each one's grid."""
        slabs = [(part.begin if part.sparse is None else part.low, part.grid.shape[0]) for part in self._parts]
        return [part.reached for part in self._parts], slabs

    def add_total_variation(self, weight: float) -> None:
        """Adds the gradient of the squared differences between neighbouring vertices, of all dense grids.

        Args:
            weight: Factor on the sum of these squares.
        """
        for part in self._parts:
            if part.sparse is not None:
                continue
            tiles = part.tiles
            if tiles is not None:
                tiles = tiles[processes.rank()] - part.low // _constants.TILE_X * _ids_along_x()
            if self._rounds:
                for halo in (slice(part.low, part.begin), slice(part.end, part.high)):
                    part.stored[halo.start - part.low : halo.stop - part.low] = part.copy[halo]
            weights = sum_weights(part.stored, weight)
            grid_total_variation_grad_(part.sums, part.stored, weights, tiles=tiles, tile_count=part.count)

    def step(self) -> None:
        """Updates this process's parts and clears their gradients, then exchanges the working copies."""
        self._find_touched()
        for part in self._parts:
            if part.sparse is not None and part.shared is not None:
                part.sparse.share(part.sums, *part.shared, touched=part.touched)
                own = part.begin - part.low, part.end - part.low
                part.sums[: own[0]].zero_()
                part.sums[own[1] :].zero_()
        table, count = self._changed()
        torch.maximum(self._most_changed, count, out=self._most_changed)
        tables = table.new_empty(processes.count(), *table.shape)
        arrive = processes.gather_later(tables, table)
        self.adam.step()
        self._publish(table, tables, arrive)

    def restrict(self, occupied: Tensor) -> None:
        """Lists the active tiles anew after a change of the occupied cells; synchronises with the device."""
        self._adapt_capacity()
        if not self._listed:
            return
        tiles = _listed_tiles([part.grid.shape for part in self._listed], occupied)
        for part, ids in zip(self._listed, tiles, strict=True):
            self._list(part, ids)

    def _adapt_capacity(self) -> None:
        """Changes the number of vertices that fit into an exchange with the largest number that a step has changed."""
        most = max(processes.gather_counts(int(self._most_changed)))
        overflows = most > self._capacity
        if overflows:
            # Some copies have not been sent since the last call, and are those of earlier steps.
            self.refresh()
        self._lists_seen += 1
        if overflows or self._lists_seen == _LISTS_PER_CAPACITY:
            wanted = _room_for(round(most * _SPARE), self._most_rows())
            self._lists_seen = 0
            self._most_changed.zero_()
            if overflows or wanted < self._capacity * _SERIES:
                self._capacity = wanted
                self.layout += 1

    def _list(self, part: _Part, ids: Tensor) -> None:
        """Lists the active tiles (K,) of a grid by their owners."""
        first = [bound // _constants.TILE_X * _ids_along_x() for bound in part.bounds]
        cuts = [0, *torch.searchsorted(ids, ids.new_tensor(first[1:-1])).tolist(), len(ids)]
        wanted = max(end - begin for begin, end in pairwise(cuts))
        present = 0 if part.tiles is None else part.tiles.shape[1]
        if part.tiles is None or not wanted <= present <= _LONGEST * wanted:
            part.tiles = ids.new_empty(
                processes.count(), _room_for(wanted, math.prod(tiles_along(part.grid.shape[:3])))
            )
            part.own_tiles, part.count = torch.empty_like(part.tiles[0]), ids.new_empty(1)
            part.touched = part.new_table(len(part.own_tiles))
            if self._skips:
                self.adam.set_touched(part.owned, part.touched)
            self.layout += 1
        assert part.own_tiles is not None
        assert part.count is not None
        part.tiles.fill_(-1)
        for row, (begin, end) in zip(part.tiles, pairwise(cuts), strict=True):
            row[: end - begin] = ids[begin:end]
        rank = processes.rank()
        torch.sub(part.tiles[rank], first[rank], out=part.own_tiles)
        part.count.fill_(cuts[rank + 1] - cuts[rank])
        self.adam.set_tiles(part.owned, part.own_tiles, part.count)
        # Total variation also adds gradients outside the tiles; later steps must not use them.
        part.sums.zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the masters into the working copies of all processes, after a change by something else than a step."""
        for part in self._parts:
            _collect(part.owned.detach().to(part.copy.dtype), part.bounds, part.copy)
        if self.shown and self._rounds:
            self.show()

    def _find_touched(self) -> None:
        """Lists the vertices with a gradient, or all if all are updated, in the table of each part."""
        for part in self._parts:
            touched_vertices(part.reached, part.touched, part.own_tiles, every=not self._skips)

    def _changed(self) -> tuple[Tensor, Tensor]:
        """Returns the own touched vertices of all grids in one table (:func:`pack_vertices`), and their number (1,)."""
        sizes = [part.rows() for part in self._parts]
        table = self._parts[0].new_table(sum(sizes))
        own = [part.own_touched for part in self._parts]
        torch._foreach_copy_([rows[: len(part)] for rows, part in zip(table.split(sizes), own, strict=True)], own)
        counts = table[:, -1]
        ends = counts.cumsum(0, dtype=torch.int32)
        table[:, -1] = ends - counts
        return table, ends[-1:]

    def _most_rows(self) -> int:
        """Returns the number of vertices that each process can have at most."""
        return sum(part.rows() for part in self._parts) * _tile_vertices()

    def _publish(self, table: Tensor, tables: Tensor, arrive: Callable[[], object]) -> None:
        """Sends the working copies of touched vertices to all processes, and receives theirs.

        Args:
            table: What :meth:`_changed` returns.
            tables: Those of all processes, once ``arrive`` has been called.
            arrive: See ``tables``.
        """
        rank, sizes = processes.rank(), [part.rows() for part in self._parts]
        sent = self._parts[0].copy.new_empty(self._capacity, self._parts[0].grid.shape[3])
        for part, rows in zip(self._parts, table.split(sizes), strict=True):
            pack_vertices(part.copy, rows, sent, **part.of_process(rank))
        received = sent.new_empty(processes.count(), *sent.shape)
        processes.gather_into(received, sent)
        arrive()
        for other in range(processes.count()):
            if other == rank:
                continue
            for part, rows in zip(self._parts, tables[other].split(sizes), strict=True):
                unpack_vertices(received[other], rows, part.copy, **part.of_process(other))

    # ---------------------------------------------------------------------------------------- the whole again

    @torch.no_grad()
    def show(self) -> None:
        """Returns the masters to the whole grids, until :meth:`hide`; moments stay divided."""
        if not self._rounds:
            self.refresh()  # what did not fit into an exchange
        for part in self._parts:
            part.owned.grad, part.sums = None, part.sums.new_empty(0)
            if self._rounds:
                whole = part.stored.new_empty(part.grid.shape)
                _collect(part.owned.detach(), part.bounds, whole)
                part.grid.data = whole
                part.stored = part.stored.new_empty(0)
                part.owned.data = whole[part.begin : part.end]
        self._working.division = None
        self._working.refresh()
        self.shown = True

    @torch.no_grad()
    def hide(self) -> None:
        """Divides the masters again as before :meth:`show`, so that steps can follow."""
        for part in self._parts:
            part.stored = part.grid.detach()[part.low : part.high]
            if self._rounds:
                part.stored = part.stored.clone()
            part.sums = torch.zeros_like(part.stored)
            own = slice(part.begin - part.low, part.end - part.low)
            part.owned.data, part.owned.grad = part.stored[own], part.sums[own]
            self._release(part)
            if self._rounds:
                self.adam.set_working(part.owned, part.copy[part.begin : part.end])
        self._working.division = self
        self.layout += 1
        self.shown = False

    def discard(self, when: Tensor) -> None:
        """Sets the gradients of the parts and their halos to zero where a flag () is true."""
        for part in self._parts:
            part.sums.masked_fill_(when, 0)

    @torch.no_grad()
    def gather(self) -> None:
        """Returns masters and moments to the whole grids and their optimizer, and ends the division."""
        for part in self._parts:
            state = self._collected_state(part, part.grid.device)
            if state:
                self._whole.state[part.grid] = state
            del self.adam.state[part.owned]
        if not self.shown:
            self.show()

    @contextlib.contextmanager
    @torch.no_grad()
    def gathered_on_host(self) -> Iterator[None]:
        """For a block, shows process 0 the whole grids and their moments, in host memory, as if undivided."""
        if not (self._rounds or self.shown):
            self.refresh()  # what did not fit into an exchange
        hidden, host = [part.grid.data for part in self._parts], torch.device("cpu")
        for part in self._parts:
            device = host if processes.is_first() else None
            state = self._collected_state(part, device)
            master = _collected(part.owned, part.bounds, device) if self._rounds else None
            if processes.is_first() and state:
                self._whole.state[part.grid] = state
            if master is not None:
                part.grid.data = master
        try:
            yield
        finally:
            for part, data in zip(self._parts, hidden, strict=True):
                part.grid.data = data
                self._whole.state.pop(part.grid, None)

    def _collected_state(self, part: _Part, device: torch.device | None) -> dict[str, Any]:
        return {
            key: _collected(value, part.bounds, device) if value.shape == part.owned.shape else value
            for key, value in self.adam.state[part.owned].items()
        }


def _collected(own: Tensor, bounds: Sequence[int], device: torch.device | None) -> Tensor | None:
    """Returns all planes of a tensor of which each process has some; None if ``device`` is None."""
    whole = None if device is None else own.new_empty(bounds[-1], *own.shape[1:], device=device)
    _collect(own, bounds, whole)
    return whole


def _collect(own: Tensor, bounds: Sequence[int], whole: Tensor | None) -> None:
    """Writes all planes of a tensor, of which each process has some, into one; a collective call.

    Args:
        own: This process's planes.
        bounds: As for :class:`_Part`.
        whole: The tensor to write to, on any device; None only sends.
    """
    plane = own.shape[1:]
    count, most = processes.count(), max(end - begin for begin, end in pairwise(bounds))
    at_once = max(1, SLAB_ELEMENTS // (count * max(math.prod(plane), 1)))
    for first in range(0, most, at_once):
        planes = min(at_once, most - first)
        sent = own.new_zeros(planes, *plane)
        part = own[first : first + planes]
        sent[: len(part)] = part
        received = own.new_empty(count * planes, *plane)
        processes.gather_into(received, sent)
        if whole is None:
            continue
        for other, (begin, end) in enumerate(pairwise(bounds)):
            some = received[other * planes :][: max(0, min(end, begin + first + planes) - begin - first)]
            whole[begin + first : begin + first + len(some)] = some


def _listed_tiles(shapes: Sequence[Sequence[int]], occupied: Tensor) -> list[Tensor]:
    """Returns the ids of the active tiles of grids, each a tensor of as many as there are; synchronises."""
    found = [active_tiles(occupied, shape[:3]) for shape in shapes]
    counts = torch.cat([count for _, count in found]).tolist() if found else []
    return [ids[:count] for (ids, _), count in zip(found, counts, strict=True)]


def _balanced(costs: Tensor, size: int, planes: int) -> list[int]:
    """Returns bounds for each process, after which the costs so far are nearest to an equal share.

    Args:
        costs: (T,) those of groups of planes.
        size: Number of planes of a group; the last one may be smaller.
        planes: Number of all planes.
    """
    so_far = [0.0, *costs.double().cumsum(0).tolist()]
    bounds = [0]
    for index in range(1, processes.count()):
        share = so_far[-1] * index / processes.count()
        nearest = min(range(len(so_far)), key=lambda group: abs(so_far[group] - share))
        bounds.append(min(max(nearest * size, bounds[-1]), planes))
    return [*bounds, planes]


def _room_for(wanted: int, total: int) -> int:
    """Returns the smallest size of the geometric series from ``total`` down that is enough."""
    size = total
    while size * _SERIES >= max(wanted, 1):
        size = math.floor(size * _SERIES)
    return size


def _tile_vertices() -> int:
    return _constants.TILE_X * _constants.TILE_Y * _constants.TILE_Z


def _ids_along_x() -> int:
    """Returns the difference of the ids of two tiles that are neighbours along x."""
    return _constants.MAX_TILES_ALONG**2
