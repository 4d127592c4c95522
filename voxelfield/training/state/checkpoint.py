"""Checkpoints: files written atomically, loaded without executing code, and checked for damage."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import torch

from voxelfield.files import atomic_write, open_regular
from voxelfield.messages import clipped
from voxelfield.ops._errors import is_out_of_memory
from voxelfield.training.state.zero_packing import copy_without_zeros, put_back_zeros

logger = logging.getLogger(__name__)

FORMAT = 8
"""Layout version of the files. Raise it when an older voxelfield could not resume from them.

A file is a zip archive with a checksum of the whole as its comment, which is verified on loading. The archive's own
checksums leave out what lies between its tensors, and torch.load ignores them: flipped bits would become weights.
"""

# The length field of a zip archive's comment, which ends an archive without one, and the comment of a checkpoint.
_LENGTH_SIZE = 2
_COMMENT_SIZE = 25
_END_SIZE = _LENGTH_SIZE + _COMMENT_SIZE
_PIECE = 1 << 20
_ADDED = {"format", "voxelfield"}
_LAST = "last.pt"
_NUMBERED = re.compile(r"checkpoint_(\d+)\.pt")


class CheckpointError(ValueError):
    """A file is not a usable voxelfield checkpoint; the message names the file and the reason in one line."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint has the format of another version of voxelfield."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is truncated, or its content does not match the checksum that was written with it."""


def checkpoint_path(directory: Path, step: int) -> Path:
    """Returns the path at which :func:`resolve_checkpoint` finds the checkpoint of a step.

    Args:
        directory: Run directory.
        step: Number of optimizer steps taken, not negative.

    Returns:
        ``directory/checkpoint_<step>.pt``, the step padded to 7 digits so that listings sort.
    """
    return directory / f"checkpoint_{step:07d}.pt"


def resolve_checkpoint(path: Path) -> Path:
    """Resolves the value of ``resume=`` to a file.

    Args:
        path: A checkpoint, or a run directory. A directory stands for its ``checkpoint_<step>.pt`` with the largest
            step, or its ``last.pt`` if there is no numbered one.

    Returns:
        An existing file.

    Raises:
        FileNotFoundError: There is no checkpoint; the message lists the checkpoints in the folder.
        ValueError: The path is neither a file nor a folder, but a named pipe, for example.
    """
    path = Path(path)
    if path.is_file():
        return path
    if path.is_dir():
        found = checkpoints(path)
        if not found:
            raise FileNotFoundError(f"{path} holds no checkpoint: expected checkpoint_<step>.pt or {_LAST}")
        return found[-1]
    if path.exists():
        open_regular(path).close()  # raises an error that says what it is
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} does not exist, and neither does the folder {path.parent}")
    names = ", ".join(file.name for file in checkpoints(path.parent)) or "none"
    raise FileNotFoundError(f"{path} does not exist; checkpoints in {path.parent}: {names}")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint atomically.

    The file replaces ``path`` only when it is complete and on disk: a full disk or Ctrl-C leaves the previous
    checkpoint intact and no temporary file behind. Large tensors are stored without runs of zeros
    (:mod:`voxelfield.training.state.zero_packing`).

    Args:
        path: File to write; its parent directory is created if needed.
        state: Nested dicts, lists and tuples of tensors (any device) and plain Python values. The keys ``format`` and
            ``voxelfield`` (the writer's version) are added.

    Raises:
        TypeError: A value has a type that a safe load would reject, for example a Path or a NumPy scalar.
        ValueError: ``state`` already contains one of the added keys.
        OSError: The file cannot be written.
    """
    write_checkpoint(path, pack_checkpoint(state))


def pack_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the input of :func:`write_checkpoint`: a copy of a state on the CPU that later steps do not change.

    Args:
        state: As for :func:`save_checkpoint`.

    Raises:
        TypeError: As for :func:`save_checkpoint`.
        ValueError: As for :func:`save_checkpoint`.
    """
    reserved = sorted(_ADDED & state.keys())
    if reserved:
        raise ValueError(f"state must not hold the keys {reserved}: save_checkpoint adds them")
    return {"format": FORMAT, "voxelfield": _version(), **copy_without_zeros(state)}


def write_checkpoint(path: Path, packed: dict[str, Any]) -> None:
    """Writes a checkpoint atomically, as :func:`save_checkpoint` does; may run in a separate thread.

    Args:
        path: File to write; its parent directory is created if needed.
        packed: The result of :func:`pack_checkpoint`.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        with atomic_write(path) as file:
            torch.save(packed, file)
            seal(file)
    except RuntimeError as error:
        # While an exception from the file propagates, torch tries to finish its archive, fails at that too, and reports
        # only "unexpected pos". The user needs to see the underlying cause: a full disk or Ctrl-C.
        if isinstance(error.__context__, (OSError, KeyboardInterrupt)):
            raise error.__context__ from None
        raise


