"""A logger whose failures lose records but do not stop training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from voxelfield.training.logs.logging import RunLogger

logger = logging.getLogger(__name__)


class FailsafeLogger:
    """Forwards records until the underlying logger fails; reports that once, and drops all later records.

    Args:
        behind: The underlying logger.
    """

    def __init__(self, behind: RunLogger) -> None:
        self._behind = behind
        self._failed = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers by tag."""
        self._try(lambda: self._behind.scalars(step, values))

    def images(self, step: int, tag: str, image: torch.Tensor) -> None:
        """Records an image, as for :class:`voxelfield.training.logs.logging.RunLogger`."""
        self._try(lambda: self._behind.images(step, tag, image))

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Records the distribution of values."""
        self._try(lambda: self._behind.histogram(step, tag, values))

    def text(self, tag: str, text: str) -> None:
        """Records a text."""
        self._try(lambda: self._behind.text(tag, text))

    def hyperparameters(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Records the configuration with the final metrics."""
        self._try(lambda: self._behind.hyperparameters(config, metrics))

    def flush(self) -> None:
        """Flushes the underlying logger, if it has a ``flush`` method."""
        flush = getattr(self._behind, "flush", None)
        if flush is not None:
            self._try(flush)

    def close(self) -> None:
        """Closes the underlying logger, even if it has failed."""
        failed, self._failed = self._failed, False
        self._try(self._behind.close, quietly=failed)

    def _try(self, record: Callable[[], None], quietly: bool = False) -> None:
        if self._failed:
            return
        try:
            record()
        except Exception as error:  # third-party loggers may raise anything
            self._failed = True
            if not quietly:
                name = type(self._behind).__name__
                logger.error("%s failed (%s): nothing more is recorded, and training continues", name, error)
