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

logger = logging.getLogger(__name__)

MOST_PROCESSES = 8
"""The largest number of processes that share memory: as many copies as :func:`grid_adam_` updates at most."""

# Bytes that torch's memory statistics do not count: those in use, and the most so far.
_bytes = {"now": 0, "most": 0}


class PeerMemory:
    """A tensor on the GPU of each process, of one size, to which all processes can write.

    It is torch.distributed's symmetric memory. Making and deleting one are collective calls.

    Args:
        size: Number of elements of each tensor.
        dtype: Their dtype.
        device: This process's GPU.

    Attributes:
        tensors: Those of all processes (size,), in their order; all appear to be on ``device``.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory  # imports much that other runs do not need

        # Not from a pool of torch's allocator, which would keep the memory of tensors that are no longer used. What it
        # keeps otherwise is no room for this.
        torch.cuda.empty_cache()
        own = _symmetric_memory._SymmetricMemory.empty_strided_p2p((size,), (1,), dtype, device)
        group = distributed.group.WORLD
        assert group is not None
        self._handle: Any = _symmetric_memory.rendezvous(own, group)
        self.tensors: list[Tensor] = [
            own if process == processes.rank() else self._handle.get_buffer(process, (size,), dtype)
            for process in range(processes.count())
        ]
        self._stream = torch.cuda.Stream(device)
        self._size = own.nbytes
        _bytes["now"] += self._size
        _bytes["most"] = max(_bytes.values())

    def __del__(self) -> None:
        _bytes["now"] -= vars(self).get("_size", 0)

    def run_beside(self, send: Callable[[], None]) -> Callable[[], None]:
        """Lets the device do the work of a function beside what follows; the function returned waits for it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            send()
        return lambda: torch.cuda.current_stream().wait_stream(self._stream)

    def meet(self) -> None:
        """Lets the device wait until those of all processes have come here, and can read what these have written."""
        self._handle.barrier()


def peak_bytes(device: torch.device) -> int:
    """Returns the most memory that this process has had on its GPU: what torch counts, and :class:`PeerMemory`.

    Both need not have been largest at the same time.
    """
    return torch.cuda.max_memory_allocated(device) + _bytes["most"]


def is_available(device: torch.device) -> bool:
    """Returns whether all processes can use :class:`PeerMemory`; says why if not, once. A collective call."""
    return device.type == "cuda" and _obstacle(device) is None


@processes.once_per_group
def _obstacle(device: torch.device) -> str | None:
    boot = Path("/proc/sys/kernel/random/boot_id")  # machines may have one name
    machines = processes.gather_objects((socket.gethostname(), boot.read_text() if boot.exists() else ""))
    if len(set(machines)) > 1:
        why: str | None = "they are in several machines"
    elif processes.count() > MOST_PROCESSES:
        why = f"there are more than {MOST_PROCESSES}"
    else:
        why = next(filter(None, processes.gather_objects(_own_obstacle(device))), None)
        if why is None:
            why = next(filter(None, processes.gather_objects(_error_of_trial(device))), None)
    if why is not None and processes.is_first():
        logger.info("the GPUs send changed vertices to each other through collective calls, because %s", why)
    return why


def _own_obstacle(device: torch.device) -> str | None:
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE is 1"
    own = torch.cuda.current_device() if device.index is None else device.index
    for other in range(torch.cuda.device_count()):
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            return f"GPU {own} cannot reach the memory of GPU {other}"
    return None


def _error_of_trial(device: torch.device) -> str | None:
    try:
        PeerMemory(1, torch.int32, device).meet()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
