"""Copies between host and device that neither of the two waits for."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

AHEAD = 3
"""Images that a device is given beyond the one that it works on: enough that it is never without work, few enough that
neither they nor what is made of them fills memory."""


class HostCopy:
    """A copy of a tensor that is on its way to the host.

    The copy begins when the device has finished the tensor, so the caller may go on at once. On the CPU it is the
    tensor itself.

    Args:
        tensor: Any tensor, which must not be changed before the copy has arrived.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        self._arrival = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def wait(self) -> Tensor:
        """Returns the copy once it is complete."""
        if self._arrival is None:
            return self._copy
        self._arrival.synchronize()
        # It came to pinned memory, which is scarce and kept for the next copies.
        return self._copy.clone()


class Uploads:
    """Copies tensors to a device while it still works on what it was given before.

    A plain ``tensor.to(device)`` would wait until the device has done all of that. Here the host waits only when it is
    a few tensors ahead.
    """

    def __init__(self) -> None:
        self._on_the_way: deque[torch.cuda.Event] = deque()

    def to(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Returns a copy on the device, or the tensor itself if it lies there.

        Args:
            tensor: Any tensor.
            device: Where the copy is needed.
        """
        if device.type != "cuda" or tensor.is_cuda:
            return tensor.to(device)
        if len(self._on_the_way) >= AHEAD:
            self._on_the_way.popleft().synchronize()
        copy = tensor.pin_memory().to(device, non_blocking=True)
        self._on_the_way.append(torch.cuda.current_stream(device).record_event())
        return copy
