"""Run directories: locking, so that only one run uses each, and detection of an earlier run's files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from voxelfield.datasets.images import IMAGE_SUFFIXES
from voxelfield.files import remove_temporaries
from voxelfield.training.cameras.refined_cameras import CAMERAS_FILE
from voxelfield.training.logs.logging import EVENTS
from voxelfield.training.state.checkpoint import checkpoints

try:
    import fcntl
except ImportError:  # Windows, where run directories are not locked
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the file that is locked during a run. The lock ends with the process, in whatever way that ends."""

METRICS = "metrics.json"
"""Name of the file with a run's metrics."""

MODEL_FILE = "model.safetensors"
"""Name of the model file of a finished run."""

VIDEO = "orbit.mp4"
"""Name of the video that a finished run writes."""

REPORT = "report.html"
"""Name of the report on a finished run."""

HYDRA_RECORDS = (".hydra", "train.log")
"""Names that Hydra creates in a run directory before the program reads its settings."""

PER_VIEW = "per_view.csv"
"""Name of the table of evaluated views."""

PICTURES = ("train", "val", "test")
"""Names of the folders of rendered views, one for each split."""

RESULTS = (METRICS, PER_VIEW, CAMERAS_FILE, MODEL_FILE, VIDEO, REPORT, *PICTURES)
"""Names of everything that a finished run writes and replaces, besides its records and checkpoints."""


@dataclass
class _Lock:
    """The lock of a directory.

    Attributes:
        descriptor: The open lock file; None if locking is not supported.
        reserved: The reservation of the directory's path; None if that is not supported.
        made: Whether this process has created the directory, and removes it on release unless :func:`keep` is called.
        users: Number of calls that want the directory to be locked.
    """

    descriptor: int | None
    reserved: socket.socket | None
    made: bool
    users: int = 1


# The locks that this process holds. Checkpoints are written by another thread than the one that trains.
_held: dict[Path, _Lock] = {}
_changing = threading.RLock()


class DirectoryInUseError(ValueError):
    """Another run is using a directory; the message names both."""


def hold(directory: Path, name: str = "hydra.run.dir") -> None:
    """Locks a run directory until :func:`release`; this process may lock it repeatedly.

    Temporary files left there by a killed run are removed. A directory that this function creates is removed on
    release, unless :func:`keep` was called or something other than Hydra has written there, so that a rejected run
    leaves no directory. On Linux the path stays locked for other processes of this machine even if the directory is
    moved or deleted; see :func:`hold_again`.

    Args:
        directory: Run directory; created if needed.
        name: What the caller calls the directory, for messages.

    Raises:
        DirectoryInUseError: Another process has locked it.
        OSError: The directory cannot be created or written to.
    """
    directory = directory.resolve()
    with _changing:
        if directory in _held:
            _held[directory].users += 1
            return
        with contextlib.ExitStack() as failing:
            reserved = _reserve(directory, name)
            if reserved is not None:
                failing.enter_context(reserved)
            made = not directory.exists()
            _held[directory] = _Lock(_lock(directory, name), reserved, made)
            failing.pop_all()
    # Images are in one folder per split. Other folders may belong to another run in progress.
    for folder in (directory, *(directory / split for split in PICTURES)):
        if folder.is_dir():
            remove_temporaries(folder)


def hold_again(directory: Path) -> None:
    """Locks a held directory anew if it was moved or deleted; called before files are written there.

    Does nothing for a directory that this process has not locked.

    Args:
        directory: As for :func:`hold`.

    Raises:
        DirectoryInUseError: Another process has locked the directory that is there now.
        OSError: The directory cannot be created.
    """
    directory = directory.resolve()
    with _changing:
        lock = _held.get(directory)
        if lock is None:
            return
        if not directory.is_dir():
            logger.warning(
                "%s was deleted, with everything that this run had written there, or moved away; it is created again "
                "for the remaining results",
                directory,
            )
            directory.mkdir(parents=True, exist_ok=True)
        if lock.descriptor is None or _is_at(lock.descriptor, directory / LOCK):
            return
        os.close(lock.descriptor)
        lock.descriptor, lock.made = None, False
        lock.descriptor = _lock(directory, "hydra.run.dir")


def keep(directory: Path) -> None:
    """Keeps a directory on release, whatever the outcome of the run; called when training begins.

    Args:
        directory: As for :func:`hold`.
    """
    lock = _held.get(directory.resolve())
    if lock is not None:
        lock.made = False


def release() -> None:
    """Releases all directories that this process has locked."""
    for directory in list(_held):
        _release(directory)


