"""Rendering whole images of a field that is stored at the vertices of a sparse lattice, without derivatives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from voxelfield.ops._table import declare
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.marching import OccupancyBits
from voxelfield.ops.render_grid import cells_to_walk
from voxelfield.ops.selection import MIN_WEIGHT


def render_baked_image(
    c2w: Tensor,
    intrinsics: Tensor,
    width: int,
    height: int,
    occupied: Tensor | OccupancyBits,
    aabb_occupancy: Tensor,
    log_density: Tensor,
    values: Tensor,
    blocks: Tensor,
    aabb: Tensor,
    *,
    lens: Tensor | None = None,
    clip: Tensor | None = None,
    step: float,
    min_transmittance: float = MIN_TRANSMITTANCE,
    min_weight: float = MIN_WEIGHT,
    boxes: Sequence[float] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Sums the values of a baked field along the ray of every pixel of a camera, in one kernel; without gradient.

    A sample's density is exp of the interpolated ``log_density``, and its values are interpolated too. They are summed
    with the rendering weights (Max 1995). Camera, occupied cells and thresholds are as for
    :func:`render_pyramid_image`.

    Args:
        c2w: (4, 4) float32, camera to world.
        intrinsics: (4,) float32.
        width: Of the image, in pixels.
        height: Of the image, in pixels.
        occupied: (X, Y, Z) distances of empty cells to occupied ones, or packed bits.
        aabb_occupancy: (2, 3) float32, their box, in warped coordinates.
        log_density: (8 A, 8 B, 8 C) float16, the logarithms of densities, per unit in warped coordinates: an atlas of
            blocks as in :class:`voxelfield.grids.sparse_grid.SparseGrid`.
        values: (8 A, 8 B, 8 C, V) uint8, V = 8 or 16, in the same places: 255 stands for 1.
        blocks: (X', Y', Z') int32, the table of these blocks.
        aabb: (2, 3) float32, the box of the lattice, in warped coordinates.
        lens: The camera's lens, or None.
        clip: (2, 3) float32, a box to which rays are clipped; None with ``boxes``.
        step: Distance between samples, in warped coordinates.
        min_transmittance: A ray stops once its transmittance falls below this.
        min_weight: Samples with a smaller weight are ignored.
        boxes: The nested boxes that cut rays into pieces, as for :func:`march_visible`; none if rays are straight.

    Returns:
        Sums (height, width, V), opacity (height, width), depth (height, width), the opacity-weighted mean distance in
        world units, and the unit directions (height, width, 3) of the rays; float32. Does not synchronise with the
        device.
    """
    image: tuple[Tensor, Tensor, Tensor, Tensor] = _render_baked_image(
        c2w,
        intrinsics,
        lens,
        width,
        height,
        *cells_to_walk(occupied, "c2w", c2w),
        aabb_occupancy,
        log_density,
        values,
        blocks,
        aabb,
        clip,
        step,
        min_transmittance,
        min_weight,
        list(boxes),
    )
    return image


def _results(c2w: Tensor, width: int, height: int, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = c2w.new_empty(height, width, values.shape[-1])
    return sums, c2w.new_empty(height, width), c2w.new_empty(height, width), c2w.new_empty(height, width, 3)


_render_baked_image = declare("render_baked_image", _results)
