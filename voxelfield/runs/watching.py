"""The viewer of a run in training."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import replace

import torch

from voxelfield.grids.working_copies import copies_dtype
from voxelfield.settings import LoggerConfig
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.training.session import Session
from voxelfield.viewer.address import Address
from voxelfield.viewer.page import ViewerPage, photographs_of

logger = logging.getLogger(__name__)


class TrainingViewer:
    """Shows a session in a browser while it trains; a failure ends the viewer but not the training.

    To be used as ``Session(scene, on_step=viewer.after_step)``, with :meth:`begin` before and :meth:`end` after. The
    training thread copies the field between two steps if the page has requested a copy, and never waits for the page.

    Args:
        config: Where the page is served.

    Raises:
        ValueError: The port cannot be listened on.
        MissingPackageError: viser is not installed.

    Example:
        >>> viewer = TrainingViewer(LoggerConfig(viewer_port=8081))  # doctest: +SKIP
        >>> session = Session(scene, on_step=viewer.after_step)  # doctest: +SKIP
        >>> viewer.begin(session)  # doctest: +SKIP
        >>> session.fit()  # doctest: +SKIP
        >>> viewer.end()  # doctest: +SKIP
    """

    def __init__(self, config: LoggerConfig | None = None) -> None:
        config = LoggerConfig() if config is None else config
        self._address = Address(config.viewer_host, config.viewer_port, ("logger.viewer_host", "logger.viewer_port"))
        # Before images are loaded, because the user can correct it.
        self._address.check()
        self.page: ViewerPage | None = None
        self._failed = False
        self._copy_requested = True
        self._newest: TrainedModel | None = None
        self._progress = ""

    def begin(self, session: Session) -> None:
        """Opens the page."""
        with self._survive():
            photographs = photographs_of(session.scene, ("train", "test"), session.cameras)
            name = str(session.output or "RUN")
            self._template = session.result()
            self.page = ViewerPage(self._address, self._template, name, photographs, self.poll, lambda: self._progress)
            self._address.log_urls()

    def after_step(self, session: Session) -> None:
        """Copies the field if the page has requested it; called by the training thread."""
        if self.page is None or self._failed:
            return
        self._progress = f"Step **{session.step}** of {session.config.trainer.steps}"
        if self._copy_requested:
            with self._survive():
                self._copy(session)

    def poll(self) -> TrainedModel | None:
        """Returns the newest copy of the field, and requests the next; None if there is no newer one.

        Called by the thread that draws; the copy is the caller's.
        """
        run, self._newest = self._newest, None
        self._copy_requested = True
        if run is None:
            return None
        run.field.requires_grad_(False)
        device = run.model.device
        run.model.grid.to(copies_dtype(run.trainer.precision, device))
        if device.type == "cuda":
            # Training may reuse the memory of the float32 copy from here on.
            torch.cuda.current_stream(device).synchronize()
        return run

    def end(self) -> None:
        """Closes the page."""
        if self.page is not None:
            with self._survive():
                self.page.close()
            self.page = None

    @torch.no_grad()
    def _copy(self, session: Session) -> None:
        self._newest = replace(self._template, steps=session.step, model=copy.deepcopy(session.model))
        self._copy_requested = False

    @contextlib.contextmanager
    def _survive(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed = True
            logger.error("the viewer failed (%s), and training continues without it", error)
