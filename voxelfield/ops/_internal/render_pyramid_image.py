"""Rendering whole images of a pyramid of grids and its networks, without derivatives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from voxelfield.ops._table import declare
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.marching import OccupancyBits
from voxelfield.ops.render_grid import cells_to_walk
from voxelfield.ops.selection import MIN_WEIGHT


def render_pyramid_image(
    c2w: Tensor,
    intrinsics: Tensor,
    width: int,
    height: int,
    background: Tensor,
    occupied: Tensor | OccupancyBits,
    aabb_occupancy: Tensor,
    levels: Sequence[Tensor],
    aabb: Tensor,
    density_weights: Sequence[Tensor],
    color_weights: Sequence[Tensor],
    *,
    lens: Tensor | None = None,
    step: float,
    density_initial: float,
    view_degree: int,
    min_transmittance: float = MIN_TRANSMITTANCE,
    min_weight: float = MIN_WEIGHT,
    boxes: Sequence[float] = (),
    blocks: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Renders the image of a camera without gradient; on CUDA one kernel does everything, including the rays.

    The field is that of :class:`voxelfield.VoxelPyramid` and :class:`voxelfield.fields.decoders.FusedMLPDecoder`:
    features of all levels side by side, a first network from these to density and geometry, a second one from geometry
    and the spherical harmonics of the viewing direction to colour (Mueller et al. 2022, Instant-NGP, section 5.4). The
    rays are those of :meth:`voxelfield.rendering.cameras.Cameras.image_rays` through ``aabb``, or through the largest
    of ``boxes``.

    On CUDA every thread of a warp marches a ray, and the warp evaluates the first network for the current samples of
    its 32 rays at once. A ray ends once its transmittance falls below ``min_transmittance``. The second network is
    evaluated only for samples whose weight exceeds ``min_weight``, 32 at a time. If the weights of both networks do not
    fit the shared memory of a block, the kernel reads the second network from global memory, which is slower, and the
    first such call warns.

    Camera and image are as for :func:`render_grid_image`, and the field is as for :func:`march_visible`, with 16
    outputs of ``density_weights``. ``color_weights`` are two to four float32 or float16 matrices, from
    16 + (view_degree + 1)^2 inputs to 3 outputs, with hidden layers of at most 128; ``view_degree`` is 0 to 3.

    Returns:
        rgb (height, width, 3) over the background, opacity (height, width) and depth (height, width), the
        opacity-weighted mean distance in world units along the ray; float32. Does not synchronise with the device. The
        image is the same in every run on a device.
    """
    image: tuple[Tensor, Tensor, Tensor] = _render_pyramid_image(
        c2w,
        intrinsics,
        lens,
        width,
        height,
        background,
        *cells_to_walk(occupied, "c2w", c2w),
        aabb_occupancy,
        list(levels),
        list(blocks),
        aabb,
        list(density_weights),
        list(color_weights),
        step,
        density_initial,
        view_degree,
        min_transmittance,
        min_weight,
        list(boxes),
    )
    return image


def empty_image(c2w: Tensor, width: int, height: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns colours, opacities and depths for a compiler: shapes and dtypes without values."""
    return c2w.new_empty(height, width, 3), c2w.new_empty(height, width), c2w.new_empty(height, width)


def pyramid_image_fits(like: Tensor, width: int) -> bool:
    """Tells whether a block on the device of ``like`` has room for networks with hidden layers of ``width``."""
    fits: bool = _pyramid_image_fits(like, width)
    return fits


_render_pyramid_image = declare("render_pyramid_image", empty_image)
_pyramid_image_fits = declare("pyramid_image_fits")
