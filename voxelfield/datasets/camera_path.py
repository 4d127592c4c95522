"""Files of camera paths, in the format of nerfstudio's viewer."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxelfield.datasets.poses import check_poses
from voxelfield.files import json_number, read_json_object
from voxelfield.foundation.errors import shown
from voxelfield.media.video import FPS_RANGE, LARGEST_SIDE
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.rigid import moved

logger = logging.getLogger(__name__)

FIELDS_OF_VIEW = (0.01, 179.0)
"""Smallest and largest vertical field of view, degrees. Beyond these, float32 cannot represent directions of rays."""


@dataclass(frozen=True)
class CameraPath:
    """A path to render.

    Attributes:
        cameras: The stations, in the units and axes of the scene's poses.
        fps: Frames per second.
    """

    cameras: Cameras
    fps: float


def read_camera_path(path: Path, origin: Sequence[float] | None = None) -> CameraPath:
    """Reads a camera path; positions in the file are not relative to ``origin``, those of the cameras are.

    The file is a JSON object with ``camera_path``, a list of frames with ``camera_to_world`` (16 numbers, row by row;
    OpenGL camera axes) and ``fov`` (vertical, degrees), and ``render_height``, ``render_width``, ``fps`` and
    ``camera_type``: ``perspective``, or ``equirectangular`` for whole spheres, which have no ``fov``. If frames have a
    ``render_time``, all must, and the cameras carry it as ``time``.

    Raises:
        FileNotFoundError: It does not exist.
        ValueError: The file is not a camera path; the message names file, frame and key.
    """
    name = str(path)
    content = read_json_object(path)
    kind = content.get("camera_type", "perspective")
    if kind not in ("perspective", "equirectangular"):
        raise ValueError(f"{name}: 'camera_type' must be perspective or equirectangular, got {shown(kind)}")
    if content.get("crop") is not None:
        logger.warning("%s: 'crop' is ignored: the whole field is rendered", name)
    height, width = (
        int(_number(name, content, key, 1, LARGEST_SIDE, whole=True)) for key in ("render_height", "render_width")
    )
    fps = _number(name, content, "fps", *FPS_RANGE)
    poses, focals = [], []
    frames = content.get("camera_path")
    if not isinstance(frames, list) or not frames:
        raise ValueError(f"{name}: 'camera_path' must be a list of at least one frame, got {shown(frames)}")
    for index, frame in enumerate(frames):
        where = f"{name}: camera_path[{index}]"
        if not isinstance(frame, dict):
            raise ValueError(f"{where} must be an object, got {shown(frame)}")
        poses.append(_pose(f"{where}: 'camera_to_world'", frame.get("camera_to_world"), origin))
        if kind == "equirectangular":
            focals.append((width / (2 * math.pi), height / math.pi))
        else:
            fov = math.radians(_number(where, frame, "fov", *FIELDS_OF_VIEW))
            focals.append(2 * (0.5 * height / math.tan(0.5 * fov),))
    intrinsics = torch.tensor([[*focal, 0.5 * width, 0.5 * height] for focal in focals])
    lens = Lens(kind, torch.zeros(len(poses), 0)) if kind == "equirectangular" else None
    cameras = Cameras(torch.stack(poses), intrinsics, width, height, lens)
    if any(frame.get("render_time") is not None for frame in frames):
        where = f"{name}: camera_path"
        times = [_number(f"{where}[{i}]", frame, "render_time", -1e30, 1e30) for i, frame in enumerate(frames)]
        cameras = cameras.with_values(time=torch.tensor(times))
    return CameraPath(cameras, fps)


def camera_path_file(cameras: Cameras, fps: float, origin: Sequence[float] | None = None) -> bytes:
    """Returns the content of a file that :func:`read_camera_path` reads, of frames per second and stations.

    These are pinhole cameras with square pixels and their principal points in the middle.
    """
    fovs = 2 * torch.atan(0.5 * cameras.height / cameras.intrinsics[:, 1].double()).rad2deg()
    # Between wide angles, a smooth path may overshoot.
    poses = moved(cameras.c2w, origin).flatten(1).tolist()
    frames = zip(poses, fovs.clamp(*FIELDS_OF_VIEW).tolist(), strict=True)
    content = {
        "camera_type": "perspective",
        "render_height": cameras.height,
        "render_width": cameras.width,
        "fps": fps,
        "seconds": len(cameras) / fps,
        "camera_path": [
            {"camera_to_world": pose, "fov": fov, "aspect": cameras.width / cameras.height} for pose, fov in frames
        ],
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def _number(where: str, content: Mapping[str, Any], key: str, low: float, high: float, *, whole: bool = False) -> float:
    """Returns a number between two limits from an object of a camera path; raises ValueError for anything else."""
    value = json_number(content.get(key))
    if not low <= value <= high or (whole and not value.is_integer()):
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{where}: '{key}' must be {kind} from {low:g} to {high:g}, got {shown(content.get(key))}")
    return value


def _pose(name: str, values: object, origin: Sequence[float] | None) -> Tensor:
    """Returns a pose (4, 4) float32, from 16 numbers row by row; raises ValueError unless it is a rigid motion."""
    numbers = [json_number(value) for value in values] if isinstance(values, list) else []
    if len(numbers) != 16 or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name} must be 16 finite numbers, row by row, got {shown(values)}")
    matrix = torch.tensor(numbers, dtype=torch.float64).view(4, 4)
    matrix = moved(matrix, origin, -1)
    check_poses(lambda _: name, matrix[None])
    return matrix.float()
