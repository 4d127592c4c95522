"""The viewer of a run in training."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from voxelfield.components.logger import FailsafeLogger
from voxelfield.grids.working_copies import copies_dtype
from voxelfield.messages import in_shell
from voxelfield.settings import LoggerConfig
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.training.session import Session
from voxelfield.viewer.address import Address
from voxelfield.viewer.page import ViewerPage, photographs_of

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_STATUS = 0.5
_CURVES = {"train/psnr": "training pixels", "test/psnr": "previewed test views"}


class _Overheard(FailsafeLogger):
    """Forwards the records of a session, and keeps its curves of PSNR, lists of steps and dB by tag."""

    def __init__(self, records: FailsafeLogger) -> None:
        super().__init__(lambda: records)
        self._records = records
        self.curves: dict[str, list[tuple[int, float]]] = {tag: [] for tag in _CURVES}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tag, curve in self.curves.items():
            if tag in values:
                curve.append((step, values[tag]))
        self._records.scalars(step, values)


class TrainingViewer:
    """Shows a session in a browser while it trains; a failure ends the viewer but not the training.

    To be used as ``Session(scene, on_step=viewer.after_step)``, with :meth:`begin` before, and :meth:`finish` and
    :meth:`end` after. The training thread copies the field between two steps if the page has requested a copy, and
    never waits for the page.

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
        >>> viewer.finish(session)  # doctest: +SKIP
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
        self._status_due = 0.0

    def begin(self, session: Session) -> None:
        """Opens the page."""
        with self._survive():
            photographs = photographs_of(session.scene, ("train", "test"), session.cameras)
            self._template = session.result()
            run = session.output or Path("RUN")
            self._command = f"voxelfield view {in_shell(run)}"
            self.page = page = ViewerPage(self._address, self._template, run, photographs, self.poll)
            session.records = self._records = _Overheard(session.records)
            with page.tabs.add_tab("Training", icon="chart-line"):
                self.status = page.server.gui.add_markdown("")
                self.chart = page.server.gui.add_uplot(
                    (np.zeros(1), np.zeros(1)),
                    ({"label": "step"}, {"label": "dB", "stroke": "rgb(47, 111, 220)", "width": 2}),
                    title="PSNR of the training pixels, dB",
                    scales={"x": {"time": False}},
                    legend={"show": False},
                    height=180,
                    visible=False,
                )
            self._address.log_urls()

    def after_step(self, session: Session) -> None:
        """Copies the field if the page has requested it, and shows the progress; called by the training thread."""
        if self.page is None or self._failed:
            return
        if self._copy_requested:
            with self._survive():
                self._copy(session)
        if time.monotonic() > self._status_due or session.step == session.config.trainer.steps:
            self._status_due = time.monotonic() + _SECONDS_BETWEEN_STATUS
            with self._survive():
                self._show(session, self.page)

    def finish(self, session: Session) -> None:
        """Shows the field at the end of training."""
        if self.page is not None and not self._failed:
            with self._survive():
                self._copy(session)
                self.page.worker.hurry()
                self._show(session, self.page)

    def wait(self) -> None:
        """Keeps the page open, unless it failed, until a signal ends the wait by an exception."""
        if self.page is not None and not self._failed:
            logger.info("viewer: %s shows the finished field until Ctrl-C", self._address.url)
            threading.Event().wait()

    def _show(self, session: Session, page: ViewerPage) -> None:
        """Shows the step and the last PSNRs, in the title of the panel too, and the curve."""
        steps, curves = f"step {session.step} of {session.config.trainer.steps}", self._records.curves
        scores = [f"{curve[-1][1]:.2f} dB {_CURVES[tag]}" for tag, curve in curves.items() if curve]
        self.status.content = "  \n".join((f"**{steps.capitalize()}**", *scores))
        curve, title = curves["train/psnr"], f"{session.scene.name}: {steps}"
        page.server.gui.set_panel_label(f"{title}, {curve[-1][1]:.1f} dB" if curve else title)
        if len(curve) > 1:
            self.chart.data = tuple(np.array(curve, dtype=np.float64).T)
            self.chart.visible = True

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
        """Closes the page, which then says what opens the field again."""
        page, self.page = self.page, None
        if page is None:
            return
        with self._survive():
            logger.info("viewer: the page is closed; the field opens again with: %s", self._command)
            clients = page.server.get_clients().values()
            for client in clients:
                client.add_notification(
                    "Training has ended", f"This page is closed. Open it again with: {self._command}"
                )
                client.flush()
            if clients:
                time.sleep(_SECONDS_BETWEEN_STATUS)  # in which browsers receive it
        with self._survive():
            page.close()

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
