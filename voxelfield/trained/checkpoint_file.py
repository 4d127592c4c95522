"""The files of checkpoints: written atomically, loaded without executing code, and checked."""

from __future__ import annotations

import contextlib
import logging
import pickletools
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from voxelfield.files import atomic_write, open_regular
from voxelfield.foundation.errors import is_out_of_memory, shown
from voxelfield.foundation.zero_packing import copy_without_zeros, put_back_zeros
from voxelfield.grids.boxes import check_box
from voxelfield.installed import VERSION
from voxelfield.messages import error_in_words, reason_of
from voxelfield.run_directory import checkpoints

logger = logging.getLogger(__name__)

FORMAT = 11
"""Layout version of the files. Raise it when an older voxelfield could not resume from them."""

_MOST_TUPLES = 50_000

ADDED = {"format", "voxelfield"}
"""Entries that a file adds to the saved state."""


class CheckpointError(ValueError):
    """A file is not a usable voxelfield checkpoint; the message names the file and the reason in one line."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint has the format of another version of voxelfield."""


def checkpoint_path(directory: Path, step: int) -> Path:
    """Returns ``directory/checkpoint_<step>.pt``, the step padded to 7 digits so that listings sort."""
    return directory / f"checkpoint_{step:07d}.pt"


def resolve_checkpoint(path: Path) -> Path:
    """Resolves the value of ``resume=``, a checkpoint or a run directory, to an existing file.

    A directory stands for its ``checkpoint_<step>.pt`` with the largest step, or its ``last.pt`` if there is no
    numbered one.

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
            raise FileNotFoundError(f"{path} contains no checkpoint: expected checkpoint_<step>.pt or last.pt")
        return found[-1]
    if path.exists():
        open_regular(path).close()  # raises an error that says what it is
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} does not exist, and neither does the folder {path.parent}")
    names = ", ".join(file.name for file in checkpoints(path.parent)) or "none"
    raise FileNotFoundError(f"{path} does not exist; checkpoints in {path.parent}: {names}")


def pack_checkpoint(state: dict[str, Any], path: Path = Path("checkpoint")) -> dict[str, Any]:
    """Copies a state to the CPU, with the keys ``format`` and ``voxelfield`` (the writer's version).

    The state consists of nested dicts, lists and tuples of tensors on any device, and of plain values. Others, such as
    a Path or a NumPy scalar, which a safe load would reject, raise CheckpointError, which names ``path``. Large tensors
    are stored without runs of zeros (:mod:`voxelfield.foundation.zero_packing`).
    """
    with contents_of(path):
        return {"format": FORMAT, "voxelfield": VERSION, **copy_without_zeros(state)}


def write_checkpoint(path: Path, packed: dict[str, Any]) -> None:
    """Writes the result of :func:`pack_checkpoint` atomically; may run in a separate thread.

    The file replaces ``path`` only when it is complete and on disk: a full disk, which raises OSError, or Ctrl-C leaves
    the previous checkpoint intact and no temporary file behind.
    """
    try:
        with atomic_write(path) as file:
            torch.save(packed, file)
            file.write(_seal(file, file.tell() - 2))
    except RuntimeError as error:
        # While an exception from the file propagates, torch tries to finish its archive, fails at that too, and reports
        # only "unexpected pos". The user needs to see the underlying cause: a full disk or Ctrl-C.
        if isinstance(error.__context__, (OSError, KeyboardInterrupt)):
            raise error.__context__ from None
        raise


def load_checkpoint(path: Path, device: torch.device | str = "cpu", without: Collection[str] = ()) -> dict[str, Any]:
    """Loads a checkpoint without executing code from it (``torch.load(weights_only=True)``).

    Args:
        path: A checkpoint or a run directory, see :func:`resolve_checkpoint`.
        device: Device for the tensors.
        without: Keys of the state to leave out; restoring the optimizer's tensors takes longer than everything else.

    Returns:
        The saved state, including the keys ``format`` and ``voxelfield``.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointVersionError: The file has another format.
        CheckpointError: The file is truncated, damaged, or not a voxelfield checkpoint.
    """
    return load_resolved(path, device, without)[1]


def load_resolved(
    path: Path, device: torch.device | str = "cpu", without: Collection[str] = ()
) -> tuple[Path, dict[str, Any]]:
    """Returns the file that :func:`load_checkpoint` loads, and its result; arguments and errors are the same.

    A run in progress replaces its checkpoints: if one of a run directory disappears before it has been read, its
    replacement is loaded.
    """
    while True:
        file = resolve_checkpoint(path)
        try:
            return file, _read(file, device, without)
        except FileNotFoundError:
            if file == Path(path) or file.exists():
                raise


def load_newest(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """Returns the newest valid checkpoint of a run directory and its state; None if there is none.

    Logs a warning for each damaged file that it skips. Raises CheckpointVersionError for one of another format, because
    skipping it would repeat training already done.
    """
    for path in reversed(checkpoints(directory) if directory.is_dir() else []):
        try:
            return path, _read(path, "cpu", ())
        except CheckpointVersionError:
            raise
        except CheckpointError as error:
            logger.warning("%s; it is skipped", error)
    return None


@contextlib.contextmanager
def contents_of(path: Path, error_type: type[ValueError] = CheckpointError) -> Iterator[None]:
    """Converts errors of a block that adopts the content of an undamaged file, whose parts may be contradictory."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError, AssertionError, RuntimeError) as error:
        # A size that overflows is the file's fault: on the meta device, nothing is allocated.
        if is_out_of_memory(error) and "overflowed" not in str(error):
            raise
        reason = error_in_words(error)
        raise error_type(f"{path} has wrong contents: its parts do not fit together ({reason})") from error
    except ValueError as error:  # from its configuration
        if str(path) in str(error):
            raise
        raise error_type(f"{path}: {error}") from error


def check_state(module: nn.Module, state: Mapping[str, Any], grids: Collection[Tensor] = ()) -> None:
    """Raises ValueError if a tensor of a state has another dtype than in a module, or a bool or a box is invalid.

    Names and shapes are left to ``load_state_dict``, which does not check dtypes where it assigns tensors. ``grids``
    are the parameters of the module that may have any floating-point dtype of grids.
    """
    converted = {id(grid) for grid in grids}
    for key, own in module.state_dict(keep_vars=True).items():
        saved = state.get(key)
        if not isinstance(own, Tensor) or not isinstance(saved, Tensor):
            continue
        # Grids are saved in the dtype in which they were read, and converted when they are loaded.
        allowed = (torch.float32, torch.float16, torch.bfloat16) if id(own) in converted else (own.dtype,)
        if saved.dtype not in allowed:
            raise ValueError(f"{key} must be {' or '.join(map(str, allowed))}, got {saved.dtype}")
        # A file can contain any byte where torch writes 0 or 1, and compiled code relies on these.
        if saved.dtype == torch.bool and saved.numel() > 0 and int(saved.contiguous().view(torch.uint8).max()) > 1:
            raise ValueError(f"{key} must contain bools, got other bytes than 0 and 1")
        if key.rpartition(".")[2] == "aabb":
            check_box(key, saved)


def _read(path: Path, device: torch.device | str, without: Collection[str]) -> dict[str, Any]:
    check_whole(path)
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [archive.read(entry) for entry in archive.infolist() if entry.filename.endswith("data.pkl")]
        operations = [(op.name, value) for each in pickles for op, value, _ in pickletools.genops(each)]
        # Torch would call constructors with any size, and hash tuples in tuples, if they are keys, on the stack.
        calls = any(name == "GLOBAL" and str(value).endswith(("Tensor", "bytearray")) for name, value in operations)
        if calls or sum(name.startswith("TUPLE") for name, _ in operations) > _MOST_TUPLES:
            raise ValueError("constructors or too many tuples")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:  # deleted in the meantime
        raise
    except Exception as error:  # unpickling invalid data can raise anything
        if is_out_of_memory(error):
            raise
        raise _foreign(path, f"it does not contain tensors and plain values only ({type(error).__name__})") from error
    if not isinstance(state, dict) or "voxelfield" not in state or not isinstance(state.get("format"), int):
        raise _foreign(path, "it lacks the keys 'format' and 'voxelfield'")
    if state["format"] != FORMAT:
        raise CheckpointVersionError(
            f"{path} has format {shown(state['format'])}, written by voxelfield {shown(state['voxelfield'])}; this "
            f"version ({VERSION}) reads format {FORMAT}: "
            + ("upgrade voxelfield" if state["format"] > FORMAT else "train again, or continue with that version")
        )
    try:
        wanted = {key: value for key, value in state.items() if key not in without}
        restored: dict[str, Any] = put_back_zeros(wanted, device)
    except ValueError as error:
        raise _foreign(path, reason_of(error)) from error
    return restored


def _foreign(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a voxelfield checkpoint: {reason}")


def check_whole(path: Path) -> None:
    """Compares a checkpoint with its checksum (CRC-32), or without one with those of its archive's entries.

    torch.load compares none: a flipped bit would become a wrong weight. Raises CheckpointError if they differ or the
    file is something else.
    """
    with path.open("rb") as file:
        # After a power failure, some file systems show zeros where data had not been written.
        if file.read(4).strip(b"\0") not in (b"", b"PK\x03\x04"):
            raise _foreign(path, "it is not a torch archive")
        size = path.stat().st_size
        try:
            archive = zipfile.ZipFile(file)
            entries = archive.infolist()
            # torch stores tensors uncompressed; decompressing a zip bomb would exhaust the memory.
            compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            whole = compressed or sum(entry.file_size for entry in entries) <= size
            if whole and not compressed:
                # Without a checksum of the whole, as torch writes it, the archive ends with the length of no comment.
                end = _seal(file, size - 27) if archive.comment else b"\0\0"
                file.seek(size - len(end))
                whole = file.read() == end and (archive.comment != b"" or archive.testzip() is None)
        except Exception:  # broken headers raise anything from EOFError to UnicodeDecodeError
            compressed = whole = False
    if compressed:
        raise _foreign(path, "it is a compressed zip file")
    if not whole:
        raise CheckpointError(
            f"{path} is truncated or damaged ({size} bytes); resume=auto continues from the newest intact checkpoint"
        )


def _seal(file: BinaryIO, size: int) -> bytes:
    """Returns how an archive of ``size`` bytes ends: a comment with its checksum, after the comment's length."""
    checksum = file.seek(0)
    for begin in range(0, size, 1 << 20):
        checksum = zlib.crc32(file.read(min(1 << 20, size - begin)), checksum)
    return b"\x19\0voxelfield crc32 %08x" % checksum
