"""Conversions of colours and pixels, and image files in memory."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_VISIBLE_OPACITY = 0.5 / 255
"""An opacity below this changes no 8-bit pixel value."""


def to_uint8(rgb: torch.Tensor) -> torch.Tensor:
    """Quantises floating-point colours of any shape to uint8 by rounding; values outside [0, 1] are clamped.

    Raises:
        TypeError: ``rgb`` is not floating point.
    """
    if not rgb.is_floating_point():
        raise TypeError(f"rgb must be floating point, got {rgb.dtype}")
    # At least float32: float16 and bfloat16 cannot tell all 256 levels apart once scaled.
    scaled = rgb.detach().to(torch.promote_types(rgb.dtype, torch.float32)).nan_to_num()
    return (scaled.clamp(0, 1) * 255).round().to(torch.uint8)


def png_bytes(rgb: torch.Tensor) -> bytes:
    """Encodes colours (H, W, 3), floating point and nominally in [0, 1], as a PNG file with 8 bits per channel."""
    from PIL import Image  # optional dependency

    file = io.BytesIO()
    Image.fromarray(to_uint8(rgb).cpu().numpy()).save(file, format="PNG")
    return file.getvalue()


def jpeg_bytes(image: Image) -> bytes:
    """Encodes a small image as a JPEG file, whose colours are as sharp as its brightness."""
    file = io.BytesIO()
    # Without optimize=True, for which Pillow's buffer holds one byte per pixel: noisy images need more and would fail.
    image.save(file, format="JPEG", quality=85, subsampling=0)
    return file.getvalue()


def composite_background(rgba: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
    """Composites colours (..., 4) uint8 of straight (not premultiplied) alpha over a background (3,) in [0, 1].

    Returns ``alpha * rgb + (1 - alpha) * background``, (..., 3) float32 in [0, 1], on the device of ``rgba``. Previews
    and the evaluation both use this function for their ground truth, so they agree.
    """
    scaled = rgba.to(torch.float32) / 255
    # lerp is exact at both ends: opaque pixels do not change, and transparent ones equal the background exactly.
    return torch.lerp(background.to(scaled), scaled[..., :3], scaled[..., 3:])


def linear_light(colors: torch.Tensor) -> torch.Tensor:
    """Decodes sRGB colours in [0, 1], of any shape, to linear light (IEC 61966-2-1)."""
    return torch.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)


# Coefficients of ascending powers of the value; one row each for red, green and blue.
_TURBO = (
    (0.13572138, 4.61539260, -42.66032258, 132.13108234, -152.94239396, 59.28637943),
    (0.09140261, 2.19418839, 4.84296658, -14.18503333, 4.27729857, 2.82956604),
    (0.10667330, 12.64194608, -60.58204836, 110.36276771, -89.90310912, 27.34824973),
)


def turbo(values: torch.Tensor) -> torch.Tensor:
    """Maps values, of any shape, to colours (..., 3) of the map Turbo: dark blue (0), green (0.5), dark red (1).

    Uses the degree-5 polynomial fit of A. Mikhailov and R. Du to Mikhailov's table ("Turbo, An Improved Rainbow
    Colormap for Visualization", Google AI Blog, 2019; coefficients Apache-2.0). Other values are clamped.
    """
    values = values.clamp(0, 1)[..., None]
    colors = torch.zeros_like(values)
    for coefficients in values.new_tensor(_TURBO).unbind(dim=1)[::-1]:
        colors = colors * values + coefficients
    return colors.clamp(0, 1)
