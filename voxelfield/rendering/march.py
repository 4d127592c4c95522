"""Samples along rays: placement in occupied space, and selection of the visible ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.fields.field import Field, density_at_samples, warp_of
from voxelfield.foundation.checks import check_not_negative, check_step
from voxelfield.ops._internal.march_pieces import march_through
from voxelfield.ops._internal.march_visible import march_visible
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.selection import MIN_WEIGHT
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays
from voxelfield.warps.warp import Warp, nested_box_args

# Number of consecutive unused rows of a fixed capacity that share a random position. At a single position, the atomic
# additions of their zero gradients to a grid would be serialised on a GPU; at as many positions as rows, each row would
# cause its own memory accesses.
_ROWS_PER_POSITION = 32

# In the first steps of training, fog fills space and about half this many samples of a ray are visible; later, a few.
MAX_VISIBLE_PER_RAY = 256


@dataclass(frozen=True)
class RenderSettings:
    """Sampling settings: the distance between samples, and the thresholds below which they are ignored.

    Attributes:
        step: Distance between samples, in world units, or in units in warped coordinates.
        min_transmittance: A ray stops once its transmittance falls below this.
        min_weight: Samples with a smaller compositing weight are dropped before colour is evaluated.
    """

    step: float
    min_transmittance: float = MIN_TRANSMITTANCE
    min_weight: float = MIN_WEIGHT

    def __post_init__(self) -> None:
        """Checks the numbers, which kernels take as they are."""
        check_step(self.step)
        check_not_negative("min_transmittance", self.min_transmittance)
        check_not_negative("min_weight", self.min_weight)


@dataclass(frozen=True)
class Capacity:
    """Fixed buffer sizes for samples, for callers that must not synchronise to learn the number of samples.

    Rays are processed in order as long as all their samples fit; the remaining rays are ignored.

    Attributes:
        candidates: Number of samples in occupied space.
        visible: Number of visible samples.
    """

    candidates: int
    visible: int


Sampler = Callable[
    [Field, Rays, OccupancyGrid, RenderSettings, bool, Capacity | None], tuple[ops.PackedSamples, Tensor | None]
]
"""Places samples on rays: :func:`visible_samples`, or a user's function with the same arguments and results.

