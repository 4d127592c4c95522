"""Images of the quantities of a view: colour, error, depth, opacity."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.images import turbo
from voxelfield.rendering.paths import at_size
from voxelfield.rendering.render import View
from voxelfield.rendering.renderer import FieldRenderer

ERROR_MAXIMUM = 0.25
"""Mean absolute colour error that :func:`comparison_panel` shows in the last colour of its map."""

PICTURES = ("rgb", "depth", "opacity")
"""Quantities that :func:`picture` can show."""

# Number of frames that are rendered to find a path's range of depths, and the height of their images.
_LOOKS, _LOOK_HEIGHT = 8, 128

# Depths are not shown as less than this, because `picture` shows their inverse.
_MIN_DEPTH = 1e-6


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
    near, far = (max(depth, _MIN_DEPTH) for depth in _percentiles(depths))
    # The range must not be empty: a wall that faces the camera has a single depth.
    return near, max(far, 1.001 * near)


def comparison_panel(
    rgb: Tensor,
    truth: Tensor,
    depth: Tensor,
    opacity: Tensor,
    near_far: tuple[float, float] | None = None,
) -> Tensor:
    """Places render, truth, error and depth side by side.

    The error is the absolute difference, averaged over the channels, in Turbo colours from 0 to the fixed
    ``ERROR_MAXIMUM``, so panels of different steps and views are comparable. Depth is in Turbo colours from near (blue)
    to far (red); pixels with opacity of at most 0.5 are white.

    Args:
        rgb: (H, W, 3) floating point, nominally in [0, 1].
        truth: (H, W, 3) floating point in [0, 1], same device.
        depth: (H, W) world units, same device.
        opacity: (H, W) in [0, 1], same device.
        near_far: Depths of the first and last colour. None uses the 1st and 99th percentile over the pixels with
            opacity above 0.5.

    Returns:
        (H, 4 * W, 3) float32 in [0, 1] on the device of ``rgb``, detached.

    Raises:
        ValueError: A shape is wrong or ``near_far`` is not increasing.
    """
    if rgb.ndim != 3 or rgb.shape[-1] != 3:
        raise ValueError(f"rgb must have shape (H, W, 3), got {tuple(rgb.shape)}")
    for name, image, shape in (
        ("truth", truth, rgb.shape),
        ("depth", depth, rgb.shape[:2]),
        ("opacity", opacity, rgb.shape[:2]),
    ):
        if image.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(image.shape)}")
    if near_far is not None and not near_far[0] < near_far[1]:
        raise ValueError(f"near_far must be increasing, got {near_far}")
    rgb, truth, depth = (image.detach().to(torch.float32) for image in (rgb, truth, depth))
    error = (rgb - truth).abs().mean(dim=-1) / ERROR_MAXIMUM
    depth_rgb = depth_colors(depth, opacity.detach(), near_far)
    return torch.cat((rgb.clamp(0, 1), truth.clamp(0, 1), turbo(error), depth_rgb), dim=1)


def depth_colors(depth: Tensor, opacity: Tensor, near_far: tuple[float, float] | None = None) -> Tensor:
    """Maps depth to Turbo colours from near (blue) to far (red), and to white where opacity is at most 0.5.

    Args:
        depth: (H, W) float32, world units.
        opacity: (H, W) in [0, 1], same device.
        near_far: As for :func:`comparison_panel`.

    Returns:
        (H, W, 3) float32 in [0, 1].
    """
    filled = (opacity > 0.5) & depth.isfinite()
    depths = depth[filled]
    if near_far is None:
        near_far = _percentiles(depths) if len(depths) > 0 else (0.0, 1.0)
    low, high = near_far
    # The lower bound avoids a division by zero for a flat wall.
    scaled = (depth - low) / max(high - low, 1e-6)
    return torch.where(filled.unsqueeze(-1), turbo(scaled), 1.0)


def _percentiles(depths: Tensor) -> tuple[float, float]:
    """Returns the 1st and 99th percentile of (M,) depths, M at least 1.

    They are found by sorting, because torch.quantile rejects more than 2**24 values.
    """
    ordered = depths.sort().values
    last = len(ordered) - 1
    return float(ordered[round(0.01 * last)]), float(ordered[round(0.99 * last)])
