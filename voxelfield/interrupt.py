"""Handling of signals that stop a run: between two steps, or at once where no work would be lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from voxelfield import processes

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that stop a run. Windows has no SIGHUP, which is sent when a terminal is closed."""

_STEPS_BETWEEN_AGREEMENTS = 32


class Interrupted(KeyboardInterrupt):
    """A signal arrived while the program could stop immediately (:meth:`Interrupt.at_once`)."""


class Interrupt:
    """Records Ctrl-C (SIGINT), SIGTERM and SIGHUP while the context is entered.

    A second Ctrl-C raises KeyboardInterrupt; the other signals may be repeated. Contexts can be nested: the inner one
    starts with a signal that the outer one has recorded, and passes its own to the outer one at exit. Outside the main
    thread, where signals cannot be handled, it does nothing. If SIGHUP is ignored, as under ``nohup``, it stays
    ignored.

    Args:
        last: Whether the program ends after the block. If a signal has arrived, later ones are then ignored, except
            Ctrl-C, which ends the program without a message.

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
        """Makes the first signal end a block by raising :class:`Interrupted`, also one that had arrived before."""
        self._at_once = True
        try:
            if self.requested:
                raise Interrupted
            yield
        finally:
            self._at_once = False

    def requested_by_any(self, step: int, device: torch.device) -> bool:
        """Returns whether any process of a group has been asked to stop, so that all stop after the same ``step``."""
        # Hosts of GPUs are many steps ahead of them, and need not wait for each other in every step.
        every = _STEPS_BETWEEN_AGREEMENTS if device.type == "cuda" and processes.count() > 1 else 1
        return step % every == 0 and processes.any_of(self.requested)

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if number in (signal.SIGINT, signal.SIGTERM) or handler is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        outer = self._outer()
        self.requested = outer is not None and outer.requested
        return self

    def __exit__(self, *_: object) -> None:
        outer = self._outer()
        for number, handler in self._previous.items():
            if self._last and self.requested:
                # Python resets handlers written in Python when it shuts down, but not these.
                handler = signal.SIG_DFL if number == signal.SIGINT else signal.SIG_IGN
            signal.signal(number, handler)
        self._previous.clear()
        # Only from here on can no further signal arrive in this context.
        if outer is not None:
            outer.requested |= self.requested

    def _outer(self) -> Interrupt | None:
        """Returns the context within which this one was entered."""
        handler = self._previous.get(signal.SIGTERM)
        owner = getattr(handler, "__self__", None)
        return owner if isinstance(owner, Interrupt) else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.requested = not self.requested, True
        if not first and number == signal.SIGINT:
            raise KeyboardInterrupt
        if first and self._at_once:
            raise Interrupted
