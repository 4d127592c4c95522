"""Stopping when asked to: between two steps, or at once where nothing would be lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

# A closed terminal is not there on Windows.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Interrupted(KeyboardInterrupt):
    """A signal has arrived while nothing had to be finished (:meth:`Interrupt.at_once`)."""


class Interrupt:
    """Notes Ctrl-C, the termination signal of batch systems and a closed terminal while it is entered.

    A second Ctrl-C raises KeyboardInterrupt; the other signals may be repeated. One may be entered within another:
    either learns of what the other has noted. Outside the main thread, where signals cannot be handled, it does
    nothing. A hangup that is ignored, as under ``nohup``, stays ignored.

    Args:
        last: The program ends after the block. If a signal has arrived, further ones are then ignored, but for Ctrl-C,
            which ends it without a word.

    Attributes:
        requested: Whether a signal has arrived.
    """

    def __init__(self, *, last: bool = False) -> None:
        self.requested = False
        self._last = last
        self._at_once = False
        self._previous: dict[int, Any] = {}

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Lets the first signal end a block.

        Raises:
            Interrupted: A signal arrives, or had arrived.
        """
        self._at_once = True
        try:
            if self.requested:
                raise Interrupted
            yield
        finally:
            self._at_once = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if number in (signal.SIGINT, signal.SIGTERM) or handler is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        outer = self._outer()
        self.requested = outer is not None and outer.requested
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outer = self._outer()
        for number, handler in self._previous.items():
            if self._last and self.requested:
                # Python forgets handlers of its own when it shuts down, but not these.
                handler = signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN
            signal.signal(number, handler)
        self._previous.clear()
        # Only now does no further signal arrive here.
        if outer is not None:
            outer.requested |= self.requested

    def _outer(self) -> Interrupt | None:
        """Returns the one that this one was entered within."""
        handler = self._previous.get(signal.SIGTERM)
        owner = getattr(handler, "__self__", None)
        return owner if isinstance(owner, Interrupt) else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.requested = not self.requested, True
        if not first and number == signal.SIGINT:
            raise KeyboardInterrupt
        if first and self._at_once:
            raise Interrupted
