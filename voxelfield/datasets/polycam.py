"""Loader of Polycam's raw data: a folder ``keyframes`` of images, with a JSON file of each one's camera.

Format: "Polycam's data format" (github.com/PolyCam/polyform). The images and poses that Polycam has corrected are read,
or, if it has corrected none, those of the device. ``t_ij`` are rows of poses, camera to world, with OpenGL's axes, in
metres, in ARKit's world with y up, which becomes z up. Depths are in ``keyframes/depth``, in millimetres.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from voxelfield.datasets.assembly import load_capture
from voxelfield.datasets.images import image_files
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, scaled
from voxelfield.datasets.poses import with_z_up
from voxelfield.datasets.registry import Format, contains
from voxelfield.datasets.scene import Scene
from voxelfield.datasets.text_files import json_numbers, warn_of_unused
from voxelfield.files import read_json_object

logger = logging.getLogger(__name__)

_CAMERAS = ("keyframes/corrected_cameras", "keyframes/cameras")
_IMAGES = ("keyframes/corrected_images", "keyframes/images")
_NUMBERS = ("fx", "fy", "cx", "cy", "width", "height", *(f"t_{row}{column}" for row in range(3) for column in range(4)))
_HARMLESS = ("blur_score", "timestamp", "neighbors", "manual_keyframe", "center_depth", "angular_velocity")


def load_polycam(folder: Path, options: LoadOptions) -> Scene:
    """Loads a capture; see :class:`voxelfield.datasets.registry.Format`."""
    pairs = [(folder / cameras, folder / images) for cameras, images in zip(_CAMERAS, _IMAGES, strict=True)]
    cameras, images = next((pair for pair in pairs if all(each.is_dir() for each in pair)), pairs[-1])
    if cameras == pairs[-1][0]:
        logger.warning("%s: without corrected images, poses are those of the device (camera=adjust)", folder)
    files = sorted(cameras.glob("[!.]*.json"))
    if not files:
        raise FileNotFoundError(f"{cameras}: must hold a file NAME.json for each image, got none")
    known = {path.stem: path for path in image_files(images)}
    depths = {path.stem: path for path in image_files(folder / "keyframes/depth")}
    photos = []
    for file in files:
        meta = read_json_object(file)
        warn_of_unused(file, meta, (*_NUMBERS, *_HARMLESS))
        numbers = {key: json_numbers(file, key, [meta.get(key)], 1)[0] for key in _NUMBERS}
        fx, fy, cx, cy, width, height, *rows = numbers.values()
        c2w = torch.tensor([*rows, 0, 0, 0, 1], dtype=torch.float64).view(4, 4)
        path = known.get(file.stem, images / f"{file.stem}.jpg")
        intrinsics = scaled((fx, fy, cx, cy), (width, height), str(file))
        pose_name = f"{file}: the pose t_00 to t_23"
        photos.append(Photo(path, with_z_up(c2w), intrinsics, depth=depths.get(file.stem), pose_name=pose_name))
    return load_capture(folder, cameras, photos, options)


FORMAT = Format("Polycam", " or ".join(_CAMERAS), contains(_CAMERAS), load_polycam, order=80)
