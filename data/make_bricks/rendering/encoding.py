"""The sRGB transfer function, from colours to light and from rendered light to pixels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from make_bricks.arrays import Array, Pixels


def decode_srgb(encoded: Array) -> Array:
    """Returns the linear light of sRGB values in [0, 1]."""
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def encode_rgba(film: NDArray[np.float32]) -> Pixels:
    """Turns a rendered film into the pixels of an image file.

    Args:
        film: Linear colour multiplied by alpha, and alpha, (H, W, 4).

    Returns:
        sRGB colour not multiplied by alpha, and alpha, (H, W, 4); all four are 0 where alpha is 0.
    """
    alpha = np.clip(film[..., 3:], 0.0, 1.0)
    rgb = np.clip(film[..., :3] / np.maximum(film[..., 3:], 1e-6), 0.0, 1.0)
    rgb = np.where(rgb <= 0.0031308, 12.92 * rgb, 1.055 * rgb ** (1 / 2.4) - 0.055)
    pixels = np.rint(255 * np.concatenate([rgb, alpha], axis=-1)).astype(np.uint8)
    pixels[pixels[..., 3] == 0] = 0
    return pixels
