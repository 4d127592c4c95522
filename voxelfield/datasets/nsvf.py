"""Loader of NSVF's layout: ``intrinsics.txt``, ``bbox.txt``, a folder ``rgb`` of images and a folder ``pose``.

The first character of a file's name is its split: 0 training, 1 validation, 2 test. Poses are camera to world with
OpenCV axes. Format: Liu et al., "Neural Sparse Voxel Fields", NeurIPS 2020; so are Synthetic-NSVF and that paper's
versions of Tanks & Temples and BlendedMVS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from voxelfield.datasets.assembly import load_capture
from voxelfield.datasets.image_paths import on_disk
from voxelfield.datasets.images import image_files
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Intrinsics, Photo, centred, scaled
from voxelfield.datasets.poses import FARTHEST, turned_about
from voxelfield.datasets.registry import Format, contains
from voxelfield.datasets.scene import Scene
from voxelfield.datasets.text_files import numbers_in
from voxelfield.files import read_regular

FILE = "intrinsics.txt"

_SPLITS = {"0": "train", "1": "val", "2": "test"}


def load_nsvf(folder: Path, options: LoadOptions) -> Scene:
    """Loads a scene; see :class:`voxelfield.datasets.registry.Format`.

    In Tanks & Temples and BlendedMVS no name begins with 2, and names with 1 are the test views. The
    box is read from ``bbox.txt``.
    """
    source = folder / "pose"
    intrinsics = _read_intrinsics(folder / FILE)
    images = {path.stem: path for path in image_files(folder / "rgb")}
    photos = []
    listed: dict[str, set[Path]] = {name: set() for name in _SPLITS.values()}
    for file in sorted(source.glob("[!.]*.txt")):
        split = _SPLITS.get(file.name[0])
        if split is None:
            raise ValueError(f"{file}: the name must begin with 0, 1 or 2, got {file.name!r}")
        path = images.get(file.stem) or on_disk(folder / "rgb" / f"{file.stem}.png")
        pose = torch.tensor(_read_numbers(file, (16,), "a 4x4 matrix"), dtype=torch.float64).view(4, 4)
        photos.append(Photo(path, turned_about(pose), intrinsics, pose_name=f"{file}: pose with OpenGL's axes"))
        listed[split].add(path)
    if not photos:
        raise FileNotFoundError(f"{source}: must hold a file NAME.txt for each image, got none")
    box = folder / "bbox.txt"
    stated = _read_box(box) if box.is_file() else None
    return load_capture(folder, source, photos, options, listed, stated_box=stated)


def _read_numbers(file: Path, counts: Collection[int], wanted: str) -> list[float]:
    """Returns the numbers in a file; see :func:`voxelfield.datasets.text_files.numbers_in`."""
    return numbers_in(str(file), read_regular(file).decode("utf-8-sig", "replace"), counts, wanted)


def _read_intrinsics(file: Path) -> Callable[[int, int], Intrinsics]:
    """Reads a matrix (4, 4), or the eleven numbers of SRN's format, which the size of the images is among."""
    numbers = _read_numbers(file, (11, 16), "a 4x4 matrix, or the 11 numbers of SRN's format")
    if len(numbers) == 16:
        fx, _, cx, _, _, fy, cy = numbers[:7]
        size = None
    else:
        # Focal length, principal point, 0; a translation; near; scale; height and width.
        fx, cx, cy = numbers[:3]
        fy, size = fx, (numbers[10], numbers[9])
    if min(fx, fy, *(size or ())) <= 0:
        raise ValueError(f"{file}: focal lengths and sizes must be above 0 pixels, got {numbers}")
    intrinsics = (fx, fy, cx, cy)
    return scaled(intrinsics, size, str(file)) if size else partial(centred, intrinsics)


def _read_box(file: Path) -> Tensor:
    numbers = _read_numbers(file, (6, 7), "the two corners of a box, and optionally a voxel size")
    box = torch.tensor(numbers[:6], dtype=torch.float64).view(2, 3)
    # As float32, like all boxes.
    low, high = box.float()
    if float((high - low).min()) < 1 / FARTHEST or float(box.abs().max()) > FARTHEST:
        raise ValueError(
            f"{file}: must hold the low and the high corner of a box, at least {1 / FARTHEST:g} apart along every axis "
            f"and within {FARTHEST:g} world units of the origin, got {box.tolist()}"
        )
    return box


FORMAT = Format("NSVF", f"{FILE} and pose", contains([FILE], ["pose"]), load_nsvf, order=60)
