"""Ctrl-C on the command line: one line and an exit status, whatever the program is doing."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit status of a program that a signal has stopped."""

# Seconds that compiled code has to return before the program ends without it.
_PATIENCE = 3.0


def say_stopped() -> None:
    """Tells the user that Ctrl-C has ended the program."""
    print("stopped", file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Makes Ctrl-C end the process immediately, for a block that has nothing to clean up, such as imports.

    An exception would not do: modules catch exceptions of their imports, and compiled ones turn them into others. Does
    nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda number, frame: _end())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def when_possible() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt, and end the process if compiled code prevents that for seconds.

    Python handles signals only between two of its own instructions, but an image of a field can take minutes in a
    single call of a kernel. Does nothing outside the main thread, and on Windows.
    """
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        yield
        return
    noticed = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        noticed.set()
        raise KeyboardInterrupt

    # The interpreter writes the numbers of signals to a pipe as soon as they arrive, whatever the main thread is doing.
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    watching = threading.Thread(target=_watch, args=(source, noticed), name="ctrl-c", daemon=True)
    previous = signal.signal(signal.SIGINT, note)
    previous_sink = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    watching.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_sink)
        signal.signal(signal.SIGINT, previous)
        os.close(sink)
        watching.join()
        os.close(source)


def _watch(source: int, noticed: threading.Event) -> None:
    """Ends the process if a Ctrl-C that is announced in a pipe is not noticed in time; returns when the pipe closes."""
    while number := os.read(source, 1):
        if number[0] == signal.SIGINT and not noticed.wait(_PATIENCE):
            _end()


def _end() -> None:
    say_stopped()
    os._exit(INTERRUPTED)
