"""Writing of a run's results, with handling of errors such as a full disk."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from voxelfield.installed import MissingPackageError
from voxelfield.training.state.run_directory import RunDirectoryLock

logger = logging.getLogger(__name__)


class Results:
    """Writes results one after another; an error in one of them does not prevent the others.

    Args:
        directory: Folder of the results.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._missing: list[str] = []

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Logs an OSError or a missing package in a block, and continues after it.

        Args:
            name: Name of the result that the block writes.

        Raises:
            DirectoryInUseError: The folder was moved or deleted, and another process has locked the present one.
        """
        try:
            RunDirectoryLock.renew(self._directory)
            yield
        except (OSError, MissingPackageError) as error:
            logger.error("%s: %s", self._directory / name, getattr(error, "strerror", None) or error)
            self._missing.append(name)

    def check(self) -> None:
        """Raises OSError if a result could not be written."""
        if self._missing:
            raise OSError(f"{', '.join(self._missing)} could not be written in {self._directory}")
