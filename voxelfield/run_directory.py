"""Run directories: locking, so that only one run uses each, and detection of an earlier run's files."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import threading
from pathlib import Path
from typing import Any, ClassVar

from voxelfield.datasets.images import IMAGE_SUFFIXES
from voxelfield.files import read_json_object, remove_temporaries
from voxelfield.trained.checkpoint_file import checkpoints

try:
    import fcntl
except ImportError:  # Windows, where run directories are not locked
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".lock"
METRICS = "metrics.json"
MODEL_FILE = "model.safetensors"
VIDEO = "orbit.mp4"
REPORT = "report.html"
PER_VIEW = "per_view.csv"
CAMERAS_FILE = "cameras.json"

EVENTS = "events.out.tfevents.*"
"""Names of TensorBoard's files, which continue with the second in which a file was begun, the host and the process."""

HYDRA_RECORDS = (".hydra", "train.log")
"""Names that Hydra creates in a run directory before the program reads its settings."""

PICTURES = ("train", "val", "test")
"""Names of the folders of rendered views, one for each split."""

MASKS = "masks"
"""Name of the folder of masks of what moves (:mod:`voxelfield.components.robust`)."""

RESULTS = (METRICS, PER_VIEW, CAMERAS_FILE, MODEL_FILE, VIDEO, REPORT, MASKS, *PICTURES)
"""Names of everything that a finished run writes and replaces, besides its records and checkpoints."""


_METRICS_HOLD: dict[str, Any] = {
    "psnr": (int, float),
    "steps": int,
    "settings": dict,
    "psnr_per_view": dict,
    "per_view": list,
    "split": str,
}


def read_metrics(directory: Path) -> dict[str, Any]:
    """Returns the content of the ``metrics.json`` of a finished run.

    Raises:
        OSError: The file cannot be read.
        ValueError: It does not have the entries of such a file; the message names it.
    """
    metrics = read_json_object(directory / METRICS)
    for key, kind in _METRICS_HOLD.items():
        if not isinstance(metrics.get(key), kind):
            raise ValueError(f"{directory / METRICS}: must have the entry {key!r} of a finished run")
    return metrics


class DirectoryInUseError(ValueError):
    """Another run is using a directory; the message names both."""


