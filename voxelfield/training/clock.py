"""Wall-clock time that includes what the device was asked to do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch


def synchronized_time(device: torch.device) -> float:
    """Returns the time on a clock, in seconds, once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Pause:
    """Adds up the time spent inside its ``with`` blocks, which training is not charged for.

    Args:
        now: The clock.
        paused: Makes a context for each block, such as one that takes a progress bar off the screen.

    Attributes:
        seconds: The sum.
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
