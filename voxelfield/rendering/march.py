"""Samples along rays: placement in occupied space, selection of the visible ones, and the cells that contain these."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield import ops
from voxelfield.fields.field import Field, density_at_samples, warp_of
from voxelfield.foundation.checks import check_fraction, check_not_negative, lies_within
from voxelfield.foundation.errors import ArgumentValueError, shown
from voxelfield.grids.boxes import flat_indices
from voxelfield.ops._internal.fields import march_visible
from voxelfield.ops._internal.rays import march_pieces
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.selection import MIN_WEIGHT
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays
from voxelfield.warps.warp import Warp, nested_box_args

# Number of consecutive unused rows of a fixed capacity that share a random position. At a single position, the atomic
# additions of their zero gradients to a grid would be serialised on a GPU; at as many positions as rows, each row would
# cause its own memory accesses.
_ROWS_PER_POSITION = 32

# In the first steps of training, fog fills space and about half this many samples of a ray are visible; later, a few.
MAX_VISIBLE_PER_RAY = 256

# Largest number of cells along each axis to which the occupied cells are subdivided.
_MAX_CELLS_PER_AXIS = 256


@dataclass(frozen=True)
class RenderSettings:
    """Sampling settings: the distance between samples, and the thresholds below which they are ignored.

    Attributes:
        step: Distance between samples, in world units, or in units in warped coordinates.
        min_transmittance: A ray stops once its transmittance falls below this.
        min_weight: Samples with a smaller compositing weight are dropped before colour is evaluated.
        roulette: With jitter, samples with a smaller weight are kept at random and made longer, so that the mean of
            every weight stays (Russian roulette). A step of training then has samples for more rays. Fields without a
            :meth:`RadianceField.pyramid_density` keep them all.
    """

    step: float
    min_transmittance: float = MIN_TRANSMITTANCE
    min_weight: float = MIN_WEIGHT
    roulette: float = 0.0

    def __post_init__(self) -> None:
        """Checks the numbers, which kernels take as they are, in float32."""
        limits = torch.finfo(torch.float32)
        if not lies_within("step", self.step, limits.tiny, limits.max):
            raise ArgumentValueError(f"step must be a positive, finite distance, got {shown(self.step)}")
        check_not_negative("min_transmittance", self.min_transmittance)
        check_not_negative("min_weight", self.min_weight)
        check_fraction("roulette", self.roulette)


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
    walk = (*_mapped(rays, warp), occupancy.bits, occupancy.aabb, step)
    if boxes := nested_box_args(warp):
        return march_pieces(*walk, boxes, offset, capacity=capacity)
    return ops.march_rays(*walk, offset, capacity=capacity)


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
    roulette = settings.roulette if jitter else 0.0
    wants_all = settings.min_weight <= 0 and capacity is None and roulette == 0
    if not wants_all and (density := field.pyramid_density()) is not None:
        packed = march_visible(
            *_mapped(rays, warp),
            occupancy.empty_distance if rays.origins.is_cuda else occupancy.bits,
            occupancy.aabb,
            **vars(density),
            step=settings.step,
            offset=rays.random() if jitter else None,
            min_transmittance=settings.min_transmittance,
            min_weight=settings.min_weight,
            max_samples_per_ray=MAX_VISIBLE_PER_RAY,
            capacity=None if capacity is None else capacity.visible,
            boxes=nested_box_args(warp),
            roulette=roulette,
        )
        return packed, None
    room = None if capacity is None else capacity.candidates
    candidates = march(rays, occupancy, settings.step, jitter, room, warp)
    count = candidates.ray_offsets[-1]
    if capacity is None:
        return (candidates if wants_all else select(field, candidates, settings, rays=rays)), count
    if not field.skips_nan:
        candidates = _without_nan(candidates, occupancy.aabb)
    packed = select(field, candidates, settings, capacity.visible, rays=rays)
    if not field.skips_nan:
        packed = _without_nan(packed, occupancy.aabb)
    rays_kept = torch.minimum(candidates.rays_kept, packed.rays_kept)
    return packed._replace(rays_kept=rays_kept), count


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


def ray_spacing(field: Field, aabb: Tensor, cameras: Cameras, *, farthest: bool = False) -> float:
    """Returns the largest distance between the rays of neighbouring pixels in a box; synchronises with the device.

    The box (2, 3) and the result are in the coordinates of the field's samples. Without a warp, the distance is
    measured in the middle of the box, or in the corner that is ``farthest`` from a camera.
    """
    # The largest angle between the rays of neighbouring pixels of each camera, radians.
    flat = cameras.lens is None and cameras.rolling is None
    angles = 1 / cameras.intrinsics[:, :2].amin(dim=-1) if flat else cameras.pixel_angles()[:, 1]
    origins, angles = cameras.c2w[:, :3, 3].to(aabb.device), angles.to(aabb.device)
    warp = warp_of(field)
    if warp is not None:
        return warp.ray_spacing(origins, angles)
    distances = (origins - aabb.mean(dim=0)).norm(dim=-1)
    if farthest:
        distances = distances + (aabb[1] - aabb[0]).norm() / 2
    return float((distances * angles).max().clamp_min(torch.finfo(torch.float32).tiny))


def pixel_stride(field: Field, occupancy: OccupancyGrid, cameras: Cameras, across: int) -> int:
    """Returns the largest stride between pixels with which ``across`` rays still cross each cell side by side.

    That holds wherever the cell is in the box and however it is turned. The stride is at least 1, with which pixels may
    be too far apart for so many rays. Synchronises with the device.
    """
    fits = _rays_across_cells(occupancy, ray_spacing(field, occupancy.aabb, cameras, farthest=True))
    return max(1, int(min(fits) / across))


def _rays_across_cells(occupancy: OccupancyGrid, spacing: float) -> list[float]:
    """Returns how many rays of a spacing cross a cell side by side, at least, along x, y and z."""
    sizes = (occupancy.aabb[1] - occupancy.aabb[0]).tolist()
    # A square with a side of one pixel diagonal contains the centre of a pixel in any orientation.
    return [
        size / cells / (math.sqrt(2) * spacing) for size, cells in zip(sizes, occupancy.occupied.shape, strict=True)
    ]


@torch.no_grad()
def visible_cells(
    field: Field,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    cameras: Cameras,
    *,
    spacing: float | None = None,
    every: int = 1,
    chunk: int = 1 << 17,
) -> Tensor:
    """Marks the occupied cells, or parts of them, in which a pixel of some camera has a visible sample.

    Cells are split into parts as small as the spacing of the pixels allows: the rays through the centres of pixels must
    not miss a part that is visible between them. Where pixels are wider than cells, cells up to two pixels from such a
    sample are marked as well.

    One ray is cast through the centre of each pixel, or as :meth:`Cameras.image_chunks` says for ``every`` and
    ``chunk``. If these are only some of the cameras, ``spacing`` is the :func:`ray_spacing` of all. The result, (X, Y,
    Z) bool, subdivides the occupancy's box: its numbers of cells are multiples of the occupancy's.
    """
    seen = occupancy.occupied
    if len(cameras) == 0:
        return torch.zeros_like(seen)
    if spacing is None:
        spacing = ray_spacing(field, occupancy.aabb, cameras)
    fits = _rays_across_cells(occupancy, spacing)
    for axis, fit in enumerate(fits):
        seen = seen.repeat_interleave(int(max(1, min(fit, _MAX_CELLS_PER_AXIS // seen.shape[axis]))), axis)
    counts = count_visible_samples(field, occupancy, settings, cameras, seen.shape, every=every, chunk=chunk)
    shown = (counts > 0)[None].float()
    if min(fits) < 1:
        # The visible part of a cell may be narrower than a pixel and missed, while the rays beside it are not.
        for axis, (fit, cells) in enumerate(zip(fits, seen.shape, strict=True)):
            reach = [0, 0, 0]
            reach[axis] = min(2 * math.ceil(1 / fit) - 1, cells)
            shown = F.max_pool3d(shown, [2 * each + 1 for each in reach], stride=1, padding=reach)
    return seen & (shown[0] > 0)


@torch.no_grad()
def count_visible_samples(
    field: Field,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    cameras: Cameras,
    shape: Sequence[int],
    *,
    every: int = 1,
    chunk: int = 1 << 17,
) -> Tensor:
    """Counts the visible samples of the cameras' pixels in each of ``shape`` cells of the occupancy's box.

    The other arguments are as for :func:`visible_cells`; the result is (X, Y, Z) int32, on the field's device.
    """
    aabb, device = occupancy.aabb, occupancy.aabb.device
    cameras = cameras.to(device)
    counts = torch.zeros(tuple(shape), dtype=torch.int32, device=device)
    cells = torch.tensor(list(shape), device=device)
    for camera in range(len(cameras)):
        for rays in cameras.image_chunks(camera, field.aabb, chunk, every):
            positions = visible_samples(field, rays, occupancy, settings)[0].positions
            index = ((positions - aabb[0]) / (aabb[1] - aabb[0]) * cells).long()
            flat = flat_indices(index.clamp(cells.new_zeros(3), cells - 1), shape)
            counts.view(-1).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return counts
