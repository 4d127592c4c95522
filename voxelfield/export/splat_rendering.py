"""Rendering of splats with derivatives, by torch and the ops for compositing: exact, and fast enough to fit them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield import ops
from voxelfield.export.splat_file import Splats
from voxelfield.fields.decoders import spherical_harmonics
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.rigid import rotations

# As in Kerbl et al. (2023) and in viewers: the smallest and largest opacity in a pixel, the
# variance, in square pixels, that is added to each Gaussian in the image, and the distance from the image, in images,
# beyond which a Gaussian is projected as if it were there.
MIN_ALPHA, MAX_ALPHA = 1 / 255, 0.99
_DILATION = 0.3
_MARGIN = 0.15

# Pairs of a Gaussian and a pixel that are examined at once.
_CHUNK = 1 << 21


def render_splats(splats: Splats, camera: Cameras, background: Tensor, near: Tensor | float) -> Tensor:
    """Renders one image as splat viewers do, without anti-aliasing; differentiable in the splats.

    Args:
        splats: N Gaussians.
        camera: One pinhole camera, on their device.
        background: (3,) colour behind them.
        near: Depth, () or (N,), world units, up to which a Gaussian is left out.

    Returns:
        (H, W, 3) float32, not below 0.
    """
    pose, (width, height) = camera.c2w[0], camera.size(0)
    fx, fy, cx, cy = camera.intrinsics[0]
    axes = pose[:3, :3] * pose.new_tensor([1.0, -1.0, -1.0])  # x right, y down, z forward
    with torch.no_grad():
        depth = (splats.means - pose[:3, 3]) @ axes[:, 2]
        order = depth.argsort()
        order = order[(depth > near)[order]]
    chosen = splats[order]
    arms = chosen.means - pose[:3, 3]
    x, y, z = (arms @ axes).unbind(-1)
    slope_x, slope_y = _within_view(x / z, width / fx, cx / fx), _within_view(y / z, height / fy, cy / fy)
    zero = torch.zeros_like(z)
    jacobian = torch.stack((fx / z, zero, -fx * slope_x / z, zero, fy / z, -fy * slope_y / z), dim=-1).view(-1, 2, 3)
    root = jacobian @ axes.T @ (rotations(F.normalize(chosen.rotations, dim=-1)) * chosen.log_scales.exp()[:, None])
    a, b, c = (root @ root.mT).view(-1, 4)[:, [0, 1, 3]].unbind(-1)
    a, c = a + _DILATION, c + _DILATION
    determinant = a * c - b * b
    shapes = (fx * x / z + cx, fy * y / z + cy, c / determinant, -b / determinant, a / determinant)
    drawn = torch.stack((*shapes, chosen.opacity_logits.sigmoid()), dim=-1)
    colors = (spherical_harmonics(F.normalize(arms, dim=-1), 3)[..., None] * chosen.harmonics).sum(dim=1)
    colors = (colors + 0.5).clamp(min=0)
    pixel, index, offsets = _visible_pairs(drawn.detach(), a.detach(), c.detach(), width, height)
    alpha = _alphas(drawn.index_select(0, index), pixel, width)
    seen = ops.composite_alphas(alpha, colors.index_select(0, index), torch.zeros_like(alpha), offsets)
    return (seen.rgb + (1 - seen.opacity)[:, None] * background).view(height, width, 3)


def _within_view(slopes: Tensor, extent: Tensor, before: Tensor) -> Tensor:
    """Limits slopes to a view of an ``extent``, ``before`` of which is negative, and a margin around it."""
    return slopes.clamp(-before - _MARGIN * extent, extent - before + _MARGIN * extent)


def _alphas(drawn: Tensor, pixel: Tensor, width: int) -> Tensor:
    """Returns the opacities (M,) in pixels (M,) of Gaussians (M, 6): centre, inverse covariance, opacity."""
    u, v, a, b, c, opacity = drawn.unbind(-1)
    dx, dy = pixel % width + 0.5 - u, pixel // width + 0.5 - v
    return (opacity * torch.exp(-0.5 * (a * dx * dx + 2 * b * dx * dy + c * dy * dy))).clamp(max=MAX_ALPHA)


@torch.no_grad()
def _visible_pairs(drawn: Tensor, across: Tensor, down: Tensor, width: int, height: int) -> tuple[Tensor, ...]:
    """Finds which Gaussians (N, 6), in order of depth and as for :func:`_alphas`, contribute to which pixels.

    Their variances along x and y are ``across`` and ``down`` (N,), in square pixels. Returns (M,) pixels and (M,)
    Gaussians, by pixel and then by depth, and offsets (width * height + 1,) of the pixels.
    """
    reach = 2 * (drawn[:, 5] / MIN_ALPHA).clamp(min=1).log()
    spans = []
    for centre, variance, size in ((drawn[:, 0], across, width), (drawn[:, 1], down, height)):
        radius = (reach * variance).sqrt()
        first = (centre - radius - 0.5).clamp(-1, size).ceil().long().clamp(min=0)
        stop = (centre + radius - 0.5).clamp(-1, size - 1).floor().long() + 1
        spans.append((first, (stop - first).clamp(min=0)))
    (left, columns), (top, rows) = spans
    counts = columns * rows
    ends, device = counts.cumsum(0), counts.device
    total = int(counts.sum())
    depths = torch.zeros(width * height, device=device)  # optical
    found = []
    for begin in range(0, max(1, total), _CHUNK):
        pair = torch.arange(begin, min(begin + _CHUNK, total), device=device)
        index = torch.searchsorted(ends, pair, right=True)
        within = pair - (ends - counts)[index]
        pixel = (top[index] + within // columns[index]) * width + left[index] + within % columns[index]
        alpha = _alphas(drawn[index], pixel, width)
        # Pairs come from front to back, so pixels that are opaque by now need no more of them.
        counted = (alpha >= MIN_ALPHA) & (depths[pixel] < -math.log(MIN_TRANSMITTANCE))
        found.append((pixel[counted], index[counted], alpha[counted]))
        depths.index_add_(0, pixel[counted], -torch.log1p(-alpha[counted]))
    pixel, index, alpha = (torch.cat(each) for each in zip(*found, strict=True))
    pixel, order = pixel.sort(stable=True)
    index, alpha = index[order], alpha[order]
    borders = torch.arange(width * height + 1, device=device)
    # Hidden pairs need not be differentiated.
    seen = ops.alpha_weights(alpha, torch.searchsorted(pixel, borders)) > 0
    return pixel[seen], index[seen], torch.searchsorted(pixel[seen], borders)
