"""Figures of single images: how sharp one is, and a small copy by which two are compared."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

SHARPNESS_SIZE = 512
"""Longest side, in pixels, of the copies whose sharpness is measured; larger images are shrunk to it."""

FINGERPRINT_SIZE = 32
"""Both sides, in pixels, of the copies by which images are compared."""


def sharpness(image: Image.Image) -> float:
    """Returns the variance of the Laplacian: high for an image full of edges, near 0 for a blurred one.

    Only images of one capture are comparable, since the figure depends on what they show.

    Args:
        image: Any mode; transparent pixels count as white.

    Returns:
        The variance, in squared grey levels of 256; 0 for an image below 3 pixels.
    """
    grey = _grey(image)
    factor = max(grey.size) / SHARPNESS_SIZE
    if factor > 1:
        grey = grey.resize(
            (max(1, round(grey.width / factor)), max(1, round(grey.height / factor))), Image.Resampling.BOX
        )
    if min(grey.size) < 3:
        return 0.0
    values = np.asarray(grey, dtype=np.float32)
    around = values[:-2, 1:-1] + values[2:, 1:-1] + values[1:-1, :-2] + values[1:-1, 2:]
    return float((around - 4 * values[1:-1, 1:-1]).var())


def fingerprint(image: Image.Image) -> npt.NDArray[np.float32]:
    """Returns a small grey copy: the mean difference of two tells whether two images show the same.

    Args:
        image: Any mode; transparent pixels count as white.

    Returns:
        (32, 32) grey levels from 0 to 255.
    """
    return np.asarray(_grey(image).resize((FINGERPRINT_SIZE, FINGERPRINT_SIZE), Image.Resampling.BOX), dtype=np.float32)


def _grey(image: Image.Image) -> Image.Image:
    if "A" in image.getbands():
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L")
