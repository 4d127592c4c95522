"""Exchanges samples, and the working copies of vertices that a step has changed, between processes.

They take place in collective calls, or through memory on the GPUs of one machine to which all processes write.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from voxelfield import processes
from voxelfield.devices import UNCOUNTED_BYTES
from voxelfield.distributed.shards import Shard, new_table, tile_vertices
from voxelfield.grids.working_copies import WorkingCopies
from voxelfield.ops._internal.optim import pack_vertices, unpack_vertices

logger = logging.getLogger(__name__)

# How many times as many vertices fit into an exchange as any recent step has changed.
_SPARE = 1.25

# The room for an exchange shrinks once it has been too large during so many calls of :meth:`PackedExchange.adapt`.
_CALLS_PER_CAPACITY = 8

_VERTICES_PER_SAMPLE = 32

# Buffers have the sizes of a geometric series with this ratio, so that the step is captured again only a few times
# while the occupied cells become fewer.
SERIES = 0.8

# The largest number of processes that share memory: as many copies as :func:`grid_adam_` updates at most.
_MAX_PROCESSES = 8

# Grids in one tensor begin at multiples of this many elements, aligned like separate allocations.
_ALIGNMENT = 256


class PackedExchange:
    """Exchanges by collective calls, between any devices and machines: changed vertices are packed into rows.

    Args:
        shards: The shards of grids with the same number of channels, whose ``touched`` are updated before
            :meth:`publish`.
        samples: Largest number of samples of a step, of all processes.
        every: Whether all vertices may change in a step, regardless of the number of samples.
        refresh: Sends all copies anew.

    Attributes:
        layout: Number of times that tensors which a captured step refers to have been replaced.
    """

    def __init__(self, shards: Sequence[Shard], samples: int, every: bool, refresh: Callable[[], None]) -> None:
        self.layout = 0
        self._shards, self._refresh = shards, refresh
        for shard in shards:
            shard.add_table()
            if shard.copy.dtype != torch.float32:
                shard.written = [shard.copy[shard.planes]]
        # Until it is known how many vertices a step changes: samples of a ray have most vertices in common.
        reached = _VERTICES_PER_SAMPLE * samples // processes.count()
        self._capacity = self._max_rows() if every else min(reached, self._max_rows())
        self._most_changed = torch.zeros(1, dtype=torch.int32, device=shards[0].copy.device)
        self._calls = 0

    def receive(self, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yields what :meth:`DividedGrids.receive` yields."""
        yield _gathered(tensors, processes.row_counts(tensors[0]))

    def publish(self, update: Callable[[], None]) -> None:
        """Calls a function that updates the shards, and sends the copies of touched vertices to all processes."""
        rank, sizes = processes.rank(), [shard.rows() for shard in self._shards]
        table, count = self._changed(sizes)
        torch.maximum(self._most_changed, count, out=self._most_changed)
        tables = table.new_empty(processes.count(), *table.shape)
        arrive = processes.gather_later(tables, table)
        update()
        sent = self._shards[0].copy.new_empty(self._capacity, self._shards[0].grid.shape[3])
        for shard, rows in zip(self._shards, table.split(sizes), strict=True):
            pack_vertices(shard.copy, rows, sent, **shard.tiles_of(rank))
        received = sent.new_empty(processes.count(), *sent.shape)
        processes.gather_later(received, sent)()
        arrive()
        for other in range(processes.count()):
            if other == rank:
                continue
            for shard, rows in zip(self._shards, tables[other].split(sizes), strict=True):
                unpack_vertices(received[other], rows, shard.copy, **shard.tiles_of(other))

    def adapt(self) -> None:
        """Changes the number of vertices that fit into an exchange with the largest number that a step has changed."""
        changed = max(processes.gather_counts(int(self._most_changed)))
        overflows = changed > self._capacity
        if overflows:
            # Some copies have not been sent since the last call, and are out of date.
            self._refresh()
        self._calls += 1
        if overflows or self._calls == _CALLS_PER_CAPACITY:
            wanted = room_for(round(changed * _SPARE), self._max_rows())
            self._calls = 0
            self._most_changed.zero_()
            if overflows or wanted < self._capacity * SERIES:
                self._capacity = wanted
                self.layout += 1

    def _changed(self, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns a table of the local touched vertices of all grids (:func:`pack_vertices`), and their number (1,)."""
        table = new_table(sum(sizes), self._most_changed.device)
        local = [rows for rows in (shard.local_touched for shard in self._shards) if rows is not None]
        torch._foreach_copy_([rows[: len(some)] for rows, some in zip(table.split(sizes), local, strict=True)], local)
        counts = table[:, -1]
        ends = counts.cumsum(0, dtype=torch.int32)
        table[:, -1] = ends - counts
        return table, ends[-1:]

    def _max_rows(self) -> int:
        """Returns the largest possible number of changed vertices of a process."""
        return sum(shard.rows() for shard in self._shards) * tile_vertices()


class PeerMemory:
    """A tensor on the GPU of each process, of one size in elements, to which all processes can write.

    It is torch.distributed's symmetric memory. Making and deleting one are collective calls.

    Attributes:
        tensors: The tensors (size,) of all processes, in the order of ranks; all appear to be on ``device``.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory  # imports much that other runs do not need

        # Not from a pool of torch's allocator, which would keep the memory of tensors that are no longer used. This
        # memory cannot be taken from what the allocator caches, which is therefore returned first.
        torch.cuda.empty_cache()
        local = _symmetric_memory._SymmetricMemory.empty_strided_p2p((size,), (1,), dtype, device)
        group = distributed.group.WORLD
        assert group is not None
        self._handle: Any = _symmetric_memory.rendezvous(local, group)
        self.tensors: list[Tensor] = [
            local if process == processes.rank() else self._handle.get_buffer(process, (size,), dtype)
            for process in range(processes.count())
        ]
        self._stream = torch.cuda.Stream(device)
        self._size = local.nbytes
        UNCOUNTED_BYTES["now"] += self._size
        UNCOUNTED_BYTES["peak"] = max(UNCOUNTED_BYTES.values())

    def __del__(self) -> None:
        UNCOUNTED_BYTES["now"] -= vars(self).get("_size", 0)

    def run_beside(self, send: Callable[[], None]) -> Callable[[], None]:
        """Runs a function on a second stream; the returned function makes the current stream wait for it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            send()
        return lambda: torch.cuda.current_stream().wait_stream(self._stream)

    def barrier(self) -> None:
        """Makes the device wait for the devices of all processes, and see what these have written before."""
        self._handle.barrier()


class DirectExchange:
    """Exchanges between the GPUs of one machine, which write into each other's memory while they compute.

    The optimizer writes the copies of all processes, so that the update itself is the exchange.

    Args:
        working: The working copies; they move into memory to which all processes can write.
        shards: The shards of all grids.
        samples: Largest number of samples of a step, of all processes. More of them are exchanged by collective calls.
        tables: Whether the shards of atlases need ``touched``.

    Attributes:
        layout: As for :class:`PackedExchange`; the tensors here stay.
    """

    layout = 0

    def __init__(self, working: WorkingCopies, shards: Sequence[Shard], samples: int, *, tables: bool) -> None:
        device = shards[0].copy.device
        sizes = [-(-copy.numel() // _ALIGNMENT) * _ALIGNMENT for copy in working.copies]
        self._copies = PeerMemory(sum(sizes), working.dtype, device)
        of_processes = [memory.split(sizes) for memory in self._copies.tensors]
        for index, shard in enumerate(shards):
            copies = [memory[index][: shard.copy.numel()].view_as(shard.copy) for memory in of_processes]
            shard.copy = copies[processes.rank()].copy_(shard.copy)
            working.copies[index] = shard.copy
            shard.written = [copy[shard.planes] for copy in copies]
            if tables and shard.shared is not None:
                shard.add_table()
        others = processes.count() - 1
        self._max_received = -(-samples // processes.count()) * others
        # The gradients of features, and positions.
        room = working.channels * self._max_received + len(shards) * _ALIGNMENT
        self._received = {
            working.dtype: PeerMemory(room, working.dtype, device),
            torch.float32: PeerMemory(3 * self._max_received, torch.float32, device),
        }
        # Whether a process may still read what it has received.
        self._in_use = False

    def receive(self, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yields what :meth:`DividedGrids.receive` yields: the local rows while the others arrive, then these."""
        counts, used = processes.row_counts(tensors[0]), dict.fromkeys(self._received, 0)
        rank, total = processes.rank(), sum(counts)
        longest = total - min(counts)
        if longest > self._max_received:
            yield _gathered(tensors, counts)
            return
        received: list[Tensor] = []

        def send() -> None:
            if self._in_use:
                self._copies.barrier()
            for local in tensors:
                start, size = used[local.dtype], longest * local.shape[1]
                used[local.dtype] += -(-size // _ALIGNMENT) * _ALIGNMENT
                for other, memory in enumerate(self._received[local.dtype].tensors):
                    rows = memory[start : start + size].view(longest, local.shape[1])
                    if other == rank:
                        received.append(rows[: total - counts[rank]])
                    else:
                        begin = sum(counts[:rank]) - (counts[other] if other < rank else 0)
                        rows[begin : begin + counts[rank]] = local
            self._copies.barrier()

        arrive = self._copies.run_beside(send)
        self._in_use = True
        yield tensors
        arrive()
        yield received

    def publish(self, update: Callable[[], None]) -> None:
        """Calls a function that updates the shards and what is ``written`` of them, in the memory of all processes."""
        self._copies.barrier()
        update()
        self._copies.barrier()
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
    return [processes.gather_rows(local, counts) for local in tensors]


def shares_memory(device: torch.device) -> bool:
    """Returns whether all processes can use :class:`PeerMemory`; says why if not, once. A collective call."""
    return device.type == "cuda" and _obstacle(device) is None


@processes.once_per_group
def _obstacle(device: torch.device) -> str | None:
    boot = Path("/proc/sys/kernel/random/boot_id")  # machines may have one name
    machines = processes.gather_objects((socket.gethostname(), boot.read_text() if boot.exists() else ""))
    why: str | None = None
    if len(set(machines)) > 1:
        why = "they are in several machines"
    elif processes.count() > _MAX_PROCESSES:
        why = f"there are more than {_MAX_PROCESSES}"
    for obstacle in (_local_obstacle, _error_of_trial):
        why = why or next(filter(None, processes.gather_objects(obstacle(device))), None)
    if why is not None and processes.is_first():
        logger.info("the GPUs send changed vertices to each other through collective calls, because %s", why)
    return why


def _local_obstacle(device: torch.device) -> str | None:
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE is 1"
    index = torch.cuda.current_device() if device.index is None else device.index
    for other in range(torch.cuda.device_count()):
        if other != index and not torch.cuda.can_device_access_peer(index, other):
            return f"GPU {index} cannot reach the memory of GPU {other}"
    return None


def _error_of_trial(device: torch.device) -> str | None:
    try:
        PeerMemory(1, torch.int32, device).barrier()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
