"""The keys that programs write into ``transforms*.json``: which of them are refused, ignored or unknown here."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from voxelfield.ops._errors import shown

logger = logging.getLogger(__name__)

_MOST_NAMED = 10

# Read by voxelfield.datasets.transforms and .nerfstudio.
_READ = {
    *("frames", "file_path", "mask_path", "transform_matrix", "train_filenames", "val_filenames", "test_filenames"),
    *("camera_angle_x", "camera_angle_y", "fl_x", "fl_y", "x_fov", "y_fov", "cx", "cy", "w", "h"),
    *("camera_model", "is_fisheye", "distortion_params", "latlong", "equirectangular", "orthographic"),
    *("time", "depth_file_path", "depth_unit_scale_factor"),
}
LENS_KEY = re.compile(r"[kps]\d|s[xy]1|omega|k|alpha|beta|ftheta_p\d")
"""Matches the keys of coefficients of lenses."""

# These change rays in ways that are not modelled. Zeros change nothing.
_REFUSED = {
    "rolling_shutter": "the rows of an image are taken to be exposed at once",
    "transform_matrix_start": "a camera is taken to stand still during the exposure",
    "transform_matrix_end": "a camera is taken to stand still during the exposure",
    "shift_x": "give the principal point as cx and cy",
    "shift_y": "give the principal point as cx and cy",
    "skew": "pixels are taken to have rows and columns at right angles",
    "pixel_aspect_x": "give the focal lengths as fl_x and fl_y",
    "pixel_aspect_y": "give the focal lengths as fl_x and fl_y",
    "from_na": "poses are taken to have OpenGL's axes",
    "normal_mts_args": "poses are taken to have OpenGL's axes, not Mitsuba's",
}

# Provenance, and the normalisation of other programs, which leaves the poses in the file as they are.
_HARMLESS = {
    *("aabb_scale", "scale", "offset", "aabb", "render_aabb", "up", "applied_transform", "applied_scale"),
    *("orientation_override", "auto_scale_poses_override", "near", "far", "z_near", "z_far", "importance_sampling"),
    *("n_extra_learnable_dims", "sharpness", "rotation", "derived_from", "timestamp", "id", "name", "n_frames"),
    *("colmap_im_id", "colmap_image_id", "colmap_camera_id", "camera_id", "cam_id", "image_id", "frame_id"),
}


def check_keys(file: Path, meta: Mapping[str, Any], frames: Sequence[Mapping[str, Any]]) -> None:
    """Refuses keys that change the geometry and are not modelled; the log names the others that have no effect.

    Args:
        file: The file, for messages.
        meta: All of it.
        frames: Its frames.

    Raises:
        ValueError: A key is refused; the message says why.
    """
    unused: dict[str, object] = {}  # the first value of each key that no loader reads
    for holder in (meta, *frames):
        for key, value in holder.items():
            if key in _READ or key in _HARMLESS or _is_nothing(value) or LENS_KEY.fullmatch(key):
                continue
            if key in _REFUSED and not (key.startswith("pixel_aspect") and value == 1):
                raise ValueError(f"{file}: {key!r} must be absent, got {shown(value)}: {_REFUSED[key]}")
            if key not in _REFUSED:
                unused.setdefault(key, value)
    if unused:
        named = [f"{shown(key)} ({shown(value)})" for key, value in unused.items()]
        logger.warning("%s: these keys have no effect: %s", file, ", ".join(named[:_MOST_NAMED]))


def _is_nothing(value: object) -> bool:
    """Returns whether a value is null, false, empty, or zeros."""
    return all(map(_is_nothing, value)) if isinstance(value, list) else value in (None, False, "", {})
