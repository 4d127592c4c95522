"""Loader of COLMAP's layout: a model, such as ``sparse/0``, and a folder of images.

A folder ``masks`` beside the folder of images may contain a mask for each image. pycolmap reads the model, binary or
text, with or without rigs. Poses have OpenCV axes (y down, looking along z).
"""

from __future__ import annotations

import logging
import math
import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from voxelfield.datasets.assembly import load_capture
from voxelfield.datasets.image_paths import find_images, on_disk
from voxelfield.datasets.images import masks_within
from voxelfield.datasets.lenses import CAMERA_MODELS, photo_lens
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, points_near, scaled, with_shrunk_images
from voxelfield.datasets.poses import COLMAP_AXES, FARTHEST, turned_about
from voxelfield.datasets.registry import Format
from voxelfield.datasets.scene import Scene
from voxelfield.foundation.errors import shown
from voxelfield.installed import import_optional
from voxelfield.messages import reason_of

logger = logging.getLogger(__name__)

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

_FILES = ("images", "cameras", "points3D")  # of a model, .bin or .txt
_POSE = 7 * 8  # bytes of a quaternion and a translation, of doubles
_SENSOR = 4 + 4  # of its type and its number


def load_colmap(folder: Path, options: LoadOptions) -> Scene:
    """Loads a capture; see :class:`voxelfield.datasets.registry.Format`.

    Raises:
        MissingPackageError: pycolmap is not installed.
    """
    source, images = find_model(folder, options.model)
    model = _read_model(source)
    posed = [image for image in model.images.values() if image.has_pose]
    if not posed:
        raise ValueError(f"{source}: the model must have images with poses, got none of {len(model.images)}")
    names = [_name(source, image) for image in posed]
    # Names such as images/a.jpg are relative to the folder around that of the images.
    folders = (base for base in (images, images.parent) if any(on_disk(base / name).is_file() for name in names))
    found = find_images(source, names, "NAME", next(folders, images))
    paths = [found[name] for name in names]
    roots = [images if path.is_relative_to(images) else images.parent for path in paths]
    relative = [path.relative_to(root) for path, root in zip(paths, roots, strict=True)]
    masks = masks_within(images.with_name("masks"), relative)
    photos = [
        _photo(source, path, mask, image, model.cameras[image.camera_id])
        for path, mask, image in zip(paths, masks, posed, strict=True)
    ]
    if options.depth:
        photos = _with_observations(source, photos, posed, model)
    photos = with_shrunk_images(photos, images, options.downscale)
    positions = np.array([point.xyz for point in model.points3D.values()], dtype=np.float64).reshape(-1, 3)
    points = points_near(source, torch.from_numpy(positions), photos)
    return load_capture(folder, source, photos, options, points=points, images=images)


def is_colmap(folder: Path) -> bool:
    """Returns whether a folder holds a COLMAP model; see :class:`voxelfield.datasets.registry.Format`."""
    return any(_models_in(folder / models, _FILES) for models, _ in _LAYOUTS)


def find_model(folder: Path, number: int | None) -> tuple[Path, Path]:
    """Returns the folders of a capture's model and of its images.

    The model has the given number, or else poses for the most images, with a warning if there are several. If a capture
    has several folders of models, those beside their images come first. Several models in one folder, such as
    ``sparse/0`` and ``sparse/1``, are reconstructions of parts that COLMAP could not join.
    """
    # Those without a file of images, which cannot be read, come last.
    layouts = [(folder / models, folder / images) for models, images in _LAYOUTS]
    found = [each for names in (_FILES[:1], _FILES) for each in layouts if _models_in(each[0], names)]
    models_folder, images = next((each for each in found if each[1].is_dir()), found[0])
    models = _models_in(models_folder) or _models_in(models_folder, _FILES)
    if number is not None:
        named = next((model for model in models if model.name == str(number)), None)
        if named is None:
            numbers = ", ".join(model.name for model in models if model.name.isdecimal())
            known = f"one of {numbers}" if numbers else "None"
            raise ValueError(f"model must be {known}, as {models_folder} has no other, got {number}")
        return named, images
    if len(models) == 1:
        return models[0], images
    counts = {model: _count_posed_images(model) for model in models}
    best = max(models, key=lambda model: counts[model])
    sizes = ", ".join(f"{model.name} with {count} images" for model, count in counts.items())
    logger.warning(
        "%s has several models, %s: %s is read, and scene.model=N selects another", models_folder, sizes, best.name
    )
    return best, images