class RunDirectoryLock:
    """An exclusive lock of a run directory, which ends with the process, in whatever way that ends.

    The process may lock a directory several times; the lock ends with the last of its users. As a context manager, it
    releases one of them at the end of the block.

    Attributes:
        created: Whether the directory is removed on release if only Hydra has written there, so that a rejected run
            leaves no directory: it did not exist before. Set it to False when training begins.
    """

    _of_this_process: ClassVar[dict[Path, RunDirectoryLock]] = {}
    # Checkpoints are written by another thread than the one that trains.
    _changing = threading.RLock()

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._users = directory, 1
        self.created = not directory.exists()
        self._descriptor = _lock(directory, name)

    @classmethod
    def acquire(cls, directory: Path, name: str = "hydra.run.dir") -> RunDirectoryLock:
        """Locks a run directory, created if needed, and removes temporary files that a killed run left there.

        Raises:
            DirectoryInUseError: Another process has locked it.
            OSError: The directory cannot be created or written to.
        """
        directory = directory.resolve()
        with cls._changing:
            lock = cls._of_this_process.get(directory)
            if lock is not None:
                lock._users += 1
                return lock
            lock = cls._of_this_process[directory] = cls(directory, name)
        # Images are in one folder per split. Other folders may belong to another run in progress.
        for folder in (directory, *(directory / split for split in (MASKS, *PICTURES))):
            if folder.is_dir():
                remove_temporaries(folder)
        return lock

    @classmethod
    def renew(cls, directory: Path) -> None:
        """Locks a directory again if it was moved or deleted; called before files are written there.

        Does nothing for a directory that this process has not locked.

        Raises:
            DirectoryInUseError: Another process has locked the directory that is there now.
            OSError: The directory cannot be created.
        """
        with cls._changing:
            lock = cls._of_this_process.get(directory.resolve())
            if lock is None or (lock._descriptor is None and directory.is_dir()) or lock._is_in_place():
                return
            logger.warning(
                "%s was deleted, with everything that this run had written there, or moved away; it is created again "
                "for the remaining results",
                directory,
            )
            descriptor = _lock(lock._directory, "hydra.run.dir")
            lock._close()
            lock.created, lock._descriptor = False, descriptor

    def release(self) -> None:
        """Ends one use of the lock."""
        with self._changing:
            self._users -= 1
            if self._users > 0 or self._of_this_process.get(self._directory) is not self:
                return
            del self._of_this_process[self._directory]
            # Files of another process are not removed: before the lock ends, and only where it still is.
            if self._descriptor is None or self._is_in_place():
                with contextlib.suppress(OSError):
                    if self.created and {path.name for path in self._directory.iterdir()} <= {LOCK, *HYDRA_RECORDS}:
                        shutil.rmtree(self._directory)
                    else:
                        (self._directory / LOCK).unlink()
            self._close()

    @classmethod
    def release_all(cls) -> None:
        """Releases all directories that this process has locked."""
        for lock in list(cls._of_this_process.values()):
            lock._users = 1
            lock.release()

    def __enter__(self) -> RunDirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_in_place(self) -> bool:
        return self._descriptor is not None and _is_at(self._descriptor, self._directory / LOCK)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def _lock(directory: Path, name: str) -> int | None:
    """Creates a directory if needed; returns its open and locked file, or None if locking is not supported."""
    path = directory / LOCK
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            return None
        try:
            # A link could lead to a file of someone else, which would then be overwritten.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # another process has just removed the directory
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(descriptor)
            os.close(descriptor)
            raise DirectoryInUseError(
                f"{name} must be a folder that no other run is using, but {owner} is using {directory}"
            ) from None
        except OSError as error:
            os.close(descriptor)
            logger.warning("%s cannot be locked (%s): make sure that no other run uses it", directory, error.strerror)
            return None
        # Another process may have removed the file between the calls that open and lock it.
        if _is_at(descriptor, path):
            break
        os.close(descriptor)
    with contextlib.suppress(OSError):  # for example a full disk; the text is only used in messages
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _owner(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def check_ended(directory: Path) -> None:
    """Raises DirectoryInUseError if another process is training in a directory from which a checkpoint is loaded."""
    path = directory / LOCK
    if fcntl is None or directory.resolve() in RunDirectoryLock._of_this_process or not path.is_file():
        return
    with path.open("rb") as file, contextlib.suppress(OSError):  # of a file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUseError(
                f"resume must name a run that has ended, but {_owner(file.fileno())} is using {directory}"
            ) from None


def check_results(directory: Path) -> None:
    """Raises ValueError if a directory has images or files with the names of results, but no records of a run."""
    if not directory.is_dir() or (directory / HYDRA_RECORDS[0]).is_dir() or checkpoints(directory):
        return
    present = [result for result in RESULTS if (directory / result).exists()]
    # A run writes its own images to subfolders.
    present += [path.name for path in sorted(directory.iterdir()) if path.suffix.lower() in IMAGE_SUFFIXES][:1]
    if present:
        raise ValueError(
            f"hydra.run.dir must be a new folder or that of an earlier run, got {directory}, which contains "
            f"{', '.join(present)} of something else: choose another folder"
        )


def earlier_run(directory: Path) -> list[str]:
    """Returns names of files that an earlier run left in a directory, at most one of each kind."""
    found = checkpoints(directory)[-1:] if directory.is_dir() else []
    found += [path for path in (directory / METRICS, directory / MODEL_FILE) if path.is_file()]
    return [path.name for path in (*found, *sorted(directory.glob(EVENTS))[-1:])]
