"""Loader of the cameras of RealityCapture and RealityScan: files ``NAME.xmp`` beside the photographs they belong to.

``Export > Metadata (XMP)`` writes them. Formats: "RealityCapture XMP Camera Math" (support.capturingreality.com) and
"XMP Metadata Files" (rshelp.capturingreality.com). ``xcr:Rotation`` is world to camera, by rows, with OpenCV's axes (x
right, y down, looking along z), and ``xcr:Position`` that of the camera. Lengths are relative to the longer side of the
image: the focal length as for 36 mm of film, the principal point from the middle. Coefficients of the Brown models are
k1 to k4, and t1, t2 as OpenCV's p1, p2.

The program's CSV files are not read, because their angles are documented nowhere.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from voxelfield.datasets.assembly import load_capture
from voxelfield.datasets.image_paths import find_images
from voxelfield.datasets.lenses import photo_lens
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Intrinsics, Photo, with_shrunk_images
from voxelfield.datasets.poses import turned_about
from voxelfield.datasets.registry import Format
from voxelfield.datasets.scene import Scene
from voxelfield.datasets.text_files import files_with, numbers_in, read_xml, warn_of_unused
from voxelfield.foundation.errors import shown
from voxelfield.rendering.rigid import pose_matrices

_NAMESPACE = "http://www.capturingreality.com/ns/xcr/1.1#"
_FILM = 36.0  # millimetres
_MODELS = ("brown3", "brown4", "brown3t2", "brown4t2")
_PLACE = ("Rotation", "Position")
_NUMBERS = {"FocalLength35mm": None, "PrincipalPointU": 0.0, "PrincipalPointV": 0.0, "AspectRatio": 1.0, "Skew": 0.0}
_LENS = ("DistortionModel", "DistortionCoeficients")
# How the program uses the image, and what else it knows of the camera.
_HARMLESS = {
    *("Version", "PosePrior", "Coordinates", "CalibrationPrior", "CalibrationGroup", "DistortionGroup", "ComponentId"),
    *("Rig", "RigInstance", "RigPoseIndex", "InTexturing", "InMeshing", "InColoring"),
}


def load_realitycapture(folder: Path, options: LoadOptions) -> Scene:
    """Loads a capture; see :class:`voxelfield.datasets.registry.Format`."""
    files = _files(folder)
    source = files[0].parent
    paths = find_images(source, [file.stem for file in files], "name of an XMP file", source)
    photos = [_photo(file, paths[file.stem]) for file in files]
    return load_capture(folder, source, with_shrunk_images(photos, folder / "images", options.downscale), options)


def _files(folder: Path) -> list[Path]:
    """Lists the files in a folder, or else in its folder of images."""
    each = (files_with(place, "*.xmp", (_NAMESPACE.encode(),)) for place in (folder, folder / "images"))
    return next(filter(None, each), [])


def _photo(file: Path, path: Path) -> Photo:
    found: dict[str, str] = {}
    for element in read_xml(file).iter():
        entries = {**element.attrib, element.tag: element.text or ""}
        found |= {key.removeprefix(f"{{{_NAMESPACE}}}"): text for key, text in entries.items() if _NAMESPACE in key}
    warn_of_unused(file, found, {*_PLACE, *_NUMBERS, *_LENS, *_HARMLESS})
    if lacking := [key for key in (*_PLACE, "FocalLength35mm") if key not in found]:
        raise ValueError(f"{file}: must have xcr:{lacking[0]}: export with camera poses, which draft and exact have")
    rotation = numbers_in(f"{file}: xcr:Rotation", found["Rotation"], (9,), "9 numbers")
    position = numbers_in(f"{file}: xcr:Position", found["Position"], (3,), "3 numbers")
    focal, u, v, aspect, skew = (
        numbers_in(f"{file}: xcr:{key}", found.get(key, str(default)), (1,), "a number")[0]
        for key, default in _NUMBERS.items()
    )
    if skew != 0:
        raise ValueError(f"{file}: xcr:Skew must be 0, got {skew:g}: undistort the images first")
    terms = numbers_in(f"{file}: xcr:{_LENS[1]}", found.get(_LENS[1]), (0, 6), "6 coefficients")
    model = found.get("DistortionModel", _MODELS[0])
    if any(terms) and model not in _MODELS:
        raise ValueError(
            f"{file}: xcr:DistortionModel must be one of {', '.join(_MODELS)}, got {shown(model)}: choose another in "
            "the alignment settings, or undistort the images first"
        )
    lens = photo_lens(str(file), "perspective", dict(zip(("k1", "k2", "k3", "k4", "p1", "p2"), terms, strict=False)))
    axes = torch.tensor(rotation, dtype=torch.float64).view(3, 3).mT
    c2w = pose_matrices(axes, torch.tensor(position, dtype=torch.float64))
    relative = (focal / _FILM, aspect * focal / _FILM, u, v)
    return Photo(path, turned_about(c2w), partial(_of_size, relative), lens, pose_name=f"{file}: xcr:Rotation")


def _of_size(relative: Intrinsics, width: int, height: int) -> Intrinsics:
    """Returns the intrinsics for an image from those relative to its longer side."""
    side = max(width, height)
    fx, fy, u, v = (side * length for length in relative)
    return fx, fy, width / 2 + u, height / 2 + v


FORMAT = Format(
    "RealityCapture or RealityScan",
    "NAME.xmp beside the photographs",
    lambda folder: bool(_files(folder)),
    load_realitycapture,
    order=75,
)
