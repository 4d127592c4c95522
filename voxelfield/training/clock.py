"""Wall-clock time that includes pending work on the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch


def synchronized_time(device: torch.device) -> float:
    """Waits until the device has finished all pending work, and returns the time on a clock in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Pause:
    """Sums up the time spent inside its ``with`` blocks, which does not count as training time.

    Args:
        now: The clock.
        paused: Returns a context manager for each block, such as one that hides a progress bar.

    Attributes:
        seconds: The total time.
    """

    def __init__(self, now: Callable[[], float], paused: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self.seconds = 0.0
        self._now = now
        self._paused = paused
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._began = self._now()
        self._stack.enter_context(self._paused())

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self.seconds += self._now() - self._began
