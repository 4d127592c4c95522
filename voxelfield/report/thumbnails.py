"""Small pictures of evaluated views."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from voxelfield import processes
from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import Evaluation
from voxelfield.rendering.pixels import jpeg_bytes, to_uint8, turbo
from voxelfield.rendering.render import View
from voxelfield.rendering.view_pictures import ERROR_MAXIMUM, depth_colors
from voxelfield.trained.trained_model import TrainedModel

_MIN_SIDE, _MAX_SIDE = 64, 480
# Pixels of one kind of picture in a whole report: 200 of 240 x 240.
_PIXELS = 200 * 240**2


@dataclass(frozen=True)
class ViewPictures:
    """Pictures of one view in the report, JPEG files of one size: the view and the photograph over the background.

    The error is the absolute difference, averaged over the channels, in Turbo colours from 0 to ``ERROR_MAXIMUM``,
    computed before the reduction; the depth is in Turbo colours from near (blue) to far (red), white in empty space.
    """

    render: bytes
    truth: bytes
    error: bytes
    depth: bytes
    width: int
    height: int


class Thumbnails:
    """Collects reduced views during an evaluation, and makes pictures of them afterwards.

    Adding a view launches a few kernels without synchronising. Reduced views stay on the device and take about 130 MB
    at most; their size depends on the number of views to expect.
    """

    def __init__(self, count: int) -> None:
        self._side = thumbnail_side(count)
        # 8-bit channels of render (3), truth (3), error and opacity, and the depth.
        self._views: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def add(self, name: str, view: View, truth: Tensor, mask: Tensor | None) -> None:
        """Adds a view, or replaces the one of that name; the error counts in ``mask`` (H, W), or everywhere."""
        rgb = view.rgb.clamp(0, 1)
        error = (rgb - truth).abs().mean(dim=-1, keepdim=True) / ERROR_MAXIMUM
        if mask is not None:
            error = torch.where(mask[..., None], error, 0)
        filled = (view.opacity > 0.5) & view.depth.isfinite()
        depth = torch.where(filled, view.depth, 0)[..., None]
        whole = torch.cat((rgb, truth, error.clamp(max=1), filled[..., None].to(rgb), depth), dim=-1)
        # An integer factor, because that is fastest on a GPU.
        factor = math.ceil(max(rgb.shape[:2]) / self._side)
        small = F.avg_pool2d(whole.permute(2, 0, 1)[None], factor, ceil_mode=True)[0]
        # Where only part of a pixel is filled, its depth is the mean of that part.
        mean_depth = small[8] / small[7].clamp(min=1e-6)
        self._views[name] = to_uint8(small[:8]), mean_depth.clamp(max=torch.finfo(torch.float16).max).half()

    def gather(self) -> None:
        """Adds the views of all processes that train together; a collective call, which waits for the device."""
        if processes.count() == 1:
            return
        local = {name: (colors.cpu(), depth.cpu()) for name, (colors, depth) in self._views.items()}
        for views in processes.gather_objects(local):
            self._views |= views

    def enlarge(self, trained: TrainedModel, split: Split, evaluation: Evaluation) -> None:
        """Draws the best and the worst view again, if pictures are small; a collective call, after :meth:`gather`."""
        if self._side == _MAX_SIDE or split.local_slice is not None:
            return
        ranked = sorted(zip(evaluation.scores["psnr"], evaluation.names, strict=True))
        large, extremes = Thumbnails(2), {split.names.index(name) for _, name in (ranked[0], ranked[-1])}
        trained.evaluate(split[sorted(extremes)], lpips=False, on_view=large.add, progress=False)
        large.gather()
        self._views |= large._views

    def pictures(self) -> dict[str, ViewPictures]:
        """Returns the pictures by the views' names; waits for the device."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="thumbnails") as pool:
            return dict(zip(self._views, pool.map(_pictures, self._views.values()), strict=True))


def thumbnail_side(count: int) -> int:
    """Returns the largest number of pixels of each picture's longer side, from 480 for few views to 64.

    The pictures of all views together take about the same space for 50 views as for 2000.
    """
    return min(max(round(math.sqrt(_PIXELS / max(count, 1))), _MIN_SIDE), _MAX_SIDE)


def _pictures(view: tuple[Tensor, Tensor]) -> ViewPictures:
    colors, depth = view[0].cpu().permute(1, 2, 0) / 255, view[1].cpu().float()
    shown = (colors[..., :3], colors[..., 3:6], turbo(colors[..., 6]), depth_colors(depth, colors[..., 7]))
    height, width = depth.shape
    render, truth, error, distance = (jpeg_bytes(Image.fromarray(to_uint8(rgb).numpy())) for rgb in shown)
    return ViewPictures(render, truth, error, distance, width, height)
