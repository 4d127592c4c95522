"""Conversion of colours to linear light."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_light(colors: Tensor) -> Tensor:
    """Decodes sRGB colours to linear light (IEC 61966-2-1).

    Args:
        colors: (...) floating point in [0, 1].

    Returns:
        (...) in [0, 1], same dtype and device.
    """
    return torch.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
