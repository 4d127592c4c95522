"""A field in training: copies for the viewer, and pausing."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from voxelfield.training.interrupt import Interrupt
from voxelfield.training.optimizer import copies_dtype
from voxelfield.training.session import Session
from voxelfield.training.trained_model import TrainedModel

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.05
"""Seconds between checks whether paused training may continue."""

_ALONE_SECONDS = 15.0
"""Seconds without a connected client after which paused training continues; reloading a page takes less."""


class LiveField:
    """Connects the thread that trains with those of the viewer.

    The training thread copies the field between two steps if a copy has been requested. It never waits for the viewer,
    except while the user has paused training, which is not counted as training time.

    Args:
        session: The training.
        connected: Returns the number of connected clients.

    Attributes:
        step: The number of steps done.
        steps: The number of steps to do.
    """

    def __init__(self, session: Session, connected: Callable[[], int]) -> None:
        self.steps = session.config.trainer.steps
        self.step = session.step
        self._device = session.device
        self._connected = connected
        self._template = session.result()
        self._copy_requested = True
        self._newest: TrainedModel | None = None
        self._running = threading.Event()
        self._running.set()

    @property
    def paused(self) -> bool:
        """Whether training waits, or will after the current step."""
        return not self._running.is_set()

    def pause(self) -> None:
        """Pauses training after the current step."""
        self._running.clear()

    def resume(self) -> None:
        """Continues training."""
        self._running.set()

    def after_step(self, session: Session) -> None:
        """Copies the field if requested, and waits while training is paused; called by the training thread."""
        self.step = session.step
        if self._copy_requested:
            self._copy(session)
        if self.paused and self.step < self.steps:
            self._wait(session)

    def poll(self) -> TrainedModel | None:
        """Returns the newest copy of the field, and requests the next; None if there is no newer one.

        Called by the thread that draws; the copy is the caller's.
        """
        run, self._newest = self._newest, None
        self._copy_requested = True
        if run is None:
            return None
        run.field.requires_grad_(False)
        run.model.grid.to(copies_dtype(run.trainer.precision, self._device))
        if self._device.type == "cuda":
            # Training may reuse the memory of the float32 copy from here on.
            torch.cuda.current_stream(self._device).synchronize()
        return run

    @torch.no_grad()
    def _copy(self, session: Session) -> None:
        if self._template.steps == session.step:
            return
        field, occupancy = copy.deepcopy((session.field, session.occupancy))
        model = session.model.around(field, occupancy)
        self._template = replace(self._template, steps=session.step)
        self._newest = replace(self._template, model=model)
        self._copy_requested = False

    def _wait(self, session: Session) -> None:
        """Waits until the user lets training continue, nobody is connected any more, or the program is to end."""
        logger.info("step %d: training is paused in the viewer", session.step)
        alone_since = time.monotonic()
        with session.off_the_clock(), Interrupt() as interrupt:
            while not interrupt.requested:
                if self._copy_requested:
                    self._copy(session)
                if self._running.wait(_CHECK_SECONDS):
                    break
                now = time.monotonic()
                if self._connected() > 0:
                    alone_since = now
                elif now - alone_since > _ALONE_SECONDS:
                    logger.info("no browser is connected to the viewer: training continues")
                    self.resume()
