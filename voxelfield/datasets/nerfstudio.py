"""Loader of captures with one ``transforms.json``, as nerfstudio and instant-ngp write it.

Poses have OpenGL axes. ``train_filenames``, ``val_filenames`` and ``test_filenames`` may list splits (nerfstudio).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from voxelfield.datasets.assembly import SPLITS, load_capture
from voxelfield.datasets.image_paths import find_images
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, with_shrunk_images
from voxelfield.datasets.registry import Format, contains
from voxelfield.datasets.scene import Scene
from voxelfield.datasets.transforms import read_transforms
from voxelfield.foundation.errors import shown

FILE = "transforms.json"


def load_nerfstudio(folder: Path, options: LoadOptions) -> Scene:
    """Loads a capture; see :class:`voxelfield.datasets.registry.Format`."""
    file = folder / FILE
    photos, meta = read_transforms(file)
    photos = with_shrunk_images(photos, folder / "images", options.downscale)
    return load_capture(folder, file, photos, options, _listed_splits(file, meta, photos))


def _listed_splits(file: Path, meta: dict[str, Any], photos: list[Photo]) -> dict[str, set[Path]] | None:
    """Returns the paths of the images of each split, if a file lists them."""
    known = {photo.path for photo in photos}
    splits = {}
    for name in SPLITS:
        key = f"{name}_filenames"
        if key not in meta:
            continue
        paths = meta[key]
        if not (isinstance(paths, list) and all(isinstance(path, str) for path in paths)):
            raise ValueError(f"{file}: '{key}' must be a list of paths, got {shown(paths)}")
        found = find_images(file, paths, key)
        unknown = [path for path in paths if found[path] not in known]
        if unknown:
            raise ValueError(f"{file}: '{key}' must name images of 'frames', got {shown(unknown[0])}")
        splits[name] = set(found.values())
    return splits or None


FORMAT = Format("nerfstudio or instant-ngp", FILE, contains([FILE]), load_nerfstudio, order=20)
