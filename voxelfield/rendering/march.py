"""Samples along rays: placed in occupied space, and those kept that show."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.fields.field import Field, density_at_samples
from voxelfield.fields.pyramid_density import PyramidDensity
from voxelfield.grids.nested_boxes import NestedBoxes
from voxelfield.ops._internal.march_pieces import march_through
from voxelfield.ops._internal.march_visible import march_visible
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.selection import MIN_WEIGHT
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays

# Unused rows of a fixed capacity lie at so many places, so many neighbouring rows at each. At a single place, the
# gradients of zero that they send back to a grid would wait for one another on a GPU; a place for each row would be
# read from memory for each row.
_UNUSED_PLACES = 4096
_ROWS_AT_A_PLACE = 32
# The positive root of x^4 = x + 1, whose inverse powers spread points evenly in three dimensions (Roberts 2018, "The
# unreasonable effectiveness of quasirandom sequences").
_EVEN_SPREAD = 1.22074408460575947

# Fog, which fills space in the first steps of training, shows about half as many samples of a ray; surfaces show a few.
MAX_VISIBLE_PER_RAY = 256


@dataclass(frozen=True)
class RenderSettings:
    """How finely rays are sampled, and what is too faint to matter.

    Attributes:
        step: Distance between samples, world units, or those of the frame of the field's nested boxes.
        min_transmittance: A ray stops where less light than this gets through.
        min_weight: Samples whose share of their pixel is below this are dropped before colour is evaluated.
    """

    step: float
    min_transmittance: float = MIN_TRANSMITTANCE
    min_weight: float = MIN_WEIGHT


@dataclass(frozen=True)
class Capacity:
    """How many samples there is room for, where the number of samples must not be waited for.

    Rays are taken in order for as long as all their samples fit; the others count for nothing.

    Attributes:
        candidates: Samples in occupied space.
        visible: Samples that show.
    """

    candidates: int
    visible: int


def march(
    rays: Rays,
    occupancy: OccupancyGrid,
    step: float,
    jitter: bool = False,
    capacity: int | None = None,
    boxes: NestedBoxes | None = None,
) -> ops.PackedSamples:
    """Places samples along rays wherever space is occupied.

    Args:
        rays: R rays.
        occupancy: What is occupied, on the rays' device.
        step: Distance between samples, in their frame.
        jitter: Shift each ray's samples by a random part of a step, from torch's global generator.
        capacity: As for :func:`voxelfield.ops.march_rays`.
        boxes: Those of the field, if it has any: occupancy, step and samples are then in their frame.

    Returns:
        The samples, packed; none at all is valid.
    """
    offset = torch.rand_like(rays.near) if jitter else None
    return march_through(
        [] if boxes is None else boxes.numbers,
        rays.origins,
        rays.directions,
        rays.near,
        rays.far,
        occupancy.bits,
        occupancy.aabb,
        step,
        offset,
        capacity=capacity,
    )


@torch.no_grad()
def select(
    field: Field, samples: ops.PackedSamples, settings: RenderSettings, capacity: int | None = None
) -> ops.PackedSamples:
    """Returns the samples that show, still packed by ray.

    Args:
        field: Tells their densities.
        samples: M samples of R rays.
        settings: What is too faint to matter.
        capacity: As for :func:`voxelfield.ops.select_samples`.
    """
    return ops.select_samples(
        density_at_samples(field)(samples.positions),
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
    """Places samples along rays and returns those that show, packed by ray, and how many were placed.

    A field whose density :meth:`RadianceField.pyramid_density` can tell is marched through by one kernel, which
    leaves a ray where it is dark; what lies behind is never placed, nor counted. Others are marched, evaluated and
    judged one after the other, with the same samples for a result, except that the kernel keeps the first
    ``MAX_VISIBLE_PER_RAY`` of a ray that shows more.

    Args:
        field: Tells their densities.
        rays: R rays.
        occupancy: Where to sample.
        settings: How to sample; with a ``min_weight`` of 0 and no ``capacity`` all samples are kept.
        jitter: As for :func:`march`.
        capacity: Room for samples.

    Returns:
        The samples, in the frame of the field's nested boxes if it has any, and their number before faint ones were
        dropped, () int64, or None if that is not known.
    """
    boxes: NestedBoxes | None = getattr(field, "boxes", None)
    if settings.min_weight <= 0 and capacity is None:
        packed = march(rays, occupancy, settings.step, jitter, boxes=boxes)
        return packed, packed.ray_offsets[-1]
    density = _pyramid_density(field)
    if density is not None:
        packed = march_visible(
            rays.origins,
            rays.directions,
            rays.near,
            rays.far,
            occupancy.empty_distance if rays.origins.is_cuda else occupancy.bits,
            occupancy.aabb,
            density.levels,
            density.aabb,
            density.weights,
            step=settings.step,
            density_initial=density.initial,
            offset=torch.rand_like(rays.near) if jitter else None,
            min_transmittance=settings.min_transmittance,
            min_weight=settings.min_weight,
            max_samples_per_ray=MAX_VISIBLE_PER_RAY,
            capacity=None if capacity is None else capacity.visible,
            boxes=[] if boxes is None else boxes.numbers,
            blocks=density.blocks,
        )
        return packed, None
    if capacity is None:
        candidates = march(rays, occupancy, settings.step, jitter, boxes=boxes)
        return select(field, candidates, settings), candidates.ray_offsets[-1]
    skips_nan = getattr(field, "skips_nan", False)
    candidates = march(rays, occupancy, settings.step, jitter, capacity.candidates, boxes)
    if not skips_nan:
        candidates = _without_nan(candidates, occupancy.aabb)
    packed = select(field, candidates, settings, capacity.visible)
    if not skips_nan:
        packed = _without_nan(packed, occupancy.aabb)
    rays_kept = torch.minimum(candidates.rays_kept, packed.rays_kept)
    return packed._replace(rays_kept=rays_kept), candidates.ray_offsets[-1]


def _pyramid_density(field: Field) -> PyramidDensity | None:
    """Returns the density in the form that one kernel marches through, if the field has such a form."""
    in_that_form = getattr(field, "pyramid_density", None)
    found: PyramidDensity | None = None if in_that_form is None else in_that_form()
    return found


def _without_nan(samples: ops.PackedSamples, aabb: Tensor) -> ops.PackedSamples:
    """Spreads unused rows over the box (2, 3), without waiting for the device."""
    positions = samples.positions
    rows = positions.shape[0]
    groups = -(-rows // _ROWS_AT_A_PLACE)
    place = torch.arange(min(groups, _UNUSED_PLACES), dtype=positions.dtype, device=positions.device)
    axis = torch.arange(1, 4, dtype=positions.dtype, device=positions.device)
    fractions = torch.frac((place[:, None] + 0.5) * _EVEN_SPREAD**-axis)
    inside = torch.lerp(aabb[0], aabb[1], fractions).repeat(-(-groups // _UNUSED_PLACES), 1)[:groups]
    spread = inside[:, None].expand(-1, _ROWS_AT_A_PLACE, -1).reshape(-1, 3)[:rows]
    return samples._replace(positions=torch.where(positions.isnan(), spread, positions))
