"""A field evaluated once at the vertices of a sparse lattice, from which images are drawn without its networks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.fields.decoders import DeferredMLPDecoder
from voxelfield.fields.field import RadianceField, single_samples
from voxelfield.fields.harmonics import HarmonicsDecoder
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.sparse_grid import BLOCK_CELLS, BLOCK_VERTICES, SparseGrid, overlapping_sums
from voxelfield.progress import tracked
from voxelfield.rendering.occupancy import OccupancyGrid

logger = logging.getLogger(__name__)

PER_VOXEL = 2
"""Vertices for each voxel of the finest level, along each axis. Between vertices, values are interpolated after the
network instead of before it, so one for each voxel would round off detail that the network makes of a single voxel."""

# Blocks of 512 vertices that are evaluated at once.
_BLOCKS_AT_ONCE = 1 << 12
# The ranges of features are taken from at most this many blocks, and only from vertices whose opacity over a step of
# the lattice exceeds this. Diffuse colours lie between 0 and 1.
_RANGE_BLOCKS, _RANGE_OPACITY = 1 << 14, 1e-3
# Codes 0 to 254 of densities stand for logarithms of the optical thickness between two vertices from -16, which even
# thousands of samples do not show, to 3, which is opaque. The other code is that of densities that are not finite.
_LOWEST, _LOG_STEP, _CODES = -16.0, 19 / 254, 255
_EMPTY = -25.0  # the logarithm for densities of zero
# Differences to both neighbours along an axis by which vertices are corrected, so that straight lines between them lie
# as far below a curve as above it.
_CORRECTION = 1 / 20
# The numbers of vertices with values, along each axis of a block, and the squared error that one of them must save: in
# steps of 8 bits, weighted by how visible it is, and that of a diffuse colour counted so many times.
_SIDES, _ERROR, _DIFFUSE = (2, 3, 4, 5, 6, BLOCK_VERTICES), 25.0, 4.0
# Rows behind all values, so that a kernel may read the eight vertices around any.
_MARGIN = (BLOCK_VERTICES + 1) * BLOCK_VERTICES + 2
# The numbers of values of a vertex that the renderer reads.
_WIDTHS = (8, 16)

_Matrices = Mapping[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Bricks:
    """The emission of a field with deferred shading at vertices, in blocks of 8 x 8 x 8 (Hedman et al. 2021, SNeRG).

    Each block has densities at all of its vertices, and values at as many as these need: N x N x N vertices from corner
    to corner, in 4 bits between a least and a greatest value of the block.

    Attributes:
        density: (8 A, 8 B, 8 C) uint8, codes of the logarithms of densities, per unit in warped coordinates: 0 to 254
            stand for ``log_low + code * log_step``, and 255 for a density that is not finite.
        values: (M, 4 or 8) uint8, diffuse colours and features of all vertices of a block after another, two in a byte,
            the first one in its lower bits: 0 to 15 stand for the least to the greatest value of the block.
        first: (A B C,) int32, the first row of ``values`` of each block of the atlas.
        side: (A B C,) uint8, N of each block, 2 to 8.
        ranges: (A B C, 2, 8 or 16) uint8, the least and the greatest values of each block; 0 to 255 stand for ``low``
            to ``low + extent``.
        low: (8 or 16,) float32. Values that the field does not have are 0.
        extent: (8 or 16,) float32.
        blocks: (X, Y, Z) int32, where each block is (:attr:`voxelfield.grids.sparse_grid.SparseGrid.blocks`).
        aabb: (2, 3) float32, the box of the lattice, in warped coordinates.
        log_low: The logarithm of density of code 0.
        log_step: The difference between the logarithms of two codes.
    """

    density: Tensor
    values: Tensor
    first: Tensor
    side: Tensor
    ranges: Tensor
    low: Tensor
    extent: Tensor
    blocks: Tensor
    aabb: Tensor
    log_low: float
    log_step: float = _LOG_STEP

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Returns what is stored for vertices, with the values of blocks with fewer interpolated.

        Returns:
            Logarithms of densities (8 A, 8 B, 8 C) float16, NaN where a density is not finite, and values
            (8 A, 8 B, 8 C, 8 or 16) uint8, where 0 to 255 stand for ``low`` to ``low + extent``.
        """
        log_density = (self.log_low + self.log_step * self.density).masked_fill(self.density == _CODES, math.nan).half()
        x, y, z = (size // BLOCK_VERTICES for size in self.density.shape)
        values = self.ranges.new_zeros(x * y * z, BLOCK_VERTICES**3, len(self.low))
        for side in _SIDES:
            spread = _fit_and_spread(side, self.low)[1]
            rows = torch.arange(side**3, device=self.low.device)
            for blocks in (self.side == side).nonzero()[:, 0].split(_BLOCKS_AT_ONCE):
                pairs = self.values[self.first[blocks].long()[:, None] + rows]
                fractions = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2) / 15
                least, greatest = self.ranges[blocks].float().split(1, dim=1)
                values[blocks] = (spread @ (least + (greatest - least) * fractions)).round().to(torch.uint8)
        cubes = values.view(x, y, z, *[BLOCK_VERTICES] * 3, -1).permute(0, 3, 1, 4, 2, 5, 6)
        return log_density, cubes.reshape(*self.density.shape, -1)


