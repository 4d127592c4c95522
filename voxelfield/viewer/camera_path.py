"""Camera paths: smooth curves through key frames, and files in the format of nerfstudio."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from voxelfield.datasets.camera_path import FIELDS_OF_VIEW, number, path_frames, pose
from voxelfield.datasets.text import json_object
from voxelfield.messages import clipped
from voxelfield.ops._errors import shown
from voxelfield.rendering.paths import through_poses
from voxelfield.viewer.display import Viewpoint

DURATIONS = (0.1, 3600.0)
"""Shortest and longest path, seconds."""

RATES = (1, 240)
"""Fewest and most frames per second."""

SIDES = (16, 8192)
"""Smallest and largest height and width of a frame, pixels."""

MOST_KEY_FRAMES = 500

MOST_FRAMES = 36_000
"""Largest number of frames of a path: ten minutes at 60 frames per second."""


@dataclass(frozen=True)
class PathSettings:
    """How a path is to be rendered.

    Attributes:
        seconds: Duration.
        fps: Frames per second.
        height: Height of the frames, pixels.
        width: Width of the frames, pixels.
        closed: Whether the path returns to its first key frame.
    """

    seconds: float = 6.0
    fps: int = 30
    height: int = 1080
    width: int = 1920
    closed: bool = False

    @property
    def frames(self) -> int:
        """Number of frames."""
        return max(1, round(self.seconds * self.fps))


def interpolate(keys: Sequence[Viewpoint], frames: int, *, closed: bool = False) -> list[Viewpoint]:
    """Returns viewpoints on a smooth path through key frames, which take equal times.

    Positions, orientations (as quaternions) and fields of view follow Catmull-Rom splines. Fields of view stay between
    the smallest and the largest of the key frames.

    Args:
        keys: At least one key frame.
        frames: Number of viewpoints, at least 1. An open path begins and ends at a key frame.
        closed: Whether the path returns to its first key frame, which is not repeated at the end.

    Raises:
        ValueError: There are no key frames, or ``frames`` is below 1.
    """
    if not keys:
        raise ValueError("keys must be at least one key frame, got none")
    poses = torch.stack([key.matrix for key in keys])
    fovs = torch.tensor([[key.fov] for key in keys], dtype=torch.float64)
    path, path_fovs = through_poses(poses, fovs, frames, closed=closed)
    # A spline overshoots, and a field of view must stay below 180 degrees.
    clamped = path_fovs[:, 0].clamp(fovs.min(), fovs.max())
    return [Viewpoint.of(pose, float(fov)) for pose, fov in zip(path, clamped, strict=True)]


def write_path(keys: Sequence[Viewpoint], settings: PathSettings) -> bytes:
    """Returns the content of a camera path's file, with all frames and the key frames they came from.

    Poses are camera to world in the units and axes of the world, with OpenGL camera axes; fields of view are vertical,
    in degrees.

    Args:
        keys: At least one key frame.
        settings: How the path is to be rendered.

    Raises:
        ValueError: There are no key frames, or the path has more than :data:`MOST_FRAMES` frames.
    """
    if settings.frames > MOST_FRAMES:
        raise ValueError(
            f"seconds times fps must be at most {MOST_FRAMES} frames, got {settings.seconds:g} x {settings.fps}"
        )
    aspect = settings.width / settings.height
    frames = interpolate(keys, settings.frames, closed=settings.closed)
    span = len(keys) if settings.closed else max(len(keys) - 1, 1)
    content = {
        "default_fov": math.degrees(keys[0].fov),
        "default_transition_sec": settings.seconds / span,
        "keyframes": [
            {
                "matrix": list(key.c2w),
                "fov": math.degrees(key.fov),
                "aspect": aspect,
                "override_transition_enabled": False,
                "override_transition_sec": None,
            }
            for key in keys
        ],
        "camera_type": "perspective",
        "render_height": settings.height,
        "render_width": settings.width,
        "fps": settings.fps,
        "seconds": settings.seconds,
        "is_cycle": settings.closed,
        "smoothness_value": 0.0,
        "camera_path": [
            {"camera_to_world": list(frame.c2w), "fov": math.degrees(frame.fov), "aspect": aspect} for frame in frames
        ],
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def read_path(content: bytes, name: str) -> tuple[list[Viewpoint], PathSettings]:
    """Reads the key frames of a camera path's file, and how it is to be rendered.

    Args:
        content: Content of the file.
        name: Name of the file, for messages.

    Raises:
        ValueError: The file is not such a path; the message names file, key frame and key.
    """
    name = clipped(name)
    found = json_object(name, content)
    keys = []
    for where, frame in path_frames(name, found, "keyframes"):
        fov = math.radians(number(where, frame, "fov", *FIELDS_OF_VIEW))
        keys.append(Viewpoint.of(pose(f"{where}: 'matrix'", frame.get("matrix")), fov))
    if len(keys) > MOST_KEY_FRAMES:
        raise ValueError(f"{name}: 'keyframes' must be at most {MOST_KEY_FRAMES}, got {len(keys)}")
    height, width = (int(number(name, found, key, *SIDES, whole=True)) for key in ("render_height", "render_width"))
    seconds, fps = number(name, found, "seconds", *DURATIONS), round(number(name, found, "fps", *RATES))
    closed = found.get("is_cycle", False)
    if not isinstance(closed, bool):
        raise ValueError(f"{name}: 'is_cycle' must be true or false, got {shown(closed)}")
    return keys, PathSettings(seconds, fps, height, width, closed)
