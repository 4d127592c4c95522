"""Rays through pixels of photographs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops._checks import (
    check_at_least_one,
    check_dtype,
    check_float32,
    check_index,
    check_same_device,
    check_tensor,
)
from voxelfield.ops._internal.lens import LENS_NUMBERS
from voxelfield.ops._no_derivative import hold_constant


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
    """Casts the rays of some pixels and reads the pixels' colours, in one pass.

    A pixel is divided into equal squares, and the rays are those of :meth:`voxelfield.Cameras.rays` through the centres
    of these squares. Does not synchronise with the device. Not differentiable.

    Args:
        images: (N, H, W, 4) uint8, contiguous.
        index: (P,) int64 in [0, N * H * W): pixels, counted through all images row by row. Not checked on CUDA, because
            that would synchronise: an index outside is clamped to that range.
        c2w: (N, 4, 4) float32, camera to world, OpenGL axes.
        intrinsics: (N, 4) float32: fx, fy, cx, cy in pixels.
        aabb: (2, 3) float32, the box that bounds the rays, world units.
        lens: (N, 14) float32, :attr:`voxelfield.rendering.lens.Lens.rows`, or None for pinholes.
        supersampling: Number of squares along each side of a pixel, at least 1. With 1 the only ray goes through the
            pixel's centre.

    Returns:
        R = P * supersampling**2 rays, those of a pixel together, row by row; and the pixels' colours. float32.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device, or ``images`` is not contiguous, or has no pixel to
            choose from, or ``supersampling`` is no int of at least 1; or, on the CPU, ``index`` leaves its range.
        NotImplementedError: An argument carries a tangent of forward-mode differentiation.
    """
    check_tensor("images", images, ("N", "H", "W", 4))
    check_dtype("images", images, (torch.uint8,))
    if not images.is_contiguous():
        raise ValueError(f"images must be contiguous, got strides {images.stride()}")
    check_tensor("index", index, ("P",))
    check_dtype("index", index, (torch.int64,))
    check_same_device("index", index, "images", images)
    count = images.shape[0]
    shapes: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "c2w": (c2w, (count, 4, 4)),
        "intrinsics": (intrinsics, (count, 4)),
        "aabb": (aabb, (2, 3)),
    }
    if lens is not None:
        shapes["lens"] = (lens, (count, LENS_NUMBERS))
    for name, (value, shape) in shapes.items():
        check_float32(name, value, shape, "images", images)
    pixels = images.numel() // 4
    if pixels == 0 and index.shape[0] > 0:
        raise ValueError(f"images must have pixels for index to choose from, got shape {tuple(images.shape)}")
    check_index("index", index, pixels, f"for images of shape {tuple(images.shape)}")
    check_at_least_one("supersampling", supersampling)
    c2w, intrinsics, aabb = hold_constant("pixel_rays", c2w=c2w, intrinsics=intrinsics, aabb=aabb)
    if lens is not None:
        (lens,) = hold_constant("pixel_rays", lens=lens)
    _library.ensure_loaded(images.device.type)
    return PixelBatch(*torch.ops.voxelfield.pixel_rays(images, index, c2w, intrinsics, lens, aabb, supersampling))


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::pixel_rays")
    def _(
        images: Tensor,
        index: Tensor,
        c2w: Tensor,
        intrinsics: Tensor,
        lens: Tensor | None,
        aabb: Tensor,
        supersampling: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        pixels = index.shape[0]
        rays = pixels * supersampling**2
        shapes = ((rays, 3), (rays, 3), (rays,), (rays,), (pixels, 4))
        origins, directions, near, far, rgba = (c2w.new_empty(shape) for shape in shapes)
        return origins, directions, near, far, rgba
