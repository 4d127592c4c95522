"""Transparent pixels: whether they are the empty background of an object, or pixels without a value."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from voxelfield.datasets.scene import Split

logger = logging.getLogger(__name__)

CUT_OUT = 0.1
"""Least transparency of images that show an object without its background. Undistorting photographs leaves a few
percent of each without a value, and editing them stray pixels; cutting an object out removes tens of percent."""

# Opacity, of 255, below which a pixel of a photograph has no value.
_HALF = 128


def transparency(split: Split) -> list[float]:
    """Returns the mean transparency of each image of a split, from 0 to 1; see :meth:`Split.all_gather`."""
    alphas = (split.image(index).numpy()[..., 3] for index in split.local_indices)
    return split.all_gather([1 - float(alpha.sum(dtype=np.int64)) / (255 * alpha.size) for alpha in alphas])


def check_visible(split: Split) -> None:
    """Refuses images that are transparent throughout, from which nothing can be learned.

    Raises:
        ValueError: There are some; the message names the first.
    """
    blank = split.all_gather([index for index in split.local_indices if not bool(split.image(index)[..., 3].any())])
    if blank:
        file = split.names[blank[0]] if split.paths is None else split.paths[blank[0]]
        others = f", like {len(blank) - 1} others of {len(split)}" if len(blank) > 1 else ""
        raise ValueError(
            f"{file}: must have opaque pixels, got an image that is transparent throughout{others}: save it with its "
            "alpha channel as it should be, or leave it out"
        )


def shows_object(source: Path, splits: Mapping[str, Split]) -> bool:
    """Returns whether images show an object whose background is transparent.

    The training images decide if they are loaded.

    Args:
        source: The source of the images, for the log.
        splits: The loaded splits.
    """
    decisive = [splits["train"]] if "train" in splits else list(splits.values())
    shares = [share for split in decisive for share in transparency(split)]
    if not any(shares):
        return False
    mean = sum(shares) / len(shares)
    if mean >= CUT_OUT:
        logger.info("%.0f %% of all pixels are transparent: the scene is an object that ends at its box", 100 * mean)
        return True
    some = sum(share > 0 for share in shares)
    logger.warning(
        "%s: %.2g %% of all pixels are transparent, in %d of %d images: they count as pixels without a value, because "
        "images of an object without its background have at least %.0f %%",
        *(source, 100 * mean, some, len(shares), 100 * CUT_OUT),
    )
    return False


def without_transparency(split: Split) -> Split:
    """Returns a split whose transparent pixels are masked; all others become opaque, in the memory of its images.

    Raises:
        ValueError: An image has no other pixels.
    """
    alpha = split.images[..., 3]
    opaque = alpha >= _HALF
    alpha.fill_(255)
    if all(split.all_gather([bool(opaque.all())])):
        return split
    masks = opaque if split.masks is None else opaque & split.masks
    sizes = split.cameras.all_sizes().tolist()
    pairs = zip(split.local_indices, masks, strict=True)
    bare = [index for index, mask in pairs if not bool(mask[: sizes[index][1], : sizes[index][0]].any())]
    for index in split.all_gather(bare):
        file = split.names[index] if split.paths is None else split.paths[index]
        raise ValueError(f"{file}: must have opaque pixels that are not masked, got none: leave it out")
    return replace(split, masks=masks)
