"""Grids whose float32 masters, moments and gradients are divided over the processes that train together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield import processes
from voxelfield.distributed.exchange import DirectExchange, Exchange, PackedExchange, room_for, shares_memory
from voxelfield.distributed.shards import Shard, collect_rows, row_slabs, rows_between
from voxelfield.foundation import constants
from voxelfield.foundation.zero_packing import pack_streams
from voxelfield.grids.adam import RULE, GridAdam, moments_of, new_state, sum_weights
from voxelfield.grids.sparse_grid import BLOCK_VERTICES, SparseGrid
from voxelfield.grids.working_copies import WorkingCopies
from voxelfield.ops._internal.optim import (
    active_tiles,
    grid_adam_,
    grid_total_variation_grad_,
    tiles_along,
    touched_vertices,
)
from voxelfield.ops._internal.stencil import sum_duplicates_

# A list of tiles shrinks once it is this many times too long. Its unused entries cost little.
_LONGEST = 3.0


class DividedGrids:
    """Divides grids over processes, each of which has a shard of each grid: a range of planes along x.

    Masters and moments are divided as in ZeRO (Rajbhandari et al. 2020), but no gradient of a grid is exchanged. A
    sample's contribution to the gradients of all levels follows from its position and from the gradient in its
    features, which are far fewer numbers than the vertices around it have. Each process therefore receives positions
    and gradients of all samples and adds them to the vertices of its shards. After the update the processes exchange
    the working copies of the vertices that have changed; the copies are whole in each process.

    The parameters of grids with 16-bit copies have no memory meanwhile and read as NaN, until :meth:`materialize` or
    :meth:`gather`.

    Args:
        working: The working copies of all grids, which the field reads.
        whole: The optimizer of the whole grids, whose options and state are used until :meth:`gather`. Its groups agree
            on all options but ``channel_rates``.
        listed: For each grid, whether only active tiles are updated.
        occupied: (X, Y, Z) bool, the occupied cells, by whose number the planes are divided.
        samples: Largest number of samples of a step, of all processes.
        halo: Whether the total variation of dense grids will be added, which needs the planes beside the local ones.
        previous: A division with 16-bit copies that ends now. Grids that it has not gathered are divided anew without
            being whole in between.

    Attributes:
        materialized: Whether the grids are whole, after :meth:`materialize`.
    """

    def __init__(
        self,
        working: WorkingCopies,
        whole: GridAdam,
        listed: Sequence[bool],
        occupied: Tensor,
        *,
        samples: int,
        halo: bool,
        previous: DividedGrids | None = None,
    ) -> None:
        self._working, self._whole, self._rounds = working, whole, working.dtype != torch.float32
        working.forget_grids()
        self._replaced = 0
        self.materialized = False
        shapes = [grid.shape for grid, lists in zip(working.grids, listed, strict=True) if lists]
        tiles = iter(_listed_tiles(shapes, occupied))
        atlases = [None] * (len(working.grids) - len(working.sparse)) + list(working.sparse)
        halo_planes = constants.TILE_X if halo else 0
        self._shards: dict[nn.Parameter, Shard] = {}
        for grid, copy, sparse, lists in zip(working.grids, working.copies, atlases, listed, strict=True):
            if sparse is not None:
                costs, size = sparse.plane_costs(), BLOCK_VERTICES
            elif lists:
                size = constants.TILE_X
                costs = torch.bincount(next(tiles) // _ids_along_x(), minlength=-(-grid.shape[0] // size))
            else:
                costs, size = grid.new_ones(grid.shape[0]), 1
            # Sums of costs may round differently on each device.
            bounds = processes.gather_objects(_balanced(costs, size, grid.shape[0]))[0]
            old = None if previous is None else previous._shards.get(grid)
            self._shards[grid] = self._shard(grid, copy, bounds, sparse, halo_planes, old)
        shards = list(self._shards.values())
        for shard in shards:  # once no grid is whole any more
            shard.start_sums()
        self._skips = bool(whole.param_groups[0]["skip_untouched"])
        self._channel_rates = {grid: group["channel_rates"] for group in whole.param_groups for grid in group["params"]}
        self._exchanges: list[Exchange] = []
        if self._rounds and shares_memory(occupied.device):
            self._exchanges = [DirectExchange(working, shards, samples, tables=self._skips)]
        else:
            every = halo or not self._skips
            for width in dict.fromkeys(shard.grid.shape[3] for shard in shards):
                alike = [shard for shard in shards if shard.grid.shape[3] == width]
                self._exchanges.append(PackedExchange(alike, samples, every=every, refresh=self.refresh))
        self._listed = [shard for shard, lists in zip(shards, listed, strict=True) if lists]
        if previous is not None:
            self.refresh()
        self.restrict(occupied)
        working.division = self

    @property
    def layout(self) -> int:
        """The number of times that tensors which a captured step refers to have been replaced."""
        return self._replaced + sum(exchange.layout for exchange in self._exchanges)

    def _shard(
        self,
        grid: nn.Parameter,
        copy: Tensor,
        bounds: list[int],
        sparse: SparseGrid | None,
        halo: int,
        old: Shard | None,
    ) -> Shard:
        """Cuts this process's shard out of a whole grid, or out of the shards of the previous division."""
        begin, end = bounds[processes.rank()], bounds[processes.rank() + 1]
        low, high, shared = max(0, begin - halo), min(grid.shape[0], end + halo), None
        if sparse is not None:
            low, high, shared = sparse.shared_by(begin, end)

        def cut(values: Tensor, first: int, last: int) -> Tensor:
            if old is None:
                return values[first:last].clone()
            return rows_between(values, old.bounds, first, last)

        before = self._whole.state.pop(grid, {}) if old is None else old.state
        if old is not None:
            stored = cut(old.local, low, high)
            old.local.data = old.stored = old.stored.new_empty(0)
        else:
            stored = cut(grid.detach(), low, high) if self._rounds else grid.detach()[low:high]
        self._drop_whole(grid)
        local = nn.Parameter(stored[begin - low : end - low])
        state = {}
        for name in list(before):
            values = before.pop(name)  # so that the memory of a whole moment is free before the next one is cut
            state[name] = values if name == "step" else cut(values, begin, end)
        return Shard(grid, copy, bounds, low, high, stored, local, sparse, shared, state)

    def _drop_whole(self, grid: nn.Parameter) -> None:
        """Frees the memory of a whole grid, if it has a copy of its own."""
        grid.grad = None
        if self._rounds:
            # Whatever reads the parameter computes NaN, rather than values that have not been up to date for long.
            grid.data = grid.new_full((), math.nan).expand(grid.shape)

    def local_shard(self, grid: nn.Parameter) -> nn.Parameter:
        """Returns the parameter of this process's shard of a grid, or a parameter that is not divided itself."""
        return self._shards[grid].local if grid in self._shards else grid

    def local_planes(self, grid: nn.Parameter, values: Tensor) -> Tensor:
        """Returns this process's planes of values that belong to a whole grid, or all values of another parameter."""
        return values[self._shards[grid].planes].clone() if grid in self._shards else values

    def collected(self, grid: nn.Parameter, local: Tensor) -> Any:
        """Returns values of all planes to process 0, packed for a checkpoint, and None to others; a collective call.

        Given are those of this process's planes; the values of a parameter that is not divided are returned as given.
        """
        if grid not in self._shards:
            return local
        received = row_slabs(local, self._shards[grid].bounds)
        if processes.is_first():
            return pack_streams(((process, planes) for process, _, planes in received), grid.shape, local.dtype)
        for _ in received:
            pass
        return None

    # ------------------------------------------------------------------------------------------------ a step

    def receive(self, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yields the rows of tensors (N, F) of all processes, some at a time; each time rows of the same samples.

        Between two of them, the device can work on the first while the second arrives. In a captured graph, all
        processes must have the same number of samples.
        """
        return self._exchanges[0].receive(tensors)  # any of them would do

    def targets(self) -> tuple[list[Tensor], list[tuple[int, int]]]:
        """Returns the tensors to which gradients are added, and the first plane and the planes of each one's grid."""
        shards = self._shards.values()
        slabs = [(shard.begin if shard.sparse is None else shard.low, shard.grid.shape[0]) for shard in shards]
        return [shard.reached for shard in shards], slabs

    def add_total_variation(self, weight: float) -> None:
        """Adds the gradient of the squared differences between neighbouring vertices, of all dense grids, weighted."""
        for shard in self._shards.values():
            if shard.sparse is not None:
                continue
            tiles = shard.tiles
            if tiles is not None:
                tiles = tiles[processes.rank()] - shard.low // constants.TILE_X * _ids_along_x()
            if self._rounds:
                for halo in (slice(shard.low, shard.begin), slice(shard.end, shard.high)):
                    shard.stored[halo.start - shard.low : halo.stop - shard.low] = shard.copy[halo]
            weights = sum_weights(shard.stored, weight)
            grid_total_variation_grad_(shard.sums, shard.stored, weights, tiles=tiles, tile_count=shard.count)

    def step(self) -> None:
        """Updates this process's shards, clears their gradients, and exchanges the working copies."""
        for shard in self._shards.values():
            if shard.touched is not None:
                touched_vertices(shard.reached, shard.touched, shard.local_tiles, every=not self._skips)
            if shard.shared is not None:
                sum_duplicates_(shard.sums, *shard.shared, shard.touched)
                shard.sums[: shard.in_stored.start].zero_()
                shard.sums[shard.in_stored.stop :].zero_()
        update: Callable[[], None] = self._update
        for exchange in self._exchanges:
            # Each exchange announces its changed vertices before any grid is updated.
            update = partial(exchange.publish, update)
        update()

    def start_moments(self) -> None:
        """Makes the moments of grids that no step has reached; else the next step does.

        Memory that was freed on the main stream cannot be reused on a side stream, on which a step before a capture
        runs, so they are made here.
        """
        for shard in self._shards.values():
            if not shard.state:
                shard.state |= new_state(shard.local, moments_of(self._whole.param_groups[0]))

    def _update(self) -> None:
        self.start_moments()
        group, shards = self._whole.param_groups[0], self._shards.values()
        states = [shard.state for shard in shards]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        grid_adam_(
            [shard.local for shard in shards],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [shard.sums[shard.in_stored] for shard in shards],
            [group["lr"]] * len(shards),
            steps,
            working=[copy for shard in shards for copy in shard.written],
            tiles=[shard.local_tiles for shard in shards],
            tile_counts=[shard.count for shard in shards],
            touched=[shard.local_touched if self._skips else None for shard in shards],
            channel_rates=[self._channel_rates[shard.grid] for shard in shards],
            **{name: group[name] for name in RULE},
        )

    def restrict(self, occupied: Tensor) -> None:
        """Lists the active tiles anew after a change of the occupied cells; synchronises with the device."""
        for exchange in self._exchanges:
            exchange.adapt()
        tiles = _listed_tiles([shard.grid.shape for shard in self._listed], occupied)
        for shard, ids in zip(self._listed, tiles, strict=True):
            self._list(shard, ids)

    def _list(self, shard: Shard, ids: Tensor) -> None:
        """Lists the active tiles (K,) of a grid by their processes."""
        first = [bound // constants.TILE_X * _ids_along_x() for bound in shard.bounds]
        cuts = [0, *torch.searchsorted(ids, ids.new_tensor(first[1:-1])).tolist(), len(ids)]
        wanted = max(end - begin for begin, end in pairwise(cuts))
        present = 0 if shard.tiles is None else shard.tiles.shape[1]
        # The time of a packed exchange depends on the length of the lists.
        packs = isinstance(self._exchanges[0], PackedExchange)
        follows = packs and not wanted <= present <= _LONGEST * wanted
        if shard.tiles is None or follows:
            total = math.prod(tiles_along(shard.grid.shape[:3]))
            shard.tiles = ids.new_empty(processes.count(), room_for(wanted, total) if follows else total)
            shard.local_tiles, shard.count = torch.empty_like(shard.tiles[0]), ids.new_empty(1)
            if shard.touched is not None:
                shard.add_table()
            self._replaced += 1
        assert shard.local_tiles is not None
        assert shard.count is not None
        shard.tiles.fill_(-1)
        for row, (begin, end) in zip(shard.tiles, pairwise(cuts), strict=True):
            row[: end - begin] = ids[begin:end]
        rank = processes.rank()
        torch.sub(shard.tiles[rank], first[rank], out=shard.local_tiles)
        shard.count.fill_(cuts[rank + 1] - cuts[rank])
        # Total variation also adds gradients outside the tiles; later steps must not use them.
        shard.sums.zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the masters into the working copies of all processes, after a change by something else than a step."""
        for shard in self._shards.values():
            collect_rows(shard.local.detach().to(shard.copy.dtype), shard.bounds, shard.copy)
        if self.materialized and self._rounds:
            self.materialize()

    # ---------------------------------------------------------------------------------------- the whole again

    @torch.no_grad()
    def materialize(self) -> None:
        """Makes the masters whole in each process until :meth:`release`; moments stay divided."""
        if not self._rounds:
            self.refresh()  # what did not fit into an exchange
        for shard in self._shards.values():
            self._materialize(shard)
        self._working.division = None
        self._working.refresh()
        self.materialized = True

    def _materialize(self, shard: Shard) -> None:
        shard.drop_sums()
        if self._rounds:
            shard.grid.data = rows_between(shard.local, shard.bounds, 0, shard.grid.shape[0])
            shard.stored = shard.stored.new_empty(0)
            shard.local.data = shard.grid.data[shard.planes]

    @torch.no_grad()
    def release(self) -> None:
        """Divides the masters again after :meth:`materialize`, so that steps can follow."""
        self._working.refresh()
        self._working.forget_grids()
        for shard in self._shards.values():
            shard.stored = shard.grid.detach()[shard.low : shard.high]
            if self._rounds:
                shard.stored = shard.stored.clone()
            shard.local.data = shard.stored[shard.in_stored]
            self._drop_whole(shard.grid)
        for shard in self._shards.values():
            shard.start_sums()
        self._working.division = self
        self._replaced += 1
        self.materialized = False

    def discard(self, when: Tensor) -> None:
        """Sets the gradients of the shards and their halos to zero where a flag () is true."""
        for shard in self._shards.values():
            shard.sums.masked_fill_(when, 0)

    @torch.no_grad()
    def gather(self, grids: Sequence[nn.Parameter] | None = None) -> bool:
        """Returns masters and moments to whole grids and their optimizer; no step may follow.

        Returns whether all grids are whole. With 16-bit copies, only those asked for become whole, unless all have been
        already; the copies of all, which fields read, then stay as the last step has left them.
        """
        if grids is None or self.materialized or not self._rounds:
            for shard in self._shards.values():
                self._return_state(shard)
            if not self.materialized:
                self.materialize()
            return True
        for shard in [self._shards.pop(grid) for grid in grids if grid in self._shards]:
            self._return_state(shard)
            self._materialize(shard)
            # Unused from now on, but perhaps referenced until the next garbage collection.
            shard.local.data = shard.stored
        return False

    def free(self) -> None:
        """Frees gradients and copies, before another division takes over what has not been gathered."""
        for shard in self._shards.values():
            shard.drop_sums()
            shard.copy, shard.written = shard.copy.new_empty(0), []
        self._working.copies.clear()
        del self._exchanges

    def _return_state(self, shard: Shard) -> None:
        if shard.state:
            planes = shard.grid.shape[0]
            self._whole.state[shard.grid] = {
                key: value if key == "step" else rows_between(value, shard.bounds, 0, planes)
                for key, value in shard.state.items()
            }
        shard.state.clear()

    @torch.no_grad()
    def packed(self) -> tuple[dict[nn.Parameter, Any], dict[nn.Parameter, dict[str, Any]]]:
        """Returns the masters of grids that are not whole, and the moments of all, by grid, to process 0.

        They are packed, as if undivided, and need never be whole in one memory
        (:func:`voxelfield.foundation.zero_packing.pack_streams`). Others get None in place of them.
        """
        if not (self._rounds or self.materialized):
            self.refresh()  # what did not fit into an exchange
        masters: dict[nn.Parameter, Any] = {}
        moments: dict[nn.Parameter, dict[str, Any]] = {}
        for grid, shard in self._shards.items():
            state = {key: value if key == "step" else self.collected(grid, value) for key, value in shard.state.items()}
            if state:
                moments[grid] = state
            if self._rounds and not self.materialized:
                masters[grid] = self.collected(grid, shard.local.detach())
        return masters, moments


def _listed_tiles(shapes: Sequence[Sequence[int]], occupied: Tensor) -> list[Tensor]:
    """Returns the ids of the active tiles of grids, each a tensor of as many as there are; synchronises."""
    found = [active_tiles(occupied, shape[:3]) for shape in shapes]
    counts = torch.cat([count for _, count in found]).tolist() if found else []
    return [ids[:count] for (ids, _), count in zip(found, counts, strict=True)]


def _balanced(costs: Tensor, size: int, planes: int) -> list[int]:
    """Returns bounds for each process, at which the sum of costs is nearest to an equal fraction of all.

    The costs (T,) are those of groups of ``size`` planes, of which the last may have fewer.
    """
    so_far = [0.0, *costs.double().cumsum(0).tolist()]
    bounds = [0]
    for index in range(1, processes.count()):
        equal = so_far[-1] * index / processes.count()
        nearest = min(range(len(so_far)), key=lambda group: abs(so_far[group] - equal))
        bounds.append(min(max(nearest * size, bounds[-1]), planes))
    return [*bounds, planes]


def _ids_along_x() -> int:
    """Returns the difference of the ids of two tiles that are neighbours along x."""
    return constants.MAX_TILES_ALONG**2
