"""Writing of checkpoints in the background during training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from voxelfield.training.state.checkpoint import (
    CheckpointError,
    check_whole,
    checkpoint_path,
    pack_checkpoint,
    write_checkpoint,
)
from voxelfield.training.state.run_directory import RunDirectoryLock

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes a run's checkpoints one after another in a thread, each replacing the previous ones.

    At most two checkpoints wait to be written, because each takes memory.

    Args:
        directory: Folder for the files; created if needed.
        keep: Keep all checkpoints.
        before: Called in the thread before each file is written.

    Attributes:
        newest: The last checkpoint on disk, or None.
    """

    def __init__(self, directory: Path, keep: bool, before: Callable[[], None] = lambda: None) -> None:
        self.newest: Path | None = None
        self._before = before
        self._directory = directory
        self._keep = keep
        self._replaceable: list[Path] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: list[tuple[Future[None], bool]] = []

    def follow(self, newest: Path, older: Sequence[Path]) -> None:
        """Registers the checkpoint from which a run resumes, and those that the next one replaces."""
        self.newest = newest
        self._replaceable = list(older)

    def save(
        self, step: int, state: dict[str, Any], *, finite: bool = True, settled: bool = False, optional: bool = False
    ) -> Path:
        """Copies the state and schedules its writing after the earlier checkpoints.

        Args:
            step: Number of steps done.
            state: As for :func:`voxelfield.training.state.checkpoint.save_checkpoint`.
            finite: Whether training can resume from the checkpoint. If not, the file gets a name that
                ``resume=DIRECTORY`` ignores, and replaces no other checkpoint.
            settled: Whether the state does not change until :meth:`wait` returns, so that it can be copied in the
                thread.
            optional: Whether an error is only logged instead of being raised by the next call.

        Returns:
            The file, which exists once :meth:`wait` has returned.

        Raises:
            OSError: An earlier checkpoint could not be written.
        """
        if not settled:
            state = pack_checkpoint(state)
        while len(self._writing) > 1 or (self._writing and self._writing[0][0].done()):
            self._finish_first()
        path = checkpoint_path(self._directory, step)
        if not finite:
            path = path.with_name(path.name.replace("checkpoint", "not_finite"))
        self._writing.append((self._thread.submit(self._write, path, state, not settled, finite), optional))
        return path

    def wait(self) -> None:
        """Waits until all checkpoints are on disk; raises OSError if one could not be written."""
        while self._writing:
            self._finish_first()

    def _finish_first(self) -> None:
        writing, optional = self._writing[0]
        # Fetched before the entry is removed, because waiting may be interrupted.
        error = writing.exception()
        self._writing.pop(0)
        if error is None:
            return
        if not (optional and isinstance(error, OSError)):
            raise error
        last = "there is no checkpoint yet" if self.newest is None else f"the last checkpoint is {self.newest}"
        logger.error("%s; training continues, and %s", error, last)

    def _write(self, path: Path, state: dict[str, Any], packed: bool, finite: bool) -> None:
        RunDirectoryLock.renew(self._directory)
        self._before()
        try:
            write_checkpoint(path, state if packed else pack_checkpoint(state))
        except OSError as error:
            # The original error names the temporary file, or none.
            raise OSError(f"{path} could not be written: {error.strerror or error}") from error
        if not finite:
            return
        older = [] if self._keep else [file for file in self._replaceable if file != path]
        try:
            if older:
                check_whole(path)
            for file in older:
                file.unlink(missing_ok=True)
        except (CheckpointError, OSError) as error:
            logger.error("%s; earlier checkpoints are not removed", error)
            self._replaceable.append(path)
        else:
            self.newest, self._replaceable = path, [path]
