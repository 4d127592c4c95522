"""The viewer of a run that is being trained."""

from __future__ import annotations

import logging
import threading
from typing import Any

from voxelfield.training.config import LoggerConfig
from voxelfield.training.session import Session
from voxelfield.viewer.curves import Curves, RecordingLogger
from voxelfield.viewer.drawing.painter import boxes_around, reference_of
from voxelfield.viewer.drawing.photographs import Photographs
from voxelfield.viewer.page.address import Address, import_viser
from voxelfield.viewer.page.viewer_page import ViewerPage
from voxelfield.viewer.scheduling.live import LiveField

logger = logging.getLogger(__name__)


class TrainingViewer:
    """Shows a session in a browser while it trains; whatever fails here ends the viewer and not the training.

    To be used as ``Session(scene, on_step=viewer.after_step)``, with :meth:`begin` before and :meth:`end` after.

    Args:
        config: Says where the page is served.

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
        # What the user can mend is told before images are loaded.
        import_viser()
        self._address.check()
        self.live: LiveField | None = None
        self.page: ViewerPage | None = None
        self._opening: threading.Thread | None = None

    def begin(self, session: Session) -> None:
        """Opens the page, in a thread of its own; training need not wait for it."""
        try:
            curves = Curves()
            session.log = RecordingLogger(session.log, curves)
            self.live = LiveField(session, self._connected)
            self._opening = threading.Thread(
                target=self._open, args=(session, self.live, curves), name="viewer page", daemon=True
            )
            self._opening.start()
        except Exception as error:
            self._give_up(error)

    def after_step(self, session: Session) -> None:
        """Copies the field if the page wants it; waits only while the user has paused training."""
        if self.live is None:
            return
        try:
            self.live.after_step(session)
        except Exception as error:
            self._give_up(error)

    def end(self) -> None:
        """Closes the page."""
        if self.live is not None:
            self.live.resume()
        if self._opening is not None:
            self._opening.join()
        page, self.page = self.page, None
        if page is None:
            return
        try:
            page.close()
        except Exception as error:
            self._give_up(error)

    def _open(self, session: Session, live: LiveField, curves: Curves) -> None:
        try:
            scene, refined, warp = session.scene, session.cameras, session.model.warp
            self.page = ViewerPage(
                self._address,
                scene.name,
                str(session.output or "RUN"),
                live,
                Photographs.of(scene, ("train", "test"), refined),
                [scene.aabb.cpu()] if warp is None else boxes_around(warp),
                session.background.cpu(),
                curves,
                live,
                reference=reference_of(warp),
            )
            self._address.tell()
        except Exception as error:
            self._give_up(error)

    def _connected(self) -> int:
        page: Any = self.page
        return 0 if page is None else len(page.server.get_clients())

    def _give_up(self, error: Exception) -> None:
        self.live = None
        logger.error("the viewer failed (%s), and training continues without it", error)
