"""Writing the results of a run, on a disk that may be full."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from voxelfield.installed import MissingPackageError

logger = logging.getLogger(__name__)


class Results:
    """Writes results one after the other; one that cannot be written does not keep the others from it.

    Args:
        directory: Where they are written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._missing: list[str] = []

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Logs an OSError in a block, or that it needs what is not installed, and goes on after it.

        Args:
            name: What is written in the block.
        """
        try:
            yield
        except (OSError, MissingPackageError) as error:
            logger.error("%s: %s", self._directory / name, getattr(error, "strerror", None) or error)
            self._missing.append(name)

    def check(self) -> None:
        """Raises OSError if something could not be written."""
        if self._missing:
            raise OSError(f"{', '.join(self._missing)} could not be written in {self._directory}")
