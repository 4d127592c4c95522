"""Memory on the GPUs of one machine to which all processes write directly, without collective calls."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from voxelfield import processes
from voxelfield.devices import UNCOUNTED_BYTES

logger = logging.getLogger(__name__)

MAX_PROCESSES = 8
"""The largest number of processes that share memory: as many copies as :func:`grid_adam_` updates at most."""


class PeerMemory:
    """A tensor on the GPU of each process, of one size, to which all processes can write.

    It is torch.distributed's symmetric memory. Making and deleting one are collective calls.

    Args:
        size: Number of elements of each tensor.
        dtype: Their dtype.
        device: This process's GPU.

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


def is_available(device: torch.device) -> bool:
    """Returns whether all processes can use :class:`PeerMemory`; says why if not, once. A collective call."""
    return device.type == "cuda" and _obstacle(device) is None


@processes.once_per_group
def _obstacle(device: torch.device) -> str | None:
    boot = Path("/proc/sys/kernel/random/boot_id")  # machines may have one name
    machines = processes.gather_objects((socket.gethostname(), boot.read_text() if boot.exists() else ""))
    if len(set(machines)) > 1:
        why: str | None = "they are in several machines"
    elif processes.count() > MAX_PROCESSES:
        why = f"there are more than {MAX_PROCESSES}"
    else:
        why = next(filter(None, processes.gather_objects(_local_obstacle(device))), None)
        if why is None:
            why = next(filter(None, processes.gather_objects(_error_of_trial(device))), None)
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
