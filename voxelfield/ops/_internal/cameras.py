"""Image points, pixels and their rays, through lenses with distortion (extension/cameras/lens.h) and panoramas."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from voxelfield.foundation.checks import check_index
from voxelfield.ops._table import declare

LENS_NUMBERS = 14
"""Length of the row of numbers by which ops know a lens (:attr:`voxelfield.rendering.lens.Lens.rows`)."""

# Square of the sine of the angle to a pole up to which a ray counts as vertical.
_VERTICAL = 1e-10
# The root of 0 has no derivative.
_TINY = 1e-20


def lens_rays(points: Tensor, lens: Tensor) -> Tensor:
    """Computes the rays through points of an image, without derivatives.

    Rays are exact up to rounding: Newton's iteration solves models without a closed formula. A point beyond
    the largest radius that the lens can image gets a ray near the outermost one. Does not synchronise with the device.

    Args:
        points: (N, 2) float32, in focal lengths from the principal point, x to the right and y down.
        lens: (N, 14) float32, a row of :attr:`voxelfield.rendering.lens.Lens.rows` for each point, or (1, 14) for all.

    Returns:
        (N, 3) float32: right, down and forward, of any length.
    """
    return _lens_rays(points, lens)


def lens_points(rays: Tensor, lens: Tensor) -> Tensor:
    """Projects rays to image points: the inverse of :func:`lens_rays`, for rays that the lens can image.

    The result is meaningless for rays that lie behind a camera that is no fisheye, or so far off the axis that the
    distortion folds back. Such rays can be detected by applying :func:`lens_rays` to the result, which then gives a
    different ray.
    """
    return _lens_points(rays, lens)


def sphere_rays(points: Tensor) -> Tensor:
    """Returns the rays (..., 3), right, down and forward, of unit length, at points of a panorama.

    Args:
        points: (..., 2) floating point, radians to the right and down. Beyond a pole, points show the pole.
    """
    right, down = points[..., 0], points[..., 1].clamp(-math.pi / 2, math.pi / 2)
    flat = down.cos()
    return torch.stack((flat * right.sin(), down.sin(), flat * right.cos()), dim=-1)


def sphere_points(rays: Tensor) -> Tensor:
    """Returns where a panorama shows rays (..., 3) of any length: the inverse of :func:`sphere_rays`.

    Returns:
        (..., 2) radians to the right, from -pi to pi, and down. Differentiable, also where a ray is vertical and any
        angle to the right is right.
    """
    right, down, forward = rays.unbind(dim=-1)
    square = right.square() + forward.square()
    vertical = square <= _VERTICAL * (square + down.square())
    right, forward = right.masked_fill(vertical, 0.0), forward.masked_fill(vertical, 1.0)
    return torch.stack((torch.atan2(right, forward), torch.atan2(down, square.clamp(min=_TINY).sqrt())), dim=-1)


_lens_rays = declare("lens_rays", lambda points: points.new_empty(points.shape[0], 3))
_lens_points = declare("lens_points", lambda rays: rays.new_empty(rays.shape[0], 2))


class PixelBatch(NamedTuple):
    """The result of :func:`pixel_rays`: R rays of P pixels.

    Attributes:
        origins: (R, 3) world units.
        directions: (R, 3) unit length, world frame.
        near: (R,) where the ray enters the box, 0 if it starts inside or misses.
        far: (R,) where it leaves the box, 0 if it misses.
        rgba: (P, 4) the pixels, in [0, 1].
    """

    origins: Tensor
    directions: Tensor
    near: Tensor
    far: Tensor
    rgba: Tensor


def pixel_rays(
    images: Tensor,
    index: Tensor,
    c2w: Tensor,
    intrinsics: Tensor,
    aabb: Tensor,
    *,
    lens: Tensor | None = None,
    supersampling: int = 1,
) -> PixelBatch:
    """Casts the rays of some pixels and reads the pixels' colours, in one pass, without derivatives.

    The rays are those of :meth:`voxelfield.Cameras.rays` through
    :func:`voxelfield.rendering.cameras.points_in_pixels`. Does not synchronise with the device.

    Args:
        images: (N, H, W, 4) uint8, contiguous.
        index: (P,) int64 in [0, N * H * W): pixels, counted through all images row by row. Not checked on CUDA, because
            that would synchronise: an index outside is clamped to that range.
        c2w: (N, 4, 4) float32, camera to world, OpenGL axes.
        intrinsics: (N, 4) float32: fx, fy, cx, cy in pixels.
        aabb: (2, 3) float32, the box that bounds the rays, world units.
        lens: (N, 14) float32, :attr:`voxelfield.rendering.lens.Lens.rows`, or None for pinholes.
        supersampling: Number of rays along each side of a pixel. With 1 the only ray goes through the centre.

    Returns:
        R = P * supersampling**2 rays, pixel by pixel and row by row in each; and the pixels' colours. float32.
    """
    if images.numel() > 0:
        check_index("index", index, images.numel() // 4, f"for images of shape {tuple(images.shape)}")
    return PixelBatch(*_pixel_rays(images, index, c2w, intrinsics, lens, aabb, supersampling))


def _results(index: Tensor, c2w: Tensor, supersampling: int) -> tuple[Tensor, ...]:
    pixels = index.shape[0]
    rays = pixels * supersampling**2
    return tuple(c2w.new_empty(shape) for shape in ((rays, 3), (rays, 3), (rays,), (rays,), (pixels, 4)))


_pixel_rays = declare("pixel_rays", _results)
