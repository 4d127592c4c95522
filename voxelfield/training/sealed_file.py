"""Zip archives that end in a checksum of themselves.

A zip archive has a checksum of each member's data, but none of the names, sizes and places between them. The seal is
the archive's comment, so that every reader of zip files still reads it.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

_SEAL = re.compile(rb"voxelfield crc32 ([0-9a-f]{8})")
_SEAL_SIZE = 25
# The length of the comment, with which an archive ends that has none.
_LENGTH_SIZE = 2
_PIECE = 1 << 20


class SealingFile:
    """Passes an archive on to a file, and computes its checksum on the way.

    Args:
        file: Open for writing, at its beginning; can seek.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._checksum = 0
        self._last = b""

    def write(self, data: bytes | memoryview) -> int:
        """Writes some bytes."""
        view = memoryview(data).cast("B")
        # The length of the comment is yet to change.
        summed = max(len(view) - _LENGTH_SIZE, 0)
        last = self._last + bytes(view[summed:])
        if summed > 0:
            self._checksum = zlib.crc32(view[:summed], zlib.crc32(self._last, self._checksum))
            last = bytes(view[summed:])
        elif len(last) > _LENGTH_SIZE:
            self._checksum = zlib.crc32(last[:-_LENGTH_SIZE], self._checksum)
            last = last[-_LENGTH_SIZE:]
        self._last = last
        return self._file.write(data)

    def flush(self) -> None:
        """Flushes the file."""
        self._file.flush()

    def seal(self) -> None:
        """Appends the checksum to the archive, which is complete.

        Raises:
            ValueError: What was written ends in no archive without a comment.
        """
        if self._last != bytes(_LENGTH_SIZE):
            raise ValueError("an archive must end without a comment to be sealed")
        self._file.seek(-_LENGTH_SIZE, os.SEEK_END)
        self._file.write(struct.pack("<H", _SEAL_SIZE) + f"voxelfield crc32 {self._checksum:08x}".encode())


def read_seal(path: Path) -> bool | None:
    """Compares a file with its seal.

    Args:
        path: An archive.

    Returns:
        Whether they agree; None if it has no seal.

    Raises:
        OSError: The file cannot be read.
    """
    left = path.stat().st_size - _SEAL_SIZE - _LENGTH_SIZE
    if left < 0:
        return None
    checksum = 0
    with path.open("rb") as file:
        file.seek(left)
        length, seal = file.read(_LENGTH_SIZE), _SEAL.fullmatch(file.read())
        if seal is None:
            return None
        file.seek(0)
        while left > 0:
            piece = file.read(min(left, _PIECE))
            if not piece:  # it has become shorter
                return False
            checksum = zlib.crc32(piece, checksum)
            left -= len(piece)
    return checksum == int(seal[1], 16) and length == struct.pack("<H", _SEAL_SIZE)