def load_checkpoint(
    path: Path, device: torch.device | str = "cpu", parts: Collection[str] | None = None
) -> dict[str, Any]:
    """Loads a checkpoint without executing code from it (``torch.load(weights_only=True)``).

    Args:
        path: A checkpoint or a run directory, see :func:`resolve_checkpoint`.
        device: Device for the tensors.
        parts: Keys of the state to return; restoring the optimizer's tensors takes longer than everything else. None
            for all keys.

    Returns:
        The saved state, or the requested parts of it, including the keys ``format`` and ``voxelfield``.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedCheckpointError: The file is truncated or damaged; the message names the newest valid one before it.
        CheckpointVersionError: The file has another format.
        CheckpointError: The file is not a voxelfield checkpoint.
    """
    return load_resolved(path, device, parts)[1]


def load_resolved(
    path: Path, device: torch.device | str = "cpu", parts: Collection[str] | None = None
) -> tuple[Path, dict[str, Any]]:
    """Loads a checkpoint as :func:`load_checkpoint` does, and returns its file as well.

    A run in progress replaces its checkpoints: if that of a run directory is gone before it has been read, the one that
    replaces it is loaded.

    Args:
        path: As for :func:`load_checkpoint`.
        device: As for :func:`load_checkpoint`.
        parts: As for :func:`load_checkpoint`.

    Returns:
        The file, and the result of :func:`load_checkpoint`.

    Raises:
        FileNotFoundError: As for :func:`load_checkpoint`.
        CheckpointError: As for :func:`load_checkpoint`.
    """
    while True:
        file = resolve_checkpoint(path)
        try:
            return file, _load_file(file, device, parts)
        except FileNotFoundError:
            if file == Path(path) or file.exists():
                raise


def _load_file(path: Path, device: torch.device | str, parts: Collection[str] | None) -> dict[str, Any]:
    """Implements :func:`load_checkpoint` for a file."""
    try:
        return _read(path, device, parts)
    except DamagedCheckpointError as error:
        beside = checkpoints(path.parent)
        for older in reversed(beside[: beside.index(path)] if path in beside else []):
            try:
                check_whole(older)
            except CheckpointError:
                continue
            raise DamagedCheckpointError(f"{error}; the newest intact one before it is {older}") from error
        raise DamagedCheckpointError(f"{error}; there is no intact one before it") from error


def load_newest(directory: Path, device: torch.device | str = "cpu") -> tuple[Path, dict[str, Any]] | None:
    """Loads the newest valid checkpoint of a run; logs a warning for each file that it skips.

    Args:
        directory: Run directory, which need not exist.
        device: Device for the tensors.

    Returns:
        The file and its state as :func:`load_checkpoint` returns it, or None if there is no valid one.

    Raises:
        CheckpointVersionError: A checkpoint has another format. Skipping it would repeat training already done.
    """
    for path in reversed(checkpoints(directory) if directory.is_dir() else []):
        try:
            return path, _read(path, device, None)
        except CheckpointVersionError:
            raise
        except CheckpointError as error:
            logger.warning("%s; it is skipped", error)
    return None


@contextlib.contextmanager
def contents_of(path: Path) -> Iterator[None]:
    """Raises an error that names a checkpoint if its content, although undamaged, is not that of a run.

    Args:
        path: The file.

    Raises:
        CheckpointError: The block fails, for example because parts of the checkpoint contradict each other.
    """
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError, AssertionError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = clipped(" ".join(f"{type(error).__name__}: {error}".split()), 300)
        raise CheckpointError(
            f"{path} does not hold the state of a run: its parts do not fit together ({reason})"
        ) from error
    except ValueError as error:  # from its configuration
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error


def check_progress(state: Mapping[str, Any]) -> None:
    """Raises TypeError if a state's step or training time is not a valid number, and KeyError if it is missing."""
    step, seconds = state["step"], state["train_seconds"]
    if type(step) is not int or step < 0:
        raise TypeError(f"step must be a whole number, not negative, got {clipped(repr(step))}")
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise TypeError(f"train_seconds must be a number, not negative, got {clipped(repr(seconds))}")


