"""A field that is being trained: copies for the viewer, pause and single steps."""

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

_LOOK_SECONDS = 0.05
"""How often paused training looks whether to go on."""

_ALONE_SECONDS = 15.0
"""Seconds without a connected client after which paused training resumes; reloading a page takes less."""


class LiveField:
    """Stands between the thread that trains and the one that draws.

    The thread that trains copies the field between two steps where a copy has been asked for, which takes as long as
    copying memory does. It never waits for the one that draws, nor for a browser; only where the user has paused
    training, it waits for the user, off training's clock.

    Args:
        session: The training.
        connected: Returns the number of connected clients.
    """

    def __init__(self, session: Session, connected: Callable[[], int]) -> None:
        self.device = session.device
        self.steps = session.config.trainer.steps
        self.step = session.step
        self._connected = connected
        self._shell = session.result()
        self._wanted = True
        self._copied_step = -1
        self._newest: TrainedModel | None = None
        self._go_on = threading.Event()
        self._go_on.set()
        self._steps_allowed = 0

    @property
    def paused(self) -> bool:
        """Whether training waits, or will after the steps that are still allowed."""
        return not self._go_on.is_set()

    def pause(self) -> None:
        """Makes training wait after the present step."""
        self._go_on.clear()

    def resume(self) -> None:
        """Makes training go on."""
        self._steps_allowed = 0
        self._go_on.set()

    def allow(self, steps: int) -> None:
        """Makes paused training take some steps."""
        self._steps_allowed = steps

    def after_step(self, session: Session) -> None:
        """Copies the field if requested, and waits if training is paused; called on the training thread."""
        self.step = session.step
        if self._wanted:
            self._copy(session)
        if self.paused and self.step < self.steps:
            self._wait(session)

    def poll(self) -> TrainedModel | None:
        """As for :class:`voxelfield.viewer.scheduling.source.Source`."""
        run, self._newest = self._newest, None
        self._wanted = True
        if run is None:
            return None
        run.field.requires_grad_(False)
        run.model.grid.to(copies_dtype(run.trainer.precision, self.device))
        if self.device.type == "cuda":
            # What the grids were copied to before is training's to reuse from here on.
            torch.cuda.current_stream(self.device).synchronize()
        return run

    @torch.no_grad()
    def _copy(self, session: Session) -> None:
        if session.step == self._copied_step:
            return
        field, occupancy = copy.deepcopy((session.field, session.occupancy))
        model = session.model.around(field, occupancy)
        self._newest = replace(self._shell, model=model, steps=session.step)
        self._copied_step = session.step
        self._wanted = False

    def _wait(self, session: Session) -> None:
        """Waits until training may go on: by the user, for want of anybody who looks, or because it is to end."""
        if self._steps_allowed > 0:
            self._steps_allowed -= 1
            return
        logger.info("step %d: training is paused in the viewer", session.step)
        alone_since = time.monotonic()
        with session.off_the_clock(), Interrupt() as interrupt:
            while not interrupt.requested and self._steps_allowed == 0:
                if self._wanted:
                    self._copy(session)
                if self._go_on.wait(_LOOK_SECONDS):
                    break
                now = time.monotonic()
                if self._connected() > 0:
                    alone_since = now
                elif now - alone_since > _ALONE_SECONDS:
                    logger.info("no browser is connected to the viewer: training continues")
                    self.resume()
        self._steps_allowed = max(self._steps_allowed - 1, 0)
