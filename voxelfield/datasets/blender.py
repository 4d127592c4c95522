"""Loader of the NeRF-synthetic (Blender) layout.

A scene is a folder with ``transforms_train.json``, ``transforms_test.json`` and maybe ``transforms_val.json``. Each
lists frames (``file_path``, ``transform_matrix``) and the horizontal field of view ``camera_angle_x`` in radians, or
``fl_x``, ``fl_y``, ``cx``, ``cy``, ``w``, ``h`` in pixels, for the whole file or for a frame. Format: Mildenhall et
al., "NeRF", ECCV 2020.
"""

from __future__ import annotations

import json
import logging
import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from voxelfield.datasets.images import factor_to_fit, read_images
from voxelfield.datasets.scene import Scene, Split
from voxelfield.grids.boxes import box_tensor, parse_box
from voxelfield.rendering.cameras import Cameras

SPLITS = ("train", "val", "test")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
DEFAULT_AABB = ((-1.5, -1.5, -1.5), (1.5, 1.5, 1.5))

logger = logging.getLogger(__name__)


def is_blender(folder: Path) -> bool:
    """Tells whether a folder holds a ``transforms_<split>.json``; see :class:`voxelfield.datasets.registry.Format`."""
    return bool(available_splits(folder))


def load(
    folder: Path,
    *,
    splits: Sequence[str],
    image_size: int | None,
    missing_images: Literal["error", "skip"],
    aabb: Tensor | Sequence[Sequence[float]] | None,
) -> Scene:
    """Loads a scene for :func:`voxelfield.load_scene`; see :class:`voxelfield.datasets.registry.Loader`."""
    return load_blender(
        folder,
        splits=splits,
        downscale=1 if image_size is None else downscale_to_fit(folder, image_size),
        missing_images=missing_images,
        aabb=DEFAULT_AABB if aabb is None else aabb,
    )


def load_blender(
    folder: Path | str,
    *,
    splits: Sequence[str] = ("train", "test"),
    downscale: int = 1,
    missing_images: Literal["error", "skip"] = "error",
    aabb: Tensor | Sequence[Sequence[float]] = DEFAULT_AABB,
) -> Scene:
    """Loads a scene in the NeRF-synthetic layout. Only the splits asked for are read.

    Args:
        folder: The scene's folder; its name becomes the scene's.
        splits: Which of train, val and test to load; each needs its ``transforms_<split>.json``.
        downscale: Whole factor to shrink images by, averaging areas; must divide width and height.
        missing_images: "error" refuses a split that lacks a listed image, "skip" leaves such frames out and warns.
        aabb: (2, 3) low and high corner of the scene in world units.

    Returns:
        The scene, on the CPU. Images are RGBA with straight alpha; those without alpha are opaque.

    Raises:
        FileNotFoundError: The folder, a split's json or an image is missing.
        ValueError: An argument, a json file or an image is not as described above; the message is one line and names
            it.
    """
    folder = Path(folder)
    if downscale < 1:
        raise ValueError(f"downscale must be a whole number of at least 1, got {downscale}")
    if missing_images not in ("error", "skip"):
        raise ValueError(f"missing_images must be 'error' or 'skip', got {missing_images!r}")
    if not folder.is_dir():
        raise FileNotFoundError(
            f"folder must be a scene with transforms_train.json in it, got {folder}, which does not exist"
        )
    box = box_tensor(parse_box(aabb), torch.device("cpu"))
    loaded = {name: _load_split(folder, name, downscale, missing_images) for name in splits}
    return Scene(name=folder.resolve().name, aabb=box, splits=loaded)


def available_splits(folder: Path | str) -> tuple[str, ...]:
    """Lists the splits whose ``transforms_<split>.json`` exists, in the order train, val, test."""
    return tuple(name for name in SPLITS if _split_file(Path(folder), name).is_file())


def downscale_to_fit(folder: Path | str, max_size: int, split: str = "train") -> int:
    """Finds the smallest ``downscale`` for :func:`load_blender` that brings a scene's images to a size.

    Args:
        folder: The scene's folder.
        max_size: Longest image side wanted, in pixels.
        split: The split whose first image present is measured.

    Returns:
        The smallest whole factor that divides both sides and leaves neither longer than ``max_size``.

    Raises:
        FileNotFoundError: The split's json is missing, or all its images are.
        ValueError: The json or the image is unreadable, or no factor divides both sides to fit.
    """
    file = _split_file(Path(folder), split)
    paths = [_image_path(Path(folder), frame["file_path"]) for frame in _frames(file, _read_json(Path(folder), file))]
    present = next((path for path in paths if path.is_file()), None)
    if present is None:
        raise FileNotFoundError(f"{file}: {len(paths)} of {len(paths)} images are missing, the first is {paths[0]}")
    return factor_to_fit(present, max_size)


