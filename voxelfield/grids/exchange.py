"""Exchanges samples, and the working copies of vertices that a step has changed, between processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from voxelfield import processes
from voxelfield.grids.parts import Part, new_table, tile_vertices
from voxelfield.grids.working_copies import WorkingCopies
from voxelfield.ops._internal.tiles import pack_vertices, unpack_vertices
from voxelfield.peer_memory import PeerMemory

# How many times as many vertices fit into an exchange as a step has changed at most, of late.
_SPARE = 1.25

# The room for an exchange shrinks once it has been too large during so many calls of :meth:`PackedExchange.adapt`.
_CALLS_PER_CAPACITY = 8

_VERTICES_PER_SAMPLE = 32

# Buffers have the sizes of a geometric series with this ratio, so that the step is captured again only a few times
# while the occupied cells become fewer.
SERIES = 0.8

# Elements between the starts of grids in one tensor are a multiple of this, as far apart as allocations of their own.
_ALIGNMENT = 256


class PackedExchange:
    """Exchanges by collective calls, between any devices and machines: changed vertices are packed into rows.

    Args:
        parts: The parts of grids with the same number of channels, whose ``touched`` are updated before
            :meth:`publish`.
        samples: Largest number of samples of a step, of all processes.
        every: Whether all vertices may change in a step, regardless of the number of samples.
        refresh: Sends all copies anew.

    Attributes:
        layout: Number of times that tensors which a captured step refers to have been replaced.
        depends_on_lists: Whether the time of an exchange depends on the length of the lists of tiles.
    """

    depends_on_lists = True

    def __init__(self, parts: Sequence[Part], samples: int, every: bool, refresh: Callable[[], None]) -> None:
        self.layout = 0
        self._parts, self._refresh = parts, refresh
        for part in parts:
            part.add_table()
            if part.copy.dtype != torch.float32:
                part.written = [part.copy[part.begin : part.end]]
        # Until it is known how many vertices a step changes: samples of a ray share most of theirs.
        reached = _VERTICES_PER_SAMPLE * samples // processes.count()
        self._capacity = self._most_rows() if every else min(reached, self._most_rows())
        self._most_changed = torch.zeros(1, dtype=torch.int32, device=parts[0].copy.device)
        self._calls = 0

    def receive(self, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yields what :meth:`DividedGrids.receive` yields."""
        yield _gathered(tensors, processes.row_counts(tensors[0]))

    def publish(self, update: Callable[[], None]) -> None:
        """Calls a function that updates the parts, and sends the working copies of touched vertices to all processes.

        Args:
            update: Updates the vertices that the tables of the parts have.
        """
        rank, sizes = processes.rank(), [part.rows() for part in self._parts]
        table, count = self._changed(sizes)
        torch.maximum(self._most_changed, count, out=self._most_changed)
        tables = table.new_empty(processes.count(), *table.shape)
        arrive = processes.gather_later(tables, table)
        update()
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

    def adapt(self) -> None:
        """Changes the number of vertices that fit into an exchange with the largest number that a step has changed."""
        most = max(processes.gather_counts(int(self._most_changed)))
        overflows = most > self._capacity
        if overflows:
            # Some copies have not been sent since the last call, and are those of earlier steps.
            self._refresh()
        self._calls += 1
        if overflows or self._calls == _CALLS_PER_CAPACITY:
            wanted = room_for(round(most * _SPARE), self._most_rows())
            self._calls = 0
            self._most_changed.zero_()
            if overflows or wanted < self._capacity * SERIES:
                self._capacity = wanted
                self.layout += 1

    def _changed(self, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the own touched vertices of all grids in one table (:func:`pack_vertices`), and their number (1,)."""
        table = new_table(sum(sizes), self._most_changed.device)
        own = [rows for rows in (part.own_touched for part in self._parts) if rows is not None]
        torch._foreach_copy_([rows[: len(part)] for rows, part in zip(table.split(sizes), own, strict=True)], own)
        counts = table[:, -1]
        ends = counts.cumsum(0, dtype=torch.int32)
        table[:, -1] = ends - counts
        return table, ends[-1:]

    def _most_rows(self) -> int:
        """Returns the number of vertices that each process can have at most."""
        return sum(part.rows() for part in self._parts) * tile_vertices()


class DirectExchange:
    """Exchanges between the GPUs of one machine, which write into each other's memory while they compute.

    The optimizer writes the copies of all processes, so that the update itself is the exchange.

    Args:
        working: The working copies; they move into memory to which all processes can write.
        parts: The parts of all grids.
        samples: Largest number of samples of a step, of all processes. More of them are exchanged by collective calls.
        tables: Whether the parts of atlases need ``touched``.

    Attributes:
        layout: As for :class:`PackedExchange`; the tensors here stay.
        depends_on_lists: As for :class:`PackedExchange`.
    """

    layout, depends_on_lists = 0, False

    def __init__(self, working: WorkingCopies, parts: Sequence[Part], samples: int, *, tables: bool) -> None:
        device = parts[0].copy.device
        sizes = [-(-copy.numel() // _ALIGNMENT) * _ALIGNMENT for copy in working.copies]
        self._copies = PeerMemory(sum(sizes), working.dtype, device)
        of_processes = [memory.split(sizes) for memory in self._copies.tensors]
        for index, part in enumerate(parts):
            copies = [memory[index][: part.copy.numel()].view_as(part.copy) for memory in of_processes]
            part.copy = copies[processes.rank()].copy_(part.copy)
            working.copies[index] = part.copy
            part.written = [copy[part.begin : part.end] for copy in copies]
            if tables and part.shared is not None:
                part.add_table()
        others = processes.count() - 1
        self._most = -(-samples // processes.count()) * others
        # The gradients of features, and positions.
        room = working.channels * self._most + len(parts) * _ALIGNMENT
        self._received = {
            working.dtype: PeerMemory(room, working.dtype, device),
            torch.float32: PeerMemory(3 * self._most, torch.float32, device),
        }
        # Whether a process may still read what it has received.
        self._in_use = False

    def receive(self, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yields what :meth:`DividedGrids.receive` yields: the own rows while the others arrive, then these."""
        counts, used = processes.row_counts(tensors[0]), dict.fromkeys(self._received, 0)
        rank, total = processes.rank(), sum(counts)
        most = total - min(counts)
        if most > self._most:
            yield _gathered(tensors, counts)
            return
        received: list[Tensor] = []

        def send() -> None:
            if self._in_use:
                self._copies.meet()
            for own in tensors:
                start, size = used[own.dtype], most * own.shape[1]
                used[own.dtype] += -(-size // _ALIGNMENT) * _ALIGNMENT
                for other, memory in enumerate(self._received[own.dtype].tensors):
                    rows = memory[start : start + size].view(most, own.shape[1])
                    if other == rank:
                        received.append(rows[: total - counts[rank]])
                    else:
                        begin = sum(counts[:rank]) - (counts[other] if other < rank else 0)
                        rows[begin : begin + counts[rank]] = own
            self._copies.meet()

        arrive = self._copies.run_beside(send)
        self._in_use = True
        yield tensors
        arrive()
        yield received

    def publish(self, update: Callable[[], None]) -> None:
        """Calls a function that updates the parts and all that is ``written`` of them, in the memory of all processes.

        Args:
            update: Updates the parts.
        """
        self._copies.meet()
        update()
        self._copies.meet()
        self._in_use = False

    def adapt(self) -> None:
        """Does nothing: everything has room."""


Exchange = PackedExchange | DirectExchange


def room_for(wanted: int, total: int) -> int:
    """Returns the smallest size of the geometric series from ``total`` down that is enough."""
    size = total
    while size * SERIES >= max(wanted, 1):
        size = math.floor(size * SERIES)
    return size


def _gathered(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    return [processes.gather_rows(own, counts) for own in tensors]
