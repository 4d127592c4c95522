"""A measure of the sharpness of photographs, by which those of a capture are compared."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

SHARPNESS_SIZE = 512
"""Longest side, in pixels, of the copies whose sharpness is measured; larger images are reduced to it."""

BLURRED = 0.2
"""Share of a capture's median sharpness below which a photograph counts as blurred."""


def sharpness(image: Image.Image) -> float:
    """Returns the variance of the Laplacian: high for an image full of edges, near 0 for a blurred one.

    Only images of one capture are comparable, since the value depends on their subject.

    Args:
        image: Any mode; transparent pixels count as white.

    Returns:
        The variance, in squared grey levels of 256; 0 for an image below 3 pixels.
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
