"""Run directories: locking, so that only one run uses each, and detection of an earlier run's files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from voxelfield.export.model_file import MODEL_FILE
from voxelfield.files import remove_temporaries
from voxelfield.training.checkpoint import checkpoints
from voxelfield.training.config import TrainerConfig

try:
    import fcntl
except ImportError:  # Windows, where run directories are not locked
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the file that is locked during a run. The lock ends with the process, in whatever way that ends."""

METRICS = "metrics.json"
"""Name of the file with a run's metrics."""

VIDEO = "orbit.mp4"
"""Name of the video that a finished run writes."""

REPORT = "report.html"
"""Name of the report on a finished run."""

HYDRA_RECORDS = (".hydra", "train.log")
"""Names that Hydra creates in a run directory before the program reads its settings."""

# Locks that this process holds: open files by run directory.
_held: dict[Path, int | None] = {}

# The held directories that this process has created; they are removed on release unless :func:`keep` is called.
_made: set[Path] = set()


class DirectoryInUseError(ValueError):
    """Another run is using a directory; the message names both."""


def hold(directory: Path) -> None:
    """Locks a run directory until :func:`release`, unless this process has already locked it.

    Temporary files left there by a killed run are removed. A directory that this function creates is removed on
    release, unless :func:`keep` was called or something other than Hydra has written there, so that a rejected run
    leaves no directory.

    Args:
        directory: Run directory; created if needed.

    Raises:
        DirectoryInUseError: Another process has locked it.
        OSError: The directory cannot be created or written to.
    """
    directory = directory.resolve()
    if directory in _held:
        return
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    _held[directory] = _lock(directory)
    if made:
        _made.add(directory)
    # Images are in one folder per split. Other folders may belong to another run in progress.
    for folder in (directory, *(directory / name for name in ("train", "val", "test"))):
        if folder.is_dir():
            remove_temporaries(folder)


def keep(directory: Path) -> None:
    """Keeps a directory on release, whatever the outcome of the run; called when training begins.

    Args:
        directory: As for :func:`hold`.
    """
    _made.discard(directory.resolve())


def release() -> None:
    """Releases all directories that this process has locked."""
    for directory in list(_held):
        _release(directory)


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Locks a run directory during a block; if it was already locked, it stays locked afterwards.

    Args:
        directory: As for :func:`hold`.

    Raises:
        DirectoryInUseError: As for :func:`hold`.
        OSError: As for :func:`hold`.
    """
    before = directory.resolve() in _held
    hold(directory)
    try:
        yield
    finally:
        if not before:
            _release(directory.resolve())


def check_ended(directory: Path) -> None:
    """Raises if another process is still training in a directory.

    Args:
        directory: Run directory from which a checkpoint is loaded.

    Raises:
        DirectoryInUseError: The run there has not ended.
    """
    path = directory / LOCK
    if fcntl is None or directory.resolve() in _held or not path.is_file():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(descriptor)
        raise DirectoryInUseError(f"resume must name a run that has ended, but {holder} is using {directory}") from None
    except OSError:  # a file system without locks
        return
    finally:
        os.close(descriptor)


def earlier_run(directory: Path) -> list[str]:
    """Returns names of files that an earlier run left in a directory, at most one of each kind.

    Args:
        directory: Run directory, which need not exist.
    """
    found = checkpoints(directory)[-1:] if directory.is_dir() else []
    found += [path for path in (directory / METRICS, directory / MODEL_FILE) if path.is_file()]
    return [path.name for path in (*found, *sorted(directory.glob("events.out.tfevents.*"))[-1:])]


def finished_metrics(directory: Path, config: TrainerConfig) -> dict[str, Any] | None:
    """Returns the metrics of a run that has produced everything configured, or None if something is missing.

    Args:
        directory: Run directory, which need not exist.
        config: Settings of the training loop.
    """
    wanted = [METRICS, *([MODEL_FILE] if config.model_file != "none" else [])]
    wanted += [VIDEO] if config.evaluation.video_frames > 0 else []
    if not all((directory / name).is_file() for name in wanted):
        return None
    try:
        metrics: dict[str, Any] = json.loads((directory / METRICS).read_text(encoding="utf-8"))
    except ValueError:  # edited by hand
        return None
    return metrics if metrics["steps"] >= config.steps else None


def _lock(directory: Path) -> int | None:
    """Returns the open file that holds the lock, or None if locking is not supported."""
    if fcntl is None:
        return None
    path = directory / LOCK
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the previous holder has just removed the directory
            directory.mkdir(parents=True, exist_ok=True)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise DirectoryInUseError(
                f"hydra.run.dir must be a folder that no other run is using, but {holder} is using {directory}"
            ) from None
        except OSError as error:
            os.close(descriptor)
            logger.warning("%s cannot be locked (%s): make sure that no other run uses it", directory, error.strerror)
            return None
        # The previous holder may have removed the file between the calls that open and lock it.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    with contextlib.suppress(OSError):  # for example a full disk; the text is only used in messages
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, 200, 0).decode(errors="replace")
    return text or "another process"


def _release(directory: Path) -> None:
    descriptor = _held.pop(directory)
    # Before the lock is released, so that no files of another process are removed.
    with contextlib.suppress(OSError):
        if directory in _made and {path.name for path in directory.iterdir()} <= {LOCK, *HYDRA_RECORDS}:
            shutil.rmtree(directory)
        elif descriptor is not None:
            (directory / LOCK).unlink()
    _made.discard(directory)
    if descriptor is not None:
        os.close(descriptor)
