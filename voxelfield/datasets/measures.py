"""Measures of photographs: transparency, sharpness, and whether they show a sky, which looks alike from all places."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageOps

from voxelfield.datasets.scene import Split
from voxelfield.fields.environment import project

SHARPNESS_SIZE = 512
"""Longest side, in pixels, of the copies whose sharpness is measured; larger images are reduced to it."""

BLURRED = 0.2
"""Share of a capture's median sharpness below which a photograph counts as blurred."""

ENOUGH_SKY = 0.03
"""Value of :func:`sky_share` from which on a capture counts as one with a sky.

It is 0.63 in a field under a sky, photographed from a drone, and 0.05 before a dark background (skull); in captures
without either it is 0.002 to 0.012 (fox, bonsai, room, fern).
"""

# About how many rays along the shorter side of each photograph show whether colours depend on directions alone.
_RAYS_ACROSS = 64
# Rows of the panorama in whose cells the photographs are compared, 2.8 degrees each.
_COMPARED_ROWS = 64
# Photographs agree on a direction if so many of them show it, and so large a share, and if the standard deviation of
# their colours is below this.
_FEWEST, _FEWEST_SHARE, _AGREEMENT = 3, 0.05, 0.03


def sharpness(image: Image.Image) -> float:
    """Returns the variance of the Laplacian: high for an image full of edges, near 0 for a blurred one.

    It is in squared grey levels of 256, and 0 for an image below 3 pixels. Transparent pixels count as white. Only
    images of one capture are comparable, since the value depends on their subject.
    """
    pixels = grey(image)
    if max(pixels.size) > SHARPNESS_SIZE:
        pixels = ImageOps.contain(pixels, (SHARPNESS_SIZE, SHARPNESS_SIZE), Image.Resampling.BOX)
    if min(pixels.size) < 3:
        return 0.0
    values = np.asarray(pixels, dtype=np.float32)
    around = values[:-2, 1:-1] + values[2:, 1:-1] + values[1:-1, :-2] + values[1:-1, 2:]
    return float((around - 4 * values[1:-1, 1:-1]).var())


def grey(image: Image.Image) -> Image.Image:
    """Returns an image in mode L; transparent pixels count as white."""
    if "A" in image.getbands():
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L")


def transparency(split: Split) -> list[float]:
    """Returns the mean transparency of each image of a split, from 0 to 1; see :meth:`Split.all_gather`."""
    alphas = (split.image(index).numpy()[..., 3] for index in split.local_indices)
    return split.all_gather([1 - float(alpha.sum(dtype=np.int64)) / (255 * alpha.size) for alpha in alphas])


def check_visible(split: Split) -> None:
    """Raises ValueError if images are transparent throughout, from which nothing can be learned."""
    blank = split.all_gather([index for index in split.local_indices if not bool(split.image(index)[..., 3].any())])
    if blank:
        file = split.source_of(blank[0])
        others = f", like {len(blank) - 1} others of {len(split)}" if len(blank) > 1 else ""
        raise ValueError(
            f"{file}: must have opaque pixels, got an image that is transparent throughout{others}: save it with its "
            "alpha channel as it should be, or leave it out"
        )


def sky_share(split: Split) -> float:
    """Returns the share of pixels in directions on whose colours the photographs agree.

    What is infinitely far away has one colour in each direction, whereas photographs from different places see other
    matter there. Only some of the pixels are read. A collective call if a process group divides the images.
    """
    rows, columns = _COMPARED_ROWS, 2 * _COMPARED_ROWS
    box = torch.zeros(2, 3)  # only the rays' directions are used
    # Of each direction: the number of photographs that show it and of their pixels, and the sums of the photographs'
    # mean colours and of their squares.
    totals = torch.zeros(rows * columns, 8)
    for index in split.local_indices:
        image, mask = split.image(index)[..., :3], split.mask(index)
        every = max(1, min(image.shape[:2]) // _RAYS_ACROSS)
        v, u = torch.meshgrid(*(torch.arange(0, side, every) for side in image.shape[:2]), indexing="ij")
        u, v = u.flatten(), v.flatten()
        camera = torch.full_like(u, index)
        rays = split.cameras.rays(camera, torch.stack((u, v), dim=1) + 0.5, box)
        places = zip(project(rays.directions), (rows, columns), strict=True)
        row, column = ((share * count).long().clamp(0, count - 1) for share, count in places)
        counted = torch.ones(len(u), 1) if mask is None else mask[v, u, None].float()
        pixels = counted * torch.cat((image[v, u] / 255, counted), dim=1)
        *color, count = torch.zeros(rows * columns, 4).index_add(0, row * columns + column, pixels).unbind(dim=1)
        means = torch.stack(color, dim=1) / count.clamp(min=1)[:, None]
        totals += torch.cat(((count > 0).float()[:, None], count[:, None], means, means.square()), dim=1)
    photographs, count, *sums = torch.stack(split.all_gather([totals])).sum(dim=0).split((1, 1, 3, 3), dim=1)
    mean, square = (each / photographs.clamp(min=1) for each in sums)
    variance = (square - mean.square()).mean(dim=1, keepdim=True)
    enough = photographs >= max(_FEWEST, _FEWEST_SHARE * len(split))
    return float(count[enough & (variance < _AGREEMENT**2)].sum() / count.sum().clamp(min=1))
