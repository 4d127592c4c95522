"""Rays through pixels of photographs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from voxelfield.foundation.checks import check_index
from voxelfield.ops._table import declare


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

    A pixel is divided into equal squares, and the rays are those of :meth:`voxelfield.Cameras.rays` through the centres
    of these squares. Does not synchronise with the device.

    Args:
        images: (N, H, W, 4) uint8, contiguous.
        index: (P,) int64 in [0, N * H * W): pixels, counted through all images row by row. Not checked on CUDA, because
            that would synchronise: an index outside is clamped to that range.
        c2w: (N, 4, 4) float32, camera to world, OpenGL axes.
        intrinsics: (N, 4) float32: fx, fy, cx, cy in pixels.
        aabb: (2, 3) float32, the box that bounds the rays, world units.
        lens: (N, 14) float32, :attr:`voxelfield.rendering.lens.Lens.rows`, or None for pinholes.
        supersampling: Number of squares along each side of a pixel. With 1 the only ray goes through the centre.

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
