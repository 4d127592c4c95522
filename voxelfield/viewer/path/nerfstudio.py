"""Camera paths as nerfstudio's viewer writes them."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from voxelfield.datasets.poses import check_poses
from voxelfield.messages import clipped
from voxelfield.viewer.drawing.viewpoint import FIELDS_OF_VIEW, Viewpoint
from voxelfield.viewer.path.key_frames import between

DURATIONS = (0.1, 3600.0)
"""Shortest and longest path, seconds."""

RATES = (1, 240)
"""Fewest and most frames per second."""

SIDES = (16, 8192)
"""Smallest and largest height and width of a frame, pixels."""

MOST_KEY_FRAMES = 500

MOST_FRAMES = 36_000
"""Of a path: ten minutes at 60 frames per second."""


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
    frames = between(keys, settings.frames, closed=settings.closed)
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
        ValueError: It is no such file, or its numbers are out of range; the message names file and key.
    """
    name = clipped(name)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a camera path in nerfstudio's format, in JSON ({error})") from error
    frames = found.get("keyframes") if isinstance(found, dict) else None
    if not isinstance(frames, list) or not 1 <= len(frames) <= MOST_KEY_FRAMES:
        raise ValueError(f"{name} must be a camera path with 1 to {MOST_KEY_FRAMES} key frames, 'keyframes'")
    keys = [_key_frame(f"{name}: keyframes[{index}]", frame) for index, frame in enumerate(frames)]
    seconds, fps = _number(name, found, "seconds", DURATIONS), round(_number(name, found, "fps", RATES))
    height, width = (round(_number(name, found, key, SIDES)) for key in ("render_height", "render_width"))
    closed = found.get("is_cycle", False)
    if not isinstance(closed, bool):
        raise ValueError(f"{name}: 'is_cycle' must be true or false, got {_shown(closed)}")
    return keys, PathSettings(seconds, fps, height, width, closed)


def _key_frame(where: str, frame: object) -> Viewpoint:
    if not isinstance(frame, dict):
        raise ValueError(f"{where} must be an object, got {_shown(frame)}")
    matrix, by_columns = frame.get("matrix"), False
    if isinstance(matrix, str):
        # Older versions of nerfstudio's viewer write the list as a text, column by column.
        by_columns = True
        with contextlib.suppress(ValueError, RecursionError):
            matrix = json.loads(matrix)
    if not isinstance(matrix, list) or len(matrix) != 16 or not all(map(_is_finite, matrix)):
        raise ValueError(f"{where}: 'matrix' must be 16 finite numbers, got {_shown(matrix)}")
    c2w = torch.tensor(matrix, dtype=torch.float64).view(4, 4)
    c2w = c2w.mT if by_columns else c2w
    check_poses(lambda _: f"{where}: 'matrix'", c2w[None])
    degrees = tuple(map(math.degrees, FIELDS_OF_VIEW))
    return Viewpoint.of(c2w, math.radians(_number(where, frame, "fov", degrees)))


def _number(where: str, found: Mapping[str, Any], key: str, limits: tuple[float, ...]) -> float:
    value = found.get(key)
    if not _is_finite(value) or not limits[0] <= value <= limits[-1]:
        raise ValueError(f"{where}: '{key}' must be {limits[0]:g} to {limits[-1]:g}, got {_shown(value)}")
    return float(value)


def _is_finite(value: object) -> TypeGuard[float]:
    # Integers of any length are valid JSON, and only some of them floats.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _shown(value: object) -> str:
    return clipped(" ".join(repr(value).split()), 60)
