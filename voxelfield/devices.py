"""Selection of devices."""

from __future__ import annotations

import re

import torch

from voxelfield import processes

DEVICES = r"auto|cpu|cuda(:\d{1,2})?"
"""Regular expression of the values that :func:`choose_device` accepts."""

DEVICES_IN_WORDS = "auto, cpu, cuda or cuda:<index>"
"""Description of these values for messages."""


UNCOUNTED_BYTES = {"now": 0, "peak": 0}
"""Memory on this process's GPU that torch's statistics do not count: in use now, and the peak."""


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


def peak_bytes(device: torch.device) -> int:
    """Returns this process's peak memory on its GPU: torch's own peak, plus the one of :data:`UNCOUNTED_BYTES`."""
    return torch.cuda.max_memory_allocated(device) + UNCOUNTED_BYTES["peak"]
