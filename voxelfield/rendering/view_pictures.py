"""Images of the quantities of a view: colour, error, depth, opacity."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.grids.boxes import box_tensor
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.paths import at_size
from voxelfield.rendering.pixels import turbo
from voxelfield.rendering.render import View
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.warps.warp import Warp

ERROR_MAXIMUM = 0.25
"""Mean absolute colour error that :func:`comparison_panel` shows in the last colour of its map."""

PICTURES = ("rgb", "depth", "opacity")
"""Quantities that :func:`picture` can show."""

# Words in the corners of a panel, and the size in pixels from which on its pictures are large enough to look at.
_WORDS, _LARGE = ("render", "truth", "error", "depth"), 400

# Number of frames that are rendered to find a path's range of depths, and the height of their images.
_LOOKS, _LOOK_HEIGHT = 8, 128

# Smallest depth in a range, because the inverse is shown.
_MIN_DEPTH = 1e-6

# Size of the box of depths in normalised device coordinates, in sizes of the field's own box.
_BEYOND = 10.0


def picture(view: View, shown: str, near_far: tuple[float, float]) -> Tensor:
    """Converts a quantity of a view, one of :data:`PICTURES`, to an image (H, W, 3) float32 in [0, 1] on its device.

    Depth is shown by :func:`depth_colors`, between the depths ``near_far``.
    """
    if shown == "rgb":
        return view.rgb
    if shown == "opacity":
        return view.opacity[..., None].expand(*view.opacity.shape, 3)
    return depth_colors(view.depth, view.opacity, near_far)


def depth_range(renderer: FieldRenderer, cameras: Cameras) -> tuple[float, float]:
    """Returns a range that contains nearly all depths of a path, so that all frames use the same colour scale.

    A few of the path's cameras are rendered.
    """
    height = min(_LOOK_HEIGHT, cameras.height)
    width = max(1, round(cameras.width * height / cameras.height))
    count = min(_LOOKS, len(cameras))
    looks = at_size(cameras[[index * len(cameras) // count for index in range(count)]], width, height)
    views = [renderer.view(looks, index) for index in range(count)]
    return _range(torch.cat([view.depth[view.opacity > 0.5] for view in views]))


def depth_bounds(aabb: Tensor, warp: Warp | None) -> Tensor:
    """Returns the box (2, 3), in world units on the CPU, whose depths a depth image distinguishes.

    It is the field's box ``aabb``, or ten times its size in normalised device coordinates, which reach to infinity.
    """
    if warp is None or not warp.is_forward_facing:
        return aabb.cpu()
    low, high = box_tensor(warp.aabb, torch.device("cpu"))
    centre = (low + high) / 2
    return torch.stack((centre + _BEYOND * (low - centre), centre + _BEYOND * (high - centre)))


def comparison_panel(view: View, truth: Tensor) -> Tensor:
    """Places render and truth side by side, and error and depth below them, each with that word in its corner.

    The error is the absolute difference, averaged over the channels, in Turbo colours from 0 to the fixed
    ``ERROR_MAXIMUM``, so panels of different steps and views are comparable. Depth is shown by :func:`depth_colors`.
    The truth is (H, W, 3) floating point in [0, 1], the panel (2 * F * H, 2 * F * W, 3) float32, on the device of both;
    F is the largest whole number with which no side of a picture has more than 400 pixels, and at least 1.
    """
    error = (view.rgb - truth).abs().mean(dim=-1) / ERROR_MAXIMUM
    pictures = (view.rgb.clamp(0, 1), truth.clamp(0, 1), turbo(error), depth_colors(view.depth, view.opacity))
    factor = max(1, _LARGE // max(truth.shape[:2]))
    panel = torch.cat((torch.cat(pictures[:2], dim=1), torch.cat(pictures[2:], dim=1)))
    panel = panel.repeat_interleave(factor, dim=0).repeat_interleave(factor, dim=1)
    ink, opacity = _words(*panel.shape[:2]).to(panel).div_(255).split(1, dim=-1)
    return torch.lerp(panel, ink, opacity)


def _words(height: int, width: int) -> Tensor:
    """Returns the words of a panel: brightness and opacity (H, W, 2) uint8."""
    from PIL import Image, ImageDraw, ImageFont  # optional dependency

    image, size = Image.new("LA", (width, height)), max(height // 15, 8)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size)
    for index, word in enumerate(_WORDS):
        corner = (size // 3 + index % 2 * (width // 2), size // 4 + index // 2 * (height // 2))
        # White with a black outline is legible on everything.
        draw.text(corner, word, (255, 255), font, stroke_width=max(size // 12, 1), stroke_fill=(0, 255))
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, 2)


def depth_colors(depth: Tensor, opacity: Tensor, near_far: tuple[float, float] | None = None) -> Tensor:
    """Maps inverse depth to Turbo colours from blue (near) to red (far), and to white where opacity is at most 0.5.

    The depths of the first and last colour, ``near_far``, are positive and in increasing order. They are by default the
    1st and 99th percentile over the pixels with opacity above 0.5.
    """
    filled = (opacity > 0.5) & depth.isfinite()
    near, far = _range(depth[filled]) if near_far is None else near_far
    nearness = (1 / depth.clamp(near, far) - 1 / far) / (1 / near - 1 / far)
    return torch.where(filled.unsqueeze(-1), turbo(1 - nearness), 1.0)


def _range(depths: Tensor) -> tuple[float, float]:
    """Returns the 1st and 99th percentile of depths (M,), positive and in increasing order.

    They are found by sorting, because torch.quantile rejects more than 2**24 values.
    """
    if len(depths) == 0:
        return 0.5, 1.0
    ordered = depths.sort().values
    last = len(ordered) - 1
    near, far = (max(float(ordered[round(q * last)]), _MIN_DEPTH) for q in (0.01, 0.99))
    # The range must not be empty: a wall that faces the camera has a single depth.
    return near, max(far, 1.001 * near)