def _models_in(folder: Path, names: Sequence[str] = ("images",)) -> list[Path]:
    """Returns the models in numbered folders, sorted by number; else the folder itself if it is a model."""
    numbered = [child for child in folder.glob("*") if child.name.isdecimal() and _is_model(child, names)]
    if numbered:
        return sorted(numbered, key=lambda child: (int(child.name), child.name))
    return [folder] if _is_model(folder, names) else []


def _is_model(folder: Path, names: Sequence[str]) -> bool:
    return any((folder / f"{name}.{suffix}").is_file() for name in names for suffix in ("bin", "txt"))


def _lacking(folder: Path, suffix: str) -> list[str]:
    """Returns the files that a model lacks; pycolmap reads the binary files if it has all, and otherwise the text."""
    return [f"{name}.{suffix}" for name in _FILES if not (folder / f"{name}.{suffix}").is_file()]


def _count_posed_images(folder: Path) -> int:
    """Returns how many images a model has, as its file of images says; 0 if it cannot be read."""
    try:
        if _lacking(folder, "bin"):
            return len(_names_in_text(folder))
        with (folder / "images.bin").open("rb") as file:
            return int.from_bytes(file.read(8), "little")
    except OSError:
        return 0


def _names_in_text(folder: Path) -> dict[int, bytes]:
    """Returns the names of a text model's images by their numbers, with the white space at which pycolmap ends one."""
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


def _read_model(source: Path) -> Any:
    pycolmap = import_optional("pycolmap", "read a COLMAP model", "colmap")
    lacking = min((_lacking(source, suffix) for suffix in ("bin", "txt")), key=len)
    if lacking:
        raise FileNotFoundError(f"{source}: must have cameras, images and points3D, got no {' and '.join(lacking)}")
    is_binary = not _lacking(source, "bin")
    if is_binary:
        check_binary_model(source)
    try:
        model: Any = pycolmap.Reconstruction(source)
    except (ValueError, RuntimeError, OSError, IndexError) as error:
        raise ValueError(f"{source}: not a COLMAP model ({reason_of(error)})") from error
    if not is_binary:
        for number, name in _names_in_text(source).items():
            if len(name.split()) > 1 and number in model.images:
                model.images[number].name = name
    return model


def _name(source: Path, image: Any) -> str:
    try:
        name = str(image.name)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: names of images must be UTF-8, got {error.object!r}") from error
    leaves = Path(name).is_absolute() or ".." in name.replace("\\", "/").split("/")
    if not Path(name).name or leaves or "\n" in name:
        raise ValueError(f"{source}: names of images must be files inside the folder images, got {shown(name)}")
    return name


def _photo(source: Path, path: Path, mask: Path | None, image: Any, camera: Any) -> Photo:
    kind, owner = camera.model.name, f"{source}: camera {camera.camera_id}"
    if kind not in CAMERA_MODELS:
        raise ValueError(
            f"{owner} must be one of {', '.join(CAMERA_MODELS)}, got {kind}: undistort the images first (colmap "
            "image_undistorter)"
        )
    model, terms = CAMERA_MODELS[kind]
    numbers = camera.params[-len(terms) :].tolist() if terms else []
    lens = photo_lens(owner, model, dict(zip(terms, numbers, strict=True)))
    w2c = torch.eye(4, dtype=torch.float64)
    w2c[:3] = torch.from_numpy(np.array(image.cam_from_world().matrix()))
    name = f"{source}: pose of {image.name}"
    # A short one becomes the identity, or nearly. Longer ones give no rotation, which load_capture refuses.
    quaternion = image.cam_from_world().rotation.quat
    if math.hypot(*quaternion) < 0.5:
        raise ValueError(f"{name} must have a unit quaternion, got {quaternion.tolist()}")
    c2w = turned_about(torch.linalg.inv(w2c))
    size = width, height = camera.width, camera.height
    if model == "equirectangular":
        # pycolmap crashes where it is asked for a focal length that the model does not have.
        intrinsics = (width / (2 * math.pi), height / math.pi, width / 2, height / 2)
    else:
        intrinsics = (camera.focal_length_x, camera.focal_length_y, camera.principal_point_x, camera.principal_point_y)
    return Photo(path, c2w, scaled(intrinsics, size, owner), lens, mask=mask, pose_name=name, wrong_axes=COLMAP_AXES)


