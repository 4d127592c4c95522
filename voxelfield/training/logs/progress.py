"""Display of a run's progress."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from tqdm import tqdm

logger = logging.getLogger(__name__)


class Progress:
    """Progress of a run: step, PSNR, rays per second, time left.

    If standard error is a terminal, it draws a tqdm bar; elsewhere (batch systems, log files) it logs a line now and
    then instead of printing control characters. Between displays, :meth:`update` only reads a clock, so it may be
    called every step.

    Args:
        total: Number of steps of the whole run.
        initial: Number of steps already done, when resuming.
        silent: Display nothing, as in all processes but the first.
    """

    def __init__(self, total: int, initial: int = 0, *, silent: bool = False) -> None:
        terminal = sys.stderr.isatty() and not silent
        self._silent = silent
        self._total = total
        # Seconds between two displays.
        self._interval = 0.5 if terminal else 10.0
        self._first = self._step = initial
        self._started = self._shown = time.monotonic()
        self._rays = 0
        # The interval is limited here, so that PSNR is read from the device only when it is displayed.
        self._bar: tqdm[NoReturn] = tqdm(
            total=total,
            initial=initial,
            desc="train",
            dynamic_ncols=True,
            mininterval=0,
            miniters=1,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",
            disable=not terminal,
        )

    def update(self, step: int, *, psnr: Callable[[], float] | None = None, rays: int = 0) -> None:
        """Reports that a step is done; displays it if a display is due or it is the last step.

        Args:
            step: Steps done so far, including earlier runs.
            psnr: Returns the training PSNR in dB; called only when it is displayed, because it may synchronise.
            rays: Rays rendered since the previous call.
        """
        self._step = step
        self._rays += rays
        now = time.monotonic()
        elapsed = now - self._shown
        if self._silent or (elapsed < self._interval and step < self._total):
            return
        fields = [] if psnr is None else [f"PSNR {psnr():.2f} dB"]
        if self._rays and elapsed > 0:
            fields.append(f"{tqdm.format_sizeof(self._rays / elapsed)} rays/s")
        done = step - self._first
        if done > 0:
            fields.append(f"ETA {tqdm.format_interval((now - self._started) / done * (self._total - step))}")
        if self._bar.disable:
            share = 100 * step / self._total if self._total else 100.0
            logger.info("%s", ", ".join([f"step {step}/{self._total} ({share:.0f} %)", *fields]))
        else:
            self._bar.set_postfix_str(", ".join(fields), refresh=False)
            self._bar.update(step - self._bar.n)
        # Read again, because computing the PSNR may have taken time.
        self._shown = time.monotonic()
        self._rays = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock and hides the bar during a block, such as an evaluation between steps."""
        began = time.monotonic()
        self._bar.clear()
        try:
            yield
        finally:
            pause = time.monotonic() - began
            self._started += pause
            self._shown += pause
            self._bar.refresh()

    def close(self) -> None:
        """Finishes the bar, leaving its last state on the screen."""
        self._bar.update(self._step - self._bar.n)
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
