"""Copies between host and device for which the device is never kept waiting."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

AHEAD = 3
"""Images that a device is given beyond the one that it works on: enough that it is never without work, few enough that
neither they nor what is made of them fills memory."""


def read_from_host(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy in pinned memory of the host as a tensor of a GPU.

    The GPU's kernels read it over the bus: slower than its own memory by far, but only what they ask for. Nothing else
    differs, so that what fits nowhere on the device can be indexed like what does, within a CUDA graph too.

    Args:
        tensor: Any tensor on the CPU, of a dtype that NumPy has.
        device: A CUDA device.
    """
    with torch.cuda.device(device):
        pinned = tensor.contiguous().pin_memory()
        return torch.as_tensor(_Pinned(pinned), device=device)


class _Pinned:
    """Pinned memory by the address at which a GPU finds it too; lives as long as tensors that were made of it."""

    def __init__(self, pinned: Tensor) -> None:
        self._pinned = pinned

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._pinned.numpy().__array_interface__, "version": 2}


class OnDevice:
    """A tensor that some thread will want on the host.

    Until then it stays on its device. Whoever fetches it waits for this tensor alone, not for the work that the device
    was given afterwards.

    Args:
        tensor: Any tensor, which must not be changed before it has been fetched.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._done = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def fetch(self) -> Tensor:
        """Returns the tensor on the host: a copy, or the tensor itself if it lies there."""
        if self._done is None:
            return self._tensor
        # A stream of its own, because the current one may be busy with what came later.
        stream = torch.cuda.Stream(self._tensor.device)
        stream.wait_event(self._done)
        with torch.cuda.stream(stream):
            return self._tensor.cpu()


class Uploads:
    """Copies tensors to a device while it still works on what it was given before.

    A plain ``tensor.to(device)`` would wait until the device has done all of that. Here the host waits only when it is
    a few tensors ahead.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._on_the_way: deque[torch.cuda.Event] = deque()

    def to(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Returns a copy on the device, or the tensor itself if it lies there.

        Args:
            tensor: Any tensor.
            device: Where the copy is needed, the same in every call.
        """
        if device.type != "cuda" or tensor.is_cuda:
            return tensor.to(device)
        if len(self._on_the_way) >= AHEAD:
            self._on_the_way.popleft().synchronize()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # Not through pinned memory: to copy a photograph there first takes longer than the driver's own way.
        with torch.cuda.stream(self._stream):
            copy = tensor.to(device, non_blocking=True)
        current = torch.cuda.current_stream(device)
        current.wait_stream(self._stream)
        copy.record_stream(current)
        self._on_the_way.append(current.record_event())
        return copy
