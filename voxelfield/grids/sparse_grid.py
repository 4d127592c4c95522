"""SparseGrid: trainable features on selected blocks of the vertices of a regular grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from voxelfield.foundation.autograd import needs_long_path
from voxelfield.foundation.checks import is_divided
from voxelfield.foundation.errors import ArgumentValueError
from voxelfield.grids.boxes import box_tensor, cell_indices, flat_indices, parse_box
from voxelfield.grids.resampling import migratable_state, refuse_sharded, replace_values
from voxelfield.ops._internal.optim import touched_vertices
from voxelfield.ops._internal.stencil import atlas_coordinates, sum_duplicates_
from voxelfield.ops.voxel_list import VoxelIndex, atlas_blocks

BLOCK_VERTICES = 8
"""Vertices along each axis of a block. The outermost ones are shared with the neighbouring blocks."""

BLOCK_CELLS = BLOCK_VERTICES - 1
"""Cells along each axis of a block."""

_NUMBER_BITS = 10
# Fraction of a given cell by which it must overlap a block; more than the rounding of positions.
_SLACK = 1e-3
# Blocks whose outer vertices are compared at once, which takes 20 kB each.
_BLOCKS_COMPARED = 1 << 14


class SparseGrid(nn.Module):
    """Trainable features on blocks of 8 x 8 x 8 vertices of a regular grid, of which only some are allocated.

    A position inside an allocated block reads the same value as in a dense grid with these vertices; elsewhere it reads
    zeros. Surfaces fill a small fraction of space, so a sparse grid can have a resolution at which a dense grid would
    not fit in memory (Niessner et al. 2013, here with a table instead of a hash).

    Blocks lie side by side in an atlas, which the kernels for dense grids sample. Neighbouring blocks share their
    outermost vertices, and each block has its own copy of them. The copies are equal, and stay equal if
    :meth:`share_gradient` is called between the backward pass and the optimizer's step and the optimizer treats all
    elements alike.

    Args:
        cells_along: Requested number of cells along x, y and z, rounded to whole blocks of 7 cells. At least 1.
        channels: Number C of features per vertex. At least 1.
        aabb: (2, 3) box in world units, as for :class:`voxelfield.VoxelGrid`.
        device: Device of features and tables.

    Attributes:
        features: Parameter (8 A, 8 B, 8 C', C), the atlas: a single block of zeros before the first
            :meth:`allocate`.
        exists: Buffer (X, Y, Z) bool: which blocks are allocated; initially none.
        blocks: Buffer (X, Y, Z) int32: the location of each block in the atlas, as for
            :func:`voxelfield.ops._internal.stencil.atlas_coordinates`.
        aabb: Buffer (2, 3) float32, world units.

    Raises:
        ValueError: A size is below 1, or ``aabb`` is not a box.
    """

    features: nn.Parameter
    exists: Tensor
    blocks: Tensor
    aabb: Tensor

    def __init__(
        self,
        cells_along: Sequence[int],
        channels: int,
        aabb: Sequence[Sequence[float]] | Tensor,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if len(cells_along) != 3 or min(cells_along) < 1 or channels < 1:
            raise ArgumentValueError(
                f"cells_along and channels must be at least 1, got {list(cells_along)} and {channels}"
            )
        shape, side = _blocks_along(cells_along), BLOCK_VERTICES
        self.features = nn.Parameter(torch.zeros(side, side, side, channels, device=device))
        self.register_buffer("aabb", box_tensor(parse_box(aabb), self.features.device))
        self.register_buffer("exists", torch.zeros(shape, dtype=torch.bool, device=device))
        self.register_buffer("blocks", torch.full(shape, -1, dtype=torch.int32, device=device), persistent=False)
        nothing = torch.zeros(0, dtype=torch.int32, device=device)
        self.register_buffer("_copies", nothing, persistent=False)
        self.register_buffer("_begins", torch.zeros(1, dtype=torch.int32, device=device), persistent=False)
        self._count = 0
        self._shown: Tensor | None = None  # the sums over cells by which the present blocks were allocated

    @classmethod
    @torch.no_grad()
    def from_voxels(cls, features: Tensor, index: VoxelIndex, aabb: Sequence[Sequence[float]] | Tensor) -> SparseGrid:
        """Makes a grid of a list of voxels, which reads the same as :func:`voxelfield.ops.sample_voxels`.

        Args:
            features: (N, C) features of the voxels, float32; they are copied.
            index: Where they are, without a batch.
            aabb: (2, 3) the box of the whole list, half a voxel around the centres of the outermost ones, world units.
                That of the grid is larger: from one voxel before the first centre, in whole blocks.

        Raises:
            ValueError: The index has a batch, or ``aabb`` is not a box.
        """
        if index.batch is not None:
            raise ArgumentValueError(f"index must have no batch, got {index.batch} elements")
        box = box_tensor(parse_box(aabb), features.device)
        voxel = (box[1] - box[0]) / box.new_tensor(index.resolution)
        cells = [BLOCK_CELLS * blocks for blocks in index.exists.shape[1:]]
        low = box[0] - voxel / 2
        grid = cls(cells, features.shape[1], torch.stack((low, low + voxel * box.new_tensor(cells))).tolist())
        grid.to(features.device)._adopt(index.exists[0])
        replace_values(grid.features, F.embedding(index.rows, F.pad(features, (0, 0, 0, 1))))
        return grid

    @torch.no_grad()
    def voxels(self) -> tuple[Tensor, Tensor]:
        """Returns the vertices whose features are not all zero, as a list.

        Returns:
            (N, 3) int64 coordinates of the vertices, and (N, C) their features. With ``align_corners=True``, a
            :class:`voxelfield.ops.VoxelIndex` of :attr:`resolution` samples them as the grid does inside its box.
        """
        blocks, within = self.exists.nonzero(), _all_vertices(self.exists.device)
        rows = (self._first_rows()[:, None] + flat_indices(within, self._atlas_shape())).flatten()
        values, vertices = self.features.flatten(0, -2)[rows], (BLOCK_CELLS * blocks[:, None] + within).flatten(0, 1)
        filled = (values != 0).any(dim=1)
        coords, index = vertices[filled].unique(dim=0, return_inverse=True)
        return coords, values.new_empty(len(coords), self.channels).index_put_((index,), values[filled])

    @property
    def channels(self) -> int:
        """Number of features per vertex."""
        return self.features.shape[-1]

    @property
    def count(self) -> int:
        """Number of allocated blocks."""
        return self._count

    @property
    def resolution(self) -> tuple[int, int, int]:
        """Number of vertices along x, y and z of the corresponding dense grid."""
        x, y, z = (BLOCK_CELLS * blocks + 1 for blocks in self.exists.shape)
        return x, y, z

    def atlas_positions(self, unit: Tensor) -> Tensor:
        """Maps positions to the atlas, which :func:`voxelfield.ops.sample_trilinear` samples there.

        Args:
            unit: (N, 3) float32, in the unit cube of the box.

        Returns:
            (N, 3) in the unit cube of the atlas, NaN where no block is allocated. Differentiable: within a block, the
            atlas is the grid's box on another scale. A position beyond a face gets no gradient across it.
        """
        placed = atlas_coordinates(unit.detach(), self.blocks, self.features.shape[:3])
        if not (needs_long_path() or (unit.requires_grad and torch.is_grad_enabled())):
            return placed
        return placed + (unit - unit.detach()) * self.atlas_slopes(unit)

    def atlas_slopes(self, unit: Tensor) -> Tensor:
        """Returns the derivative of each coordinate of :meth:`atlas_positions`; 0 beyond the box's faces.

        Args:
            unit: (N, 3) float32, in the unit cube of the box.

        Returns:
            (N, 3) float32, without gradient.
        """
        inside = ((unit >= 0) & (unit <= 1)).to(unit.dtype)
        sides = zip(inside.unbind(dim=1), self.exists.shape, self.features.shape[:3], strict=True)
        # A tensor of numbers from the host could not be made while a graph is captured.
        return torch.stack([axis * (BLOCK_CELLS * blocks / (side - 1)) for axis, blocks, side in sides], dim=1)

    @torch.no_grad()
    def refit(self, aabb: Sequence[Sequence[float]] | Tensor, cells_along: Sequence[int]) -> None:
        """Moves the grid, which must have no blocks yet, to another box; the arguments are those of the class."""
        if self._count > 0:
            raise ArgumentValueError(f"aabb must stay as it is once there are blocks, of which there are {self._count}")
        self.aabb.copy_(box_tensor(parse_box(aabb), self.aabb.device))
        self.exists = torch.zeros(_blocks_along(cells_along), dtype=torch.bool, device=self.exists.device)
        self.blocks = torch.full(self.exists.shape, -1, dtype=torch.int32, device=self.exists.device)

    @torch.no_grad()
    def allocate(
        self,
        cells: Tensor,
        aabb: Tensor,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        max_blocks: int | None = None,
    ) -> int:
        """Allocates the blocks that overlap given cells and drops all others.

        Blocks that are already allocated and still needed retain their features. Wrap the model in
        ``DistributedDataParallel`` again afterwards; the previous wrapper raises an error.

        Args:
            cells: (X', Y', Z') bool or integers from 0, on the grid's device: how much each cell of ``aabb`` needs
                blocks. Cells of zero need none.
            aabb: (2, 3) that box, world units.
            optimizer: The optimizer that trains the grid, if any; its moments are moved with the features.
            max_blocks: Largest number of blocks. If more are needed, those with the largest sums over their cells are
                allocated.

        Returns:
            Number of blocks needed.

        Raises:
            ValueError: The grid is sharded (``fully_shard``), or the optimizer's state cannot be resized.
        """
        refuse_sharded(self.features, "allocate")
        state, shaped = ({}, []) if optimizer is None else migratable_state(self.features, optimizer)
        need = overlapping_sums(cells, aabb, self.exists.shape, self.aabb)
        wanted = need > 0
        count = int(wanted.sum())
        if max_blocks is not None and count > max_blocks:
            largest = need.view(-1).sort(descending=True, stable=True).indices[:max_blocks]
            wanted = torch.zeros_like(wanted)
            wanted.view(-1)[largest] = True
        before = self.exists
        old_rows = self._rows(wanted[before]).view(-1)
        self._adopt(wanted)
        self._shown = need[wanted]
        new_rows = self._rows(before[wanted]).view(-1)

        def carried(values: Tensor) -> Tensor:
            moved = values.new_zeros(*self._atlas_shape(), self.channels)
            if len(new_rows) == 0:
                return moved
            moved.view(-1, self.channels)[new_rows] = values.reshape(-1, self.channels)[old_rows]
            # New blocks next to existing ones take over the values at the faces between them.
            weights = torch.zeros_like(moved)
            weights.view(-1, self.channels)[new_rows] = 1
            self.share(moved)
            self.share(weights)
            return moved.div_(weights.clamp_(min=1))

        for key in shaped:
            state[key] = carried(state[key].to(self.features.dtype)).to(state[key].dtype)
        replace_values(self.features, carried(self.features.data))
        return count

    @torch.no_grad()
    def share_gradient(self, touched: Tensor | None = None) -> None:
        """Sets the gradient of all copies of a vertex to its sum; call once, before the optimizer's step.

        Args:
            touched: (K, 5) int32, the table of :func:`voxelfield.ops._internal.optim.touched_vertices` without ids;
                receives the vertices that have a gradient then, for :meth:`voxelfield.GridAdam.set_touched`. With it,
                the gradients are read once, and only copies of these vertices are summed. None: all are.

        Raises:
            ValueError: The grid is sharded (``fully_shard``).
        """
        if is_divided(self.features):  # after a backward pass they are not lent, which would take long to find out
            refuse_sharded(self.features, "share_gradient")
        if touched is not None and self.features.grad is not None:
            touched_vertices(self.features.grad, touched)
        self.share(self.features.grad, touched)

    @torch.no_grad()
    def share(self, sums: Tensor | None, touched: Tensor | None = None) -> None:
        """Sets all copies of a vertex to the sum of their values, in place.

        Args:
            sums: Tensor of the atlas's shape, float32, contiguous; None does nothing.
            touched: The table of the vertices that are not zero, to which copies are added; None reads all vertices.
        """
        if sums is not None and self._copies.numel() > 0:
            sum_duplicates_(sums, self._copies, self._begins, touched)

    def shared_by(self, begin: int, end: int) -> tuple[int, int, tuple[Tensor, Tensor]]:
        """Finds the vertices of planes of the atlas that are stored in several blocks, and where their copies are.

        Args:
            begin: The first plane along x.
            end: The end of the planes.

        Returns:
            The first plane, and the end of the planes, of the blocks with the given ones and with all copies of their
            vertices; and for a tensor of these planes, ``copies`` and ``begins`` of
            :func:`voxelfield.ops._internal.stencil.sum_duplicates_`.
        """
        _, y, z, _ = self.features.shape
        sizes = self._begins.diff()
        group = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        plane = self._copies // (y * z)
        wanted = torch.zeros_like(sizes, dtype=torch.bool)
        wanted[group[(plane >= begin) & (plane < end)]] = True
        copies = self._copies[wanted[group]]
        blocks = torch.cat((plane[wanted[group]], plane.new_tensor([begin, max(end - 1, begin)]))) // BLOCK_VERTICES
        low, high = int(blocks.min()) * BLOCK_VERTICES, (int(blocks.max()) + 1) * BLOCK_VERTICES
        begins = F.pad(sizes[wanted].cumsum(0), (1, 0)).to(torch.int32)
        return low, min(high, self.features.shape[0]), (copies - low * y * z, begins)

    def plane_costs(self) -> Tensor:
        """Estimates how much of an update of all blocks falls on each plane of blocks along x of the atlas.

        Half of the cost is equal for all blocks. The other half is in proportion to what :meth:`allocate` was given for
        them, if it has been called: the more is seen of a block, the more of its vertices change in a step.

        Returns:
            (A,) float32 on the grid's device.
        """
        costs = self.features.new_ones(self._count)
        if self._shown is not None:
            costs = costs + self._shown / self._shown.float().mean().clamp(min=1)
        planes = costs.new_zeros(self.features.shape[0] // BLOCK_VERTICES)
        return planes.index_add(0, self._numbers()[0], costs)

    def _adopt(self, exists: Tensor) -> None:
        """Sets which blocks are allocated and updates the derived tables; leaves the features unchanged."""
        self._shown = None
        self._count = int(exists.sum())
        self.exists = exists
        numbers = torch.stack(self._numbers(), dim=-1)
        if self._count > 0 and int(numbers.amax()) >= 1 << _NUMBER_BITS:
            raise ArgumentValueError(f"blocks must be at most {1 << 3 * _NUMBER_BITS}, got {self._count}")
        ids = numbers[:, 0] << 2 * _NUMBER_BITS | numbers[:, 1] << _NUMBER_BITS | numbers[:, 2]
        self.blocks = torch.full(exists.shape, -1, dtype=torch.int32, device=exists.device)
        self.blocks[exists] = ids.to(torch.int32)
        self._copies, self._begins = self._find_copies()

    def _atlas_shape(self) -> tuple[int, int, int]:
        """Returns the number of vertices of the atlas."""
        x, y, z = (BLOCK_VERTICES * blocks for blocks in atlas_blocks(self._count))
        return x, y, z

    def _numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the indices of all blocks in the atlas, (count,) along each axis, in the order of ``exists``."""
        order = torch.arange(self._count, device=self.exists.device)
        return cell_indices(order, [size // BLOCK_VERTICES for size in self._atlas_shape()])

    def vertices(self, chosen: Tensor, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields where the vertices of some blocks are, for a few blocks at a time.

        Args:
            chosen: (N,) int64, numbers of blocks in the order of ``exists``.
            at_once: Largest number B of blocks at a time.

        Yields:
            Their indices along x, y and z in the whole grid, (B, 512, 3) int64, and their rows in the flattened atlas,
            (B, 512) int64.
        """
        within, blocks = _all_vertices(self.exists.device), self.exists.nonzero()
        for some in chosen.split(at_once):
            yield BLOCK_CELLS * blocks[some][:, None] + within, self._rows(some)

    def _rows(self, chosen: Tensor) -> Tensor:
        """Returns the rows of the flattened atlas with the vertices of chosen blocks, (N, 512) int64."""
        return self._first_rows()[chosen, None] + flat_indices(_all_vertices(self.exists.device), self._atlas_shape())

    def _first_rows(self) -> Tensor:
        """Returns the row of the flattened atlas with the first vertex of each block, (count,) int64."""
        return flat_indices(BLOCK_VERTICES * torch.stack(self._numbers(), dim=-1), self._atlas_shape())

    def _find_copies(self) -> tuple[Tensor, Tensor]:
        """Returns the atlas rows of vertices with several copies, grouped by vertex, and where each group begins."""
        within = _all_vertices(self.exists.device)
        within = within[((within == 0) | (within == BLOCK_CELLS)).any(dim=-1)]
        blocks, shape = self.exists.nonzero(), self.resolution
        keys, rows = flat_indices(BLOCK_CELLS * blocks, shape), self._first_rows().to(torch.int32)
        key_within, row_within = flat_indices(within, shape), flat_indices(within, self._atlas_shape()).to(torch.int32)
        ends = [0, *torch.bincount(blocks[:, 0], minlength=len(self.exists)).cumsum(0).tolist()]
        copies, sizes = [], []
        first = 0
        for last in range(1, len(ends)):
            if ends[last] - ends[first] < _BLOCKS_COMPARED and last < len(self.exists):
                continue
            # The last plane of vertices is also the first one of the next blocks, with which it is compared.
            chosen = slice(ends[max(first - 1, 0)], ends[last])
            key = (keys[chosen, None] + key_within).flatten()
            low, high = (plane * BLOCK_CELLS * shape[1] * shape[2] for plane in (first, last))
            present = key >= low
            if last < len(self.exists):
                present &= key < high
            key, order = key[present].sort(stable=True)
            _, group, size = key.unique_consecutive(return_inverse=True, return_counts=True)
            shared = size > 1
            copies.append((rows[chosen, None] + row_within).flatten()[present][order][shared[group]])
            sizes.append(size[shared])
            first = last
        return torch.cat(copies), F.pad(torch.cat(sizes).cumsum(0), (1, 0)).to(torch.int32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseGrid:
        box = self.aabb
        super()._apply(fn, recurse)
        if self.aabb.dtype != box.dtype:
            self.aabb = box.to(self.aabb.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Adopts the saved blocks, because they are a result of training and not settings of the code."""
        exists, features = (state_dict.get(f"{prefix}{name}") for name in ("exists", "features"))
        if isinstance(exists, Tensor) and isinstance(features, Tensor):
            # On the meta device there are no values to derive tables from; the values of the state are used instead.
            self._adopt(exists.to(exists.device if self.exists.is_meta else self.exists.device, torch.bool))
            wanted = (*self._atlas_shape(), self.channels)
            if tuple(features.shape) != wanted:
                raise ArgumentValueError(
                    f"{prefix}features must have shape {wanted} for {self._count} blocks, got {tuple(features.shape)}"
                )
            if self.features.shape != wanted:
                refuse_sharded(self.features, "load_state_dict of other blocks")
                replace_values(self.features, self.features.new_empty(wanted))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Shows the settings in ``print(module)``."""
        return f"resolution={self.resolution}, channels={self.channels}, blocks={self._count}"


def _blocks_along(cells_along: Sequence[int]) -> list[int]:
    return [max(1, round(cells / BLOCK_CELLS)) for cells in cells_along]


def overlapping_sums(cells: Tensor, aabb: Tensor, shape: Sequence[int], box: Tensor) -> Tensor:
    """Sums, for each block of a box, the cells of another box that overlap it.

    The cells (X', Y', Z'), bool or integers, divide the box ``aabb``, and blocks of a shape (X, Y, Z) the other
    ``box``. The sums (X, Y, Z) are int64.
    """
    low, high = (corner.tolist() for corner in aabb.double())
    begin, end = (corner.tolist() for corner in box.double())
    for axis, blocks in enumerate(shape):
        size = cells.shape[axis]
        edges = begin[axis] + (end[axis] - begin[axis]) / blocks * torch.arange(blocks + 1, dtype=torch.float64)
        edges = (edges - low[axis]) * size / (high[axis] - low[axis])
        first = (edges[:-1] + _SLACK).floor().long().clamp(0, size).to(cells.device)
        stop = (edges[1:] - _SLACK).ceil().long().clamp(0, size).to(cells.device)
        sums = cells.cumsum(axis, dtype=torch.int64)
        sums = torch.cat((torch.zeros_like(sums.narrow(axis, 0, 1)), sums), dim=axis)
        cells = sums.index_select(axis, stop) - sums.index_select(axis, first)
    return cells


def _all_vertices(device: torch.device) -> Tensor:
    """Returns the indices (512, 3) of a block's vertices, in memory order."""
    along = torch.arange(BLOCK_VERTICES, device=device)
    return torch.cartesian_prod(along, along, along)
