"""A scene to be inspected before training: all views of all splits, with small copies of their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from voxelfield.datasets.images import Size, image_sizes
from voxelfield.datasets.loading import load_scene
from voxelfield.datasets.measures import SHARPNESS_SIZE, grey, sharpness, sky_share, transparency
from voxelfield.datasets.scene import Split
from voxelfield.messages import printable
from voxelfield.rendering.lens import Lens, join_lenses
from voxelfield.warps.choice import WarpConfig, choose_warp
from voxelfield.warps.warp import Warp

# Of the pixels whose rays are compared with the box: the least alpha, and their number along the longer side.
_OPAQUE, _LATTICE = 128, 40

_THUMBNAIL_SIDE = 192  # pixels of the longer side


@dataclass(frozen=True, eq=False)
class Capture:
    """Views of a scene.

    Attributes:
        name: The scene's name.
        format: The name of its format.
        names: N different names; those that several splits have are preceded by the split.
        splits: The split of each view.
        c2w: (N, 4, 4) float64, camera to world, OpenGL axes.
        intrinsics: (N, 4) float64, ``fx, fy, cx, cy`` in pixels of the image files.
        sizes: N widths and heights of the image files in pixels.
        aabb: (2, 3) float64, the scene's box, or the part that matters most if it extends further.
        points: (M, 3) float64, sparse points; none for formats without.
        sharpness: N values of :func:`voxelfield.datasets.measures.sharpness`.
        fingerprints: (N, 32, 32) of :func:`fingerprint`.
        thumbnails: N small images, RGB, transparent pixels on white.
        warp: The warp that a field gets by default, if the scene extends beyond ``aabb``.
        transparency: N transparent shares of the images, from 0 to 1; none if unknown.
        beyond_box: N shares of each image's opaque pixels whose rays miss the box, 0 if the scene extends beyond it;
            none if unknown.
        sky: Share of the pixels that depend on their direction alone (:func:`voxelfield.datasets.measures.sky_share`),
            if a field ends in front of what they show.
        lens: Their lenses; None for pinholes.
        motion: (N, 2) float64, how far each camera turns, in radians, and moves, in world units, while the rows of its
            image are exposed one after another; None if none does.
        times: (N,) times of the images; None if unknown.
        masked: N shares of the images' pixels that masks leave out; none without masks.
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
    sharpness: tuple[float, ...]
    fingerprints: npt.NDArray[np.float32]
    thumbnails: tuple[Image.Image, ...]
    warp: Warp | None = None
    transparency: tuple[float, ...] = ()
    beyond_box: tuple[float, ...] = ()
    sky: float = 0.0
    lens: Lens | None = None
    motion: Tensor | None = None
    times: Tensor | None = None
    masked: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def origins(self) -> Tensor:
        """(N, 3) positions of the cameras."""
        return self.c2w[:, :3, 3]

    @property
    def up(self) -> Tensor:
        """(3,) mean of the images' up directions; short where they disagree."""
        return self.c2w[:, :3, 1].mean(dim=0)

    @property
    def fields_of_view(self) -> Tensor:
        """(N, 2) horizontal and vertical angles in degrees; 180 where a focal length is not positive."""
        sizes, focal = torch.tensor(self.sizes, dtype=torch.float64), self.intrinsics[:, :2]
        angles = 2 * torch.atan2(sizes / 2, focal.clamp(min=0))
        if self.lens is not None:
            angles = torch.where(self.lens.is_sphere[:, None], sizes / focal, angles)
        return angles.rad2deg()


