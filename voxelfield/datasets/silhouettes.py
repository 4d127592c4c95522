"""The box around an object, from the silhouettes of images whose background is transparent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.rendering.cameras import Cameras, pixels_of_rays
from voxelfield.rendering.visual_hull import lattice_in_frame
from voxelfield.warps.choice import look_from_many_sides, stray_cameras, viewed_point

# Less opacity, of 255, is the noise of an image that a program has cut out.
_LEAST_ALPHA = 13
# Share of the images that may contradict a cell: masks may lack parts of the object, and poses may be wrong.
_MAY_CONTRADICT = 0.2
# Images in which a cell must appear: at least this many, and this share of those that show the best seen cell. Cameras
# aim at the object, also where none shows all of it.
_FEWEST_VIEWS = 2
_LEAST_SEEN = 0.05
# Silhouettes that the border cuts contradict nothing outside of their images. Without others, cells must be near one
# that this share of the images shows, compared with the best seen cell: at most so many cells away. Few images show the
# ends of an object that overflows most of them, so the second number applies where silhouettes touch more borders than
# the last one, on average.
_OFTEN_SEEN = 0.5
_NEAR, _NEAR_IF_OVERFLOWING = 3, 5
_OVERFLOWING = 2.2
# Cells along each axis that are looked at; blocks of pixels along the longer side of a silhouette.
_CELLS = 24
_BLOCKS = 256
# The first box reaches as far as the farthest camera, or further if cameras do not surround the object; it is shrunk
# until no edge loses a twentieth.
_FURTHER = 2.0
_ROUNDS = 12
_SHRINKS = 0.95
# Lenses may magnify the border of an image this much more than a pinhole.
_LENS_WINDOW = 1.5


@dataclass(frozen=True)
class Silhouette:
    """The silhouette of an object in an image.

    Attributes:
        counts: (rows + 1, columns + 1) int32, how many blocks above and to the left are opaque.
        block: Edge of a block in pixels.
        touched: How many of the image's four borders the silhouette reaches; None without opaque pixels.
        middle: (2,) column and row of the middle of its bounding rectangle, in pixels.
    """

    counts: Tensor
    block: int
    touched: int | None
    middle: Tensor

    @property
    def whole(self) -> bool:
        """Whether the silhouette ends within the image, so that it shows all of the object."""
        return self.touched == 0

    @classmethod
    def of(cls, alpha: Tensor) -> Silhouette:
        """Returns the silhouette of an image's opacity (H, W), uint8. Without opaque pixels, it is the whole image."""
        # By numpy, because where there are many threads, torch's take many times as long as this work.
        opaque = alpha.numpy() >= _LEAST_ALPHA
        if blank := not opaque.any():
            opaque = np.ones_like(opaque)
        height, width = opaque.shape
        rows, columns = opaque.any(axis=1).nonzero()[0], opaque.any(axis=0).nonzero()[0]
        ends = np.stack((columns[[0, -1]], rows[[0, -1]]))
        touched = int((ends == [[0, width - 1], [0, height - 1]]).sum())
        block = math.ceil(max(height, width) / _BLOCKS)
        padded = np.pad(opaque, ((0, -height % block), (0, -width % block)))
        blocks = padded.reshape(len(padded) // block, block, -1, block).any(axis=(1, 3))
        counts = np.pad(blocks.cumsum(axis=0, dtype=np.int32).cumsum(axis=1, dtype=np.int32), ((1, 0), (1, 0)))
        middle = torch.from_numpy(ends).float().mean(dim=1) + 0.5
        return cls(torch.from_numpy(counts), block, None if blank else touched, middle)


def box_of_silhouettes(silhouettes: Sequence[Silhouette], cameras: Cameras) -> Tensor | None:
    """Returns a box around the object that images with a transparent background show.

    A lattice of cells is projected into the images. An image contradicts a cell that appears in its transparent part,
    and one outside of the image if the silhouette does not touch the border. Cells that more than a fifth of the images
    contradict are dropped, so that neither masks with holes nor a few wrong poses cut the object, and so are cells that
    hardly any image shows or, if most silhouettes touch the border, far fewer than others. The box around the remaining
    ones is divided into cells again, until it does not shrink further.

    The cameras have the size of the images that the silhouettes are of; images without opaque pixels tell only where
    cameras look. The box is (2, 3) float64, world units; it is None if cameras do not look at a common point, or if the
    images contradict one another wherever the object may be.
    """
    middles = torch.stack([silhouette.middle for silhouette in silhouettes])
    rays = cameras.rays(torch.arange(len(cameras)), middles, torch.tensor([[-1.0] * 3, [1.0] * 3]))
    usual = ~stray_cameras(cameras.c2w)
    origins, looks = rays.origins[usual].double(), rays.directions[usual].double()
    centre = viewed_point(origins, looks)
    shown = [index for index, silhouette in enumerate(silhouettes) if silhouette.touched is not None]
    if not shown or not float(((centre - origins) * looks).sum(dim=-1).median()) > 0:
        return None
    reach = (1.0 if look_from_many_sides(looks) else _FURTHER) * (origins - centre).norm(dim=-1).max()
    box, showing = torch.stack((centre - reach, centre + reach)), [silhouettes[index] for index in shown]
    for _ in range(_ROUNDS):
        possible, size = _possible_cells(box, showing, cameras[shown]), (box[1] - box[0]) / _CELLS
        if not bool(possible.any()):
            return None
        cells = possible.nonzero()
        smaller = torch.stack((box[0] + size * cells.amin(dim=0), box[0] + size * (cells.amax(dim=0) + 1)))
        shrinks = bool((smaller[1] - smaller[0] < _SHRINKS * (box[1] - box[0])).any())
        box = smaller
        if not shrinks:
            break
    return box


def _possible_cells(box: Tensor, silhouettes: Sequence[Silhouette], cameras: Cameras) -> Tensor:
    """Returns which cells (X, Y, Z) of a box the object may be in, each evaluated by the ball around it."""
    size = (box[1] - box[0]) / _CELLS
    axes = [(box[0, axis] + (torch.arange(_CELLS) + 0.5) * size[axis]).float() for axis in range(3)]
    radius = 0.5 * float(size.norm())
    seen = torch.zeros(3 * (_CELLS,), dtype=torch.int32)
    contradicted = torch.zeros_like(seen)
    for index, silhouette in enumerate(silhouettes):
        shown, against = _compare(axes, radius, silhouette, cameras, index)
        seen += shown
        contradicted += against
    possible = contradicted <= _MAY_CONTRADICT * len(silhouettes)
    best = int(torch.where(possible, seen, 0).max())
    possible &= seen >= max(min(_FEWEST_VIEWS, len(silhouettes)), _LEAST_SEEN * best)
    whole = sum(silhouette.whole for silhouette in silhouettes) / len(silhouettes)
    often = possible & (seen >= (_OFTEN_SEEN - whole) * best)
    overflowing = sum(silhouette.touched or 0 for silhouette in silhouettes) > _OVERFLOWING * len(silhouettes)
    near = _NEAR_IF_OVERFLOWING if overflowing else _NEAR
    return possible & (F.max_pool3d(often[None].float(), 2 * near + 1, 1, near)[0] > 0)


def _compare(
    axes: list[Tensor], radius: float, silhouette: Silhouette, cameras: Cameras, index: int
) -> tuple[Tensor, Tensor]:
    """Returns which balls of a lattice may appear in a silhouette and which the image contradicts, (X, Y, Z) bool."""
    origin, intrinsics = cameras.c2w[index, :3, 3], cameras.intrinsics[index]
    *across, depth = lattice_in_frame(axes, cameras.c2w[index])
    turn, move = cameras.largest_motion()[index].tolist()
    if bool(cameras.is_sphere[index]):
        rays = torch.stack((*across, depth), dim=-1)
        return _compare_sphere(pixels_of_rays(cameras, index, rays), rays, radius + move, turn, silhouette, intrinsics)
    farthest = math.hypot(*(float((axis - o).abs().max()) for axis, o in zip(axes, origin, strict=True)))
    radius += move + turn * farthest
    nearest = (depth - radius).clamp_(min=1e-3 * radius)
    distance = depth.abs().clamp_(min=1e-3 * radius)
    if cameras.lens is None:
        window = 1.0
        pixels = [
            centre + (focal * side) / distance for focal, centre, side in zip(*intrinsics.chunk(2), across, strict=True)
        ]
    else:
        window = _LENS_WINDOW
        rays = torch.stack((*across, depth), dim=-1)
        pixels = [part.float() + 0.5 for part in pixels_of_rays(cameras, index, rays).unbind(dim=-1)]
    sides = []
    for focal, side, pixel in zip(intrinsics[:2], across, pixels, strict=True):
        sides.append((pixel, (side.abs() / distance + 1) * (window * radius * focal) / nearest))
    empty, beyond = _is_empty(silhouette, sides)
    before = depth > radius
    against = before & empty
    return before & ~empty, (against | (depth < -radius)) if silhouette.whole else against & ~beyond


def _compare_sphere(
    pixels: Tensor, rays: Tensor, radius: float, turn: float, silhouette: Silhouette, intrinsics: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the same for an equirectangular image.

    The balls' centres appear in ``pixels`` (X, Y, Z, 2), in the directions ``rays`` (X, Y, Z, 3), right, down and
    forward; but the balls may appear elsewhere by an angle ``turn``, radians.
    """
    distance = rays.norm(dim=-1)
    size = (radius / distance).clamp(max=1).asin() + turn
    flat = rays[..., ::2].norm(dim=-1) / distance
    # A ball around a pole is as wide as the image.
    wide = torch.where(size.sin() < flat, (size.sin() / flat).clamp(max=1).asin(), math.pi)
    (column, row), (across, down) = (pixels.float() + 0.5).unbind(dim=-1), intrinsics[:2]
    empty, beyond = _is_empty(silhouette, [(column, across * wide + 1), (row, down * size + 1)])
    # What reaches beyond the seam is seen at the other side of the circle.
    for circle in (2 * math.pi * across, -2 * math.pi * across):
        empty &= _is_empty(silhouette, [(column + circle, across * wide + 1), (row, down * size + 1)])[0]
    before = distance > radius
    return before & ~empty, before & empty if silhouette.whole else before & empty & ~beyond


def _is_empty(silhouette: Silhouette, sides: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns which windows (X, Y, Z) of an image show nothing, and which reach beyond the image.

    ``sides`` are the middles and half the sides of the windows along x and y, in pixels.
    """
    ends, beyond = [], torch.zeros_like(sides[0][0], dtype=torch.bool)
    for (pixel, reach), last in zip(sides, silhouette.counts.shape[::-1], strict=True):
        low, high = ((pixel - reach) / silhouette.block, (pixel + reach) / silhouette.block + 1)
        beyond |= (low < 0) | (high >= last)
        ends.append([end.clamp_(0, last - 1).int() for end in (low, high)])
    (x0, x1), (y0, y1) = ends
    counts, columns = silhouette.counts.flatten(), silhouette.counts.shape[1]
    above, below = y0 * columns, y1 * columns
    inside = counts[below + x1] - counts[above + x1] - counts[below + x0] + counts[above + x0]
    return inside == 0, beyond