@contextlib.contextmanager
def held(directory: Path, name: str = "hydra.run.dir") -> Iterator[None]:
    """Locks a run directory during a block; if something else has locked it, too, it stays locked afterwards.

    Args:
        directory: As for :func:`hold`.
        name: As for :func:`hold`.

    Raises:
        DirectoryInUseError: As for :func:`hold`.
        OSError: As for :func:`hold`.
    """
    directory = directory.resolve()
    hold(directory, name)
    try:
        yield
    finally:
        with _changing:
            lock = _held.get(directory)
            if lock is not None:
                lock.users -= 1
                if lock.users == 0:
                    _release(directory)


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
    with path.open("rb") as file, contextlib.suppress(OSError):  # of a file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUseError(
                f"resume must name a run that has ended, but {_holder(file.fileno())} is using {directory}"
            ) from None


def check_results(directory: Path, name: str = "hydra.run.dir") -> None:
    """Raises unless a directory can be that of a run: nothing in it belongs to something else.

    Args:
        directory: Run directory, which need not exist.
        name: As for :func:`hold`.

    Raises:
        ValueError: The directory has images, or files or folders with the names of results, but nothing tells of a run.
    """
    if not directory.is_dir() or (directory / HYDRA_RECORDS[0]).is_dir() or checkpoints(directory):
        return
    present = [result for result in RESULTS if (directory / result).exists()]
    # A run keeps its own images in subfolders.
    images = (path.name for path in sorted(directory.iterdir()) if path.suffix.lower() in IMAGE_SUFFIXES)
    present += [image for image in (next(images, None),) if image is not None]
    if present:
        raise ValueError(
            f"{name} must be a new folder or that of an earlier run, got {directory}, which holds {', '.join(present)} "
            "of something else: choose another folder"
        )


def earlier_run(directory: Path) -> list[str]:
    """Returns names of files that an earlier run left in a directory, at most one of each kind.

    Args:
        directory: Run directory, which need not exist.
    """
    found = checkpoints(directory)[-1:] if directory.is_dir() else []
    found += [path for path in (directory / METRICS, directory / MODEL_FILE) if path.is_file()]
    return [path.name for path in (*found, *sorted(directory.glob(EVENTS))[-1:])]


def _reserve(directory: Path, name: str) -> socket.socket | None:
    """Reserves a path until this process ends; returns None if that is not supported.

    A lock file lies in the directory and goes where that goes, so that the path alone would look free. A socket of
    Linux that has a name but no file is bound to the path, and ends with its process.
    """
    if sys.platform != "linux":
        return None
    # Containers may share names of sockets, but have root folders of their own.
    root = Path("/").stat()
    place = f"{root.st_dev} {root.st_ino} ".encode() + os.fsencode(directory)
    address = b"\0voxelfield " + hashlib.sha256(place).hexdigest().encode()
    reserved = socket.socket(socket.AF_UNIX)
    try:
        reserved.bind(address)
        reserved.listen()
    except OSError as error:
        reserved.close()
        if error.errno != errno.EADDRINUSE:
            return None
        raise _in_use(name, _owner(address), directory) from None
    return reserved


def _owner(address: bytes) -> str:
    """Describes the process that has reserved a path."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        asking.connect(address)
        (process,) = struct.unpack("i8x", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if process > 0:  # processes of other containers have no number here
            return f"process {process} on {socket.gethostname()}"
    return "another process"


def _in_use(name: str, holder: str, directory: Path) -> DirectoryInUseError:
    return DirectoryInUseError(f"{name} must be a folder that no other run is using, but {holder} is using {directory}")


def _lock(directory: Path, name: str) -> int | None:
    """Creates a directory if needed; returns the open file that holds its lock, or None if that is not supported."""
    path = directory / LOCK
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        if fcntl is None:
            return None
        try:
            # A link could lead to a file of someone else, which would then be overwritten.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # the previous holder has just removed the directory
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise _in_use(name, holder, directory) from None
        except OSError as error:
            os.close(descriptor)
            logger.warning("%s cannot be locked (%s): make sure that no other run uses it", directory, error.strerror)
            return None
        # The previous holder may have removed the file between the calls that open and lock it.
        if _is_at(descriptor, path):
            break
        os.close(descriptor)
    with contextlib.suppress(OSError):  # for example a full disk; the text is only used in messages
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return descriptor


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, 200, 0).decode(errors="replace")
    return text or "another process"


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def _release(directory: Path) -> None:
    lock = _held.pop(directory)
    path = directory / LOCK
    # Before the lock is released, so that no files of another process are removed; nor are they where the directory was
    # moved away and another one is in its place.
    if lock.descriptor is None or _is_at(lock.descriptor, path):
        with contextlib.suppress(OSError):
            if lock.made and {entry.name for entry in directory.iterdir()} <= {LOCK, *HYDRA_RECORDS}:
                shutil.rmtree(directory)
            elif lock.descriptor is not None:
                path.unlink()
    if lock.descriptor is not None:
        os.close(lock.descriptor)
    if lock.reserved is not None:
        lock.reserved.close()
