"""The progress of everything that takes long: on a terminal, in a notebook and in log files."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from voxelfield import processes
from voxelfield.files import size_on_disk

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two displays: as a bar, as lines of the log, and of pictures in a notebook.
_BAR_EVERY, _LINE_EVERY, _PICTURE_EVERY = 0.5, 10.0, 2.0


def in_notebook() -> bool:
    """Returns whether standard error is shown below a cell of a notebook, which draws a bar as a terminal does."""
    return type(sys.stderr).__module__ == "ipykernel.iostream"


class Progress:
    """The progress of work of a known length: how much is done, what the caller notes, and the time left.

    If standard error is a terminal or a notebook, it draws a tqdm bar, which disappears at the end; elsewhere (batch
    systems, log files) it logs a line now and then instead of printing control characters. Of several processes, only
    the first one displays anything. Between displays, :meth:`update` only reads a clock, so it may be called often.

    Args:
        name: What is counted, such as ``step``.
        total: How much there is to do.
        initial: How much of it was done before.
        delay: Seconds before a bar appears, so that none flickers for what is done by then.
    """

    def __init__(self, name: str, total: int, initial: int = 0, *, delay: float = 0.0) -> None:
        from tqdm import tqdm

        self._silent = not processes.is_first()
        drawn = not self._silent and (sys.stderr.isatty() or in_notebook())
        # The interval between displays is limited here, so that notes are read from the device only when displayed.
        self._interval = _BAR_EVERY if drawn else _LINE_EVERY
        self._name, self._total, self._first = name, total, initial
        self._started = self._shown = time.monotonic()
        self._rays = 0
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}"
        options: dict[str, Any] = {"dynamic_ncols": True, "mininterval": 0, "miniters": 1, "bar_format": form}
        options |= {"desc": name, "leave": False, "disable": not drawn, "delay": delay}
        self._bar: Any = tqdm(total=total, initial=initial, **options)

    def update(self, done: int, *, note: Callable[[], str] | None = None, rays: int = 0) -> None:
        """Reports how much is done; displays it if a display is due or everything is done.

        Args:
            done: How much is done, including ``initial``.
            note: Returns what to display beside it; called only when it is displayed, because it may synchronise.
            rays: Rays rendered since the previous call.
        """
        self._rays += rays
        now = time.monotonic()
        elapsed = now - self._shown
        if self._silent or (elapsed < self._interval and done < self._total):
            return
        fields = [] if note is None else [note()]
        if self._rays and elapsed > 0:
            fields.append(f"{self._bar.format_sizeof(self._rays / elapsed)} rays/s")
        seconds_each = (now - self._started) / max(1, done - self._first)
        fields.append(f"ETA {self._bar.format_interval(seconds_each * (self._total - done))}")
        if not self._bar.disable:
            self._bar.set_postfix_str(", ".join(fields), refresh=False)
            self._bar.update(done - self._bar.n)
        elif elapsed >= self._interval or note is not None:
            share = 100 * done / self._total
            logger.info("%s %d/%d (%.0f %%), %s", self._name, done, self._total, share, ", ".join(fields))
        # Read again, because a note may have taken time.
        self._shown = time.monotonic()
        self._rays = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock and hides the bar during a block, such as an evaluation between steps."""
        began = time.monotonic()
        self._bar.clear()
        yield
        pause = time.monotonic() - began
        self._started += pause
        self._shown += pause
        self._bar.refresh()

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()


def tracked(items: Iterable[T], name: str, total: int | None = None, *, silent: bool = False) -> Iterator[T]:
    """Yields items, whose number is ``total`` or that of a collection, while their progress is displayed.

    Nothing is displayed if it is to be ``silent``, or without tqdm, which is of the extra ``train``.
    """
    if silent or find_spec("tqdm") is None:
        yield from items
        return
    count = len(items) if isinstance(items, Collection) else total or 0
    with contextlib.closing(Progress(name, count, delay=_BAR_EVERY)) as progress:
        for done, item in enumerate(items, 1):
            yield item
            progress.update(done)


class NotebookPicture:
    """A picture below a cell of a notebook that gives way to the next one; they take at most a tenth of the time."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _PICTURE_EVERY
        self._handle: Any = None

    @property
    def due(self) -> bool:
        """Whether it is time for the next one."""
        return time.monotonic() >= self._next

    def show(self, draw: Callable[[], object]) -> None:
        """Shows what a function returns, which has a picture (``_repr_png_``)."""
        from IPython.display import display

        began = time.monotonic()
        try:
            if self._handle is None:
                self._handle = display(draw(), display_id=True)
            else:
                self._handle.update(draw())
        except Exception as error:  # such as of a field that needs more than a camera; training goes on
            logger.warning("the field is not shown: %s", error)
            self._next = math.inf
        else:
            now = time.monotonic()
            self._next = now + max(_PICTURE_EVERY, 10 * (now - began))


def size_in_words(path: Path) -> str:
    """Returns the size of a file, or of all files of a folder, such as ``3.21 MB``."""
    from tqdm import tqdm

    text = tqdm.format_sizeof(size_on_disk(path), "B")
    number = text.rstrip("BkMGTPEZY")
    return f"{number} {text[len(number) :]}"
