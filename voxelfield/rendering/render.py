"""Rendering of rays: from a field to colour, opacity and depth."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from voxelfield import ops
from voxelfield.fields.field import Field, warp_of
from voxelfield.ops.ray_sums import spread
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import Capacity, RenderSettings, Sampler, visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.pixels import png_bytes
from voxelfield.rendering.rays import Rays
from voxelfield.warps.warp import Warp

MIN_OPACITY = 1e-6
"""Rays that absorb less light than this show nothing, so their features need not be scaled to means."""


@dataclass(frozen=True, eq=False)
class Rendering:
    """Rendered rays.

    Attributes:
        rgb: (R, 3) emitted colour, without background.
        opacity: (R,) in [0, 1].
        depth_sum: (R,) sum of weights times distances along the ray, in the samples' units; divide by opacity for the
            mean.
        samples: The M samples at which colour was evaluated.
        density: (M,) their densities, per unit in warped coordinates.
        weights: (M,) their compositing weights.
        sample_rgb: (M, 3) their colours. With deferred shading, their diffuse colours plus the difference of their
            ray's colour from its mean diffuse colour.
        candidates: () int64, number of samples placed in occupied space, before invisible ones were dropped; None if
            they were not counted (see :func:`visible_samples`).
        rays_kept: () int64, number of rays that fit in the capacity, if it is limited; later rays are empty.
        distortion: (R,) the distortion of each ray's weights, as in :func:`voxelfield.ops.composite`; None unless
            requested.
    """

    rgb: Tensor
    opacity: Tensor
    depth_sum: Tensor
    samples: ops.PackedSamples
    density: Tensor
    weights: Tensor
    sample_rgb: Tensor
    candidates: Tensor | None
    rays_kept: Tensor
    distortion: Tensor | None = None

    def over(self, background: Tensor) -> Tensor:
        """Composites over a background (3,) or (R, 3), giving (R, 3)."""
        return self.rgb + (1 - self.opacity)[:, None] * background


# DistributedDataParallel(static_graph=True) never reduces gradients if it finds no tensors in what forward() returns.
register_dataclass(Rendering)


@dataclass(frozen=True, eq=False)
class View:
    """One rendered image.

    Attributes:
        rgb: (H, W, 3) float32, composited over the background, nominally in [0, 1].
        opacity: (H, W) float32 in [0, 1].
        depth: (H, W) float32, opacity-weighted mean distance along the ray, world units.
    """

    rgb: Tensor
    opacity: Tensor
    depth: Tensor

    def __repr__(self) -> str:
        """Returns the size and the device instead of the pixel values."""
        height, width = self.opacity.shape
        return f"View(width={width}, height={height}, device={self.rgb.device})"

    def _repr_png_(self) -> bytes | None:
        """Encodes the colours for display in a notebook; returns None without Pillow."""
        return None if importlib.util.find_spec("PIL") is None else png_bytes(self.rgb)


def render(
    field: Field,
    rays: Rays,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    jitter: bool = False,
    capacity: Capacity | None = None,
    distortion: bool = False,
    sampler: Sampler = visible_samples,
) -> Rendering:
    """Renders rays through a field: marches, drops invisible samples, evaluates the others, composites.

    Visibility is determined first, without gradient, so that colours and gradients are computed only for visible
    samples. Differentiable with respect to the field, and to the rays' origins and directions, with the distances of
    samples along the rays held constant (:func:`positions_on_rays`).

    Args:
        field: The field, on the rays' device.
        rays: R rays, with the values on which the field depends.
        occupancy: The occupied cells.
        settings: Sampling settings.
        jitter: As for :func:`march`; used in training.
        capacity: Fixed numbers of samples, so that the host never synchronises with the device. None for as many
            samples as needed.
        distortion: Whether to compute the rays' distortion.
        sampler: Places the samples.

    Returns:
        One colour, opacity and depth per ray.

    Raises:
        ValueError: The rays lack a value on which the field depends.
    """
    warp = warp_of(field)
    samples, candidates = sampler(field, rays, occupancy, settings, jitter, capacity)
    if torch.is_grad_enabled() and (rays.origins.requires_grad or rays.directions.requires_grad):
        positions = positions_on_rays(samples, rays.origins, rays.directions, warp)
        samples = samples._replace(positions=positions)
    density, rgb = field.sample(
        samples, rays.directions, **rays.select_values(field.extra_inputs, field.optional_inputs)
    )
    composite = ops.composite(
        density,
        rgb,
        samples.t,
        samples.dt,
        samples.ray_offsets,
        min_transmittance=settings.min_transmittance,
        distortion=distortion,
    )
    rgb, sample_rgb = shaded(field, composite, rgb, samples, rays.directions)
    _, opacity, depth_sum, weights, distortions = composite
    kept = samples.rays_kept[0]
    return Rendering(rgb, opacity, depth_sum, samples, density, weights, sample_rgb, candidates, kept, distortions)


def shaded(
    field: Field, composite: ops.Composite, emitted: Tensor, samples: ops.PackedSamples, directions: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the colours of rays (R, 3) and of their samples (M, 3), after deferred shading if the field asks for it.

    A ray's colour, without background, is the weighted sum of its samples'. ``emitted`` is the second result of
    :meth:`Field.sample`, (M, C): colours, or features for ``shade``, and ``composite`` what became of it.
    """
    if field.shade is None:
        return composite.rgb, emitted
    # Of means, so that a translucent ray has the colour of an opaque one with the same features.
    means = composite.rgb / composite.opacity.clamp(min=MIN_OPACITY)[:, None]
    colors = field.shade(means, directions, samples.rays_kept)
    differences = spread(colors - means[:, :3], samples.ray_offsets, len(emitted))
    return composite.opacity[:, None] * colors, emitted[:, :3] + differences


