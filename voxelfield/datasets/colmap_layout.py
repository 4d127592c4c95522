"""The layout of COLMAP's files: what is checked before pycolmap reads them, and what pycolmap does not read.

pycolmap trusts the number of entries that a binary file states: with a damaged file it reads past the end for hours, or
until memory is exhausted. In text it ends the name of an image at the first space.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POSE = 7 * 8  # a quaternion and a translation, of doubles
_SENSOR = 4 + 4  # its type and its number


class _Walk:
    """Reads a file from its beginning on.

    Raises:
        ValueError: The file ends too early; the message names it and what it lacks.
    """

    def __init__(self, path: Path, data: Any) -> None:
        self._path, self._data, self._at = path, data, 0

    def skip(self, size: int, what: str) -> None:
        """Skips ``size`` bytes."""
        if size > len(self._data) - self._at:
            raise ValueError(f"{self._path}: must hold complete {what}, got a truncated file")
        self._at += size

    def number(self, form: str, what: str) -> int:
        """Reads a whole number of a format of :mod:`struct`."""
        start = self._at
        self.skip(struct.calcsize(f"<{form}"), what)
        (value,) = struct.unpack_from(f"<{form}", self._data, start)
        return int(value)

    def count(self, form: str, least: int, what: str) -> int:
        """Reads the number of entries that follow, each of at least ``least`` bytes."""
        count = self.number(form, what)
        if count * least > len(self._data) - self._at:
            raise ValueError(
                f"{self._path}: must hold {count} {what}, as it declares, got a file of {len(self._data)} bytes"
            )
        return count

    def text(self, what: str) -> None:
        """Skips a zero-terminated string."""
        end = self._data.find(b"\0", self._at)
        self.skip((end if end >= 0 else len(self._data)) + 1 - self._at, what)


def is_binary(folder: Path) -> bool:
    """Tells whether pycolmap reads the binary files of a model; otherwise it reads the text."""
    return all((folder / f"{name}.bin").is_file() for name in ("cameras", "images", "points3D"))


def count_posed_images(folder: Path) -> int:
    """Returns how many images a model has, as its file of images says; 0 if it cannot be read."""
    try:
        if not is_binary(folder):
            return len(names_in_text(folder))
        with (folder / "images.bin").open("rb") as file:
            return int.from_bytes(file.read(8), "little")
    except OSError:
        return 0


def names_in_text(folder: Path) -> dict[int, bytes]:
    """Returns the names of a text model's images by their numbers, with the spaces in them.

    Raises:
        OSError: The file cannot be read.
    """
    names = {}
    with (folder / "images.txt").open("rb") as file:
        for line in file:
            words = line.strip().split(b" ", 9)
            if not line.strip() or line.startswith(b"#"):
                continue
            next(file, None)  # the points of the image
            if len(words) == 10 and words[0].isdigit():
                names[int(words[0])] = words[9]
    return names


def check_binary_model(folder: Path) -> None:
    """Raises if a file of a binary model is shorter than its stated numbers of entries require.

    Args:
        folder: A model. A text model is not checked.

    Raises:
        ValueError: A file ends too early, or a camera is of no known model.
        OSError: A file cannot be read.
    """
    if not is_binary(folder):
        return
    for name, walk in _FILES.items():
        path = folder / f"{name}.bin"
        if not path.is_file():
            continue  # models without rigs have fewer files
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ValueError(f"{path}: must begin with a number of {name}, got an empty file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                walk(_Walk(path, data))


def _cameras(walk: _Walk) -> None:
    sizes: dict[int, int] = {}
    for _ in range(walk.count("Q", 24, "cameras")):
        walk.skip(4, "cameras")
        model = walk.number("i", "cameras")
        if model not in sizes:
            sizes[model] = 8 * _parameters(walk, model)
        walk.skip(16 + sizes[model], "cameras")


def _parameters(walk: _Walk, model: int) -> int:
    """Returns how many parameters cameras of a model have."""
    import pycolmap

    known = {int(member): member for member in pycolmap.CameraModelId.__members__.values()}
    if model not in known or known[model].name == "INVALID":
        raise ValueError(f"{walk._path}: the model of a camera must be one that COLMAP knows, got {model}")
    return len(pycolmap.Camera.create_from_model_id(0, known[model], 1.0, 2, 2).params)


def _images(walk: _Walk) -> None:
    for _ in range(walk.count("Q", 4 + _POSE + 4 + 1 + 8, "images")):
        walk.skip(4 + _POSE + 4, "images")
        walk.text("images")
        walk.skip(24 * walk.count("Q", 24, "points of an image"), "points of an image")


def _points(walk: _Walk) -> None:
    for _ in range(walk.count("Q", 8 + 24 + 3 + 8 + 8, "points")):
        walk.skip(8 + 24 + 3 + 8, "points")
        walk.skip(8 * walk.count("Q", 8, "observations of a point"), "observations of a point")


def _rigs(walk: _Walk) -> None:
    for _ in range(walk.count("Q", 8, "rigs")):
        walk.skip(4, "rigs")
        sensors = walk.count("I", _SENSOR, "sensors of a rig")
        if sensors > 0:
            walk.skip(_SENSOR, "sensors of a rig")
        for _ in range(sensors - 1):
            walk.skip(_SENSOR, "sensors of a rig")
            walk.skip(_POSE if walk.number("B", "sensors of a rig") else 0, "sensors of a rig")


def _frames(walk: _Walk) -> None:
    for _ in range(walk.count("Q", 8 + _POSE + 4, "frames")):
        walk.skip(8 + _POSE, "frames")
        walk.skip((_SENSOR + 8) * walk.count("I", _SENSOR + 8, "images of a frame"), "images of a frame")


_FILES: dict[str, Callable[[_Walk], None]] = {
    "cameras": _cameras,
    "images": _images,
    "points3D": _points,
    "rigs": _rigs,
    "frames": _frames,
}
