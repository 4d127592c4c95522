"""Reading of regular files, atomic writing of files, and recognition of the images that voxelfield has written."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

# Opening a named pipe waits for a writer without the first; Windows turns line ends into others without the second.
_READ_ONLY = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

HEIC_SUFFIXES = (".heic", ".heif")  # photographs of iPhones, which Pillow reads with pillow-heif only
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", *HEIC_SUFFIXES)
"""Endings of the names of image files, in lower case. The format itself is recognised by a file's content."""

MARK = "written by voxelfield"
"""Text in the header of every rendered image, which distinguishes it from photographs."""

# The headers of PNG and EXR files, with the mark, are shorter.
_HEADER = 4096
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp(\.[^.]*)?")
# Most characters of a name and of its suffix that a temporary name repeats; a file system's limit is usually 255 bytes.
_STEM, _SUFFIX = 40, 10
# Errors of file systems that cannot flush a file or a folder, such as some network and FUSE mounts.
_CANNOT_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.EACCES}


def size_on_disk(path: Path) -> int:
    """Returns the bytes of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file, or a link to one, for reading.

    Raises:
        FileNotFoundError: It does not exist.
        ValueError: It is something else, such as a named pipe, whose readers may wait forever, or a device, which may
            never end.
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, _READ_ONLY)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{os.fspath(path)} must be a file, got {_kind(mode)}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a regular file; arguments and errors are as for :func:`open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the JSON object that a regular file consists of, in UTF-8, UTF-16 or UTF-32.

    Raises:
        ValueError: It is not a JSON object, or as for :func:`open_regular`.
        OSError: As for :func:`open_regular`.
    """
    content = read_regular(path)
    try:
        found = json.loads(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8 text, or UTF-16 with a byte order mark ({error})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must hold a JSON object, got a {type(found).__name__}")
    return found


def json_number(value: object) -> float:
    """Returns a number that JSON contains; NaN for anything else, and infinity beyond the range of floating point."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # JSON has whole numbers of any length
        return math.inf


def check_suffix(name: str, path: Path | str, suffixes: Sequence[str]) -> None:
    """Raises ValueError unless a path, called ``name`` in the message, is one line with one of some suffixes."""
    if len(Path(path).name.splitlines()) > 1:  # files such as an OBJ contain their names
        raise ValueError(f"{name} must be a file whose name is one line, got {str(path)!r}")
    if not Path(path).name[1:].lower().endswith(tuple(suffixes)):  # a name that is a suffix alone has none
        raise ValueError(f"{name} must be a file *{', *'.join(suffixes)}, got {path}")


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str], *, sync: bool = True) -> Iterator[Path]:
    """Yields a new path next to ``path``; moves the file that the block makes there onto ``path`` if it succeeds.

    For writers that open the file themselves, such as OpenEXR. The temporary name is hidden (leading dot), has the
    suffix of ``path`` and is in the same directory, so the move is one atomic rename. If the block ends early for any
    reason, including Ctrl-C, the previous ``path`` is left unchanged and the temporary file is removed. On POSIX the
    data and the rename are on disk when the block returns, so a later power failure cannot restore a truncated file;
    file systems that cannot flush a file or a folder give no such guarantee.

    Args:
        path: Final path. Its parent directory is created if needed. A symbolic link is replaced, not followed.
        sync: Wait for the disk. Without it, a power failure may leave an empty file; use that for reproducible files.

    Raises:
        OSError: The file cannot be written. An error that names the temporary file, or none, names ``path`` instead.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = path.suffix if len(path.suffix) <= _SUFFIX else ""
    temporary = path.with_name(f".{path.stem[:_STEM]}.{secrets.token_hex(4)}.tmp{suffix}")
    try:
        yield temporary
        if sync:
            _sync(temporary)
        # Unlike Path.rename, replace overwrites an existing file on every platform.
        temporary.replace(path)
    except OSError as error:
        # A full disk is reported by the call that writes, which knows no name.
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        # In a folder that has become read-only, nothing can be removed; the earlier error is the one to report.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    if sync:
        _sync(path.parent)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a binary file, whose content replaces ``path`` if the block succeeds; see :func:`atomic_path`.

    It can be written and read, and has the usual permissions of a new file (umask).
    """
    # The builtin open instead of tempfile, whose files are readable by their owner only, and would stay so.
    with atomic_path(path) as temporary, temporary.open("x+b") as file:
        yield file


def write_file(path: str | os.PathLike[str], content: bytes | memoryview) -> None:
    """Writes a file, which replaces ``path`` once it is complete; see :func:`atomic_path`."""
    with atomic_write(path) as file:
        file.write(content)


def write_json(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Writes a JSON object as :func:`write_file` does, with an entry a line."""
    write_file(path, (json.dumps(values, indent=1) + "\n").encode())


def is_replaceable(path: Path) -> bool:
    """Returns whether an image may be written to a path: there is none, or one with :data:`MARK` in its header.

    Raises OSError if the path is not valid, for example too long, or the file cannot be read.
    """
    try:
        # Opening a named pipe would wait for a writer.
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False
    with path.open("rb") as file:
        return MARK.encode() in file.read(_HEADER)


def remove_temporaries(directory: Path) -> None:
    """Removes the temporary files of :func:`atomic_path` from a directory to which no process is writing."""
    for path in directory.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flushes a file's data, or a directory's entries, to the disk, where the file system can."""
    if os.name != "posix":  # Windows opens no directories and syncs only files opened for writing
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def _kind(mode: int) -> str:
    """Returns the kind of a file that is not regular, from its mode."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
