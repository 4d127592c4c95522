"""The viewer of a run in training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from voxelfield.training.config import LoggerConfig
from voxelfield.training.session import Session
from voxelfield.viewer.address import Address, import_viser
from voxelfield.viewer.live import LiveField
from voxelfield.viewer.page import ViewerPage
from voxelfield.viewer.photographs import Photographs

logger = logging.getLogger(__name__)


class TrainingViewer:
    """Shows a session in a browser while it trains; a failure ends the viewer but not the training.

    To be used as ``Session(scene, on_step=viewer.after_step)``, with :meth:`begin` before and :meth:`end` after.

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
        # Reported before images are loaded, because the user can correct it.
        import_viser()
        self._address.check()
        self.live: LiveField | None = None
        self.page: ViewerPage | None = None

    def begin(self, session: Session) -> None:
        """Opens the page."""
        with self._survive():
            live = LiveField(session, lambda: 0 if self.page is None else len(self.page.server.get_clients()))
            photographs = Photographs.of(session.scene, ("train", "test"), session.cameras)
            name = str(session.output or "RUN")
            self.page = ViewerPage(self._address, session.result(), name, photographs, live)
            self._address.log_urls()
            self.live = live

    def after_step(self, session: Session) -> None:
        """Copies the field if the page has requested it; waits only while the user has paused training."""
        if self.live is not None:
            with self._survive():
                self.live.after_step(session)

    def end(self) -> None:
        """Closes the page."""
        if self.page is not None:
            with self._survive():
                self.page.close()
            self.page = None

    @contextlib.contextmanager
    def _survive(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.live = None
            logger.error("the viewer failed (%s), and training continues without it", error)
