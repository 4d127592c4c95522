"""Zip archives that end with a checksum of the whole file.

A zip archive has a checksum of each member's data, but none of the names, sizes and offsets between them. The checksum
is stored as the archive's comment, so the file remains readable as a zip archive.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import BinaryIO

# The length field of a zip archive's comment, which ends an archive without one, and the comment.
_LENGTH_SIZE = 2
_COMMENT_SIZE = 25
_END_SIZE = _LENGTH_SIZE + _COMMENT_SIZE
_PIECE = 1 << 20


def seal(file: BinaryIO) -> None:
    """Appends the checksum to a complete archive.

    Args:
        file: An archive without a comment, open for reading and writing.
    """
    size = file.seek(-_LENGTH_SIZE, os.SEEK_END)
    end = _end(file, size)
    file.seek(size)
    file.write(end)


def is_sealed(file: BinaryIO) -> bool:
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
