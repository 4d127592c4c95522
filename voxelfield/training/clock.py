"""Wall-clock time that includes what the device was asked to do."""

from __future__ import annotations

import time

import torch


def synchronized_time(device: torch.device) -> float:
    """Returns the time on a clock, in seconds, once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
