"""Files of a capture's COLMAP models: where they and their images lie, and checks before pycolmap reads them.

pycolmap trusts the number of entries that a binary file states: with a damaged file it reads past the end for hours, or
until memory is exhausted. In text it ends the name of an image at the first space.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Folders of models, each with the folder of its images, as COLMAP, its scripts and other programs lay them out.
# Undistorted models belong to the undistorted images only.
_LAYOUTS = (
    ("sparse", "images"),
    ("colmap/sparse", "images"),
    ("colmap/sparse", "colmap/images"),
    ("colmap_sparse", "images"),
    ("colmap_text", "images"),
    ("colmap", "images"),
    ("undistorted/sparse", "undistorted/images"),
    ("dense/sparse", "dense/images"),
    ("dense/0/sparse", "dense/0/images"),
)


def is_colmap(folder: Path) -> bool:
    """Returns whether a folder holds a COLMAP model; see :class:`voxelfield.datasets.registry.Format`."""
    return any(_models_in(folder / models) for models, _ in _LAYOUTS)


def find_model(folder: Path, number: int | None) -> tuple[Path, Path, dict[str, int]]:
    """Finds a capture's model, by its number or else the one with poses for the most images, and its images.

    If a capture has several folders of models, those beside their images come first. Several models in one folder, such
    as ``sparse/0`` and ``sparse/1``, are reconstructions of parts that COLMAP could not join.

    Returns:
        The folder of the model, the folder of its images, and, if the model was chosen among several, the number of
        images with a pose in each, by the names of their folders.
    """
    found = [(folder / models, folder / images) for models, images in _LAYOUTS if _models_in(folder / models)]
    models_folder, images = next((each for each in found if each[1].is_dir()), found[0])
    models = _models_in(models_folder)
    if number is not None:
        named = next((model for model in models if model.name == str(number)), None)
        if named is None:
            numbers = ", ".join(model.name for model in models if model.name.isdecimal())
            known = f"one of {numbers}" if numbers else "None"
            raise ValueError(f"model must be {known}, as {models_folder} has no other, got {number}")
        return named, images, {}
    if len(models) == 1:
        return models[0], images, {}
    counts = {model.name: count_posed_images(model) for model in models}
    return max(models, key=lambda model: counts[model.name]), images, counts


def image_paths(images: Path, names: Sequence[str]) -> list[Path]:
    """Returns the files of a model's images, by their names in the model, whether or not they exist.

    They are looked for in the folder ``images``, then in the folder around it, to which names such as ``images/a.jpg``
    are relative. Backslashes may separate folders.
    """
    folders = (images, images.parent)
    exist = [any((base / name).is_file() for base in folders) for name in names]
    names = [name if exists else name.replace("\\", "/") for name, exists in zip(names, exist, strict=True)]
    base = next((base for base in folders if any((base / name).is_file() for name in names)), images)
    return [base / name for name in names]


def _models_in(folder: Path) -> list[Path]:
    """Returns the models in numbered folders, sorted by number; else the folder itself if it is a model."""
    numbered = [child for child in folder.glob("*") if child.name.isdecimal() and _is_model(child)]
    if numbered:
        return sorted(numbered, key=lambda child: (int(child.name), child.name))
    return [folder] if _is_model(folder) else []


def _is_model(folder: Path) -> bool:
    return any((folder / f"images.{suffix}").is_file() for suffix in ("bin", "txt"))


def is_binary(folder: Path) -> bool:
    """Returns whether pycolmap reads the binary files of a model; otherwise it reads the text."""
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
    """Returns the names of a text model's images by their numbers, with the spaces in them."""
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
    """Raises ValueError if a file of a binary model is shorter than its stated numbers of entries require."""
    for name, walk in _FILES.items() if is_binary(folder) else ():
        path = folder / f"{name}.bin"
        if not path.is_file():
            continue  # models without rigs have fewer files
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ValueError(f"{path}: must begin with a number of {name}, got an empty file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                walk(_Walk(path, data))


_POSE = 7 * 8  # a quaternion and a translation, of doubles
_SENSOR = 4 + 4  # its type and its number


class _Walk:
    """Walks through a file; raises ValueError if it ends too early."""

    def __init__(self, path: Path, data: Any) -> None:
        self._path, self._data, self._at = path, data, 0

    def skip(self, size: int) -> None:
        """Skips a number of bytes."""
        if size > len(self._data) - self._at:
            raise ValueError(f"{self._path}: must be complete, got a truncated file")
        self._at += size

    def number(self, form: str) -> int:
        """Reads a whole number of a format of :mod:`struct`."""
        start = self._at
        self.skip(struct.calcsize(f"<{form}"))
        return int(struct.unpack_from(f"<{form}", self._data, start)[0])

    def count(self, form: str, least: int) -> int:
        """Reads the number of entries that follow, each of at least ``least`` bytes."""
        count = self.number(form)
        if count * least > len(self._data) - self._at:
            found = len(self._data)
            raise ValueError(f"{self._path}: must hold {count} entries, as it declares, got a file of {found} bytes")
        return count

    def text(self) -> None:
        """Skips a zero-terminated string."""
        end = self._data.find(b"\0", self._at)
        self.skip((end if end >= 0 else len(self._data)) + 1 - self._at)


def _cameras(walk: _Walk) -> None:
    import pycolmap

    models = pycolmap.CameraModelId.__members__
    known = {int(model): model for name, model in models.items() if name != "INVALID"}
    sizes: dict[int, int] = {}
    for _ in range(walk.count("Q", 24)):
        walk.skip(4)
        model = walk.number("i")
        if model not in known:
            raise ValueError(f"{walk._path}: the model of a camera must be one that COLMAP knows, got {model}")
        if model not in sizes:
            sizes[model] = 8 * len(pycolmap.Camera.create_from_model_id(0, known[model], 1.0, 2, 2).params)
        walk.skip(16 + sizes[model])


def _images(walk: _Walk) -> None:
    for _ in range(walk.count("Q", 4 + _POSE + 4 + 1 + 8)):
        walk.skip(4 + _POSE + 4)
        walk.text()
        walk.skip(24 * walk.count("Q", 24))


def _points(walk: _Walk) -> None:
    for _ in range(walk.count("Q", 8 + 24 + 3 + 8 + 8)):
        walk.skip(8 + 24 + 3 + 8)
        walk.skip(8 * walk.count("Q", 8))


def _rigs(walk: _Walk) -> None:
    for _ in range(walk.count("Q", 8)):
        walk.skip(4)
        sensors = walk.count("I", _SENSOR)
        if sensors > 0:
            walk.skip(_SENSOR)
        for _ in range(sensors - 1):
            walk.skip(_SENSOR)
            walk.skip(_POSE if walk.number("B") else 0)


def _frames(walk: _Walk) -> None:
    for _ in range(walk.count("Q", 8 + _POSE + 4)):
        walk.skip(8 + _POSE)
        walk.skip((_SENSOR + 8) * walk.count("I", _SENSOR + 8))


_FILES: dict[str, Callable[[_Walk], None]] = {
    "cameras": _cameras,
    "images": _images,
    "points3D": _points,
    "rigs": _rigs,
    "frames": _frames,
}
