"""Camera paths that nerfstudio's viewer, or voxelfield's own, has written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from voxelfield.datasets.poses import check_poses
from voxelfield.datasets.transforms import read_object
from voxelfield.rendering.cameras import Cameras


@dataclass(frozen=True)
class CameraPath:
    """A path to render.

    Attributes:
        cameras: The stations, in the units and axes of the scene's poses.
        fps: Frames per second.
    """

    cameras: Cameras
    fps: float


def read_camera_path(path: Path) -> CameraPath:
    """Reads a camera path.

    The file is a JSON object with ``camera_path``, a list of frames with ``camera_to_world`` (16 numbers, row by row;
    OpenGL camera axes) and ``fov`` (vertical, degrees), and ``render_height``, ``render_width``, ``fps`` and
    ``camera_type``.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: It is not there.
        ValueError: The file is not a camera path; the message names file, frame and key.
    """
    content = read_object(path)
    kind = content.get("camera_type", "perspective")
    if kind != "perspective":
        raise ValueError(f"{path}: 'camera_type' must be perspective, got {kind!r}")
    height, width = (_number(path, content, key, whole=True) for key in ("render_height", "render_width"))
    fps = _number(path, content, "fps")
    frames = content.get("camera_path")
    if not isinstance(frames, list) or not frames:
        raise ValueError(f"{path}: 'camera_path' must be a list of at least one frame, got {_shown(frames)}")
    poses, focals = [], []
    for index, frame in enumerate(frames):
        where = f"{path}: camera_path[{index}]"
        if not isinstance(frame, dict):
            raise ValueError(f"{where} must be an object, got {_shown(frame)}")
        poses.append(_pose(where, frame.get("camera_to_world")))
        fov = _number(where, frame, "fov")
        if fov >= 180:
            raise ValueError(f"{where}: 'fov' must lie below 180 degrees, got {fov:g}")
        focals.append(0.5 * height / math.tan(math.radians(0.5 * fov)))
    intrinsics = torch.tensor([[focal, focal, 0.5 * width, 0.5 * height] for focal in focals])
    return CameraPath(Cameras(torch.stack(poses), intrinsics, int(width), int(height)), fps)


def _number(where: Path | str, content: Mapping[str, Any], key: str, *, whole: bool = False) -> float:
    value = content.get(key)
    if not _finite(value) or value <= 0 or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{where}: '{key}' must be {kind} above 0, got {_shown(value)}")
    return float(value)


def _pose(where: str, values: object) -> torch.Tensor:
    if not isinstance(values, list) or len(values) != 16 or not all(map(_finite, values)):
        raise ValueError(f"{where}: 'camera_to_world' must be 16 finite numbers, row by row, got {_shown(values)}")
    pose = torch.tensor(values, dtype=torch.float64).view(4, 4)
    check_poses(lambda _: f"{where}: 'camera_to_world'", pose[None])
    return pose.float()


def _finite(value: object) -> TypeGuard[float]:
    # Integers of any length are valid JSON; beyond this they are no float32.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
