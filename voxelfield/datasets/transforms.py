"""Files of frames with their poses, ``transforms*.json``, as several formats have them.

A file lists ``frames`` (``file_path``, ``transform_matrix``) and the horizontal field of view ``camera_angle_x`` in
radians, or ``fl_x``, ``fl_y``, ``cx``, ``cy``, ``w``, ``h`` in pixels, for the whole file or for a frame. A lens that
distorts has ``k1``, ``k2``, ``k3``, ``k4``, ``p1``, ``p2`` and a ``camera_model`` (nerfstudio), or ``is_fisheye``
(instant-ngp). A frame may have a ``mask_path``, an image that is black where pixels must be ignored.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxelfield.datasets.images import IMAGE_SUFFIXES
from voxelfield.datasets.photos import LENS_TERMS, Intrinsics, Photo, photo_lens
from voxelfield.datasets.poses import check_poses
from voxelfield.files import read_regular
from voxelfield.messages import clipped
from voxelfield.ops._errors import shown
from voxelfield.rendering.lens import Lens, LensModel

logger = logging.getLogger(__name__)

# So many take seconds.
_MANY_FRAMES = 10_000
# Of any file system in use, in bytes.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_PINHOLES = ("PINHOLE", "SIMPLE_PINHOLE")
_LENSES: dict[str, LensModel] = {
    "OPENCV": "perspective",
    "SIMPLE_RADIAL": "perspective",
    "RADIAL": "perspective",
    "OPENCV_FISHEYE": "fisheye",
    "SIMPLE_RADIAL_FISHEYE": "fisheye",
    "RADIAL_FISHEYE": "fisheye",
}


def read_transforms(file: Path) -> list[Photo]:
    """Reads such a file.

    Args:
        file: It lies in the folder that paths of images start from.

    Returns:
        The photographs that it lists, whether their files are there or not.

    Raises:
        ValueError: It is not as described above, an image's path leaves the folder, or a lens is of another
            model.
    """
    meta = read_object(file)
    frames = _frames(file, meta)
    if len(frames) >= _MANY_FRAMES:
        logger.info("%s: checking %d frames", file, len(frames))
    photos = []
    for frame, pose in zip(frames, _poses(file, frames), strict=True):
        known = ChainMap(frame, meta)
        path = image_path(file, frame["file_path"])
        mask = image_path(file, frame["mask_path"], "mask_path") if frame.get("mask_path") is not None else None
        photos.append(Photo(path, pose, partial(_intrinsics, file, known), _lens(file, known), mask=mask))
    return photos


def read_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ValueError: The file holds none.
    """
    try:
        meta = json.loads(read_regular(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(meta, dict):
        raise ValueError(f"{file}: must hold an object with 'frames', got a {type(meta).__name__}")
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
        for key in ("file_path", "mask_path"):
            path = frame.get(key)
            if not (isinstance(path, str) and path) and (key == "file_path" or path is not None):
                raise ValueError(f"{file}: '{key}' of frame {index} must be a path, got {shown(path)}")
    return frames


def image_path(file: Path, file_path: str, key: str = "file_path") -> Path:
    """Returns where the image of a frame is.

    Args:
        file: Names it.
        file_path: As the file has it, relative to the file's folder, or absolute; a suffix that is lacking is
            ``.png``.
        key: What the file calls it, for messages.

    Raises:
        ValueError: The path leaves the folder, or no file system could have it.
    """
    folder = os.path.abspath(file.parent)  # noqa: PTH100 - links stay as they are, unlike with resolve
    # By its words, as links within the folder may well lead out of it.
    inside = os.path.relpath(os.path.join(folder, file_path), folder)  # noqa: PTH118 - joins what Path would clean
    if inside.split(os.sep, 1)[0] == os.pardir:
        raise ValueError(f"{file}: '{key}' must be inside the scene's folder, got {shown(file_path)}")
    encoded = os.path.join(folder, inside).encode(errors="surrogatepass")  # noqa: PTH118
    longest = max(map(len, encoded.split(os.sep.encode())))
    if longest > _LONGEST_NAME or len(encoded) > _LONGEST_PATH or b"\0" in encoded:
        raise ValueError(f"{file}: '{key}' must be a valid file path, got {shown(file_path)}")
    path = file.parent / inside
    # Only known suffixes count: in "view_0.5" the ".5" belongs to the name.
    return path if path.suffix.lower() in IMAGE_SUFFIXES else path.with_name(path.name + ".png")


def _poses(file: Path, frames: Sequence[Mapping[str, Any]]) -> Tensor:
    """Returns the poses (N, 4, 4) of all frames."""

    def name(index: int) -> str:
        return f"{file}: 'transform_matrix' of {clipped(frames[index]['file_path'])}"

    matrices = torch.empty(len(frames), 4, 4, dtype=torch.float64)
    for index, frame in enumerate(frames):
        matrix = frame["transform_matrix"]
        try:
            read = torch.tensor(matrix, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{name(index)} must be a 4x4 matrix of numbers, got {shown(matrix)}") from error
        if read.shape != (4, 4):
            raise ValueError(f"{name(index)} must have shape (4, 4), got {clipped(str(tuple(read.shape)))}")
        matrices[index] = read
    check_poses(name, matrices)
    return matrices


def _number(file: Path, meta: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = meta.get(key, default)
    if value is None:
        raise ValueError(f"{file}: key '{key}' is missing")
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # JSON has whole numbers of any length
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{file}: '{key}' must be a finite number, got {shown(value)}")
    return number


def _intrinsics(file: Path, meta: Mapping[str, Any], width: int, height: int) -> Intrinsics:
    for key, size in (("w", width), ("h", height)):
        if _number(file, meta, key, size) != size:
            got = shown(meta[key])
            raise ValueError(f"{file}: '{key}' must be {size}, as the images are {width}x{height}, got {got}")
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


def _lens(file: Path, meta: Mapping[str, Any]) -> Lens | None:
    name = meta.get("camera_model", "OPENCV_FISHEYE" if meta.get("is_fisheye") is True else "OPENCV")
    terms = {term: _number(file, meta, term, 0.0) for term in LENS_TERMS}
    if name in _PINHOLES:
        distorting = [term for term, value in terms.items() if value != 0]
        if distorting:
            raise ValueError(
                f"{file}: 'camera_model' must be OPENCV for a lens with {', '.join(distorting)}, got {name!r}"
            )
        return None
    if not isinstance(name, str) or name not in _LENSES:
        raise ValueError(
            f"{file}: 'camera_model' must be one of {', '.join((*_PINHOLES, *_LENSES))}, got {shown(name)}: "
            "undistort the images first"
        )
    return photo_lens(str(file), _LENSES[name], terms)
