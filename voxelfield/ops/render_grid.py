"""Rendering a voxel field of spherical harmonics along rays, in one kernel each way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from voxelfield.foundation.checks import check_degree, check_field
from voxelfield.ops._table import declare
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.marching import OccupancyBits, check_bits, midpoints, pack_occupancy


class RenderedRays(NamedTuple):
    """The result of :func:`render_grid` for each ray.

    Attributes:
        rgb: (R, 3) emitted colour, without any background.
        opacity: (R,) sum of weights.
        depth_sum: (R,) sum of weights times distances; divide by ``opacity`` for the mean distance.
    """

    rgb: Tensor
    opacity: Tensor
    depth_sum: Tensor


def render_grid(
    origins: Tensor,
    directions: Tensor,
    near: Tensor,
    far: Tensor,
    occupied: Tensor | OccupancyBits,
    aabb_occupancy: Tensor,
    grid: Tensor,
    aabb_grid: Tensor,
    *,
    step: float,
    degree: int,
    density_scale: float,
    density_shift: float,
    offset: Tensor | None = None,
    density: Tensor | None = None,
    min_transmittance: float = MIN_TRANSMITTANCE,
    min_weight: float = 0.0,
) -> RenderedRays:
    r"""Marches rays through occupied space, samples a voxel field there and composites, all in one pass.

    The same as :func:`march_rays`, :func:`sample_trilinear`, :class:`voxelfield.fields.decoders.SHDecoder` and
    :func:`composite` one after the other, without anything in between being written to memory: colour is the sigmoid
    of a sum of spherical harmonics of the viewing direction whose coefficients are interpolated, density is
    :math:`s \cdot \log(1 + e^{x + b})` of the interpolated first channel (Fridovich-Keil et al. 2022, Plenoxels,
    section 3.1, with the density of Sun et al. 2022, DirectVoxGO). The backward pass walks the rays a second time and
    finds the sums over the samples behind each by subtracting those ahead from the ray's totals.

    A density or colour that is not finite gives a pixel that is not finite where a ray reaches it, as for
    :func:`composite`.

    Args:
        origins: (R, 3) float32, world units.
        directions: (R, 3) float32, unit length.
        near: (R,) float32, distance at which a ray starts.
        far: (R,) float32, distance at which it ends. ``far <= near`` yields nothing; an infinite one ends where the ray
            leaves the box ``aabb_occupancy``.
        occupied: Which cells of the box ``aabb_occupancy`` are sampled: (X', Y', Z') bool, or the same packed by
            :func:`pack_occupancy`; or (X', Y', Z') uint8, the distance of each cell to the nearest occupied one, as
            :attr:`voxelfield.OccupancyGrid.empty_distance` has it, with which a ray crosses empty space in fewer
            strides. The samples are the same.
        aabb_occupancy: (2, 3) float32, lower and upper corner.
        grid: (X, Y, Z, C) features at the vertices of ``aabb_grid``, vertices on its faces; float32, float16 or
            bfloat16, arithmetic in float32. Channel 0 is raw density; then for red, green and blue the coefficients of
            all :math:`(degree + 1)^2` basis functions. Further channels are padding, finite and otherwise ignored: rows
            of a multiple of 16 bytes are read fastest. Positions outside the box see its nearest face. Differentiable,
            once.
        aabb_grid: (2, 3) float32.
        step: Distance between samples, world units.
        degree: Degree of the spherical harmonics, 0 to 3.
        density_scale: :math:`s`, per world unit of length.
        density_shift: :math:`b`.
        offset: (R,) float32 in [0, 1), shift of each ray's samples in steps; 0.5 (midpoints) if None.
        density: (X, Y, Z) raw densities in the dtype of ``grid``, read in place of channel 0: rendering visits many
            more densities than colours, and these lie closer together. Without gradient.
        min_transmittance: Transmittance below which a ray stops, in [0, 1]; 0 never stops it.
        min_weight: Samples whose weight does not exceed this are dropped as if they did not exist, and their colour is
            not read; in [0, 1].

    Returns:
        The sums of each ray, float32; zeros for a ray without samples. Does not synchronise with the device.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device, or a number is out of range; or ``density`` is given
            while ``grid`` requires a gradient.
        NotImplementedError: A second derivative, forward-mode differentiation or ``torch.vmap`` is requested.
        RuntimeError: On CUDA, a gradient is requested under ``torch.use_deterministic_algorithms(True)``: it is summed
            by atomics, in an order that changes from run to run.
    """
    check_degree("degree", degree)
    if density is not None and isinstance(grid, Tensor) and grid.requires_grad and torch.is_grad_enabled():
        raise ValueError("density must be None where grid requires a gradient: it would receive none")
    cells = cells_to_walk(occupied)
    offset = midpoints(near) if offset is None else offset
    rays = origins, directions, near, far, offset
    numbers = step, degree, density_scale, density_shift, min_transmittance, min_weight
    return RenderedRays(*_render_grid(*rays, *cells, aabb_occupancy, grid, density, aabb_grid, *numbers))


def cells_to_walk(occupied: Tensor | OccupancyBits) -> tuple[Tensor, tuple[int, int, int]]:
    """Returns bits or empty distances, and their resolution."""
    if isinstance(occupied, OccupancyBits):
        check_bits(occupied)
        return occupied
    check_field("occupied", occupied, ("X", "Y", "Z"), (torch.bool, torch.uint8))
    if occupied.dtype == torch.bool:
        return pack_occupancy(occupied)
    x, y, z = occupied.shape
    return occupied, (x, y, z)


def _gradients(grad_rgb: Tensor, density: Tensor | None, backward: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    if density is not None:
        raise NotImplementedError("rendering with a density of its own has no derivative; leave density out")
    if grad_rgb.is_cuda and torch.are_deterministic_algorithms_enabled():
        # As torch's own ops without a deterministic implementation do.
        message = (
            "the gradient of render_grid does not have a deterministic implementation on CUDA, but "
            "torch.use_deterministic_algorithms(True) is set: use march_rays, sample_trilinear and composite instead"
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=1)
    return backward()


_render_grid = declare(
    "render_grid",
    lambda origins: tuple(origins.new_empty(origins.shape[0], *shape) for shape in ((3,), (), ())),
    gradients=_gradients,
    differentiable=("grid",),
)
_render_grid_backward = declare(
    "render_grid_backward",
    lambda grid: grid.new_empty(grid.shape, dtype=torch.float32),
    refusal="render_grid is differentiable once; a second derivative was asked for",
)
