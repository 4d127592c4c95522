"""Selection of devices, and copies between host and device that do not stall the device."""

from __future__ import annotations

import ctypes
import re
import sys
from collections import deque
from typing import Any

import torch
from torch import Tensor

from voxelfield import processes
from voxelfield.messages import reason_of

DEVICES = r"auto|cpu|cuda(:\d{1,2})?"
"""Regular expression of the values that :func:`choose_device` accepts."""

DEVICES_IN_WORDS = "auto, cpu, cuda or cuda:<index>"
"""Description of these values for messages."""

UNCOUNTED_BYTES = {"now": 0, "peak": 0}
"""Memory on this process's GPU that torch's statistics do not count: in use now, and the peak."""

AHEAD = 3
"""Number of images queued on a device beyond the one in progress: enough to keep it busy, few enough that the images
and intermediate results do not fill its memory."""


def choose_device(requested: str) -> torch.device:
    """Returns the device for ``auto`` (CUDA if available), or the named device.

    Each of several processes that train together gets its current CUDA device, which its launcher has set.

    Raises:
        ValueError: The device is not supported, or the CUDA device does not exist.
    """
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(DEVICES, requested) is None:
        raise ValueError(f"device must be {DEVICES_IN_WORDS}, got {requested!r}")
    device = torch.device(requested)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu where torch {torch.__version__} finds no CUDA device, got {requested!r}")
    if device.index is not None and device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(
            f"device must be cuda:0 to cuda:{count - 1}, as torch finds {count} CUDA devices, got {requested!r}"
        )
    if requested == "cuda" and processes.count() > 1:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next tensors, which otherwise get new pages from the system each time.

    A training step on a CPU frees and allocates hundreds of megabytes. Only for programs that do nothing but train: the
    memory stays with the process. Other C libraries are left as they are.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, -1)


# Numbers of options in malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def peak_bytes(device: torch.device) -> int:
    """Returns this process's peak memory on its GPU: torch's own peak, plus the one of :data:`UNCOUNTED_BYTES`."""
    return torch.cuda.max_memory_allocated(device) + UNCOUNTED_BYTES["peak"]


def read_from_host(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a tensor in pinned host memory as a CUDA tensor.

    GPU kernels read it over the bus, which is far slower than device memory, but transfer only what they access. In all
    other respects it is a normal CUDA tensor, so data too large for the device can be indexed like any other, also
    within a CUDA graph. The dtype must be one that NumPy supports.
    """
    with torch.cuda.device(device):
        try:
            pinned = tensor.contiguous().pin_memory()
        except RuntimeError as error:
            gib = tensor.numel() * tensor.itemsize / 2**30
            raise ValueError(
                f"trainer.images must be device, because {gib:.2f} GiB of host memory cannot be pinned "
                f"({reason_of(error)})"
            ) from error
        return torch.as_tensor(_Pinned(pinned), device=device)


class _Pinned:
    """Pinned memory at an address that is valid on the GPU too; lives as long as the tensors that refer to it."""

    def __init__(self, pinned: Tensor) -> None:
        self._pinned = pinned

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._pinned.numpy().__array_interface__, "version": 2}


class OnDevice:
    """A tensor that another thread will later copy to the host.

    Until then it stays on its device, and must not be changed. Fetching it waits for this tensor only, not for work
    that was queued on the device afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._done = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def fetch(self) -> Tensor:
        """Returns the tensor on the host: a copy, or the tensor itself if it is already there."""
        if self._done is None:
            return self._tensor
        # A separate stream, because the current one may be busy with later work.
        stream = torch.cuda.Stream(self._tensor.device)
        stream.wait_event(self._done)
        with torch.cuda.stream(stream):
            return self._tensor.cpu()


class Uploads:
    """Copies tensors to a device while the device is still busy with earlier work.

    A plain ``tensor.to(device)`` would wait until all of that work is done. Here the host waits only when it is a few
    tensors ahead.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._on_the_way: deque[torch.cuda.Event] = deque()

    def to(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Returns a copy on the device, the same one in every call, or the tensor itself if it is already there."""
        if device.type != "cuda" or tensor.is_cuda:
            return tensor.to(device)
        if len(self._on_the_way) >= AHEAD:
            self._on_the_way.popleft().synchronize()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # Not through pinned memory: copying a photograph there first takes longer than the driver's own staging.
        with torch.cuda.stream(self._stream):
            copy = tensor.to(device, non_blocking=True)
        current = torch.cuda.current_stream(device)
        current.wait_stream(self._stream)
        copy.record_stream(current)
        self._on_the_way.append(current.record_event())
        return copy
