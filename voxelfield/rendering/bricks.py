"""A field evaluated once at the vertices of a sparse lattice, from which images are drawn without its networks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from voxelfield.fields.decoders import DeferredMLPDecoder
from voxelfield.fields.field import RadianceField, single_samples
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.sparse_grid import BLOCK_CELLS, BLOCK_VERTICES, SparseGrid, overlapping_sums
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import MIN_OPACITY

logger = logging.getLogger(__name__)

# Vertices for each voxel of the finest level, along each axis. Between vertices, values are interpolated after the
# network instead of before it, so one for each voxel would round off detail that the network makes of a single voxel.
_PER_VOXEL = 2
# Blocks of 512 vertices that are evaluated at once.
_BLOCKS_AT_ONCE = 1 << 10
# The ranges of features are taken from at most this many blocks, and only from vertices whose opacity over a step
# exceeds this. Diffuse colours lie between 0 and 1.
_RANGE_BLOCKS, _RANGE_OPACITY = 1 << 14, 1e-3
# Densities below exp of this are invisible at any step.
_LOWEST_LOG_DENSITY = -20.0
# The numbers of values of a vertex that the renderer reads.
_WIDTHS = (8, 16)


@dataclass(frozen=True, eq=False)
class Bricks:
    """What a field with deferred shading emits, at the vertices of blocks of 8 x 8 x 8 (Hedman et al. 2021, SNeRG).

    Attributes:
        log_density: (8 A, 8 B, 8 C) float16, logarithms of densities, per unit in warped coordinates.
        values: (8 A, 8 B, 8 C, 8 or 16) uint8, diffuse colours and features; 0 to 255 stand for ``low`` to
            ``low + extent``.
        low: (V,) float32, for the V values that the field has.
        extent: (V,) float32.
        blocks: (X, Y, Z) int32, where each block is (:attr:`voxelfield.grids.sparse_grid.SparseGrid.blocks`).
        aabb: (2, 3) float32, the box of the lattice, in warped coordinates.
    """

    log_density: Tensor
    values: Tensor
    low: Tensor
    extent: Tensor
    blocks: Tensor
    aabb: Tensor

    def means(self, sums: Tensor, opacity: Tensor) -> Tensor:
        """Returns the mean values (..., V) along rays from the sums of stored ones (..., 8 or 16) and opacities."""
        return self.low + self.extent * sums[..., : len(self.low)] / opacity.clamp(min=MIN_OPACITY)[..., None]


def can_bake(field: object) -> bool:
    """Returns whether a field is one that :func:`bake` accepts."""
    return isinstance(field, RadianceField) and field.has_pyramid_density and field.shade is not None


@torch.no_grad()
def bake(field: RadianceField, occupancy: OccupancyGrid, settings: RenderSettings) -> Bricks:
    """Evaluates a field at the vertices of its finest level and halfway between them, in blocks that show something.

    Blocks are left out if they have no occupied cell, if the field has sparse levels but none of these has a block
    there, or if no sample in them could be heavier than ``settings.min_weight``. Synchronises with the device. A block
    of 8 x 8 x 8 vertices, which has 3.5 voxels along each axis, takes 9 KiB, or 5 with at most eight values.

    Args:
        field: A field for which :func:`can_bake` is True.
        occupancy: Its occupied cells, on its device.
        settings: Those with which images are rendered.

    Returns:
        The stored field, on the field's device.
    """
    pyramid, decoder = field.grid, field.decoder
    assert isinstance(pyramid, VoxelPyramid)
    assert isinstance(decoder, DeferredMLPDecoder)
    voxel, voxels = pyramid.finest_voxels()
    voxel = voxel / _PER_VOXEL
    # Every second vertex is where one of the finest level is, so the last blocks may end outside.
    whole = [-(-_PER_VOXEL * count // BLOCK_CELLS) * BLOCK_CELLS for count in voxels]
    low = pyramid.aabb[0].double()
    box = torch.stack((low, low + voxel * voxel.new_tensor(whole))).float()
    lattice = SparseGrid(whole, 1, box.tolist(), device=box.device)
    lattice.allocate(_blocks_with_content(lattice, pyramid, occupancy), lattice.aabb)

    def positions(blocks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the positions (M, 3) of vertices of some blocks, and their atlas rows (M,)."""
        for vertices, rows in lattice.vertices(blocks, _BLOCKS_AT_ONCE):
            yield (low + voxel * vertices.view(-1, 3)).float(), rows.view(-1)

    def emitted(places: Tensor) -> tuple[Tensor, Tensor]:
        return field.sample(single_samples(places), torch.zeros_like(places))

    def opacity(density: Tensor) -> Tensor:
        return -torch.expm1(-density * settings.step)

    def every_block() -> Tensor:
        return torch.arange(lattice.count, device=box.device)

    def absorbing(blocks: Tensor) -> Iterator[Tensor]:
        """Yields the values (M, V) of those vertices that show something."""
        for places, _ in positions(blocks):
            density, own = emitted(places)
            yield own[(opacity(density) > _RANGE_OPACITY) & occupancy.contains(places)]

    considered = lattice.count
    heaviest = [
        opacity(field.density_in_warp(places)).view(-1, BLOCK_VERTICES**3).amax(dim=1)
        for places, _ in positions(every_block())
    ]
    shown = lattice.exists.clone()
    shown[lattice.exists] = torch.cat([*heaviest, box.new_zeros(0)]) > settings.min_weight
    lattice.allocate(shown, lattice.aabb)
    some = torch.linspace(0, lattice.count - 1, min(lattice.count, _RANGE_BLOCKS), device=box.device).long()
    lowest, highest = _ranges(absorbing(some), decoder.emitted, box)
    lowest[:3], highest[:3] = 0, 1
    extent = (highest - lowest).clamp(min=1e-6)
    atlas = lattice.features.shape[:3]
    lattice.features.data = lattice.features.new_empty(0)  # only its tables are needed
    width = next(width for width in _WIDTHS if width >= len(lowest))
    log_density = torch.full(atlas, _LOWEST_LOG_DENSITY, dtype=torch.float16, device=box.device)
    values = torch.zeros(*atlas, width, dtype=torch.uint8, device=box.device)
    for places, rows in positions(every_block()):
        density, own = emitted(places)
        log_density.view(-1)[rows] = density.log().clamp(min=_LOWEST_LOG_DENSITY).half()
        stored = ((own - lowest) / extent * 255).round().clamp(0, 255).to(torch.uint8)
        values.view(-1, width)[rows, : len(lowest)] = stored
    size = (log_density.nbytes + values.nbytes) / 2**20
    logger.info("%d of %d blocks of the field's values are stored, %.0f MiB", lattice.count, considered, size)
    return Bricks(log_density, values, lowest, extent, lattice.blocks, box)


def _blocks_with_content(lattice: SparseGrid, pyramid: VoxelPyramid, occupancy: OccupancyGrid) -> Tensor:
    """Returns the blocks that overlap an occupied cell and, if there are sparse levels, a block of one of these.

    Sparse levels have blocks where the training images showed something.
    """

    def overlapped(cells: Tensor, aabb: Tensor) -> Tensor:
        return overlapping_sums(cells, aabb, lattice.exists.shape, lattice.aabb) > 0

    wanted = overlapped(occupancy.occupied, occupancy.aabb)
    levels = [overlapped(grid.exists, grid.aabb) for grid in pyramid.sparse_grids if grid.count > 0]
    return wanted & torch.stack(levels).any(dim=0) if levels else wanted


def _ranges(parts: Iterable[Tensor], count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the least and the greatest values (V,) of several (M, V); 0 and 1 if there are none."""
    least = torch.full((count,), math.inf, device=like.device)
    greatest = -least
    for values in parts:
        least = torch.cat((least[None], values)).amin(dim=0)
        greatest = torch.cat((greatest[None], values)).amax(dim=0)
    empty = least > greatest
    return least.masked_fill(empty, 0), greatest.masked_fill(empty, 1)
