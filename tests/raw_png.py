"""PNG files that Pillow would not write: of any size, of 16 bits per channel, with chunks of one's own."""

from __future__ import annotations

import struct
import zlib

import numpy as np

GREY, RGB, GREY_ALPHA, RGBA = 0, 2, 4, 6
_COLORS = {1: GREY, 2: GREY_ALPHA, 3: RGB, 4: RGBA}


def raw_png(width: int, height: int, bits: int, rows: bytes, color: int = RGB, extra: tuple[bytes, ...] = ()) -> bytes:
    """Returns a file of such a header, whatever the rows of pixels hold; each row begins with the byte of its filter.

    Chunks in ``extra`` are names of four letters followed by content.
    """
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    chunks = [b"IHDR" + header, *extra, b"IDAT" + zlib.compress(rows), b"IEND"]
    coded = [struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(coded)


def png_of_16_bits(pixels: np.ndarray, extra: tuple[bytes, ...] = ()) -> bytes:
    """Returns a file of pixels (H, W, C) below 65536: grey, grey with alpha, RGB or RGBA, by their channels."""
    height, width, channels = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    return raw_png(width, height, 16, rows, _COLORS[channels], extra)
