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
from voxelfield.fields.harmonics import HarmonicsDecoder
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.sparse_grid import BLOCK_CELLS, BLOCK_VERTICES, SparseGrid, overlapping_sums
from voxelfield.progress import tracked
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import MIN_OPACITY

logger = logging.getLogger(__name__)

PER_VOXEL = 2
"""Vertices for each voxel of the finest level, along each axis. Between vertices, values are interpolated after the
network instead of before it, so one for each voxel would round off detail that the network makes of a single voxel."""

# Blocks of 512 vertices that are evaluated at once.
_BLOCKS_AT_ONCE = 1 << 10
# The ranges of features are taken from at most this many blocks, and only from vertices whose opacity over a step of
# the lattice exceeds this. Diffuse colours lie between 0 and 1.
_RANGE_BLOCKS, _RANGE_OPACITY = 1 << 14, 1e-3
# Densities below exp of this are invisible at any step.
_LOWEST_LOG_DENSITY = -20.0
# The numbers of values of a vertex that the renderer reads.
_WIDTHS = (8, 16)


@dataclass(frozen=True, eq=False)
class Bricks:
    """The emission of a field with deferred shading at vertices, in blocks of 8 x 8 x 8 (Hedman et al. 2021, SNeRG).

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
    return isinstance(field, RadianceField) and field.shade is not None and field.pyramid_parts() is not None


@torch.no_grad()
def bake(field: RadianceField, occupancy: OccupancyGrid, per_voxel: int = PER_VOXEL) -> Bricks:
    """Evaluates a field at the vertices of its finest level and halfway between them, in blocks that show something.

    Blocks are left out if they have no occupied cell, or if the field has sparse levels but none of these has a block
    there. Synchronises with the device. A block of 8 x 8 x 8 vertices, which has 3.5 voxels along each axis, takes 9
    KiB, or 5 with at most eight values. The field must be one that :func:`can_bake`, or have a
    :class:`voxelfield.fields.harmonics.HarmonicsDecoder`.
    """
    decoder = field.decoder
    assert isinstance(decoder, DeferredMLPDecoder | HarmonicsDecoder)
    lattice, voxel = _lattice(field, per_voxel)
    lattice.allocate(_blocks_with_content(lattice, field, occupancy), lattice.aabb)
    box, low = lattice.aabb, field.grid.aabb[0].double()

    def emitted(blocks: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yields positions (M, 3) of vertices of blocks, their atlas rows (M,), densities (M,) and values (M, V)."""
        parts = lattice.vertices(blocks, _BLOCKS_AT_ONCE)
        for vertices, rows in tracked(parts, "baking", -(-len(blocks) // _BLOCKS_AT_ONCE)):
            positions = (low + voxel * vertices.view(-1, 3)).float()
            yield positions, rows.view(-1), *field.sample(single_samples(positions), torch.zeros_like(positions))

    def absorbing(blocks: Tensor) -> Iterator[Tensor]:
        """Yields the values (M, V) of those vertices that show something."""
        for positions, _, density, emission in emitted(blocks):
            opaque = -torch.expm1(-density * voxel.min()) > _RANGE_OPACITY
            yield emission[opaque & occupancy.contains(positions)]

    many = _RANGE_BLOCKS // (8 if isinstance(decoder, HarmonicsDecoder) else 1)  # which takes that much longer
    some = torch.linspace(0, lattice.count - 1, min(lattice.count, many), device=box.device).long()
    lowest, highest = _ranges(absorbing(some), decoder.emitted, box)
    lowest[:3], highest[:3] = 0, 1
    extent = (highest - lowest).clamp(min=1e-6)
    atlas = lattice.features.shape[:3]
    lattice.features.data = lattice.features.new_empty(0)  # only its tables are needed
    width = _width(field)
    log_density = torch.full(atlas, _LOWEST_LOG_DENSITY, dtype=torch.float16, device=box.device)
    values = torch.zeros(*atlas, width, dtype=torch.uint8, device=box.device)
    for _, rows, density, emission in emitted(torch.arange(lattice.count, device=box.device)):
        log_density.view(-1)[rows] = density.log().clamp(min=_LOWEST_LOG_DENSITY).half()
        stored = ((emission - lowest) / extent * 255).round().clamp(0, 255).to(torch.uint8)
        values.view(-1, width)[rows, : len(lowest)] = stored
    size = (log_density.nbytes + values.nbytes) / 2**20
    logger.info("%d blocks of the field's values are stored, %.0f MiB", lattice.count, size)
    return Bricks(log_density, values, lowest, extent, lattice.blocks, box)


def lattice_spacing(field: RadianceField) -> float:
    """Returns the largest distance between neighbouring vertices that :func:`bake` stores, in warped coordinates."""
    return float(_lattice(field, PER_VOXEL)[1].max())


def stored_bytes(field: RadianceField, occupancy: OccupancyGrid, per_voxel: int = PER_VOXEL) -> int:
    """Returns the bytes of the blocks that :func:`bake` would store, without evaluating the field; synchronises."""
    blocks = int(_blocks_with_content(_lattice(field, per_voxel)[0], field, occupancy).sum())
    return blocks * BLOCK_VERTICES**3 * (2 + _width(field))


def _width(field: RadianceField) -> int:
    """Returns the number of values that are stored for a vertex."""
    assert isinstance(field.decoder, DeferredMLPDecoder | HarmonicsDecoder)
    return next(width for width in _WIDTHS if width >= field.decoder.emitted)


def _lattice(field: RadianceField, per_voxel: int) -> tuple[SparseGrid, Tensor]:
    """Returns a lattice without blocks, and the distances (3,) float64 between its vertices along x, y and z."""
    voxel, voxels = field.grid.finest_voxels()
    voxel = voxel / per_voxel
    # Some vertices coincide with vertices of the finest level, so the last blocks may end outside.
    whole = [-(-per_voxel * count // BLOCK_CELLS) * BLOCK_CELLS for count in voxels]
    low = field.grid.aabb[0].double()
    box = torch.stack((low, low + voxel * voxel.new_tensor(whole))).float()
    return SparseGrid(whole, 1, box.tolist(), device=box.device), voxel


def _blocks_with_content(lattice: SparseGrid, field: RadianceField, occupancy: OccupancyGrid) -> Tensor:
    """Returns the blocks that overlap an occupied cell and, if there are sparse levels, a block of one of these.

    Sparse levels have blocks where the training images showed something.
    """

    def overlapped(cells: Tensor, aabb: Tensor) -> Tensor:
        return overlapping_sums(cells, aabb, lattice.exists.shape, lattice.aabb) > 0

    wanted = overlapped(occupancy.occupied, occupancy.aabb)
    sparse = field.grid.sparse_grids if isinstance(field.grid, VoxelPyramid) else []
    levels = [overlapped(grid.exists, grid.aabb) for grid in sparse if grid.count > 0]
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