def can_bake(field: object) -> bool:
    """Returns whether a field is one that :func:`bake` accepts."""
    return isinstance(field, RadianceField) and field.shade is not None and field.pyramid_parts() is not None


@torch.no_grad()
def bake(field: RadianceField, occupancy: OccupancyGrid, per_voxel: int = PER_VOXEL) -> Bricks:
    """Evaluates a field at the vertices of its finest level and halfway between them, in blocks that show something.

    Blocks are left out if they have no occupied cell, or if the field has sparse levels but none of these has a block
    there. Synchronises with the device. A block of 8 x 8 x 8 vertices, which has 3.5 voxels along each axis, takes
    512 bytes, and 4 or 8 for each of its 8 to 512 vertices with values. The field must be one that :func:`can_bake`, or
    have a :class:`voxelfield.fields.harmonics.HarmonicsDecoder`.
    """
    decoder = field.decoder
    assert isinstance(decoder, DeferredMLPDecoder | HarmonicsDecoder)
    lattice, voxel = _lattice(field, per_voxel)
    lattice.allocate(_blocks_with_content(lattice, field, occupancy), lattice.aabb)
    box, low = lattice.aabb, field.grid.aabb[0].double()

    def emitted(blocks: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yields positions (B, 512, 3) of vertices of blocks, atlas rows, densities (B, 512) and values (B, 512, V)."""
        parts = lattice.vertices(blocks, _BLOCKS_AT_ONCE)
        for vertices, rows in tracked(parts, "baking", -(-len(blocks) // _BLOCKS_AT_ONCE)):
            positions = (low + voxel * vertices).float()
            flat = positions.view(-1, 3)
            density, emission = field.sample(single_samples(flat), torch.zeros_like(flat))
            yield positions, rows, density.view(rows.shape), emission.view(*rows.shape, decoder.emitted)

    def absorbing(blocks: Tensor) -> Iterator[Tensor]:
        """Yields the values (M, V) of those vertices that show something."""
        for positions, _, density, emission in emitted(blocks):
            opaque = -torch.expm1(-density * voxel.min()) > _RANGE_OPACITY
            inside = occupancy.contains(positions.view(-1, 3)).view(opaque.shape)
            yield emission[opaque & inside]

    many = _RANGE_BLOCKS // (8 if isinstance(decoder, HarmonicsDecoder) else 1)  # which takes that much longer
    some = torch.linspace(0, lattice.count - 1, min(lattice.count, many), device=box.device).long()
    lowest, highest = _ranges(absorbing(some), decoder.emitted, box)
    lowest[:3], highest[:3] = 0, 1
    extent = (highest - lowest).clamp(min=1e-6)
    atlas = lattice.features.shape[:3]
    lattice.features.data = lattice.features.new_empty(0)  # only its tables are needed
    padding = (0, _width(field) - decoder.emitted)
    lowest, extent = F.pad(lowest, padding), F.pad(extent, padding, value=1.0)

    def scaled() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yields what :func:`_quantised` takes."""
        along = torch.arange(-1, BLOCK_VERTICES + 1, device=box.device)
        around = voxel * torch.cartesian_prod(along, along, along)
        for positions, rows, density, emission in emitted(torch.arange(lattice.count, device=box.device)):
            # A model file has nothing of vertices that no sample in an occupied cell reads.
            inside = occupancy.contains((positions[:, :1] + around).float().view(-1, 3))
            read = F.max_pool3d(inside.view(-1, 1, *[len(along)] * 3).float(), 3, stride=1).view(rows.shape) > 0
            values = (F.pad(emission, padding) - lowest) / extent * 255
            yield rows, (density * voxel.min()).masked_fill(~read, 0), values.nan_to_num().clamp(0, 255), read

    stored = _quantised(scaled(), atlas, lowest)
    size = sum(tensor.nbytes for tensor in stored.values()) / 2**20
    logger.info("%d blocks of the field's values are stored, %.0f MiB", lattice.count, size)
    log_low = _LOWEST - math.log(float(voxel.min()))
    return Bricks(**stored, log_low=log_low, low=lowest, extent=extent, blocks=lattice.blocks, aabb=box)


def _quantised(parts: Iterable[tuple[Tensor, ...]], atlas: Sequence[int], low: Tensor) -> dict[str, Any]:
    """Stores what some vertices of an atlas emit.

    Args:
        parts: Atlas rows (B, 512) of all vertices of blocks, in the order of the atlas, optical thicknesses between
            vertices (B, 512), values (B, 512, V) from 0 to 255, and (B, 512) whether a sample may read the vertex.
        atlas: Numbers of vertices along x, y and z.
        low: (V,), on the device of the result.

    Returns:
        ``density``, ``values``, ``first``, ``side`` and ``ranges`` of :class:`Bricks`.
    """
    density = torch.zeros(tuple(atlas), dtype=torch.uint8, device=low.device)
    first = torch.zeros(density.numel() // BLOCK_VERTICES**3, dtype=torch.int32, device=low.device)
    side, ranges = density.new_full(first.shape, _SIDES[0]), density.new_zeros(*first.shape, 2, len(low))
    matrices = {count: _fit_and_spread(count, low) for count in _SIDES}
    rows_of_values, done = [], 0
    for rows, thickness, values, read in parts:
        finite, own = thickness.isfinite(), slice(done, done + len(rows))
        thickness, done = thickness.float().nan_to_num(), own.stop
        log = _corrected(thickness.log().clamp(min=_EMPTY)[..., None], read)[..., 0]
        code = ((log - _LOWEST) / _LOG_STEP).round().clamp(0, _CODES - 1)
        density.view(-1)[rows] = torch.where(finite, code, _CODES).to(torch.uint8)
        shown = read[..., None].float()
        mean = (values * shown).sum(dim=1, keepdim=True) / shown.sum(dim=1, keepdim=True).clamp(min=1)
        values = torch.where(read[..., None], _corrected(values, read), mean)
        stored, side[own], ranges[own] = _at_few_vertices(values, _visibility(thickness), matrices)
        rows_of_values.append(stored)
    counts = side[:done].long() ** 3
    first[:done] = counts.cumsum(0) - counts
    rows_of_values.append(density.new_zeros(_MARGIN, len(low) // 2))
    return {"density": density, "values": torch.cat(rows_of_values), "first": first, "side": side, "ranges": ranges}


def _corrected(values: Tensor, known: Tensor) -> Tensor:
    """Moves values (B, 512, V) of blocks against their curvature, between vertices that are ``known`` (B, 512).

    Between vertices, values of a curve are interpolated along its chords, all of which lie on the same side of it.
    Along the axis that crosses a face, vertices on the face stay, so that neighbouring blocks agree on them.
    """
    cubes = values.view(-1, *[BLOCK_VERTICES] * 3, values.shape[-1])
    known = known.view(*cubes.shape[:-1], 1)
    result, count = cubes.clone(), BLOCK_VERTICES - 2
    for axis in (1, 2, 3):
        begin, middle, end = (cubes.narrow(axis, first, count) for first in range(3))
        both = known.narrow(axis, 0, count) & known.narrow(axis, 2, count)
        result.narrow(axis, 1, count).sub_((begin - 2 * middle + end) * both, alpha=_CORRECTION)
    return result.view(values.shape)


def _visibility(thickness: Tensor) -> Tensor:
    """Estimates how much of a vertex images may show from optical thicknesses (B, 512) between neighbours in blocks.

    That is the largest opacity around a vertex, times the light that passes the least opaque of its neighbours.
    """
    blocks = thickness.view(-1, 1, *[BLOCK_VERTICES] * 3)
    around = F.max_pool3d(blocks, 3, stride=1, padding=1)
    # What is beyond the faces of a block may be empty.
    least = -F.max_pool3d(F.pad(-blocks, [1] * 6), 3, stride=1)
    return (-torch.expm1(-around) * torch.exp(-least)).view(thickness.shape)


def _fit_and_spread(side: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the matrices between values at the 512 vertices of a block and at fewer, from corner to corner.

    Returns:
        (side^3, 512), the least squares fit, and (512, side^3), the interpolation; on the device of ``like``, float32.
    """

    def along(count: int, vertices: int) -> Tensor:
        """Returns the weights (count, vertices) of vertices at points along an axis, both from face to face."""
        places = torch.linspace(0, vertices - 1, count, dtype=torch.float64)
        return (1 - (places[:, None] - torch.arange(vertices)).abs()).clamp(min=0)

    # The fit is to the function between the 512 vertices too, which the fewer ones do not divide.
    points = 4 * BLOCK_CELLS + 1
    fit = torch.linalg.lstsq(along(points, side), along(points, BLOCK_VERTICES)).solution
    fits, spreads = (torch.kron(torch.kron(x, x), x).to(like) for x in (fit, along(BLOCK_VERTICES, side)))
    return fits, spreads


def _at_few_vertices(values: Tensor, weights: Tensor, matrices: _Matrices) -> tuple[Tensor, Tensor, Tensor]:
    """Stores the values of each block at as few vertices as their errors allow, in 4 bits.

    Args:
        values: (B, 512, V) float32, 0 to 255.
        weights: (B, 512) float32, 0 to 1, how much the errors of vertices count.
        matrices: What :func:`_fit_and_spread` returns for each number of vertices along an axis that a block may have.

    Returns:
        ``values`` and, for each block, ``side`` and ``ranges``, as in :class:`Bricks`.
    """
    important = weights[..., None] * F.pad(values.new_full((3,), _DIFFUSE), (0, values.shape[-1] - 3), value=1.0)
    least_cost = values.new_full((len(values),), math.inf)
    chosen = torch.zeros_like(least_cost, dtype=torch.int64)
    ranges = values.new_zeros(len(values), 2, values.shape[-1], dtype=torch.uint8)
    candidates, left = [], torch.arange(len(values), device=values.device)
    for side, (fit, spread) in matrices.items():
        few = fit @ values[left]
        least = few.amin(dim=1, keepdim=True).clamp(0, 255).floor()
        greatest = few.amax(dim=1, keepdim=True).clamp(0, 255).ceil().maximum(least)
        code = ((few - least) / (greatest - least).clamp(min=1) * 15).round().clamp(0, 15)
        result = spread @ (least + (greatest - least) / 15 * code)
        cost = _ERROR * side**3 + ((result - values[left]).square() * important[left]).sum(dim=(1, 2))
        better = cost < least_cost[left]
        own = left[better]
        chosen[own], least_cost[own] = side, cost[better]
        ranges[own] = torch.cat((least, greatest), dim=1)[better].to(torch.uint8)
        candidates.append((side, left, (code[..., 0::2] + 16 * code[..., 1::2]).to(torch.uint8)))
        # More vertices cannot save more than the whole error.
        left = left[least_cost[left] > _ERROR * (side + 1) ** 3]
    first = (chosen**3).cumsum(0) - chosen**3
    stored = ranges.new_empty((int((chosen**3).sum()), values.shape[-1] // 2))
    for side, blocks, codes in candidates:
        own = chosen[blocks] == side
        stored[first[blocks[own], None] + torch.arange(side**3, device=values.device)] = codes[own]
    return stored, chosen.to(torch.uint8), ranges


def lattice_spacing(field: RadianceField) -> float:
    """Returns the largest distance between neighbouring vertices that :func:`bake` stores, in warped coordinates."""
    return float(_lattice(field, PER_VOXEL)[1].max())


def stored_bytes(field: RadianceField, occupancy: OccupancyGrid, per_voxel: int = PER_VOXEL) -> int:
    """Returns the bytes of the blocks of :meth:`Bricks.unpacked`, without evaluating the field; synchronises."""
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
