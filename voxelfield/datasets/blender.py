"""Loader of the NeRF-synthetic (Blender) layout.

A scene is a folder with ``transforms_train.json``, ``transforms_test.json`` and maybe ``transforms_val.json``. Each
lists frames (``file_path``, ``transform_matrix``) and the horizontal field of view ``camera_angle_x`` in radians, or
``fl_x``, ``fl_y``, ``cx``, ``cy``, ``w``, ``h`` in pixels, for the whole file or for a frame. Format: Mildenhall et
al., "NeRF", ECCV 2020.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from voxelfield.datasets.assembly import SPLITS, choose_splits, scene_of_photos
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, checked_poses, present_photos
from voxelfield.datasets.registry import Format, contains
from voxelfield.datasets.scene import Scene
from voxelfield.datasets.transforms import read_transforms

logger = logging.getLogger(__name__)


def load_blender(folder: Path | str, options: LoadOptions | None = None) -> Scene:
    """Loads a scene; see :class:`voxelfield.datasets.registry.Format`.

    Only the images of the splits asked for are read. Each split but the test split needs its
    ``transforms_<split>.json`` (:func:`voxelfield.datasets.assembly.choose_splits`), and a missing image is an error
    unless the options say otherwise.
    """
    folder, options = Path(folder), options or LoadOptions()
    available = available_splits(folder)
    for name in options.splits or ():
        if name not in available and name != "test":
            there = ", ".join(available) or "none"
            raise FileNotFoundError(f"{_split_file(folder, name)}: no such file (splits of this scene: {there})")
    missing = options.missing_images or "error"
    photos = {name: _read_photos(folder, name, missing) for name in available}
    chosen = {
        name: present_photos(folder, folder, some, missing)
        for name, some in choose_splits(folder, photos, options).items()
    }
    # Of all splits, so that the warp does not depend on those asked for.
    present = [photo for split in photos.values() for photo in split if photo.path.is_file()]
    return scene_of_photos(folder, _split_file(folder, available[0]), present, chosen, options)


def available_splits(folder: Path | str) -> tuple[str, ...]:
    """Lists the splits whose ``transforms_<split>.json`` exists, in the order train, val, test."""
    return tuple(name for name in SPLITS if _split_file(Path(folder), name).is_file())


def _read_photos(folder: Path, name: str, missing_images: Literal["error", "skip"]) -> list[Photo]:
    """Returns the photographs of a split; none if its file lists none, or if all are missing and may be."""
    file = _split_file(folder, name)
    photos, _ = read_transforms(file, may_be_empty=name != "train")
    if photos:
        photos = checked_poses(file, photos)
    if missing_images == "skip" and name != "train" and not any(photo.path.is_file() for photo in photos):
        if photos:
            logger.warning("%s: all %d images are missing; the split is left out", file, len(photos))
        return []
    return photos


def _split_file(folder: Path, name: str) -> Path:
    return folder / f"transforms_{name}.json"


FORMAT = Format(
    "blender",
    "transforms_train.json, transforms_val.json or transforms_test.json",
    contains([f"transforms_{split}.json" for split in SPLITS]),
    load_blender,
    order=10,
)
