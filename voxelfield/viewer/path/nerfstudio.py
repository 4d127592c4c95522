"""Camera paths as nerfstudio's viewer writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from voxelfield.viewer.drawing.viewpoint import Viewpoint
from voxelfield.viewer.path.key_frames import between


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
        ValueError: There are no key frames.
    """
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
        ValueError: It is no such file; the message names it.
    """
    try:
        found: dict[str, Any] = json.loads(content)
        keys = [_key_frame(frame) for frame in found["keyframes"]]
        settings = PathSettings(
            float(found["seconds"]),
            round(float(found["fps"])),
            int(found["render_height"]),
            int(found["render_width"]),
            bool(found.get("is_cycle", False)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} must be a camera path in nerfstudio's format, with key frames: {error!r}") from error
    if not keys:
        raise ValueError(f"{name} must be a camera path with key frames, got none")
    return keys, settings


def _key_frame(frame: dict[str, Any]) -> Viewpoint:
    matrix = frame["matrix"]
    # Older versions of nerfstudio's viewer write the list as a text, column by column.
    c2w = torch.tensor(json.loads(matrix) if isinstance(matrix, str) else matrix, dtype=torch.float32).view(4, 4)
    return Viewpoint.of(c2w.mT if isinstance(matrix, str) else c2w, math.radians(float(frame["fov"])))
