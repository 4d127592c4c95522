"""Small pictures of every format that Pillow writes, as files in memory, and how files of such names are read."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from raw_png import png_of_16_bits

from voxelfield.captures.photographs import copy_photographs
from voxelfield.datasets.images import exif_orientation, image_size, read_images

READ = {"PNG", "JPEG", "MPO", "WEBP", "TIFF", "BMP"}
"""Formats of Pillow that may be decoded."""

WIDTH, HEIGHT = 12, 8
_MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "F")
_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "JPEG": [{"progressive": True}, {"subsampling": 2}],
    "TIFF": [{"compression": name} for name in ("tiff_lzw", "tiff_deflate", "jpeg", "packbits")],
    "WEBP": [{"lossless": True}, {"save_all": True}],
    "PNG": [{"save_all": True}, {"transparency": 0}],
    "MPO": [{"save_all": True}],
}


def _picture(mode: str, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    return Image.fromarray(pixels).convert(mode)


@cache
def sound_pictures() -> dict[str, bytes]:
    """Returns the files by what they are."""
    Image.init()
    exif = Image.Exif()
    exif[0x0112] = 6
    found = {}
    for file_format in sorted(Image.SAVE):
        for options in ({}, {"exif": exif}, *_VARIANTS.get(file_format, ())) if file_format in READ else ({},):
            for mode in _MODES:
                file = io.BytesIO()
                extra = {"append_images": [_picture(mode, 1)]} if "save_all" in options else {}
                try:
                    _picture(mode).save(file, file_format, **options, **extra)
                except Exception:  # this format has no such mode or option, or needs something that is not installed
                    continue
                found[f"{file_format} {mode} {' '.join(options)}"] = file.getvalue()
                if file_format not in READ:
                    break
    for channels in (1, 2, 3, 4):
        wide = np.random.default_rng(2).integers(0, 65536, (HEIGHT, WIDTH, channels))
        found[f"PNG of 16 bits, {channels}"] = png_of_16_bits(wide)
    return found


def with_right_crcs(content: bytes) -> bytes:
    """Returns a PNG file whose chunks have the checksums of what they hold; other files stay as they are."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return content
    parts, at = [content[:8]], 8
    while at + 12 <= len(content):
        (size,) = struct.unpack_from(">I", content, at)
        body = content[at + 4 : at + 8 + size]
        parts += [content[at : at + 4], body, struct.pack(">I", zlib.crc32(body))]
        at += 12 + size
    return b"".join(parts)


@contextmanager
def only_listed_formats() -> Iterator[None]:
    """Fails if Pillow so much as opens a file as one of another format."""
    Image.init()
    kept = dict(Image.OPEN)

    def refuse(name: str) -> Callable[..., None]:
        def factory(*_: object) -> None:
            raise SystemExit(f"Pillow's decoder of {name} was called")  # which nothing catches

        return factory

    try:
        for name, (_, accept) in kept.items():
            if name not in READ:
                Image.OPEN[name] = (refuse(name), accept)
        yield
    finally:
        Image.OPEN.update(kept)


def read_or_refuse(path: Path, copies: Path) -> bool:
    """Returns whether a file is read as a picture, in all ways; fails unless it is, or is refused in one line.

    Args:
        path: The file.
        copies: A folder that is not there, for its copy.
    """
    results = []
    for read in (
        lambda: read_images([path]),
        lambda: copy_photographs([path], copies, 2**31),
        lambda: image_size(path),
    ):
        try:
            results.append(read())
        except ValueError as error:
            text = str(error)
            assert text.startswith(f"{path}: unreadable image ("), text
            assert "\n" not in text
            assert len(text) < 1000
            results.append(text)
    images, copied, size = results
    if isinstance(images, str) or (isinstance(copied, str) and "EXIF data are damaged" in copied):
        return False  # all that reads the EXIF data refuses them, and nothing else does
    assert isinstance(images, torch.Tensor)
    assert images.dtype == torch.uint8
    assert images.shape == (1, size[1], size[0], 4)
    assert 1 <= exif_orientation(path) <= 8
    (copy,) = copies.iterdir()
    turned = exif_orientation(path) >= 5
    assert image_size(copy) == (size[::-1] if turned else size)
    return True
