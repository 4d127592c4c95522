"""Small pictures of the views that an evaluation has evaluated."""

from __future__ import annotations

import io
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from voxelfield.rendering.images import turbo
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.render import View
from voxelfield.rendering.view_pictures import ERROR_MAXIMUM, depth_colors

_MIN_SIDE, _MAX_SIDE = 64, 480
# Pixels of one kind of picture in a whole report: 200 of 240 x 240.
_PIXELS = 200 * 240**2

# Matter that hides the view from right before the camera: its depth as a share of the view's median depth, and how many
# times the view's mean error it has, without which it may be part of the scene.
_NEAR_DEPTH = 0.3
_NEAR_ERROR = 3.0


@dataclass(frozen=True)
class ViewPictures:
    """What the report shows of one view.

    Attributes:
        name: The view's.
        render: JPEG file, as are all four.
        truth: The photograph, over the background of the evaluation.
        error: Absolute difference, averaged over the channels, in Turbo colours from 0 to ``ERROR_MAXIMUM``; that of
            the whole image, not of the small pictures.
        depth: Depth in Turbo colours from near (blue) to far (red), white where there is nothing.
        width: Width of each picture, in pixels.
        height: Height of each picture, in pixels.
        hidden: Share of the pixels that show something which hangs right before the camera and is not in the
            photograph.
    """

    name: str
    render: bytes
    truth: bytes
    error: bytes
    depth: bytes
    width: int
    height: int
    hidden: float


@dataclass(frozen=True)
class _Reduced:
    """A view that is reduced in size: 8-bit channels of render (3), truth (3), error and opacity, and its depth."""

    colors: Tensor
    depth: Tensor


class Thumbnails:
    """Collects reduced views during an evaluation, and makes pictures of them when there is time.

    Adding a view launches a few kernels without synchronising. Reduced views stay on the device and take about 130 MB
    at most; with more than 50 views, each is smaller.

    Args:
        count: Number of views to expect, on which the size of the pictures depends.
    """

    def __init__(self, count: int) -> None:
        self._side = thumbnail_side(count)
        self._views: dict[str, _Reduced] = {}

    def __len__(self) -> int:
        return len(self._views)

    @torch.no_grad()
    def add(self, name: str, view: View, truth: Tensor, mask: Tensor | None) -> None:
        """Keeps a view; one of the same name takes the place of the one before.

        Args:
            name: The view's.
            view: As rendered.
            truth: (H, W, 3) in [0, 1], same device.
            mask: (H, W) bool, same device: where the error counts; None: everywhere.
        """
        rgb = view.rgb.clamp(0, 1)
        error = (rgb - truth).abs().mean(dim=-1, keepdim=True) / ERROR_MAXIMUM
        if mask is not None:
            error = torch.where(mask[..., None], error, 0)
        filled = (view.opacity > 0.5) & view.depth.isfinite()
        depth = torch.where(filled, view.depth, 0)[..., None]
        whole = torch.cat((rgb, truth, error.clamp(max=1), filled[..., None].to(rgb), depth), dim=-1)
        small = F.avg_pool2d(whole.permute(2, 0, 1)[None], self._factor(*rgb.shape[:2]), ceil_mode=True)[0]
        # Where only part of a pixel is filled, its depth is the mean of that part.
        mean_depth = small[8] / small[7].clamp(min=1e-6)
        self._views[name] = _Reduced(to_uint8(small[:8]), mean_depth.clamp(max=torch.finfo(torch.float16).max).half())

    def pictures(self) -> dict[str, ViewPictures]:
        """Returns the pictures by the views' names; waits for the device."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="thumbnails") as pool:
            return dict(zip(self._views, pool.map(_pictures, self._views, self._views.values()), strict=True))

    def _factor(self, height: int, width: int) -> int:
        """Returns the side of the square of pixels that becomes one; an integer, because that is fastest on a GPU."""
        return math.ceil(max(height, width) / self._side)


def thumbnail_side(count: int) -> int:
    """Returns the largest number of pixels of each picture's longer side.

    The pictures of all views together take about the same space for 50 views as for 2000; fewer views have pictures of
    480 pixels, and more have pictures of 64.

    Args:
        count: Number of views.
    """
    return min(max(round(math.sqrt(_PIXELS / max(count, 1))), _MIN_SIDE), _MAX_SIDE)


def _pictures(name: str, view: _Reduced) -> ViewPictures:
    colors, depth = view.colors.cpu().permute(1, 2, 0) / 255, view.depth.cpu().float()
    error, filled = colors[..., 6], colors[..., 7]
    shown = (colors[..., :3], colors[..., 3:6], turbo(error), depth_colors(depth, filled))
    height, width = depth.shape
    render, truth, wrong, distance = map(_jpeg, shown)
    return ViewPictures(name, render, truth, wrong, distance, width, height, _hidden(error, depth, filled > 0.5))


def _hidden(error: Tensor, depth: Tensor, filled: Tensor) -> float:
    """Returns which share of a view's pixels hangs right before the camera and is wrong."""
    if not bool(filled.any()):
        return 0.0
    near = filled & (depth < _NEAR_DEPTH * depth[filled].median())
    wrong = near & (error > _NEAR_ERROR * error.mean())
    return float(wrong.double().mean())


def _jpeg(rgb: Tensor) -> bytes:
    file = io.BytesIO()
    # Full resolution of colours too: in maps of error and depth they are all that there is.
    # Without optimize=True, for which Pillow's buffer holds one byte per pixel: noisy images need more and would fail.
    Image.fromarray(to_uint8(rgb).numpy()).save(file, format="JPEG", quality=85, subsampling=0)
    return file.getvalue()
