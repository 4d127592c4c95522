"""Where a capture has its COLMAP models and their images, and which of several models is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from voxelfield.datasets.colmap_layout import count_posed_images
from voxelfield.datasets.images import IMAGE_SUFFIXES

# Folders of models, each with the folder of the images that it is of, as COLMAP, its scripts and other programs lay
# them out. Undistorted models are only of the undistorted images.
_PLACES = (
    ("sparse", "images"),
    ("colmap/sparse", "images"),
    ("colmap/sparse", "colmap/images"),
    ("colmap_sparse", "images"),
    ("colmap_text", "images"),
    ("colmap", "images"),
    ("undistorted/sparse", "undistorted/images"),
    ("dense/sparse", "dense/images"),
    ("dense/0/sparse", "dense/0/images"),
)


def is_colmap(folder: Path) -> bool:
    """Tells whether a folder holds a COLMAP model; see :class:`voxelfield.datasets.registry.Format`."""
    return any(_models_in(folder / place) for place, _ in _PLACES)


class Location(NamedTuple):
    """Where a capture's model lies.

    Attributes:
        model: Folder of the model.
        images: Folder of the images that it is of.
        counts: If it was chosen among several, with how many images each has a pose for, by the names of their folders.
    """

    model: Path
    images: Path
    counts: dict[str, int]


def find_model(folder: Path, number: int | None) -> Location:
    """Finds a capture's model and its images.

    If a capture has models in several places, those beside their images come first. Several models in one place, such
    as ``sparse/0`` and ``sparse/1``, are reconstructions of parts that COLMAP could not join.

    Args:
        folder: A folder that :func:`is_colmap` recognises.
        number: The name of one of several models; None: the one with poses for the most images.

    Raises:
        ValueError: There is no model of that number.
    """
    places = [(folder / place, folder / images) for place, images in _PLACES if _models_in(folder / place)]
    place, images = next((each for each in places if each[1].is_dir()), places[0])
    models = _models_in(place)
    if number is not None:
        named = next((model for model in models if model.name == str(number)), None)
        if named is None:
            numbers = ", ".join(model.name for model in models if model.name.isdecimal())
            known = f"one of {numbers}" if numbers else "None"
            raise ValueError(f"model must be {known}, as {place} has no other, got {number}")
        return Location(named, images, {})
    if len(models) == 1:
        return Location(models[0], images, {})
    counts = {model.name: count_posed_images(model) for model in models}
    return Location(max(models, key=lambda model: counts[model.name]), images, counts)


def image_paths(images: Path, names: Sequence[str]) -> list[Path]:
    """Returns the files of a model's images, whether they are there or not.

    Args:
        images: The folder of the images, in which names are looked for; then in the folder around it, to which names
            such as ``images/a.jpg`` are relative.
        names: As the model has them; backslashes may separate folders.
    """
    folders = (images, images.parent)
    names = [
        name.replace("\\", "/") if not any((base / name).is_file() for base in folders) else name for name in names
    ]
    base = next((base for base in folders if any((base / name).is_file() for name in names)), images)
    return [base / name for name in names]


def images_without_pose(images: Path, posed: Sequence[Path]) -> list[Path]:
    """Returns the image files of a folder and its subfolders that are not among those with a pose, sorted."""
    known = set(posed)
    every = (path for path in images.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    return sorted(path for path in every if path not in known)


def _models_in(place: Path) -> list[Path]:
    """Returns the models in numbered folders, in the order of their numbers; else the place itself if it is a model."""
    numbered = [folder for folder in place.glob("*") if folder.name.isdecimal() and _is_model(folder)]
    if numbered:
        return sorted(numbered, key=lambda folder: (int(folder.name), folder.name))
    return [place] if _is_model(place) else []


def _is_model(folder: Path) -> bool:
    return any((folder / f"images.{suffix}").is_file() for suffix in ("bin", "txt"))