def positions_on_rays(
    samples: ops.PackedSamples, origins: Tensor, directions: Tensor, warp: Warp | None = None
) -> Tensor:
    """Recomputes the positions (M, 3) of samples from their rays and their distances along them, differentiably.

    Marching is not differentiable. Distances and the choice of samples are constants here, so the gradient with respect
    to an origin is the sum of the gradients with respect to the positions of its ray's samples, and the gradient with
    respect to a direction is the sum of these gradients times the samples' distances. Sums have a fixed order.

    Args:
        samples: M samples of R rays, in warped coordinates.
        origins: (R, 3) float32 (float64 for float64 ``samples.t``), world frame.
        directions: (R, 3), in the dtype of ``origins``, as the result is. Rows that belong to no ray are NaN in it.
        warp: The field's warp; None for the world frame.
    """
    rows = samples.positions.shape[0]
    both = spread(torch.cat((origins, directions), dim=1), samples.ray_offsets, rows)
    if warp is None:
        positions = both[:, :3] + samples.t[:, None] * both[:, 3:]
    else:
        with torch.no_grad():
            t = warp.world_distances(samples, origins.detach(), directions.detach())
        positions = warp.from_world_near(both[:, :3] + t[:, None] * both[:, 3:], samples.positions)
    return torch.where(samples.positions.isnan(), samples.positions, positions)


@torch.no_grad()
def render_view(
    field: Field,
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
        camera: Index of the camera.
        occupancy: The occupied cells.
        settings: Sampling settings.
        background: (3,) colour behind the scene, on the field's device.
        chunk: Number of rays per chunk, to bound memory.

    Returns:
        The image, on the field's device.
    """
    rgb, opacity, depth = [], [], []
    for rays in cameras.image_chunks(camera, field.aabb, chunk):
        part = render(field, rays, occupancy, settings)
        rgb.append(part.over(background))
        opacity.append(part.opacity)
        sums = part.depth_sum
        if (warp := warp_of(field)) is not None:
            distances = warp.world_distances(part.samples, rays.origins, rays.directions)
            sums = ops.sum_along_rays(distances, part.samples.ray_offsets, part.weights)
        depth.append(sums / part.opacity.clamp(min=1e-6))
    size = cameras.size(camera)[::-1]
    return View(torch.cat(rgb).view(*size, 3), torch.cat(opacity).view(size), torch.cat(depth).view(size))
