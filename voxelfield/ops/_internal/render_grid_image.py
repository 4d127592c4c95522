"""Rendering whole images of a voxel field of spherical harmonics, without derivatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.ops._internal.render_pyramid_image import empty_image
from voxelfield.ops._table import declare
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.marching import OccupancyBits
from voxelfield.ops.render_grid import cells_to_walk
from voxelfield.ops.selection import MIN_WEIGHT

_ROW_BYTES = 16  # the widest read of one thread


@dataclass(frozen=True, eq=False)
class PackedSHGrid:
    """A grid of densities and spherical harmonics, in the layout that is rendered fastest.

    Attributes:
        features: (X, Y, Z, P): the channels of :func:`render_grid`, padded so that the features of a vertex are a whole
            number of 16-byte reads.
        density: (X, Y, Z): a copy of the first channel. Most samples lie in empty or hidden space and need only their
            density; a separate array of densities stays in the cache.
        aabb: (2, 3) float32, the box of the vertices.
        degree: Degree of the spherical harmonics.
    """

    features: Tensor
    density: Tensor
    aabb: Tensor
    degree: int

    @staticmethod
    @torch.no_grad()
    def pack(grid: Tensor, aabb: Tensor, degree: int, dtype: torch.dtype = torch.float16) -> PackedSHGrid:
        """Copies a field into the layout that :func:`render_grid_image` reads.

        Args:
            grid: (X, Y, Z, C) floating point, as for :func:`render_grid`.
            aabb: (2, 3) float32 on the device of ``grid``.
            degree: Degree of the spherical harmonics, 0 to 3.
            dtype: Type of the stored numbers; float16 halves the memory traffic of float32.

        Returns:
            The packed field, on the device of ``grid``.
        """
        channels = 1 + 3 * (degree + 1) ** 2
        together = _ROW_BYTES // dtype.itemsize
        features = F.pad(grid.detach()[..., :channels].to(dtype), (0, -channels % together)).contiguous()
        return PackedSHGrid(features, features[..., 0].contiguous(), aabb.to(torch.float32), degree)


def render_grid_image(
    c2w: Tensor,
    intrinsics: Tensor,
    width: int,
    height: int,
    background: Tensor,
    occupied: Tensor | OccupancyBits,
    aabb_occupancy: Tensor,
    field: PackedSHGrid,
    *,
    lens: Tensor | None = None,
    step: float,
    density_scale: float,
    density_shift: float,
    min_transmittance: float = MIN_TRANSMITTANCE,
    min_weight: float = MIN_WEIGHT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Renders the image of a camera in one kernel, rays included, without gradient.

    Each pixel is the result of :func:`render_grid` for its ray of :meth:`voxelfield.Cameras.image_rays` through the box
    of ``field``. Neighbouring threads render neighbouring pixels.

    Args:
        c2w: (4, 4) float32, camera to world; camera axes x right, y up, looking along -z.
        intrinsics: (4,) float32, fx, fy, cx, cy in pixels.
        width: Width of the image in pixels.
        height: Height of the image in pixels.
        background: (3,) float32 colour behind the scene.
        occupied: As for :func:`render_grid`; empty distances are fastest.
        aabb_occupancy: (2, 3) float32, lower and upper corner.
        field: The field, see :meth:`PackedSHGrid.pack`. All tensors are on one device.
        lens: (14,) float32, a row of :attr:`voxelfield.rendering.lens.Lens.rows`, or None for a pinhole.
        step: Distance between samples, world units.
        density_scale: As for :func:`render_grid`.
        density_shift: As for :func:`render_grid`.
        min_transmittance: As for :func:`render_grid`.
        min_weight: As for :func:`render_grid`.

    Returns:
        rgb (height, width, 3) over the background, opacity (height, width) and depth (height, width), the
        opacity-weighted mean distance in world units along the ray, 0 where opacity is 0; float32. Does not
        synchronise with the device.
    """
    features, density, box = field.features, field.density, field.aabb
    image: tuple[Tensor, Tensor, Tensor] = _render_grid_image(
        c2w,
        intrinsics,
        lens,
        width,
        height,
        background,
        *cells_to_walk(occupied, "c2w", c2w),
        aabb_occupancy,
        features,
        density,
        box,
        step,
        field.degree,
        density_scale,
        density_shift,
        min_transmittance,
        min_weight,
    )
    return image


_render_grid_image = declare("render_grid_image", empty_image)
