"""Writing checkpoints while training goes on."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from voxelfield.training.checkpoint import (
    CheckpointError,
    checkpoint_path,
    pack_checkpoint,
    replace_checkpoints,
    write_checkpoint,
)

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes a run's checkpoints one after the other in a thread, each in the place of those before it.

    At most two wait to be written, because each takes memory.

    Args:
        directory: Receives the files; created if needed.
        keep: Keep all of them.
    """

    def __init__(self, directory: Path, keep: bool) -> None:
        self._directory = directory
        self._keep = keep
        self._replaceable: list[Path] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: list[Future[None]] = []

    def save(self, step: int, state: dict[str, Any], *, replace: bool, settled: bool = False) -> Path:
        """Takes a copy of the state, to be written once those before it are on disk.

        Args:
            step: Number of steps done.
            state: As for :func:`voxelfield.training.checkpoint.save_checkpoint`.
            replace: Whether this one is fit to take the place of earlier ones.
            settled: The state stays as it is until :meth:`wait` returns, so that it can be copied in the thread too.

        Returns:
            The file, which is there after :meth:`wait`.

        Raises:
            OSError: An earlier checkpoint could not be written.
        """
        if not settled:
            state = pack_checkpoint(state)
        while len(self._writing) > 1 or (self._writing and self._writing[0].done()):
            self._writing.pop(0).result()
        path = checkpoint_path(self._directory, step)
        self._writing.append(self._thread.submit(self._write, path, state, not settled, replace and not self._keep))
        return path

    def wait(self) -> None:
        """Waits until all checkpoints are on disk.

        Raises:
            OSError: One could not be written.
        """
        while self._writing:
            self._writing.pop(0).result()

    def _write(self, path: Path, state: dict[str, Any], packed: bool, replace: bool) -> None:
        write_checkpoint(path, state if packed else pack_checkpoint(state))
        if not replace:
            return
        try:
            replace_checkpoints([older for older in self._replaceable if older != path], path)
        except (CheckpointError, OSError) as error:
            logger.error("%s; earlier checkpoints stay where they are", error)
            self._replaceable.append(path)
        else:
            self._replaceable = [path]