def _with_observations(source: Path, photos: list[Photo], posed: list[Any], model: Any) -> list[Photo]:
    """Returns photographs with the points that their images observe.

    A point's weight is exp(-(e / m)^2), where e is its reprojection error and m the mean over all points, as in the
    published code of DS-NeRF (Deng et al. 2022).
    """
    errors = {number: point.error for number, point in model.points3D.items() if point.has_error()}
    mean = max(sum(errors.values()) / max(len(errors), 1), 1e-6)
    found = []
    for photo, image in zip(photos, posed, strict=True):
        seen = image.get_observation_points2D()
        camera = model.cameras[image.camera_id]
        pixels = np.array([point.xy for point in seen], dtype=np.float64).reshape(-1, 2)
        numbers = [point.point3D_id for point in seen]
        positions = np.array([model.points3D[number].xyz for number in numbers], dtype=np.float64).reshape(-1, 3)
        c2w = photo.c2w.numpy()
        depths = (c2w[:3, 3] - positions) @ c2w[:3, 2]
        weights = np.exp(-((np.array([errors.get(number, 0.0) for number in numbers]) / mean) ** 2))
        shares = pixels / (camera.width, camera.height)
        usable = (shares >= 0).all(axis=1) & (shares < 1).all(axis=1) & (depths > 0) & (depths <= FARTHEST)
        observed = np.column_stack((shares, depths, weights))[usable]
        found.append(replace(photo, observed=torch.from_numpy(observed)))
    if not any(len(photo.observed) for photo in found if photo.observed is not None):
        raise ValueError(
            f"{source}: images must observe points where depth is asked for (trainer.loss.depth), got "
            f"{len(model.points3D)} points without tracks: keep COLMAP's own model, which has them"
        )
    return found


def check_binary_model(folder: Path) -> None:
    """Raises ValueError if a file of a binary model is shorter than its stated numbers of entries require.

    pycolmap trusts these numbers: with a damaged file it reads past the end for hours, or until memory is exhausted.
    """
    for name, walk in _WALKS.items():
        path = folder / f"{name}.bin"
        if not path.is_file():
            continue  # models without rigs have fewer files
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ValueError(f"{path}: must begin with a number of {name}, got an empty file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                walk(_Walk(path, data))


class _Walk:
    """Walks through a file; raises ValueError if it ends too early."""

    def __init__(self, path: Path, data: Any) -> None:
        self.path, self._data, self._at = path, data, 0

    def skip(self, size: int) -> None:
        """Skips a number of bytes."""
        if size > len(self._data) - self._at:
            raise ValueError(f"{self.path}: must be complete, got a truncated file")
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
            raise ValueError(f"{self.path}: must hold {count} entries, as it declares, got a file of {found} bytes")
        return count

    def lists(self, head: int, named: bool, form: str, item: int) -> None:
        """Skips entries that end with lists of items.

        Given are the bytes of an entry before its list, whether a name is among them, the format of the number of
        items, and the bytes of an item.
        """
        for _ in range(self.count("Q", head + named + struct.calcsize(form))):
            self.skip(head)
            if named:
                end = self._data.find(b"\0", self._at)
                self.skip((end if end >= 0 else len(self._data)) + 1 - self._at)
            self.skip(item * self.count(form, item))


def _walk_cameras(walk: _Walk) -> None:
    import pycolmap

    models = pycolmap.CameraModelId.__members__
    known = {int(model): model for name, model in models.items() if name != "INVALID"}
    sizes: dict[int, int] = {}
    for _ in range(walk.count("Q", 24)):
        walk.skip(4)
        model = walk.number("i")
        if model not in known:
            raise ValueError(f"{walk.path}: the model of a camera must be one that COLMAP knows, got {model}")
        if model not in sizes:
            sizes[model] = 8 * len(pycolmap.Camera.create_from_model_id(0, known[model], 1.0, 2, 2).params)
        walk.skip(16 + sizes[model])


def _walk_rigs(walk: _Walk) -> None:
    for _ in range(walk.count("Q", 8)):
        walk.skip(4)
        sensors = walk.count("I", _SENSOR)
        if sensors > 0:
            walk.skip(_SENSOR)
        for _ in range(sensors - 1):
            walk.skip(_SENSOR)
            walk.skip(_POSE if walk.number("B") else 0)


_WALKS: dict[str, Callable[[_Walk], None]] = {
    "cameras": _walk_cameras,
    "images": lambda walk: walk.lists(4 + _POSE + 4, True, "Q", 24),
    "points3D": lambda walk: walk.lists(8 + 24 + 3 + 8, False, "Q", 8),
    "rigs": _walk_rigs,
    "frames": lambda walk: walk.lists(8 + _POSE, False, "I", _SENSOR + 8),
}


FORMAT = Format("COLMAP", "sparse/0/images.bin", is_colmap, load_colmap, order=30, has_models=True)
