"""Loader of LLFF's layout: ``poses_bounds.npy`` beside a folder of images.

A row is a (3, 5) matrix, the rotation, the position and height, width and focal length in pixels, with the camera's
axes down, right and backwards, followed by the nearest and the farthest depth. Format: Mildenhall et al., "Local Light
Field Fusion", 2019. Rows belong to the images in the order of their names.

Masks lie in a folder ``masks`` beside ``images``, or in ``masks_N`` beside ``images_N`` if there are no ``images``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from voxelfield.datasets.assembly import load_capture
from voxelfield.datasets.images import image_files, masks_within, read_array
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, scaled
from voxelfield.datasets.registry import Format, contains
from voxelfield.datasets.scene import Scene
from voxelfield.rendering.rigid import pose_matrices

FILE = "poses_bounds.npy"

# Points along each axis of a frustum.
_SAMPLES = 8


def load_llff(folder: Path, options: LoadOptions) -> Scene:
    """Loads a scene; see :class:`voxelfield.datasets.registry.Format`.

    Images are read from the folder ``images``, or from ``images_N`` if ``downscale`` is N. Without ``images``, the
    folder ``images_N`` is used, or else the one with the smallest N, whose images ``downscale`` then shrinks. The
    points of the scene fill the space that the cameras see between the nearest and the farthest depths.
    """
    file = folder / FILE
    rows = _read_rows(file)
    paths = image_files(folder / "images")
    shrunk = image_files(folder / f"images_{options.downscale}")
    if not paths and shrunk:
        paths, shrunk, options = shrunk, [], replace(options, downscale=1)
    elif not paths:
        numbered = sorted((int(path.name[7:]), path) for path in folder.glob("images_*") if path.name[7:].isdigit())
        paths = next(filter(None, (image_files(images) for _, images in numbered)), [])
        if not paths:
            raise FileNotFoundError(f"{folder}: images must lie in a folder images or images_N, got none")
    if len(paths) != len(rows):
        raise ValueError(f"{file}: must have a row for each image, got {len(rows)} rows and {len(paths)} images")
    matrices, (near, far) = rows[:, :15].view(-1, 3, 5), rows[:, 15:].unbind(dim=-1)
    down, right, backwards, position = matrices[..., :4].unbind(dim=-1)
    c2w = pose_matrices(torch.stack((right, -down, backwards), dim=-1), position)
    height, width, focal = matrices[..., 4].unbind(dim=-1)
    if not bool(((height > 0) & (width > 0) & (focal > 0) & (near > 0) & (far > near)).all()):
        raise ValueError(
            f"{file}: sizes, focal lengths and depths must be positive, and the farthest beyond the nearest"
        )
    folder_of_masks = paths[0].parent.with_name(paths[0].parent.name.replace("images", "masks", 1))
    masks = masks_within(folder_of_masks, [Path(path.name) for path in paths])
    photos = []
    cameras = zip(paths, masks, c2w, width.tolist(), height.tolist(), focal.tolist(), strict=True)
    for path, mask, pose, w, h, f in cameras:
        photos.append(Photo(path, pose, scaled((f, f, w / 2, h / 2), (w, h), str(file)), mask=mask))
    # By order, as the rows are: the shrunk images of LLFF's own scenes have other names.
    if len(shrunk) == len(photos):
        photos = [replace(photo, shrunk=path) for photo, path in zip(photos, shrunk, strict=True)]
    slopes = torch.stack((width, height), dim=-1) / (2 * focal[:, None])
    return load_capture(folder, file, photos, options, points=points_of_frusta(c2w, slopes, near, far))


def points_of_frusta(c2w: Tensor, slopes: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """Returns points (M, 3) that fill the space that cameras see between two depths, in proportion to the pixels.

    The ``slopes`` (N, 2) say how far the images reach from their centres along x and y, at a depth of 1; ``near`` and
    ``far`` (N,) are depths along the optical axis, world units.
    """
    c2w = c2w.double()
    share = (torch.arange(_SAMPLES, dtype=torch.float64) + 0.5) / _SAMPLES
    # Evenly spread in 1 / depth, as the resolution of depth from pictures is.
    depth = 1 / torch.lerp(1 / near.double()[:, None], 1 / far.double()[:, None], share)
    x, y = torch.meshgrid(2 * share - 1, 2 * share - 1, indexing="ij")
    across = torch.stack((x, y), dim=-1).view(1, -1, 2) * slopes.double()[:, None]
    at_one = torch.cat((across, -torch.ones(len(c2w), across.shape[1], 1, dtype=torch.float64)), dim=-1)
    points = (at_one[:, None] * depth[:, :, None, None]).flatten(1, 2)
    return (points @ c2w[:, :3, :3].mT + c2w[:, None, :3, 3]).reshape(-1, 3)


def _read_rows(file: Path) -> Tensor:
    rows = read_array(file)
    if not (rows.dtype.kind in "fiu" and rows.ndim == 2 and rows.shape[1] == 17):
        raise ValueError(f"{file}: must be an array of numbers of shape (N, 17), got {rows.shape} of {rows.dtype}")
    found = torch.from_numpy(rows.astype(np.float64))
    if len(found) == 0 or not bool(found.isfinite().all()):
        raise ValueError(f"{file}: must have at least one row, and finite numbers, got shape {tuple(found.shape)}")
    return found


FORMAT = Format("LLFF", FILE, contains([FILE]), load_llff, order=40)
