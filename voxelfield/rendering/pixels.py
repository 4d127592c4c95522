"""Conversion of rendered colours to 8-bit pixels and to PNG files in memory."""

from __future__ import annotations

import io

import torch

MIN_VISIBLE_OPACITY = 0.5 / 255
"""An opacity below this changes no 8-bit pixel value."""


def to_uint8(rgb: torch.Tensor) -> torch.Tensor:
    """Quantises colours to 8 bits by rounding; values outside [0, 1] are clamped.

    Args:
        rgb: Floating-point tensor of any shape, nominally in [0, 1], any device.

    Returns:
        uint8 tensor of the same shape on the same device.

    Raises:
        TypeError: ``rgb`` is not floating point.
    """
    if not rgb.is_floating_point():
        raise TypeError(f"rgb must be floating point, got {rgb.dtype}")
    # At least float32: float16 and bfloat16 cannot tell all 256 levels apart once scaled.
    scaled = rgb.detach().to(torch.promote_types(rgb.dtype, torch.float32)).nan_to_num()
    return (scaled.clamp(0, 1) * 255).round().to(torch.uint8)


def png_bytes(rgb: torch.Tensor) -> bytes:
    """Encodes an image as a PNG file with 8 bits per channel.

    Args:
        rgb: (H, W, 3) floating point, nominally in [0, 1], any device.
    """
    from PIL import Image  # optional dependency

    file = io.BytesIO()
    Image.fromarray(to_uint8(rgb).cpu().numpy()).save(file, format="PNG")
    return file.getvalue()
