"""Rendering whole images of a pyramid of grids and its networks, without derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops import _constants
from voxelfield.ops._checks import check_float32, check_tensor
from voxelfield.ops._internal.images import check_camera, empty_image
from voxelfield.ops._internal.pyramid_field import check_network, check_pyramid_field
from voxelfield.ops._no_derivative import hold_constant
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.marching import OccupancyBits
from voxelfield.ops.render_grid import cells_to_walk, check_numbers
from voxelfield.ops.selection import MIN_WEIGHT

_COLORS = 3


@torch.no_grad()
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
    fit the shared memory of a block, the kernel reads those of the second from global memory, which is slower, and the
    first such call warns.

    Args:
        c2w: (4, 4) float32, camera to world; camera axes x right, y up, looking along -z.
        intrinsics: (4,) float32, fx, fy, cx, cy in pixels.
        width: Width of the image in pixels.
        height: Height of the image in pixels.
        background: (3,) float32 colour behind the scene.
        occupied: As for :func:`render_grid`; empty distances are fastest.
        aabb_occupancy: (2, 3) float32, lower and upper corner.
        levels: As for :func:`march_visible`.
        aabb: (2, 3) float32.
        density_weights: As for :func:`march_visible`, with 16 outputs.
        color_weights: Two to four matrices, from 16 + (view_degree + 1)^2 inputs to 3 outputs, hidden layers of at
            most 128; float32 or float16.
        lens: (14,) float32, a row of :attr:`voxelfield.rendering.lens.Lens.rows`, or None for a pinhole.
        step: Distance between samples, world units.
        density_initial: As for :func:`march_visible`.
        view_degree: Degree of the spherical harmonics, 0 to 3.
        min_transmittance: A ray stops once its transmittance falls below this; 0 never stops it.
        min_weight: Samples whose weight does not exceed this are dropped as if they did not exist.
        boxes: As for :func:`march_visible`.
        blocks: As for :func:`march_visible`.

    Returns:
        rgb (height, width, 3) over the background, opacity (height, width) and depth (height, width), the
        opacity-weighted mean distance in world units along the ray; float32. Does not synchronise with the device. The
        image is the same in every run on a device.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device, or a number is out of range.
        RuntimeError: On CUDA, the device does not allow a block the required shared memory, at least 20 KiB.
    """
    check_camera(c2w, intrinsics, width, height, background, lens)
    check_float32("aabb_occupancy", aabb_occupancy, (2, 3), "c2w", c2w)
    if not isinstance(view_degree, int) or not 0 <= view_degree <= _constants.MAX_DEGREE:
        raise ValueError(f"view_degree must be an int in 0..{_constants.MAX_DEGREE}, got {view_degree!r}")
    cells = cells_to_walk(occupied, "c2w", c2w)
    check_pyramid_field(levels, aabb, density_weights, density_initial, "c2w", c2w, blocks)
    inputs = _constants.MAX_GEOMETRY + (view_degree + 1) ** 2
    check_network("color_weights", color_weights, inputs, _constants.MAX_FIELD_LAYERS, "c2w", c2w)
    for name, weights, outputs in (
        ("density_weights", density_weights, _constants.MAX_GEOMETRY),
        ("color_weights", color_weights, _COLORS),
    ):
        last = weights[-1]
        check_tensor(f"{name}[{len(weights) - 1}]", last, (outputs, last.shape[1]))
    check_numbers(step, 0.0, min_transmittance, min_weight)
    hold_constant("render_pyramid_image", c2w=c2w, intrinsics=intrinsics, background=background)
    if lens is not None:
        hold_constant("render_pyramid_image", lens=lens)
    hold_constant("render_pyramid_image", aabb=aabb, aabb_occupancy=aabb_occupancy)
    for name, several in (("levels", levels), ("density_weights", density_weights), ("color_weights", color_weights)):
        hold_constant("render_pyramid_image", **{f"{name}[{i}]": x for i, x in enumerate(several)})
    _library.ensure_loaded(c2w.device.type)
    image: tuple[Tensor, Tensor, Tensor] = torch.ops.voxelfield.render_pyramid_image(
        c2w,
        intrinsics,
        lens,
        width,
        height,
        background,
        *cells,
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


def pyramid_image_fits(like: Tensor, width: int) -> bool:
    """Tells whether a block on the device of ``like`` has room for networks with hidden layers of ``width``."""
    _library.ensure_loaded(like.device.type)
    fits: bool = torch.ops.voxelfield.pyramid_image_fits(like, width)
    return fits


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::render_pyramid_image")
    def _(
        c2w: Tensor, intrinsics: Tensor, lens: Tensor | None, width: int, height: int, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return empty_image(c2w, width, height)
