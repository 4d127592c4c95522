"""Loader of Record3D's captures: ``metadata.json`` and images in ``rgb``, or ``metadata`` and ``rgbd``.

The former are exported as "EXR + JPG sequence", the latter are the content of a ``.r3d`` file, which is a zip archive.
``K`` has the intrinsics by columns, and ``perFrameIntrinsicCoeffs`` fx, fy, cx, cy of each image, for images of ``w``
times ``h`` pixels. ``poses`` are quaternions, real part last, and positions, camera to world, with OpenGL's axes, in
metres, in ARKit's world with y up, which becomes z up; the n-th belongs to the image of that number. Sources: the app's
author in github.com/marek-simonik/record3d/issues/27, and nerfstudio's ``record3d_utils.py``. Its depths, in EXR files
or compressed by LZFSE, are not read.
"""

from __future__ import annotations

from pathlib import Path

import torch

from voxelfield.datasets.assembly import load_capture
from voxelfield.datasets.images import image_files
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, scaled
from voxelfield.datasets.poses import with_z_up
from voxelfield.datasets.registry import Format
from voxelfield.datasets.scene import Scene
from voxelfield.datasets.text_files import json_numbers, warn_of_unused
from voxelfield.files import read_json_object
from voxelfield.foundation.errors import shown
from voxelfield.rendering.rigid import pose_matrices, rotations

_LAYOUTS = (("metadata.json", "rgb"), ("metadata", "rgbd"))
_READ = ("w", "h", "K", "perFrameIntrinsicCoeffs", "poses")
_HARMLESS = ("fps", "dw", "dh", "initPose", "frameTimestamps", "cameraType")


def load_record3d(folder: Path, options: LoadOptions) -> Scene:
    """Loads a capture; see :class:`voxelfield.datasets.registry.Format`."""
    name, inside = next(layout for layout in _LAYOUTS if _has(folder, *layout))
    file, images = folder / name, folder / inside
    meta = read_json_object(file)
    warn_of_unused(file, meta, (*_READ, *_HARMLESS))
    listed = meta.get("poses")
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{file}: 'poses' must be a list with entries, got {shown(listed)}")
    poses = torch.tensor([json_numbers(file, "poses", pose, 7) for pose in listed], dtype=torch.float64)
    # A quaternion of another length gives no rotation, which load_capture refuses.
    c2w = pose_matrices(rotations(poses[:, [3, 0, 1, 2]]), poses[:, 4:])
    w, h = (json_numbers(file, key, [meta.get(key)], 1)[0] for key in ("w", "h"))
    own = meta.get("perFrameIntrinsicCoeffs")
    if not own:
        fx, _, _, _, fy, _, cx, cy, _ = json_numbers(file, "K", meta.get("K"), 9)
        own = [[fx, fy, cx, cy]] * len(poses)
    if not isinstance(own, list) or len(own) != len(poses):
        raise ValueError(f"{file}: 'perFrameIntrinsicCoeffs' must be a list of one entry for each of the poses")
    known = {path.stem: path for path in image_files(images)}
    photos = []
    for index, (pose, coefficients) in enumerate(zip(with_z_up(c2w), own, strict=True)):
        fx, fy, cx, cy = json_numbers(file, "perFrameIntrinsicCoeffs", coefficients, 4)
        path = known.get(str(index), images / f"{index}.jpg")
        photos.append(Photo(path, pose, scaled((fx, fy, cx, cy), (w, h), str(file)), pose_name=f"{file}: pose {index}"))
    return load_capture(folder, file, photos, options)


def _has(folder: Path, file: str, images: str) -> bool:
    return (folder / file).is_file() and (folder / images).is_dir()


FORMAT = Format(
    "Record3D",
    " or ".join(f"{file} and {images}" for file, images in _LAYOUTS),
    lambda folder: any(_has(folder, *layout) for layout in _LAYOUTS),
    load_record3d,
    order=85,
)