A sampler that ignores ``capacity`` synchronises with the device, which a training step on CUDA must not do. Gradients
are enabled in training: evaluate the field under ``torch.no_grad()`` unless the gradient of its densities here is
wanted.
"""


def march(
    rays: Rays,
    occupancy: OccupancyGrid,
    step: float,
    jitter: bool = False,
    capacity: int | None = None,
    warp: Warp | None = None,
) -> ops.PackedSamples:
    """Places samples along rays in occupied space.

    Args:
        rays: R rays.
        occupancy: The occupied cells, on the rays' device.
        step: Distance between samples, in warped coordinates.
        jitter: Shift each ray's samples by a random fraction of a step, drawn from torch's global generator.
        capacity: As for :func:`voxelfield.ops.march_rays`.
        warp: The field's warp, in which occupancy, step and samples are then; None for the world frame.

    Returns:
        The packed samples; there may be none.
    """
    offset = rays.random() if jitter else None
    return march_through(
        nested_box_args(warp), *_mapped(rays, warp), occupancy.bits, occupancy.aabb, step, offset, capacity=capacity
    )


@torch.no_grad()
def select(
    field: Field, samples: ops.PackedSamples, settings: RenderSettings, capacity: int | None = None, *, rays: Rays
) -> ops.PackedSamples:
    """Returns the visible samples, still packed by ray.

    Args:
        field: The field that provides the densities.
        samples: M samples of R rays.
        settings: Visibility thresholds.
        capacity: As for :func:`voxelfield.ops.select_samples`.
        rays: The rays, with the values on which the field's density depends.

    Raises:
        ValueError: The rays lack such a value.
    """
    density = density_at_samples(field)
    given = rays.select_values(field.density_inputs, field.optional_inputs)
    values = {name: value.index_select(0, samples.ray_index) for name, value in given.items()}
    return ops.select_samples(
        density(samples.positions, **values),
        samples.positions,
        samples.t,
        samples.dt,
        samples.ray_offsets,
        min_transmittance=settings.min_transmittance,
        min_weight=settings.min_weight,
        capacity=capacity,
    )


def visible_samples(
    field: Field,
    rays: Rays,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    jitter: bool = False,
    capacity: Capacity | None = None,
) -> tuple[ops.PackedSamples, Tensor | None]:
    """Places samples along rays and returns the visible ones, packed by ray, and the number of samples placed.

    A field with a :meth:`RadianceField.pyramid_density` is marched by a single kernel, which stops a ray once its
    transmittance is too low; samples behind that point are neither placed nor counted. For other fields, marching,
    evaluation and selection are separate steps. Both give the same samples, except that the kernel returns at most
    the first ``MAX_VISIBLE_PER_RAY`` visible samples of a ray.

    Args:
        field: The field that provides the densities.
        rays: R rays.
        occupancy: The occupied cells.
        settings: Sampling settings; with ``min_weight`` 0 and no ``capacity``, all samples are returned.
        jitter: As for :func:`march`.
        capacity: Fixed numbers of samples, or None for as many as needed.

    Returns:
        The samples, in warped coordinates, and their number before invisible ones were dropped, () int64, or None if it
        is not known.
    """
    warp = warp_of(field)
    if settings.min_weight <= 0 and capacity is None:
        packed = march(rays, occupancy, settings.step, jitter, warp=warp)
        return packed, packed.ray_offsets[-1]
    if (density := field.pyramid_density()) is not None:
        packed = march_visible(
            *_mapped(rays, warp),
            occupancy.empty_distance if rays.origins.is_cuda else occupancy.bits,
            occupancy.aabb,
            density.levels,
            density.aabb,
            density.weights,
            step=settings.step,
            density_initial=density.initial,
            offset=rays.random() if jitter else None,
            min_transmittance=settings.min_transmittance,
            min_weight=settings.min_weight,
            max_samples_per_ray=MAX_VISIBLE_PER_RAY,
            capacity=None if capacity is None else capacity.visible,
            boxes=nested_box_args(warp),
            blocks=density.blocks,
        )
        return packed, None
    if capacity is None:
        candidates = march(rays, occupancy, settings.step, jitter, warp=warp)
        return select(field, candidates, settings, rays=rays), candidates.ray_offsets[-1]
    candidates = march(rays, occupancy, settings.step, jitter, capacity.candidates, warp)
    if not field.skips_nan:
        candidates = _without_nan(candidates, occupancy.aabb)
    packed = select(field, candidates, settings, capacity.visible, rays=rays)
    if not field.skips_nan:
        packed = _without_nan(packed, occupancy.aabb)
    rays_kept = torch.minimum(candidates.rays_kept, packed.rays_kept)
    return packed._replace(rays_kept=rays_kept), candidates.ray_offsets[-1]


@torch.no_grad()
def _mapped(rays: Rays, warp: Warp | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns origins, directions, near and far of rays as the ops that march them expect them."""
    whole = (rays.origins, rays.directions, rays.near, rays.far)
    return whole if warp is None else warp.map_rays(*whole)


def _without_nan(samples: ops.PackedSamples, aabb: Tensor) -> ops.PackedSamples:
    """Spreads the unused rows over the box (2, 3), without synchronising with the device."""
    positions = samples.positions
    rows = positions.shape[0]
    random = torch.rand(-(-rows // _ROWS_PER_POSITION), 3, dtype=positions.dtype, device=positions.device)
    inside = torch.lerp(aabb[0], aabb[1], random)
    spread = inside[:, None].expand(-1, _ROWS_PER_POSITION, -1).reshape(-1, 3)[:rows]
    return samples._replace(positions=torch.where(positions.isnan(), spread, positions))
