"""Grids whose float32 masters, moments and gradients are divided over the processes that train together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield import peer_memory, processes
from voxelfield.grids.adam import RULE, GridAdam, moments_of, new_state, sum_weights
from voxelfield.grids.exchange import DirectExchange, Exchange, PackedExchange, room_for
from voxelfield.grids.parts import Part
from voxelfield.grids.planes import collect, moved, slabs
from voxelfield.grids.sparse_grid import BLOCK_VERTICES, SparseGrid
from voxelfield.grids.working_copies import WorkingCopies
from voxelfield.ops import _constants
from voxelfield.ops._internal.grid_adam import grid_adam_
from voxelfield.ops._internal.sparse_grid import share_copies_
from voxelfield.ops._internal.tiles import active_tiles, tiles_along, touched_vertices
from voxelfield.ops._internal.total_variation import grid_total_variation_grad_

Pack = Callable[[Iterable[tuple[int, Tensor]], Sequence[int], torch.dtype], Any]
"""Packs a tensor for a file: see :func:`voxelfield.training.state.zero_packing.pack_streams`."""

# A list of tiles shrinks once it is this many times too long. Its unused entries cost little.
_LONGEST = 3.0


class DividedGrids:
    """Divides grids over processes, each of which owns a range of planes along x of each grid.

    Masters and moments are divided as in ZeRO (Rajbhandari et al. 2020), but no gradient of a grid is exchanged. A
    sample's contribution to the gradients of all levels follows from its position and from the gradient in its
    features, which are far fewer numbers than the vertices around it have. Each process therefore receives those of all
    samples and adds them to the vertices that it owns. After the update the processes exchange the working copies of
    the vertices that have changed; the copies are whole in each process.

    The parameters of grids with 16-bit copies have no memory meanwhile and read as NaN, until :meth:`show` or
    :meth:`gather`.

    Args:
        working: The working copies of all grids, which the field reads.
        whole: The optimizer of the whole grids, whose options and state are used until :meth:`gather`.
        listed: For each grid, whether only active tiles are updated.
        occupied: (X, Y, Z) bool, the occupied cells, by whose number the planes are divided.
        samples: Largest number of samples of a step, of all processes.
        halo: Whether the total variation of dense grids will be added, which needs the planes beside the own ones.
        previous: A division with 16-bit copies that ends now. Grids that it has not gathered are divided anew without
            being whole in between.

    Attributes:
        shown: Whether :meth:`show` has been called.
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
        self._working, self._whole = working, whole
        working.forget_grids()
        self._replaced = 0
        self.shown = False
        shapes = [grid.shape for grid, lists in zip(working.grids, listed, strict=True) if lists]
        tiles = iter(_listed_tiles(shapes, occupied))
        dense = len(working.grids) - len(working.sparse)
        self._parts: list[Part] = []
        for index, (grid, lists) in enumerate(zip(working.grids, listed, strict=True)):
            sparse = None if index < dense else working.sparse[index - dense]
            if sparse is not None:
                costs, size = sparse.plane_costs(), BLOCK_VERTICES
            elif lists:
                size = _constants.TILE_X
                costs = torch.bincount(next(tiles) // _ids_along_x(), minlength=-(-grid.shape[0] // size))
            else:
                costs, size = grid.new_ones(grid.shape[0]), 1
            # Sums of costs may round differently on each device.
            bounds = processes.gather_objects(_balanced(costs, size, grid.shape[0]))[0]
            old = None if previous is None else previous._part_of(grid)
            self._parts.append(self._part(index, grid, bounds, sparse, _constants.TILE_X if halo else 0, old))
        for part in self._parts:  # once no grid is whole any more
            part.start_sums()
        first, *others = whole.param_groups
        for name in (*RULE, "lr", "bfloat16_moments"):
            if any(group[name] is not first[name] and group[name] != first[name] for group in others):
                raise ValueError(f"param_groups must agree on all but channel_rates, got different values of {name}")
        self._skips = bool(first["skip_untouched"])
        self._channel_rates = {grid: group["channel_rates"] for group in whole.param_groups for grid in group["params"]}
        self._exchanges: list[Exchange]
        if self._rounds and peer_memory.is_available(occupied.device):
            self._exchanges = [DirectExchange(working, self._parts, samples, tables=self._skips)]
        else:
            every = halo or not self._skips
            alike: dict[int, list[Part]] = {}
            for part in self._parts:
                alike.setdefault(part.grid.shape[3], []).append(part)
            self._exchanges = [
                PackedExchange(parts, samples, every=every, refresh=self.refresh) for parts in alike.values()
            ]
        self._listed = [part for part, lists in zip(self._parts, listed, strict=True) if lists]
        if previous is not None:
            self.refresh()
        self.restrict(occupied)
        working.division = self

    @property
    def layout(self) -> int:
        """The number of times that tensors which a captured step refers to have been replaced."""
        return self._replaced + sum(exchange.layout for exchange in self._exchanges)

    @property
    def _rounds(self) -> bool:
        return self._working.dtype != torch.float32

    def _part(
        self,
        index: int,
        grid: nn.Parameter,
        bounds: Sequence[int],
        sparse: SparseGrid | None,
        halo: int,
        old: Part | None,
    ) -> Part:
        begin, end = bounds[processes.rank()], bounds[processes.rank() + 1]
        low, high, shared = max(0, begin - halo), min(grid.shape[0], end + halo), None
        if sparse is not None:
            low, high, shared = sparse.shared_by(begin, end)
        before = self._whole.state.pop(grid, {}) if old is None else old.state
        if old is not None:
            stored = moved(old.owned, old.bounds, low, high)
            old.owned.data = old.stored = old.stored.new_empty(0)
        elif self._rounds:
            stored = grid.detach()[low:high].clone()
        else:
            stored = grid.detach()[low:high]
        self._release(grid)
        owned = nn.Parameter(stored[begin - low : end - low])
        state = {}
        for name in list(before):
            values = before.pop(name)
            if name == "step":
                state[name] = values
            else:
                state[name] = values[begin:end].clone() if old is None else moved(values, old.bounds, begin, end)
        return Part(grid, self._working.copies[index], bounds, low, high, stored, owned, sparse, shared, state)

    def _release(self, grid: nn.Parameter) -> None:
        """Frees the memory of a whole grid, if it has a copy of its own."""
        grid.grad = None
        if self._rounds:
            # Whatever reads the parameter computes NaN, rather than values that have not been up to date for long.
            grid.data = grid.new_full((), math.nan).expand(grid.shape)

    def owned(self, grid: nn.Parameter) -> nn.Parameter:
        """Returns the parameter of this process's part of a grid, or a parameter that is not divided itself."""
        part = self._part_of(grid)
        return grid if part is None else part.owned

    def own_planes(self, grid: nn.Parameter, values: Tensor) -> Tensor:
        """Returns this process's planes of values that belong to a whole grid, or all values of another parameter."""
        part = self._part_of(grid)
        return values if part is None else values[part.begin : part.end].clone()

    def collected(self, grid: nn.Parameter, own: Tensor, pack: Pack) -> Any:
        """Returns packed values of all planes to process 0, and None to others; a collective call.

        Args:
            grid: The parameter to which the values belong.
            own: Those of this process's planes; of a parameter that is not divided, all, which are returned.
            pack: Packs them.
        """
        part = self._part_of(grid)
        return own if part is None else _packed(part, own, pack)

    def _part_of(self, grid: nn.Parameter) -> Part | None:
        return next((part for part in self._parts if part.grid is grid), None)

    # ------------------------------------------------------------------------------------------------ a step

    def receive(self, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yields the rows of tensors (N, F) of all processes, some at a time; each time those of the same samples.

        Between two of them, the device can work on the first while the second arrives. In a captured graph, all
        processes must have the same number of samples.
        """
        # Samples do not depend on the grids of an exchange, so any of the exchanges would do.
        return self._exchanges[0].receive(tensors)

    def targets(self) -> tuple[list[Tensor], list[tuple[int, int]]]:
        """Returns the tensors to which gradients are added, and the first plane and the planes of each one's grid."""
        slabs = [(part.begin if part.sparse is None else part.low, part.grid.shape[0]) for part in self._parts]
        return [part.reached for part in self._parts], slabs

    def add_total_variation(self, weight: float) -> None:
        """Adds the gradient of the squared differences between neighbouring vertices, of all dense grids.

        Args:
            weight: Factor on the sum of these squares.
        """
        for part in self._parts:
            if part.sparse is not None:
                continue
            tiles = part.tiles
            if tiles is not None:
                tiles = tiles[processes.rank()] - part.low // _constants.TILE_X * _ids_along_x()
            if self._rounds:
                for halo in (slice(part.low, part.begin), slice(part.end, part.high)):
                    part.stored[halo.start - part.low : halo.stop - part.low] = part.copy[halo]
            weights = sum_weights(part.stored, weight)
            grid_total_variation_grad_(part.sums, part.stored, weights, tiles=tiles, tile_count=part.count)

    def step(self) -> None:
        """Updates this process's parts and clears their gradients, and lets all processes have the working copies."""
        for part in self._parts:
            if part.touched is not None:
                touched_vertices(part.reached, part.touched, part.own_tiles, every=not self._skips)
            if part.shared is not None:
                share_copies_(part.sums, *part.shared, part.touched)
                part.sums[: part.begin - part.low].zero_()
                part.sums[part.end - part.low :].zero_()
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
        for part in self._parts:
            if not part.state:
                part.state |= new_state(part.owned, moments_of(self._whole.param_groups[0]))

    def _update(self) -> None:
        self.start_moments()
        group, count = self._whole.param_groups[0], len(self._parts)
        states = [part.state for part in self._parts]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        grid_adam_(
            [part.owned for part in self._parts],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [part.sums[part.own] for part in self._parts],
            [group["lr"]] * count,
            steps,
            working=[copy for part in self._parts for copy in part.written],
            tiles=[part.own_tiles for part in self._parts],
            tile_counts=[part.count for part in self._parts],
            touched=[part.own_touched if self._skips else None for part in self._parts],
            channel_rates=[self._channel_rates[part.grid] for part in self._parts],
            **{name: group[name] for name in RULE},
        )

    def restrict(self, occupied: Tensor) -> None:
        """Lists the active tiles anew after a change of the occupied cells; synchronises with the device."""
        for exchange in self._exchanges:
            exchange.adapt()
        if not self._listed:
            return
        tiles = _listed_tiles([part.grid.shape for part in self._listed], occupied)
        for part, ids in zip(self._listed, tiles, strict=True):
            self._list(part, ids)

    def _list(self, part: Part, ids: Tensor) -> None:
        """Lists the active tiles (K,) of a grid by their owners."""
        first = [bound // _constants.TILE_X * _ids_along_x() for bound in part.bounds]
        cuts = [0, *torch.searchsorted(ids, ids.new_tensor(first[1:-1])).tolist(), len(ids)]
        wanted = max(end - begin for begin, end in pairwise(cuts))
        present = 0 if part.tiles is None else part.tiles.shape[1]
        depends = any(exchange.depends_on_lists for exchange in self._exchanges)
        follows = depends and not wanted <= present <= _LONGEST * wanted
        if part.tiles is None or follows:
            total = math.prod(tiles_along(part.grid.shape[:3]))
            part.tiles = ids.new_empty(processes.count(), room_for(wanted, total) if follows else total)
            part.own_tiles, part.count = torch.empty_like(part.tiles[0]), ids.new_empty(1)
            if part.touched is not None:
                part.add_table()
            self._replaced += 1
        assert part.own_tiles is not None
        assert part.count is not None
        part.tiles.fill_(-1)
        for row, (begin, end) in zip(part.tiles, pairwise(cuts), strict=True):
            row[: end - begin] = ids[begin:end]
        rank = processes.rank()
        torch.sub(part.tiles[rank], first[rank], out=part.own_tiles)
        part.count.fill_(cuts[rank + 1] - cuts[rank])
        # Total variation also adds gradients outside the tiles; later steps must not use them.
        part.sums.zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the masters into the working copies of all processes, after a change by something else than a step."""
        for part in self._parts:
            collect(part.owned.detach().to(part.copy.dtype), part.bounds, part.copy)
        if self.shown and self._rounds:
            self.show()

    # ---------------------------------------------------------------------------------------- the whole again

    @torch.no_grad()
    def show(self) -> None:
        """Returns the masters to the whole grids, until :meth:`hide`; moments stay divided."""
        if not self._rounds:
            self.refresh()  # what did not fit into an exchange
        for part in self._parts:
            self._show(part)
        self._working.division = None
        self._working.refresh()
        self.shown = True

    def _show(self, part: Part) -> None:
        part.owned.grad, part.sums = None, part.sums.new_empty(0)
        if self._rounds:
            whole = part.stored.new_empty(part.grid.shape)
            collect(part.owned.detach(), part.bounds, whole)
            part.grid.data = whole
            part.stored = part.stored.new_empty(0)
            part.owned.data = whole[part.begin : part.end]

    @torch.no_grad()
    def hide(self) -> None:
        """Divides the masters again as before :meth:`show`, so that steps can follow."""
        self._working.refresh()
        self._working.forget_grids()
        for part in self._parts:
            part.stored = part.grid.detach()[part.low : part.high]
            if self._rounds:
                part.stored = part.stored.clone()
            part.owned.data = part.stored[part.own]
            self._release(part.grid)
        for part in self._parts:
            part.start_sums()
        self._working.division = self
        self._replaced += 1
        self.shown = False

    def discard(self, when: Tensor) -> None:
        """Sets the gradients of the parts and their halos to zero where a flag () is true."""
        for part in self._parts:
            part.sums.masked_fill_(when, 0)

    @torch.no_grad()
    def gather(self) -> None:
        """Returns masters and moments to the whole grids and their optimizer, and ends the division."""
        for part in self._parts:
            self._return_state(part)
        if not self.shown:
            self.show()

    @torch.no_grad()
    def gather_some(self, grids: Sequence[nn.Parameter]) -> None:
        """Returns masters and moments of some whole grids, if the division has 16-bit copies; no step may follow.

        The copies of all grids, which fields read, remain those of the last step.
        """
        for part in [part for part in self._parts if any(part.grid is grid for grid in grids)]:
            self._return_state(part)
            self._show(part)
            # It is used no more, but may be referenced until the next garbage collection.
            part.owned.data = part.stored
            self._parts.remove(part)

    @torch.no_grad()
    def release(self) -> None:
        """Frees gradients and copies, before another division takes over what has not been gathered."""
        for part in self._parts:
            part.owned.grad, part.sums = None, part.sums.new_empty(0)
            part.copy, part.written = part.copy.new_empty(0), []
        self._working.copies.clear()
        del self._exchanges

    def _return_state(self, part: Part) -> None:
        if part.state:
            planes = part.grid.shape[0]
            self._whole.state[part.grid] = {
                key: value if key == "step" else moved(value, part.bounds, 0, planes)
                for key, value in part.state.items()
            }
        part.state.clear()

    @contextlib.contextmanager
    @torch.no_grad()
    def packed(self, pack: Pack) -> Iterator[dict[nn.Parameter, Any]]:
        """For a block, gives the optimizer of the whole grids in process 0 their packed moments, as if undivided.

        Args:
            pack: Packs values, which need never be in one memory.

        Returns:
            The packed masters of grids that are not whole, in process 0.
        """
        if not (self._rounds or self.shown):
            self.refresh()  # what did not fit into an exchange
        masters = {}
        for part in self._parts:
            state = {key: value if key == "step" else _packed(part, value, pack) for key, value in part.state.items()}
            master = _packed(part, part.owned.detach(), pack) if self._rounds and not self.shown else None
            if processes.is_first() and state:
                self._whole.state[part.grid] = state
            if master is not None:
                masters[part.grid] = master
        try:
            yield masters
        finally:
            for part in self._parts:
                self._whole.state.pop(part.grid, None)


def _packed(part: Part, own: Tensor, pack: Pack) -> Any:
    """Returns packed planes of all processes to process 0, and None to others; a collective call."""
    received = slabs(own, part.bounds)
    if processes.is_first():
        return pack(((process, planes) for process, _, planes in received), part.grid.shape, own.dtype)
    for _ in received:
        pass
    return None


def _listed_tiles(shapes: Sequence[Sequence[int]], occupied: Tensor) -> list[Tensor]:
    """Returns the ids of the active tiles of grids, each a tensor of as many as there are; synchronises."""
    found = [active_tiles(occupied, shape[:3]) for shape in shapes]
    counts = torch.cat([count for _, count in found]).tolist() if found else []
    return [ids[:count] for (ids, _), count in zip(found, counts, strict=True)]


def _balanced(costs: Tensor, size: int, planes: int) -> list[int]:
    """Returns bounds for each process, after which the costs so far are nearest to an equal share.

    Args:
        costs: (T,) those of groups of planes.
        size: Number of planes of a group; the last one may be smaller.
        planes: Number of all planes.
    """
    so_far = [0.0, *costs.double().cumsum(0).tolist()]
    bounds = [0]
    for index in range(1, processes.count()):
        share = so_far[-1] * index / processes.count()
        nearest = min(range(len(so_far)), key=lambda group: abs(so_far[group] - share))
        bounds.append(min(max(nearest * size, bounds[-1]), planes))
    return [*bounds, planes]


def _ids_along_x() -> int:
    """Returns the difference of the ids of two tiles that are neighbours along x."""
    return _constants.MAX_TILES_ALONG**2
