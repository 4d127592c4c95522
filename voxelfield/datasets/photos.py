"""Photographs with their cameras: what every format comes to, whatever its files look like."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from voxelfield.datasets.images import image_size, read_images
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Split
from voxelfield.rendering.cameras import Cameras

logger = logging.getLogger(__name__)

Intrinsics = tuple[float, float, float, float]
"""fx, fy, cx, cy in pixels."""


@dataclass(frozen=True, eq=False)
class Photo:
    """An image file and the camera that took it.

    Attributes:
        path: The file, which may be missing.
        c2w: (4, 4) float64, camera to world, OpenGL axes.
        intrinsics: Returns the intrinsics for an image of a width and a height in pixels; may raise ValueError if the
            camera took images of another size.
    """

    path: Path
    c2w: Tensor
    intrinsics: Callable[[int, int], Intrinsics]


def check_rotation(name: str, rotation: Tensor) -> None:
    """Raises ValueError unless a matrix (3, 3) is a rotation, to a thousandth; the message calls it ``name``."""
    error = float((rotation @ rotation.mT - torch.eye(3, dtype=rotation.dtype)).abs().max())
    if not error <= 1e-3:
        raise ValueError(
            f"{name} must be a rotation with a translation, got axes that are {error:.2g} from orthonormal"
        )
    if torch.linalg.det(rotation) < 0:
        raise ValueError(f"{name} must be a rotation with a translation, got a mirror image")


def present_photos(source: Path, photos: Sequence[Photo], missing_images: Literal["error", "skip"]) -> list[Photo]:
    """Returns the photographs whose files are there.

    Args:
        source: What lists them, for messages.
        photos: At least one.
        missing_images: ``error`` refuses a missing file, ``skip`` warns of it.

    Raises:
        FileNotFoundError: A file is missing and that is refused, or all are.
    """
    missing = [photo.path for photo in photos if not photo.path.is_file()]
    if missing:
        lack = f"{len(missing)} of {len(photos)} images are missing, the first is {missing[0]}"
        if missing_images == "error" or len(missing) == len(photos):
            raise FileNotFoundError(f"{source}: {lack}")
        logger.warning("%s: %s; their frames are left out", source, lack)
    absent = set(missing)
    return [photo for photo in photos if photo.path not in absent]


def held_out(photos: Sequence[Photo], every: int) -> dict[str, list[Photo]]:
    """Divides photographs into a training and a test split.

    Args:
        photos: All of them.
        every: Every so many in the order of their names, the first one included, are for the test; 0: none.
    """
    ordered = sorted(photos, key=lambda photo: photo.path.name)
    if every == 0:
        return {"train": ordered}
    return {
        "train": [photo for index, photo in enumerate(ordered) if index % every != 0],
        "test": ordered[::every],
    }


def read_split(photos: Sequence[Photo], options: LoadOptions) -> Split:
    """Reads the images of a split.

    Args:
        photos: At least one; all files are there.
        options: Say to what size.

    Raises:
        ValueError: An image is unreadable, of another size than the first, or not of the size that its camera takes.
    """
    paths = [photo.path for photo in photos]
    size = image_size(paths[0])
    width, height = options.size_of(size)
    images = read_images(paths, (width, height))
    intrinsics = torch.tensor([photo.intrinsics(*size) for photo in photos], dtype=torch.float64)
    scale = torch.tensor([width / size[0], height / size[1]], dtype=torch.float64).repeat(2)
    c2w = torch.stack([photo.c2w for photo in photos])
    return Split(
        images, Cameras(c2w.float(), (intrinsics * scale).float(), width, height), _names(paths), paths=tuple(paths)
    )


def scaled(intrinsics: Intrinsics, size: tuple[float, float]) -> Callable[[int, int], Intrinsics]:
    """Returns what gives intrinsics for images that were resized after the cameras were found.

    Args:
        intrinsics: For the original images.
        size: Their width and height in pixels.
    """
    fx, fy, cx, cy = intrinsics

    def of(width: int, height: int) -> Intrinsics:
        x, y = width / size[0], height / size[1]
        return fx * x, fy * y, cx * x, cy * y

    return of


def _names(paths: list[Path]) -> tuple[str, ...]:
    """Names views after their images; with their number in front where two images have one name, or are one."""
    stems = [path.stem for path in paths]
    if len(set(stems)) < len(stems):
        stems = [f"{index}_{stem}" for index, stem in enumerate(stems)]
    return tuple(stems)
