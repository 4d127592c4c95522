"""From rays and a field to colour, opacity and depth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.cameras import Cameras
from voxelfield.fields import RadianceField
from voxelfield.occupancy import OccupancyGrid
from voxelfield.ops._internal.march_visible import march_visible
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.selection import MIN_WEIGHT
from voxelfield.rays import Rays, RaySamples

# Fog, which fills space in the first steps of training, shows about half as many samples of a ray; surfaces show a few.
MAX_VISIBLE_PER_RAY = 256


@dataclass(frozen=True)
class RenderSettings:
    """How finely rays are sampled, and what is too faint to matter.

    Attributes:
        step: Distance between samples, world units.
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
        marched: Samples in occupied space.
        visible: Samples that show.
    """

    marched: int
    visible: int


@dataclass(frozen=True, eq=False)
class Rendering:
    """Rendered rays.

    Attributes:
        rgb: (R, 3) emitted colour, without background.
        opacity: (R,) in [0, 1].
        depth_sum: (R,) sum of weights times distances along the ray, world units; divide by opacity for the mean.
        samples: The M samples whose colour was evaluated.
        density: (M,) their densities, per world unit.
        weights: (M,) their share of their pixel.
        sample_rgb: (M, 3) their colours.
        marched: () int64, number of samples placed in occupied space, before faint ones were dropped; None where
            they were not counted (see :func:`visible_samples`).
        rays_kept: () int64: rays from this one on had no room, if the capacity was limited, and show nothing.
        distortion: (R,) how far the weights of each ray are spread, as :func:`voxelfield.ops.composite` has it; None
            unless wanted.
    """

    rgb: Tensor
    opacity: Tensor
    depth_sum: Tensor
    samples: RaySamples
    density: Tensor
    weights: Tensor
    sample_rgb: Tensor
    marched: Tensor | None
    rays_kept: Tensor
    distortion: Tensor | None = None

    def over(self, background: Tensor) -> Tensor:
        """Composites over a background (3,) or (R, 3), giving (R, 3)."""
        return self.rgb + (1 - self.opacity)[:, None] * background


@dataclass(frozen=True, eq=False)
class View:
    """One rendered image.

    Attributes:
        rgb: (H, W, 3) float32, composited over the background, nominally in [0, 1].
        opacity: (H, W) float32 in [0, 1].
        depth: (H, W) float32, mean distance along the ray where there is matter, world units.
    """

    rgb: Tensor
    opacity: Tensor
    depth: Tensor


def march(
    rays: Rays, occupancy: OccupancyGrid, step: float, jitter: bool = False, capacity: int | None = None
) -> ops.PackedSamples:
    """Places samples along rays wherever space is occupied.

    Args:
        rays: R rays.
        occupancy: What is occupied, on the rays' device.
        step: Distance between samples, world units.
        jitter: Shift each ray's samples by a random part of a step, from torch's global generator.
        capacity: As for :func:`voxelfield.ops.march_rays`.

    Returns:
        The samples, packed; none at all is valid.
    """
    offset = torch.rand_like(rays.near) if jitter else None
    return ops.march_rays(
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
    field: RadianceField, samples: ops.PackedSamples, settings: RenderSettings, capacity: int | None = None
) -> ops.PackedSamples:
    """Returns the samples that show, still packed by ray.

    Args:
        field: Tells their densities.
        samples: M samples of R rays.
        settings: What is too faint to matter.
        capacity: As for :func:`voxelfield.ops.select_samples`.
    """
    return ops.select_samples(
        field.density(samples.positions),
        samples.positions,
        samples.t,
        samples.dt,
        samples.ray_offsets,
        min_transmittance=settings.min_transmittance,
        min_weight=settings.min_weight,
        capacity=capacity,
    )


def visible_samples(
    field: RadianceField,
    rays: Rays,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    jitter: bool = False,
    capacity: Capacity | None = None,
) -> tuple[ops.PackedSamples, Tensor | None]:
    """Places samples along rays and returns those that show, packed by ray, and how many were placed.

    A field that :meth:`RadianceField.pyramid_density` can tell the density of is marched through by one kernel, which
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
        The samples, and their number before faint ones were dropped, () int64, or None if that is not known.
    """
    if settings.min_weight <= 0 and capacity is None:
        packed = march(rays, occupancy, settings.step, jitter)
        return packed, packed.ray_offsets[-1]
    room = None if capacity is None else capacity.visible
    density = field.pyramid_density()
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
            capacity=room,
        )
        return packed, None
    marched = march(rays, occupancy, settings.step, jitter, None if capacity is None else capacity.marched)
    packed = select(field, marched, settings, room)
    if capacity is not None:
        rays_kept = torch.minimum(marched.rays_kept, packed.rays_kept)
        packed = packed._replace(rays_kept=rays_kept)
    return packed, marched.ray_offsets[-1]


def render(
    field: RadianceField,
    rays: Rays,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    jitter: bool = False,
    capacity: Capacity | None = None,
    distortion: bool = False,
) -> Rendering:
    """Renders rays through a field: march, drop what cannot be seen, evaluate, composite.

    Visibility is judged first and without gradient, so that colour, and the backward pass, are spent on samples that
    show. Differentiable with respect to the field.

    Args:
        field: The field, on the rays' device.
        rays: R rays.
        occupancy: Where to sample.
        settings: How to sample.
        jitter: As for :func:`march`; on while training.
        capacity: Room for samples: the host then never waits for the device. None: as much as there are.
        distortion: Whether the rays' distortion is wanted.

    Returns:
        One colour, opacity and depth per ray.
    """
    packed, marched = visible_samples(field, rays, occupancy, settings, jitter, capacity)
    samples = RaySamples(*packed[:5])
    density, rgb = field.sample(samples, rays.directions)
    composite = ops.composite(
        density,
        rgb,
        samples.t,
        samples.dt,
        samples.ray_offsets,
        min_transmittance=settings.min_transmittance,
        distortion=distortion,
    )
    return Rendering(
        composite.rgb,
        composite.opacity,
        composite.depth_sum,
        samples,
        density,
        composite.weights,
        rgb,
        marched,
        packed.rays_kept[0],
        composite.distortion,
    )


@torch.no_grad()
def render_view(
    field: RadianceField,
    cameras: Cameras,
    camera: int,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    background: Tensor,
    chunk: int,
) -> View:
    """Renders one camera's whole image.

    Args:
        field: The field.
        cameras: Cameras on the field's device.
        camera: Which of them.
        occupancy: Where to sample.
        settings: How to sample.
        background: (3,) colour behind the scene, on the field's device.
        chunk: Rays at once, to bound memory.

    Returns:
        The image, on the field's device.
    """
    rays = cameras.image_rays(camera, field.grid.aabb)
    rgb, opacity, depth = [], [], []
    for first in range(0, len(rays), chunk):
        part = render(field, rays[first : first + chunk], occupancy, settings)
        rgb.append(part.over(background))
        opacity.append(part.opacity)
        depth.append(part.depth_sum / part.opacity.clamp(min=1e-6))
    size = (cameras.height, cameras.width)
    return View(torch.cat(rgb).view(*size, 3), torch.cat(opacity).view(size), torch.cat(depth).view(size))
