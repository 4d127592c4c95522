"""Run directories: one run at a time in each, and what an earlier run left there."""

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
"""Name of the file that is locked while a run is at work. The lock ends with the process, however that ends."""

METRICS = "metrics.json"
"""Name of the file with a run's figures."""

VIDEO = "orbit.mp4"
"""Name of the video that a finished run shows itself in."""

REPORT = "report.html"
"""Name of the page that tells of a finished run."""

HYDRA_RECORDS = (".hydra", "train.log")
"""What Hydra writes into a run directory before the program has looked at its settings."""

# Locks that this process holds: open files by run directory.
_held: dict[Path, int | None] = {}

# Those of them that this process has made, and that go again unless :func:`keep` is called.
_made: set[Path] = set()


class DirectoryInUseError(ValueError):
    """Another run is at work in a directory; the message names both."""


def hold(directory: Path) -> None:
    """Locks a run directory until :func:`release`, unless this process holds it already.

    Temporary files that a killed run left there are removed. A directory that this makes goes again when it is
    released, unless :func:`keep` was called or Hydra is not the only one to have written there: a run that is refused
    leaves none.

    Args:
        directory: Run directory; created if needed.

    Raises:
        DirectoryInUseError: Another process holds it.
        OSError: It cannot be created or written to.
    """
    directory = directory.resolve()
    if directory in _held:
        return
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    _held[directory] = _lock(directory)
    if made:
        _made.add(directory)
    # Pictures lie in a folder for each split. Others may belong to another run that is at work.
    for folder in (directory, *(directory / name for name in ("train", "val", "test"))):
        if folder.is_dir():
            remove_temporaries(folder)


def keep(directory: Path) -> None:
    """Lets a directory stay whatever becomes of the run, because training begins there.

    Args:
        directory: As for :func:`hold`.
    """
    _made.discard(directory.resolve())


def release() -> None:
    """Gives back every directory that this process holds."""
    for directory in list(_held):
        _release(directory)


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Holds a run directory during a block, and longer if it was held before.

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
    """Refuses a directory in which another process is still training.

    Args:
        directory: Run directory that a checkpoint is taken from.

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
        raise DirectoryInUseError(f"resume must name a run that has ended, but {holder} is in {directory}") from None
    except OSError:  # a file system without locks
        return
    finally:
        os.close(descriptor)


def earlier_run(directory: Path) -> list[str]:
    """Returns names of what an earlier run left in a directory, at most one of each kind; none in a new one.

    Args:
        directory: Run directory, which need not exist.
    """
    found = checkpoints(directory)[-1:] if directory.is_dir() else []
    found += [path for path in (directory / METRICS, directory / MODEL_FILE) if path.is_file()]
    return [path.name for path in (*found, *sorted(directory.glob("events.out.tfevents.*"))[-1:])]


def finished_metrics(directory: Path, config: TrainerConfig) -> dict[str, Any] | None:
    """Returns the metrics of a run that has done all that it was asked for, or None if something is left to do.

    Args:
        directory: Run directory, which need not exist.
        config: What is asked for.
    """
    wanted = [METRICS, *([MODEL_FILE] if config.model_file != "none" else [])]
    wanted += [VIDEO] if config.evaluation.video_frames > 0 else []
    if not all((directory / name).is_file() for name in wanted):
        return None
    try:
        metrics: dict[str, Any] = json.loads((directory / METRICS).read_text(encoding="utf-8"))
    except ValueError:  # somebody edited it
        return None
    return metrics if metrics["steps"] >= config.steps else None


def _lock(directory: Path) -> int | None:
    """Returns the open file that holds the lock, or None where nothing can be locked."""
    if fcntl is None:
        return None
    path = directory / LOCK
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the holder before has just removed the directory
            directory.mkdir(parents=True, exist_ok=True)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise DirectoryInUseError(
                f"hydra.run.dir must be a folder that no other run is using, but {holder} is in {directory}"
            ) from None
        except OSError as error:
            os.close(descriptor)
            logger.warning("%s cannot be locked (%s): no other run may use it meanwhile", directory, error.strerror)
            return None
        # The holder before may have removed the file between its opening and its locking here.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    with contextlib.suppress(OSError):  # a full disk; the text is only for messages
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, 200, 0).decode(errors="replace")
    return text or "another process"


def _release(directory: Path) -> None:
    descriptor = _held.pop(directory)
    # Before the lock ends, so that nobody's files but this one's are removed.
    with contextlib.suppress(OSError):
        if directory in _made and {path.name for path in directory.iterdir()} <= {LOCK, *HYDRA_RECORDS}:
            shutil.rmtree(directory)
        elif descriptor is not None:
            (directory / LOCK).unlink()
    _made.discard(directory)
    if descriptor is not None:
        os.close(descriptor)
