"""Run directories: the names of their files, and their locks, so that only one run uses each."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
import socket
import threading
from pathlib import Path
from typing import Any, ClassVar

from voxelfield.files import read_json_object, remove_temporaries
from voxelfield.installed import config_folder

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


_LAST = "last.pt"
_NUMBERED = re.compile(r"checkpoint_(\d+)\.pt")

_METRICS_HOLD: dict[str, Any] = {
    "scene": str,
    "psnr": (int, float),
    "train_seconds": (int, float),
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


def runs_folder() -> Path:
    """Returns the folder of all runs: ``hydra.run.dir`` in ``configs/train.yaml``, up to the name of the scene."""
    import yaml  # commands that take no run do without it

    settings = yaml.safe_load((config_folder() / "train.yaml").read_text(encoding="utf-8"))
    return Path(settings["hydra"]["run"]["dir"].partition("${")[0])


def runs_in(folder: Path) -> tuple[dict[Path, dict[str, Any]], list[str]]:
    """Returns the metrics of the finished runs below a folder, the last at the end, and what other directories lack."""
    finished: dict[Path, dict[str, Any]] = {}
    others = []
    for directory in sorted({path.parent for name in (METRICS, HYDRA_RECORDS[0]) for path in folder.rglob(name)}):
        try:
            finished[directory] = read_metrics(directory)
        except FileNotFoundError:
            others.append(f"{directory}: not finished")
        except (OSError, ValueError) as error:
            others.append(str(error))
    return dict(sorted(finished.items(), key=lambda run: (run[0] / METRICS).stat().st_mtime)), others


def run_path(text: str) -> Path:
    """Returns the path of RUN; ``latest`` is the run in :func:`runs_folder` that finished last, if one has."""
    if text != "latest":
        return Path(text)
    finished, _ = runs_in(folder := runs_folder())
    if not finished:
        expected = "RUN must be a run directory, a checkpoint or a model file"
        raise FileNotFoundError(f"{expected}, got the latest run, but none in {folder.resolve()} has finished")
    logger.info("RUN is %s, which finished last", latest := [*finished][-1])
    return latest


def checkpoints(directory: Path) -> list[Path]:
    """Lists a directory's checkpoints, the newest last."""
    files = [file for file in directory.iterdir() if _NUMBERED.fullmatch(file.name) or file.name == _LAST]
    return sorted((file for file in files if file.is_file()), key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """Returns the number of steps in a checkpoint's name, or -1 if there is none, as in ``last.pt``."""
    match = _NUMBERED.fullmatch(path.name)
    return int(match[1]) if match else -1


class DirectoryInUseError(ValueError):
    """Another run is using a directory; the message names both."""


class Writer:
    """A writer of this process, which may write to a directory unless another one has done so since it was made."""

    _moments = itertools.count()
    _last: ClassVar[dict[Path, tuple[Writer, int]]] = {}

    def __init__(self) -> None:
        self._made = next(self._moments)

    def claim(self, output: Path) -> None:
        """Raises DirectoryInUseError if this may not write to a directory."""
        directory = output.resolve()
        last, moment = self._last.get(directory, (self, 0))
        if last is not self and moment > self._made:
            raise DirectoryInUseError(
                f"output must be a folder that nothing else is using, but another session of this process has written "
                f"to {directory} since this one was made: give each its own"
            )
        self._last[directory] = self, next(self._moments)


class RunDirectoryLock(contextlib.AbstractContextManager["RunDirectoryLock"]):
    """An exclusive lock of a run directory, which ends with the process, in whatever way that ends.

    The process that writes takes it once, and hands it on. The directory is created if needed, and temporary files that
    a killed run left there are removed. As a context manager, the lock is released at the end of the block.

    Args:
        directory: The directory.
        name: Name of the directory's setting, for messages.

    Attributes:
        directory: The directory, as an absolute path.
        created: Whether the directory is removed on release if only Hydra has written there, so that a rejected run
            leaves no directory: it did not exist before. Set it to False when training begins.

    Raises:
        DirectoryInUseError: The directory is locked already.
        OSError: The directory cannot be created or written to.
    """

    def __init__(self, directory: Path, name: str = "hydra.run.dir") -> None:
        self.directory = Path(os.path.abspath(directory))  # noqa: PTH100 - messages keep its links
        self.created = not self.directory.exists()
        self._is_released = False
        # Checkpoints are written by another thread than the one that trains.
        self._changing = threading.Lock()
        self._name = name
        self._descriptor = _lock(self.directory, name)
        # Images are in one folder per split. Other folders may belong to another run in progress.
        for folder in (self.directory, *(self.directory / split for split in (MASKS, *PICTURES))):
            if folder.is_dir():
                remove_temporaries(folder)

    def renew(self) -> None:
        """Locks the directory again if it was moved or deleted; called before files are written there.

        Raises:
            DirectoryInUseError: Another process has locked the directory that is there now.
            OSError: The directory cannot be created.
        """
        with self._changing:
            without_locks = self._descriptor is None and self.directory.is_dir()
            if self._is_released or without_locks or self._is_in_place():
                return
            logger.warning(
                "%s was deleted, with everything that this run had written there, or moved away; it is created again "
                "for the remaining results",
                self.directory,
            )
            descriptor = _lock(self.directory, self._name)
            self._close()
            self.created, self._descriptor = False, descriptor

    def release(self) -> None:
        """Ends the lock; does nothing the second time."""
        with self._changing:
            if self._is_released:
                return
            self._is_released = True
            # Files of another process are not removed: before the lock ends, and only where it still is.
            if self._descriptor is None or self._is_in_place():
                with contextlib.suppress(OSError):
                    if self.created and {path.name for path in self.directory.iterdir()} <= {LOCK, *HYDRA_RECORDS}:
                        shutil.rmtree(self.directory)
                    else:
                        (self.directory / LOCK).unlink()
            self._close()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_in_place(self) -> bool:
        return self._descriptor is not None and _is_at(self._descriptor, self.directory / LOCK)

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
    if fcntl is None or not path.is_file():
        return
    with path.open("rb") as file, contextlib.suppress(OSError):  # of a file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUseError(
                f"resume must name a run that has ended, but {_owner(file.fileno())} is using {directory}"
            ) from None