def read_capture(folder: Path, aabb: Sequence[Sequence[float]] | None = None, model: int | None = None) -> Capture:
    """Reads every split of a scene; arguments and errors are those of :func:`voxelfield.datasets.loading.load_scene`.

    Views whose images are missing are left out, with a warning in the log.
    """
    scene = load_scene(folder, splits=None, image_size=SHARPNESS_SIZE, missing_images="skip", aabb=aabb, model=model)
    splits = scene.splits.values()
    views = [(name, split, index) for name, split in scene.splits.items() for index in range(len(split))]
    names = [split.names[index] for _, split, index in views]
    if len(set(names)) < len(names):
        names = [f"{split}/{name}" for (split, _, _), name in zip(views, names, strict=True)]
    sizes = image_sizes([path for split in splits for path in split.paths or ()])
    scale = torch.tensor(sizes, dtype=torch.float64) / torch.cat([split.cameras.all_sizes() for split in splits])
    intrinsics = torch.cat([split.cameras.intrinsics for split in splits]).double()
    images = [Image.fromarray(split.image(index).numpy()) for _, split, index in views]
    warp = choose_warp(scene, WarpConfig())
    lenses = [split.cameras.lens or Lens("pinhole", torch.zeros(len(split), 0)) for split in splits]
    # The middle row has the pose, so that the motion of all rows is twice the largest one.
    motion = 2 * torch.cat([split.cameras.largest_motion() for split in splits]).double()
    masks = [split.mask(index) for _, split, index in views]
    any_mask, has_times = any(mask is not None for mask in masks), all("time" in split.extras for split in splits)
    return Capture(
        name=printable(scene.name),
        format=scene.format,
        names=tuple(names),
        splits=tuple(split for split, _, _ in views),
        c2w=torch.cat([split.cameras.c2w for split in splits]).double(),
        intrinsics=intrinsics * scale.repeat(1, 2),
        sizes=tuple(sizes),
        aabb=(scene.aabb if warp is None else torch.tensor(warp.aabb)).double(),
        points=(torch.zeros(0, 3) if scene.points is None else scene.points).double(),
        sharpness=tuple(map(sharpness, images)),
        fingerprints=np.stack([fingerprint(image) for image in images]),
        thumbnails=tuple(thumbnail(image, _THUMBNAIL_SIDE) for image in images),
        warp=warp,
        transparency=tuple(share for split in splits for share in transparency(split)),
        beyond_box=tuple(_share_beyond(split, index, scene.aabb) if warp is None else 0.0 for _, split, index in views),
        lens=join_lenses(lenses),
        motion=motion if bool(motion.any()) else None,
        times=torch.cat([split.extras["time"] for split in splits]) if has_times else None,
        masked=tuple(0.0 if mask is None else 1 - float(mask.double().mean()) for mask in masks) if any_mask else (),
        sky=0.0 if warp is None or warp.is_forward_facing else sky_share(scene.train),
    )


def _share_beyond(split: Split, index: int, aabb: Tensor) -> float:
    """Returns the share of an image's opaque pixels, sampled on a lattice, whose rays miss a box."""
    opaque = split.image(index)[..., 3] >= _OPAQUE
    every = max(1, max(opaque.shape) // _LATTICE)
    rows, columns = opaque[::every, ::every].nonzero().unbind(dim=-1)
    if len(rows) == 0:
        return 0.0
    pixels = every * torch.stack((columns, rows), dim=-1) + 0.5
    rays = split.cameras.rays(torch.full((len(rows),), index), pixels, aabb)
    return float((rays.near >= rays.far).double().mean())


def thumbnail(image: Image.Image, side: int, background: str | tuple[int, ...] = "white") -> Image.Image:
    """Returns a small copy of an RGBA image over a background, whose longer side has at most ``side`` pixels."""
    small = Image.new("RGB", image.size, background)
    small.paste(image, mask=image)
    small.thumbnail((side, side), Image.Resampling.BOX)
    return small


def fingerprint(image: Image.Image) -> npt.NDArray[np.float32]:
    """Returns a small grey copy (32, 32), 0 to 255, by which equal images are found; transparent pixels are white."""
    return np.asarray(grey(image).resize((32, 32), Image.Resampling.BOX), dtype=np.float32)
