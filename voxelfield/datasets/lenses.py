"""Lenses of photographs: the camera models of COLMAP, nerfstudio and instant-ngp, by name, and their coefficients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import LENS_TERMS, Lens, LensModel, join_lenses
from voxelfield.rendering.rigid import moved

CAMERA_MODELS: dict[str, tuple[LensModel, tuple[str, ...]]] = {
    "SIMPLE_PINHOLE": ("pinhole", ()),
    "PINHOLE": ("pinhole", ()),
    "SIMPLE_RADIAL": ("perspective", ("k1",)),
    "RADIAL": ("perspective", ("k1", "k2")),
    "OPENCV": ("perspective", ("k1", "k2", "p1", "p2")),
    "FULL_OPENCV": ("rational", ("k1", "k2", "p1", "p2", "k3", "k4", "k5", "k6")),
    "SIMPLE_FISHEYE": ("fisheye", ()),
    "FISHEYE": ("fisheye", ()),
    "SIMPLE_RADIAL_FISHEYE": ("fisheye", ("k1",)),
    "RADIAL_FISHEYE": ("fisheye", ("k1", "k2")),
    "OPENCV_FISHEYE": ("fisheye", ("k1", "k2", "k3", "k4")),
    "THIN_PRISM_FISHEYE": ("fisheye", ("k1", "k2", "p1", "p2", "k3", "k4", "s1", "s3")),
    "RAD_TAN_THIN_PRISM_FISHEYE": (
        "fisheye624",
        ("k1", "k2", "k3", "k4", "k5", "k6", "p2", "p1", "s1", "s2", "s3", "s4"),
    ),
    "FOV": ("field_of_view", ("omega",)),
    "SIMPLE_DIVISION": ("division", ("k",)),
    "DIVISION": ("division", ("k",)),
    "EUCM": ("extended_unified", ("alpha", "beta")),
    "EQUIRECTANGULAR": ("equirectangular", ()),
}
"""COLMAP's camera models: the lens, and the order of its coefficients after the focal lengths and principal point."""

TRANSFORMS_MODELS: dict[LensModel, str] = {model: name for name, (model, _) in CAMERA_MODELS.items()} | {
    "fisheye": "OPENCV_FISHEYE",
    "fisheye624": "FISHEYE624",
}
"""The ``camera_model`` under which a ``transforms.json`` has each lens: nerfstudio's name, or else COLMAP's."""

VELOCITY_KEYS = ("camera_angular_velocity", "camera_linear_velocity")
"""The keys of a ``transforms.json`` that say how a frame's camera moves, in the order of ``Cameras.rolling``."""


def photo_lens(name: str, model: LensModel, terms: Mapping[str, float]) -> Lens | None:
    """Returns the lens of one photograph, or None where it distorts nothing.

    ``terms`` are coefficients of the model, by name, and others are zero; ``name`` names their owner in messages.
    Raises ValueError if a term is not a finite number in float32, or out of the model's range.
    """
    return _lens(name, model, tuple(terms.get(term, 0.0) for term in LENS_TERMS[model]))


# Photographs mostly share a lens, and a tensor for each of many thousands takes long.
@lru_cache(maxsize=1024)
def _lens(name: str, model: LensModel, values: tuple[float, ...]) -> Lens | None:
    try:
        return join_lenses([Lens(model, torch.tensor([values], dtype=torch.float32))])
    except ValueError as error:
        terms = {term: value for term, value in zip(LENS_TERMS[model], values, strict=True) if value != 0}
        raise ValueError(f"{name}: {error} from terms {terms}") from error


def transforms_camera(
    cameras: Cameras, index: int, size: Sequence[int], origin: Sequence[float] | None = None
) -> dict[str, Any]:
    """Returns the entries of a frame in a ``transforms.json`` for a camera relative to an origin, and a file's size."""
    scale = torch.tensor(size, dtype=torch.float64) / torch.tensor(cameras.size(index))
    focal, centre = (cameras.intrinsics[index].double() * scale.repeat(2)).split(2)
    lens = _transforms_lens(cameras.lens, index)
    if lens["camera_model"] == TRANSFORMS_MODELS["equirectangular"]:
        focal = focal * math.pi
    (fl_x, fl_y), (cx, cy) = focal.tolist(), centre.tolist()
    frame = {"w": size[0], "h": size[1], "fl_x": fl_x, "fl_y": fl_y, "cx": cx, "cy": cy, **lens}
    pose = cameras.c2w[index]
    if cameras.rolling is not None:
        # The pose of the middle, and the motion while all rows are exposed, in one second.
        height = cameras.size(index)[1]
        pose = cameras.row_poses(torch.tensor([index]), torch.tensor([height / 2]))[0]
        motion = cameras.rolling[index, :6].double() * height
        frame |= dict(zip(VELOCITY_KEYS, motion.view(2, 3).tolist(), strict=True)) | {"rolling_shutter_time": 1.0}
    return frame | {"transform_matrix": moved(pose, origin).tolist()}


def _transforms_lens(lens: Lens | None, camera: int) -> dict[str, Any]:
    """Returns the entries that describe the lens of one camera."""
    if lens is None:
        return {"camera_model": "PINHOLE"}
    model, terms = lens.described(camera)
    if model == "fisheye624":
        order = CAMERA_MODELS["RAD_TAN_THIN_PRISM_FISHEYE"][1]
        return {"camera_model": "FISHEYE624", "distortion_params": [terms.get(term, 0.0) for term in order]}
    # Readers that know no prism refuse this name instead of dropping the terms.
    prism = model == "fisheye" and any(term in terms for term in ("s1", "s2", "s3", "s4"))
    return {"camera_model": "THIN_PRISM_FISHEYE" if prism else TRANSFORMS_MODELS[model], **terms}


def share_camera_model(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the content of a ``transforms.json``.

    The ``camera_model`` of all frames is at the top, where nerfstudio looks for it. Frames that differ keep their own.
    """
    models = {frame["camera_model"] for frame in frames}
    if len(models) > 1:
        return {"frames": frames}
    shared = [{key: value for key, value in frame.items() if key != "camera_model"} for frame in frames]
    return {"camera_model": models.pop(), "frames": shared}
