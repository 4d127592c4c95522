"""Images of the quantities of a view, for videos."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.paths import at_size
from voxelfield.rendering.render import View
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.training.images import turbo

PICTURES = ("rgb", "depth", "opacity")
"""Quantities that :func:`picture` can show."""

# Number of frames that are rendered to find a path's range of depths, and the height of their images.
_LOOKS, _LOOK_HEIGHT = 8, 128

_MIN_DEPTH = 1e-6  # :func:`picture` shows inverse depths


def picture(view: View, shown: str, near_far: tuple[float, float]) -> Tensor:
    """Converts a quantity of a view to an image.

    Args:
        view: The view.
        shown: One of :data:`PICTURES`. Depth is shown as nearness, its inverse, in colours of the Turbo map from blue
            (near) to red (far), and in white where the view is more than half transparent.
        near_far: Depths of the first and the last colour, world units; both positive, in increasing order.

    Returns:
        (H, W, 3) float32 in [0, 1] on the view's device.
    """
    if shown == "rgb":
        return view.rgb
    if shown == "opacity":
        return view.opacity[..., None].expand(*view.opacity.shape, 3)
    near, far = near_far
    nearness = (1 / view.depth.clamp(near, far) - 1 / far) / (1 / near - 1 / far)
    return torch.where((view.opacity > 0.5)[..., None], turbo(1 - nearness), 1.0)


def depth_range(renderer: FieldRenderer, cameras: Cameras) -> tuple[float, float]:
    """Returns a range that contains nearly all depths of a path, so that all frames use the same colour scale.

    Args:
        renderer: The renderer of the path.
        cameras: The cameras of the path, a few of which are rendered.
    """
    height = min(_LOOK_HEIGHT, cameras.height)
    width = max(1, round(cameras.width * height / cameras.height))
    count = min(_LOOKS, len(cameras))
    looks = at_size(cameras[[index * len(cameras) // count for index in range(count)]], width, height)
    views = [renderer.view(looks, index) for index in range(count)]
    depths = torch.cat([view.depth[view.opacity > 0.5] for view in views])
    if len(depths) == 0:
        return 0.5, 1.0
    ordered = depths.sort().values
    last = len(ordered) - 1
    near, far = (max(float(ordered[round(share * last)]), _MIN_DEPTH) for share in (0.01, 0.99))
    # The range must not be empty: a wall that faces the camera has a single depth.
    return near, max(far, 1.001 * near)
