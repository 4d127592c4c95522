"""A scene as it is looked at before training: all views of all splits in one row, with small copies of their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from voxelfield.captures.measures import SHARPNESS_SIZE, fingerprint, sharpness
from voxelfield.datasets import colmap
from voxelfield.datasets.images import Size, image_size
from voxelfield.datasets.loading import load_scene
from voxelfield.datasets.scene import Split
from voxelfield.datasets.transparency import transparency
from voxelfield.messages import printable
from voxelfield.warps.choice import WarpConfig, choose_warp
from voxelfield.warps.warp import Warp

# Of the pixels whose rays are compared with the box: the least alpha, and their number along the longer side.
_OPAQUE, _LATTICE = 128, 40

THUMBNAIL_SIZE = 192
"""Longest side of a thumbnail in pixels."""


@dataclass(frozen=True, eq=False)
class Capture:
    """Views of a scene.

    Attributes:
        name: The scene's name.
        format: The name of its format.
        names: N different names; those that several splits have are preceded by the split.
        splits: Which split each view is in.
        c2w: (N, 4, 4) float64, camera to world, OpenGL axes.
        intrinsics: (N, 4) float64, ``fx, fy, cx, cy`` in pixels of the image files.
        sizes: N widths and heights of the image files in pixels.
        aabb: (2, 3) float64, the scene's box, or the part that matters most if it extends further.
        points: (M, 3) float64, sparse points; none for formats without.
        colors: (M, 3) uint8, their colours.
        sharpness: N figures of :func:`voxelfield.captures.measures.sharpness`.
        fingerprints: (N, 32, 32) of :func:`voxelfield.captures.measures.fingerprint`.
        thumbnails: N small images, RGB, transparent pixels on white.
        warp: The warp that a field gets by default, if the scene extends beyond ``aabb``.
        without_pose: Names of the photographs that COLMAP found no pose for.
        transparency: N shares of each image that are transparent, from 0 to 1; none if that is unknown.
        beyond_box: N shares of each image's opaque pixels whose rays miss the box, 0 if the scene extends beyond it;
            none if that is unknown.
    """

    name: str
    format: str
    names: tuple[str, ...]
    splits: tuple[str, ...]
    c2w: Tensor
    intrinsics: Tensor
    sizes: tuple[Size, ...]
    aabb: Tensor
    points: Tensor
    colors: Tensor
    sharpness: tuple[float, ...]
    fingerprints: npt.NDArray[np.float32]
    thumbnails: tuple[Image.Image, ...]
    warp: Warp | None = None
    without_pose: tuple[str, ...] = ()
    transparency: tuple[float, ...] = ()
    beyond_box: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def origins(self) -> Tensor:
        """(N, 3) positions of the cameras."""
        return self.c2w[:, :3, 3]

    @property
    def looks(self) -> Tensor:
        """(N, 3) unit directions in which the cameras look."""
        return -self.c2w[:, :3, 2]

    @property
    def up(self) -> Tensor:
        """(3,) mean of the directions that are up in the images; short where they disagree."""
        return self.c2w[:, :3, 1].mean(dim=0)

    @property
    def fields_of_view(self) -> Tensor:
        """(N, 2) horizontal and vertical angles in degrees; 180 where a focal length is not positive."""
        sizes = torch.tensor(self.sizes, dtype=torch.float64)
        return (2 * torch.atan2(sizes / 2, self.intrinsics[:, :2].clamp(min=0))).rad2deg()


def read_capture(folder: Path, aabb: Sequence[Sequence[float]] | None = None, model: int | None = None) -> Capture:
    """Reads every split of a scene. Views whose images are missing are left out, with a warning in the log.

    Args:
        folder: Folder of the scene, in any format that :func:`voxelfield.datasets.loading.load_scene` reads.
        aabb: (2, 3) box in world units; None for that of the format.
        model: Number of the COLMAP model where a folder has several; None: the one with the most images.

    Raises:
        FileNotFoundError: The folder is of no known format, or lacks files.
        MissingPackageError: The format needs a package that is not installed.
        ValueError: A file is not as it must be.
    """
    scene = load_scene(folder, splits=None, image_size=SHARPNESS_SIZE, missing_images="skip", aabb=aabb, model=model)
    names: list[str] = []
    splits: list[str] = []
    sizes: list[Size] = []
    intrinsics: list[Tensor] = []
    images: list[Image.Image] = []
    for split_name, split in scene.splits.items():
        assert split.paths is not None
        names += map(printable, split.names)
        splits += [split_name] * len(split)
        found = [image_size(path) for path in split.paths]
        scale = torch.tensor(found, dtype=torch.float64) / split.cameras.all_sizes()
        intrinsics.append(split.cameras.intrinsics.double() * scale.repeat(1, 2))
        sizes += found
        images += [Image.fromarray(split.image(index).numpy()) for index in range(len(split))]
    warp = choose_warp(scene, WarpConfig())
    points, colors, without_pose = torch.zeros(0, 3).double(), torch.zeros(0, 3).byte(), []
    if scene.format == colmap.FORMAT:
        reconstruction = colmap.read_reconstruction(folder, model)
        points, colors = reconstruction.points, reconstruction.colors
        without_pose = [
            printable(path.relative_to(reconstruction.location.images).as_posix())
            for path in reconstruction.without_pose
        ]
    return Capture(
        name=printable(scene.name),
        format=scene.format,
        names=_distinct(names, splits),
        splits=tuple(splits),
        c2w=torch.cat([split.cameras.c2w for split in scene.splits.values()]).double(),
        intrinsics=torch.cat(intrinsics),
        sizes=tuple(sizes),
        aabb=(scene.aabb if warp is None else torch.tensor(warp.aabb)).double(),
        points=points,
        colors=colors,
        sharpness=tuple(sharpness(image) for image in images),
        fingerprints=np.stack([fingerprint(image) for image in images]),
        thumbnails=tuple(_thumbnail(image) for image in images),
        warp=warp,
        without_pose=tuple(without_pose),
        transparency=tuple(share for split in scene.splits.values() for share in transparency(split)),
        beyond_box=tuple(
            0.0 if warp is not None else _share_beyond(split, index, scene.aabb)
            for split in scene.splits.values()
            for index in range(len(split))
        ),
    )


def _share_beyond(split: Split, index: int, aabb: Tensor) -> float:
    """Returns the share of an image's opaque pixels whose rays miss a box, evaluated by pixels on a lattice."""
    opaque = split.image(index)[..., 3] >= _OPAQUE
    height, width = opaque.shape
    every = max(1, max(height, width) // _LATTICE)
    rows, columns = opaque[::every, ::every].nonzero().unbind(dim=-1)
    if len(rows) == 0:
        return 0.0
    pixels = every * torch.stack((columns, rows), dim=-1) + 0.5
    rays = split.cameras.rays(torch.full((len(rows),), index), pixels, aabb)
    return float((rays.near >= rays.far).double().mean())


def _distinct(names: list[str], splits: list[str]) -> tuple[str, ...]:
    if len(set(names)) == len(names):
        return tuple(names)
    return tuple(f"{split}/{name}" for split, name in zip(splits, names, strict=True))


def _thumbnail(image: Image.Image) -> Image.Image:
    small = image.copy()
    small.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE), Image.Resampling.BOX)
    return Image.alpha_composite(Image.new("RGBA", small.size, "white"), small).convert("RGB")