def _load_split(folder: Path, name: str, downscale: int, missing_images: str) -> Split:
    file = _split_file(folder, name)
    meta = _read_json(folder, file)
    frames = _frames(file, meta)
    paths = [_image_path(folder, frame["file_path"]) for frame in frames]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        lack = f"{len(missing)} of {len(paths)} images are missing, the first is {missing[0]}"
        if missing_images == "error" or len(missing) == len(paths):
            raise FileNotFoundError(f"{file}: {lack}")
        logger.warning("%s: %s; their frames are left out", file, lack)
        absent = set(missing)
        frames = [frame for frame, path in zip(frames, paths, strict=True) if path not in absent]
        paths = [path for path in paths if path not in absent]
    c2w = torch.stack([_matrix(file, frame) for frame in frames])
    images = read_images(paths, downscale)
    height, width = images.shape[1:3]
    intrinsics = [_intrinsics(file, ChainMap(frame, meta), width * downscale, height * downscale) for frame in frames]
    cameras = Cameras(c2w, torch.tensor(intrinsics, dtype=torch.float64).div(downscale).float(), width, height)
    return Split(images, cameras, _view_names(paths))


def _view_names(paths: list[Path]) -> tuple[str, ...]:
    """Names views after their images; with their number in front where two images have one name, or are one."""
    stems = [path.stem for path in paths]
    if len(set(stems)) < len(stems):
        stems = [f"{index}_{stem}" for index, stem in enumerate(stems)]
    return tuple(stems)


def _split_file(folder: Path, name: str) -> Path:
    return folder / f"transforms_{name}.json"


def _read_json(folder: Path, file: Path) -> dict[str, Any]:
    if not file.is_file():
        there = ", ".join(available_splits(folder)) or "none"
        raise FileNotFoundError(f"{file}: no such file (splits of this scene: {there})")
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(meta, dict):
        raise ValueError(f"{file}: must hold an object with 'frames', got a {type(meta).__name__}")
    for term in ("k1", "k2", "k3", "k4", "p1", "p2"):
        if meta.get(term):
            raise ValueError(f"{file}: lens distortion {term}={meta[term]}: this loader reads pinhole cameras only")
    return meta


def _frames(file: Path, meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "frames" not in meta:
        raise ValueError(f"{file}: key 'frames' is missing")
    frames = meta["frames"]
    if not isinstance(frames, list) or not frames:
        raise ValueError(
            f"{file}: 'frames' must be a list with entries, got {'none' if frames == [] else type(frames).__name__}"
        )
    for index, frame in enumerate(frames):
        if not isinstance(frame, dict):
            raise ValueError(f"{file}: frame {index} must be an object, got {type(frame).__name__}")
        for key in ("file_path", "transform_matrix"):
            if key not in frame:
                raise ValueError(f"{file}: key '{key}' is missing in frame {index}")
        if not isinstance(frame["file_path"], str) or not frame["file_path"]:
            raise ValueError(f"{file}: 'file_path' of frame {index} must be a path, got {frame['file_path']!r}")
    return frames


def _image_path(folder: Path, file_path: str) -> Path:
    path = folder / file_path
    # Only known suffixes count: in "view_0.5" the ".5" belongs to the name.
    return path if path.suffix.lower() in IMAGE_SUFFIXES else path.with_name(path.name + ".png")


def _matrix(file: Path, frame: Mapping[str, Any]) -> Tensor:
    where = f"{file}: 'transform_matrix' of {frame['file_path']}"
    try:
        matrix = torch.tensor(frame["transform_matrix"], dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where} must be a 4x4 matrix of numbers, got {frame['transform_matrix']!r}") from error
    if matrix.shape != (4, 4):
        raise ValueError(f"{where} must have shape (4, 4), got {tuple(matrix.shape)}")
    if not matrix.isfinite().all():
        raise ValueError(f"{where} must be finite, got {matrix.tolist()}")
    return matrix


def _number(file: Path, meta: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = meta.get(key, default)
    if value is None:
        raise ValueError(f"{file}: key '{key}' is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{file}: '{key}' must be a finite number, got {value!r}")
    return float(value)


def _intrinsics(file: Path, meta: Mapping[str, Any], width: int, height: int) -> tuple[float, ...]:
    for key, size in (("w", width), ("h", height)):
        if _number(file, meta, key, size) != size:
            raise ValueError(f"{file}: '{key}' must be {size}, as the images are {width}x{height}, got {meta[key]}")
    if "fl_x" in meta:
        focal = _number(file, meta, "fl_x")
    else:
        angle = _number(file, meta, "camera_angle_x")
        if not 0.0 < angle < math.pi:
            raise ValueError(f"{file}: 'camera_angle_x' must be radians between 0 and pi, got {angle}")
        focal = 0.5 * width / math.tan(0.5 * angle)
    focal_y = _number(file, meta, "fl_y", focal)
    if focal <= 0.0 or focal_y <= 0.0:
        raise ValueError(f"{file}: focal lengths must be above 0 pixels, got {focal} and {focal_y}")
    return focal, focal_y, _number(file, meta, "cx", width / 2), _number(file, meta, "cy", height / 2)