def _read(path: Path, device: torch.device | str, parts: Collection[str] | None) -> dict[str, Any]:
    """Loads a file, without advice about others if it is damaged."""
    check_whole(path)
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is not a voxelfield checkpoint: it holds objects other than tensors and plain values"
        ) from error
    except FileNotFoundError:  # deleted in the meantime
        raise
    except Exception as error:  # unpickling truncated or invalid data can raise anything
        # Errors about an absent or full device must stay visible. On the CPU, RuntimeErrors are about the file.
        of_the_file = torch.device(device).type == "cpu" or "PytorchStreamReader" in str(error)
        if is_out_of_memory(error) or (isinstance(error, RuntimeError) and not of_the_file):
            raise
        raise CheckpointError(
            f"{path} is not a voxelfield checkpoint: its contents cannot be read ({type(error).__name__})"
        ) from error
    if not isinstance(state, dict) or "voxelfield" not in state or not isinstance(state.get("format"), int):
        raise CheckpointError(f"{path} is not a voxelfield checkpoint: it lacks the keys 'format' and 'voxelfield'")
    if state["format"] != FORMAT:
        newer = state["format"] > FORMAT
        raise CheckpointVersionError(
            f"{path} has format {state['format']}, written by voxelfield {state['voxelfield']}; this version "
            f"({_version()}) reads format {FORMAT}: "
            + ("upgrade voxelfield" if newer else "train again, or continue with that version")
        )
    if parts is not None:
        state = {key: value for key, value in state.items() if key in parts or key in _ADDED}
    try:
        restored: dict[str, Any] = put_back_zeros(state)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a voxelfield checkpoint: {error}") from error
    return restored


def checkpoints(directory: Path) -> list[Path]:
    """Lists a directory's checkpoints, the newest last."""
    matches = [(_NUMBERED.fullmatch(file.name), file) for file in directory.iterdir() if file.is_file()]
    numbered = [file for match, file in matches if match]
    last = directory / _LAST
    return sorted([*numbered, *([last] if last.is_file() else [])], key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """Returns the number of steps in a checkpoint's name, or -1 if there is none, as in ``last.pt``."""
    match = _NUMBERED.fullmatch(path.name)
    return int(match[1]) if match else -1


def check_whole(path: Path) -> None:
    """Reads a checkpoint without loading it, and compares it with its checksum.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedCheckpointError: It is truncated or damaged.
        CheckpointVersionError: It is an archive without a checksum, as in formats up to 6.
        CheckpointError: It is not a voxelfield checkpoint.
    """
    with path.open("rb") as file:
        is_right, size = _is_sealed(file), file.seek(0, os.SEEK_END)
        file.seek(0)
        start = file.read(4)
        file.seek(max(size - 22, 0))
        end = file.read()
        # After a power failure, some file systems show zeros where data had not been written.
        if start != b"PK\x03\x04" and start.strip(b"\0"):
            raise CheckpointError(f"{path} is not a voxelfield checkpoint: it is not a torch archive")
        # The whole end of a zip archive without a comment; formats up to 6 have none.
        if end.startswith(b"PK\x05\x06") and end.endswith(b"\0\0"):
            raise CheckpointVersionError(
                f"{path} is not a voxelfield checkpoint of format {FORMAT}, which ends with a checksum: "
                "train again, or continue with the version that has written it"
            )
        damaged = DamagedCheckpointError(f"{path} is truncated or damaged ({size} bytes)")
        if not is_right:
            raise damaged
        try:
            infos = zipfile.ZipFile(file).infolist()
        except Exception as error:  # broken headers raise anything from EOFError to UnicodeDecodeError
            raise damaged from error
    # torch writes tensors uncompressed; decompressing a zip bomb of zeros would exhaust the memory.
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise CheckpointError(f"{path} is not a voxelfield checkpoint: it is a compressed zip file")
    if sum(info.file_size for info in infos) > size:
        raise damaged


def seal(file: BinaryIO) -> None:
    """Appends the checksum of the whole to a complete archive.

    Args:
        file: An archive without a comment, open for reading and writing.
    """
    size = file.seek(-_LENGTH_SIZE, os.SEEK_END)
    end = _end(file, size)
    file.seek(size)
    file.write(end)


def _is_sealed(file: BinaryIO) -> bool:
    """Returns whether a file, open for reading, ends with its checksum."""
    size = max(file.seek(0, os.SEEK_END) - _END_SIZE, 0)
    end = _end(file, size)
    return file.read() == end


def _end(file: BinaryIO, size: int) -> bytes:
    """Returns how a sealed archive ends whose other bytes are the first of a file, and leaves the file after these."""
    file.seek(0)
    checksum = 0
    for begin in range(0, size, _PIECE):
        checksum = zlib.crc32(file.read(min(_PIECE, size - begin)), checksum)
    return struct.pack("<H", _COMMENT_SIZE) + b"voxelfield crc32 %08x" % checksum


def _version() -> str:
    try:
        return metadata.version("voxelfield")
    except metadata.PackageNotFoundError:  # used from a source tree that is not installed
        return "unknown"
