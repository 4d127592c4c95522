"""Pictures of what a view holds, for videos."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.rendering.render import View
from voxelfield.training.images import turbo

PICTURES = ("rgb", "depth", "opacity")
"""What :func:`picture` can show."""


def picture(view: View, shown: str, far: float) -> Tensor:
    """Returns a view as an image.

    Args:
        view: The view.
        shown: One of :data:`PICTURES`. Nearness, the inverse of the depth, is in colours of the Turbo map, and white
            where the view is more than half transparent, so that all frames of a path have one scale.
        far: Depth of the last colour, world units; the first one is that of a twentieth of it, and of what is nearer.

    Returns:
        (H, W, 3) float32 in [0, 1] on the view's device.
    """
    if shown == "rgb":
        return view.rgb
    if shown == "opacity":
        return view.opacity[..., None].expand(*view.opacity.shape, 3)
    near = 0.05 * far
    nearness = (1 / view.depth.clamp(near, far) - 1 / far) / (1 / near - 1 / far)
    return torch.where((view.opacity > 0.5)[..., None], turbo(1 - nearness), 1.0)
