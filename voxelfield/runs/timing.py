"""Wall-clock times of the parts of a run."""

from __future__ import annotations

import time
from collections.abc import Callable


class Timing:
    """Divides the time since its creation into successive named parts.

    Args:
        clock: Source of seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._began = clock()

    def end(self, part: str) -> None:
        """Adds the time since the last part, or since creation, to ``part``."""
        now = self._clock()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._began
        self._began = now

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of every part that has ended."""
        return dict(self._seconds)

    def __str__(self) -> str:
        """Returns the parts as text for a log line."""
        return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self._seconds.items())
