"""Zip archives that end with a checksum of the whole file.

A zip archive has a checksum of each member's data, but none of the names, sizes and offsets between them. The checksum
is stored as the archive's comment, so the file remains readable as a zip archive.
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
# Size of the comment's length field, which ends an archive without a comment.
_LENGTH_SIZE = 2
_PIECE = 1 << 20


class SealingFile:
    """Writes an archive to a file and computes its checksum at the same time.

    Args:
        file: A seekable file, open for writing, at its beginning.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._checksum = 0
        self._last = b""

    def write(self, data: bytes | memoryview) -> int:
        """Writes some bytes."""
        view = memoryview(data).cast("B")
        # The last bytes are held back, because the length field of the comment will change.
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
        """Appends the checksum to the completed archive.

        Raises:
            ValueError: The written data do not end with an archive without a comment.
        """
        if self._last != bytes(_LENGTH_SIZE):
            raise ValueError("an archive must end without a comment to be sealed")
        self._file.seek(-_LENGTH_SIZE, os.SEEK_END)
        self._file.write(struct.pack("<H", _SEAL_SIZE) + f"voxelfield crc32 {self._checksum:08x}".encode())


def read_seal(path: Path) -> bool | None:
    """Verifies the checksum of a file.

    Args:
        path: An archive.

    Returns:
        Whether the checksum is correct; None if the file has none.

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
            if not piece:  # the file was truncated in the meantime
                return False
            checksum = zlib.crc32(piece, checksum)
            left -= len(piece)
    return checksum == int(seal[1], 16) and length == struct.pack("<H", _SEAL_SIZE)
