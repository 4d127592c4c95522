"""VoxelPyramid: grids of several resolutions over one box, concatenated or summed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from voxelfield.foundation.checks import check_choice, check_not_negative
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError, shown
from voxelfield.grids.boxes import Box, parse_box
from voxelfield.grids.grid import Grid
from voxelfield.grids.resampling import refuse_computed
from voxelfield.grids.sparse_grid import SparseGrid
from voxelfield.grids.voxel_grid import VoxelGrid, cubic_voxels
from voxelfield.grids.working_copies import Combination, WorkingCopies, sample_levels
from voxelfield.ops._grids import PADDINGS, REDUCTIONS, Padding, Reduction

# 128 bytes of float32 at 4 channels: the optimizer's tiles of vertices begin at multiples of this.
_ROW_VERTICES = 8


class VoxelPyramid(Grid):
    """Trainable features on grids from coarse to fine over one box, concatenated or summed at every position.

    Coarse levels regularise and fine levels add detail: this is the dense counterpart of a multiresolution hash grid
    (Mueller et al. 2022), without hash collisions. In a sum, fine levels store the residual of the coarse ones, and a
    feature has the same meaning as in a single grid. Each level of a sum subdivides the voxels of the previous
    one by a whole number along every axis. The vertices of a level are therefore among those of the next one, and the
    sum is trilinear in the voxels of the finest level: it equals a single grid exactly (:meth:`collapse`). Levels can
    be activated from coarse to fine (``active``); inactive levels read as zero.

    Args:
        resolutions: For each level, coarse to fine, its mean resolution: the cube root of its number of voxels, which
            are nearly cubes (:func:`cubic_voxels`). At least 2. For a sum, each must be a whole multiple of the
            previous one and counts cells: there is one more vertex than cells along every axis.
        channels: Features per vertex of each level, unless ``level_channels`` says otherwise. At least 1.
        aabb: Box in world units, as for :class:`VoxelGrid`.
        reduce: ``"concat"`` concatenates the levels' features, ``"sum"`` adds them.
        padding: The value read at a position outside the box, as for :class:`VoxelGrid`, but not ``"periodic"``:
            levels would have different periods.
        init_range: Features are initialised uniformly in [-init_range, init_range]; one number for all levels, or one
            per level.
        sparse_resolutions: Mean resolutions of additional, finer levels that store only some blocks of vertices
            (:class:`voxelfield.grids.sparse_grid.SparseGrid`, which documents the requirements on the optimizer). They
            start without blocks and inactive; :meth:`allocate` adds blocks, whose features start at zero. Only for
            ``"concat"`` and ``"border"``.
        level_channels: For each level of a sum, the rising numbers of the features to which it adds, which are all that
            it stores; None, as for the coarsest level, for all. Features that vary slowly need no fine levels.
        device: Where the features and the box live.

    Attributes:
        active: Number of active levels, counted from the coarsest; initially all dense levels.
        combination: How the features of the dense levels are combined into the features at a position.
        working_copies: The copies that :meth:`enable_copies` has made, or None.

    Raises:
        TypeError: A resolution, ``channels`` or one of ``level_channels`` is not integer.
        ValueError: There is no level, resolutions are not increasing (for a sum: by whole multiples), ``reduce`` is
            unknown, ``level_channels`` are not rising numbers below ``channels`` for each level, or a size or the box
            is wrong.

    Example:
        >>> pyramid = VoxelPyramid(resolutions=(16, 32, 64), channels=4, aabb=((-1, -1, -1), (1, 1, 1)))
        >>> pyramid(torch.zeros(5, 7, 3)).shape
        torch.Size([5, 7, 12])
    """

    def __init__(
        self,
        resolutions: Sequence[int],
        channels: int,
        aabb: Sequence[Sequence[float]] | Tensor,
        *,
        reduce: Reduction = "concat",
        padding: Padding = "border",
        init_range: float | Sequence[float] = 1e-4,
        sparse_resolutions: Sequence[int] = (),
        level_channels: Sequence[Sequence[int] | None] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(resolutions, Sequence) or not all(isinstance(size, int) for size in resolutions):
            raise ArgumentTypeError(f"resolutions must be a sequence of ints, got {shown(resolutions)}")
        check_choice("reduce", reduce, REDUCTIONS)
        check_resolutions(resolutions, sparse_resolutions, reduce)
        bounds = list(init_range) if isinstance(init_range, Sequence) else [init_range] * len(resolutions)
        if len(bounds) != len(resolutions):
            raise ArgumentValueError(f"init_range must be one number or {len(resolutions)}, got {bounds}")
        for bound in bounds:
            check_not_negative("init_range", bound)
        check_choice("padding", padding, PADDINGS)
        if padding == "periodic":
            raise ArgumentValueError("padding must not be 'periodic', because levels would have different periods")
        if sparse_resolutions and (reduce, padding) != ("concat", "border"):
            raise ArgumentValueError(
                'reduce and padding must be "concat" and "border" with sparse_resolutions, got '
                f"{reduce!r} and {padding!r}"
            )
        known = _level_channels(level_channels, len(resolutions), channels, reduce)
        box = parse_box(aabb)
        self.reduce = reduce
        self.combination = Combination(reduce, known if any(known) else ())
        self.resolutions = tuple(resolutions)
        self.sparse_resolutions = tuple(sparse_resolutions)
        self._grids = nn.ModuleList(
            VoxelGrid(resolution, channels if each is None else len(each), box, padding=padding, device=device)
            for resolution, each in zip(self._level_resolutions(box), known, strict=True)
        )
        for grid, bound in zip(self.grids, bounds, strict=True):
            grid._init_range = bound
            grid.reset_parameters()
        self._sparse_grids = nn.ModuleList(
            SparseGrid(cubic_voxels(box, finer), channels, box, device=device) for finer in sparse_resolutions
        )
        self.active = len(resolutions)

    @property
    def grids(self) -> list[VoxelGrid]:
        """The dense levels as separate grids, coarse to fine."""
        return cast(list[VoxelGrid], list(self._grids))

    @property
    def sparse_grids(self) -> list[SparseGrid]:
        """The sparse levels as separate grids, coarse to fine."""
        return cast(list[SparseGrid], list(self._sparse_grids))

    @property
    def levels(self) -> list[nn.Parameter]:
        """The levels' features (X_l, Y_l, Z_l, C_l), coarse to fine; for sparse levels the atlas."""
        return [cast(nn.Parameter, grid.features) for grid in chain(self._grids, self._sparse_grids)]

    @property
    def blocks(self) -> list[Tensor | None]:
        """For each level, its block table if it is sparse, otherwise None."""
        return [None] * len(self.grids) + [grid.blocks for grid in self.sparse_grids]

    @property
    def aabb(self) -> Tensor:
        """The box (2, 3), world units."""
        return self.grids[0].aabb

    @property
    def channels(self) -> int:
        """Number of features at a position: of all levels if concatenated, of one level if summed."""
        levels = len(self.grids) + len(self.sparse_grids)
        return levels * self.grids[0].channels if self.reduce == "concat" else self.grids[0].channels

    @property
    def resolution(self) -> tuple[int, int, int]:
        """Number of vertices along x, y and z of the finest active dense level."""
        return self._finest.resolution

    @property
    def voxel_size(self) -> Tensor:
        """Distance between neighbouring vertices of that level: (3,), world units."""
        return self._finest.voxel_size

    @property
    def finest_resolution(self) -> tuple[int, int, int]:
        """Number of vertices along x, y and z of the finest active level, sparse ones included."""
        finest: VoxelGrid | SparseGrid = next(reversed(self._active_sparse), self._finest)
        return finest.resolution

    @property
    def _finest(self) -> VoxelGrid:
        return self.grids[min(self.active, len(self.grids)) - 1]

    @property
    def _active_sparse(self) -> list[SparseGrid]:
        return self.sparse_grids[: max(0, self.active - len(self.grids))]

    def forward(self, points: Tensor) -> Tensor:
        """Interpolates the features at world positions.

        Args:
            points: (..., 3) world positions, float32, on the pyramid's device. Positions that are not finite read
                zeros and receive no gradient.

        Returns:
            (..., channels); zero for inactive levels. float32, or the dtype of the copies after
            :meth:`enable_copies`.

        Raises:
            TypeError: ``points`` is not a float32 tensor.
            ValueError: Its last dimension is not 3, or it is on another device.
        """
        first = self.grids[0]
        unit = first.to_unit(points)
        if unit.dtype != torch.float32:
            raise ArgumentTypeError(f"points must be float32, got {points.dtype}")
        rows, padding, channels = unit.reshape(-1, 3), first.padding, self.channels
        if self.working_copies is not None:
            features = self.working_copies.sample(self.levels[: self.active], rows, padding)
        else:
            levels = self.levels[: self.active]
            features = sample_levels(levels, self._active_sparse, rows, self.combination, padding)
        if features.shape[-1] < channels:
            features = F.pad(features, (0, channels - features.shape[-1]))
        return features if points.dim() == 2 else features.reshape(*points.shape[:-1], channels)

    def _new_copies(self, dtype: torch.dtype) -> WorkingCopies:
        return WorkingCopies(self.levels[: self.active], dtype, self.combination, self._active_sparse)

    def active_levels(self, dtype: torch.dtype) -> list[Tensor]:
        """Returns the features of the active levels in a dtype, without gradient. Do not write to them.

        Args:
            dtype: float16, bfloat16 or float32. If there are copies of this dtype (:meth:`enable_copies`), these are
                returned; if the levels have this dtype, the levels themselves. Neither costs memory, and both change
                as training continues.
        """
        sampled = self.sampled_levels
        levels = sampled if sampled[0].dtype == dtype else self.levels[: self.active]
        return [level.detach().to(dtype) for level in levels]

    @torch.no_grad()
    def collapse(self, dtype: torch.dtype) -> Tensor:
        """Adds the active levels of a sum into a single grid with the vertices of the finest level.

        Inside the box the result equals the sum, up to rounding, because the vertices of every level are among those of
        the next one. (This does not hold exactly for a sum loaded from a state with other numbers of vertices.) If
        there are copies (:meth:`enable_copies`), these are read.

        Args:
            dtype: Dtype of the result: float16, bfloat16 or float32.

        Returns:
            (X, Y, Z, channels) at the vertices of the finest active level.

        Raises:
            ValueError: The levels are concatenated, not summed.
        """
        if self.reduce != "sum":
            raise ArgumentValueError(f'reduce must be "sum" for levels that are to be collapsed, got {self.reduce!r}')
        x, y, z = self.resolution
        axes = [torch.linspace(0, 1, size, device=self.aabb.device) for size in (x, y, z)]
        collapsed = torch.empty(x, y, z, self.channels, dtype=dtype, device=self.aabb.device)
        for plane, height in enumerate(axes[0]):
            points = torch.cartesian_prod(height[None], axes[1], axes[2])
            collapsed[plane] = self.combination.sample(self.sampled_levels, points, "border").view(y, z, -1)
        return collapsed

    def activate(self, mean_resolution: int) -> None:
        """Activates the dense levels up to a fineness, at least the coarsest, and the sparse levels that have blocks.

        Args:
            mean_resolution: The finest level to activate, as in ``resolutions`` or ``sparse_resolutions``.
        """
        self.working_copies = None
        self.active = max(1, sum(level <= mean_resolution for level in self.resolutions))
        if self.active == len(self.resolutions):
            for finer, grid in zip(self.sparse_resolutions, self.sparse_grids, strict=True):
                if finer > mean_resolution or grid.count == 0:
                    break
                self.active += 1

    def allocate(
        self,
        mean_resolution: int,
        cells: Tensor,
        aabb: Tensor,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        max_blocks: int | None = None,
    ) -> dict[int, int]:
        """Allocates blocks of the sparse levels up to a fineness wherever given cells lie.

        Existing blocks that are still needed retain their features; the others are dropped. :meth:`activate` activates
        the levels. Ends the use of copies by :meth:`enable_copies`.

        Args:
            mean_resolution: The finest level to allocate, as in ``sparse_resolutions``.
            cells: (X, Y, Z) bool or integers from 0, on the pyramid's device: how much each cell of ``aabb`` needs
                blocks; see :meth:`SparseGrid.allocate`.
            aabb: (2, 3) that box, world units.
            optimizer: The optimizer that trains the pyramid, if any.
            max_blocks: Largest number of blocks of the finest sparse level that the pyramid can have. Coarser ones get
                at most a fraction of it (:meth:`block_limits`).

        Returns:
            For each of these levels, the number of blocks wanted.

        Raises:
            ValueError: A sparse level is sharded (``fully_shard``), or the optimizer's state cannot be resized.
        """
        self.working_copies = None
        limits = {} if max_blocks is None else self.block_limits(max_blocks)
        return {
            finer: grid.allocate(cells, aabb, optimizer, max_blocks=limits.get(finer))
            for finer, grid in zip(self.sparse_resolutions, self.sparse_grids, strict=True)
            if finer <= mean_resolution
        }

    def block_limits(self, max_blocks: int) -> dict[int, int]:
        """Returns the largest number of blocks of each sparse level, by its mean resolution.

        The number of blocks along a surface grows with the square of that, so coarser levels need fewer.

        Args:
            max_blocks: Largest number of blocks of the finest sparse level.
        """
        return {
            finer: max(1, round(max_blocks * (finer / self.sparse_resolutions[-1]) ** 2))
            for finer in self.sparse_resolutions
        }

    @torch.no_grad()
    def refit(self, aabb: Sequence[Sequence[float]] | Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Moves all levels to another box with the same number of voxels, so that a smaller box gets finer voxels.

        Features and the optimizer's moments are interpolated at the new vertices. Ends the use of copies by
        :meth:`enable_copies`.

        Args:
            aabb: The new box, world units.
            optimizer: The optimizer that trains the pyramid, if any.

        Raises:
            ValueError: ``aabb`` is not a box, a level is sharded (``fully_shard``), a sparse level has blocks, or the
                optimizer's state cannot be resampled.
        """
        for level in self.levels:
            refuse_computed(level, "refit")
        if any(grid.count > 0 for grid in self.sparse_grids):
            raise ArgumentValueError("aabb must stay as it is once sparse levels have blocks")
        self.working_copies = None
        box = parse_box(aabb)
        for grid, resolution in zip(self.grids, self._level_resolutions(box), strict=True):
            grid.refit(box, resolution, optimizer)
        for finer, sparse in zip(self.sparse_resolutions, self.sparse_grids, strict=True):
            sparse.refit(box, cubic_voxels(box, finer))

    def resize(
        self,
        mean_resolution: int,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        aabb: Sequence[Sequence[float]] | Tensor | None = None,
    ) -> None:
        """Activates the levels up to a fineness, as coarse-to-fine training does.

        Args:
            mean_resolution: As for :meth:`activate`.
            optimizer: The optimizer that trains the pyramid, if any.
            aabb: A box to which all levels are moved first (:meth:`refit`), world units.

        Raises:
            ValueError: As for :meth:`refit`.
        """
        if aabb is not None:
            self.refit(aabb, optimizer)
        self.activate(mean_resolution)

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the settings that ``state_dict`` contains in addition to the levels."""
        return {"active": self.active, "reduce": self.reduce, "level_channels": self.combination.channels}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores the state of :meth:`get_extra_state`, and ends the use of copies by :meth:`enable_copies`.

        Raises:
            ValueError: The state was saved with another ``reduce`` or other ``level_channels``, or with a number of
                active levels that this pyramid cannot have.
        """
        if state["reduce"] != self.reduce:
            raise ArgumentValueError(f"reduce must be {state['reduce']!r}, as in the loaded state, got {self.reduce!r}")
        # Model files have lists in place of tuples.
        stored = tuple(each if each is None else tuple(each) for each in state["level_channels"])
        if stored != self.combination.channels:
            raise ArgumentValueError(
                f"level_channels must be {stored}, as in the loaded state, got {self.combination.channels}"
            )
        active = state["active"]
        if type(active) is not int or not 1 <= active <= len(self.levels):
            raise ArgumentValueError(f"active must be 1 to {len(self.levels)} levels, got {shown(active)}")
        self.active = active
        self.working_copies = None

    def extra_repr(self) -> str:
        """Shows the settings in ``print(module)``."""
        sparse = f"sparse_resolutions={self.sparse_resolutions}, " if self.sparse_resolutions else ""
        return f"resolutions={self.resolutions}, {sparse}reduce={self.reduce!r}, active={self.active}"

    def _level_resolutions(self, aabb: Box) -> list[tuple[int, int, int]]:
        """Returns the numbers of vertices of each level along x, y and z, for a box."""
        if self.reduce == "concat":
            each = (cubic_voxels(aabb, mean_resolution) for mean_resolution in self.resolutions)
            # Long rows are rounded up, so that tiles of vertices do not straddle cache lines.
            row = _ROW_VERTICES
            return [(x, y, z if z < 8 * row else -(-z // row) * row) for x, y, z in each]
        # Nested levels have one more vertex than cells, so rows are not whole cache lines. This matters little if
        # vertices are wide: a tile's eight vertices of 28 channels along z cover seven lines, or touch an eighth.
        x, y, z = cubic_voxels(aabb, self.resolutions[0])
        factors = [finer // self.resolutions[0] for finer in self.resolutions]
        return [(x * factor + 1, y * factor + 1, z * factor + 1) for factor in factors]


def _level_channels(given: Any, levels: int, channels: int, reduce: Reduction) -> tuple[tuple[int, ...] | None, ...]:
    """Returns checked ``level_channels``; None stands for all channels of a level."""
    if given is None:
        return (None,) * levels
    known: list[tuple[int, ...] | None] = []
    for each in given if isinstance(given, Sequence) else (given,):
        if each is not None and not (isinstance(each, Sequence) and all(type(number) is int for number in each)):
            raise ArgumentTypeError(
                f"level_channels must be a sequence of None and sequences of ints, got {shown(given)}"
            )
        known.append(None if each is None or list(each) == list(range(channels)) else tuple(each))
    if any(known) and reduce != "sum":
        raise ArgumentValueError(f'level_channels must be None where reduce is not "sum", got {shown(given)}')
    if len(known) != levels or known[0] is not None:
        raise ArgumentValueError(
            f"level_channels must be one for each of {levels} levels, None for the first, got {shown(given)}"
        )
    for each in known:
        if each is not None and not (each and list(each) == sorted({*each} & {*range(channels)})):
            raise ArgumentValueError(
                f"level_channels must be rising numbers from 0 to {channels - 1}, got {shown(list(each))}"
            )
    return tuple(known)


def check_resolutions(
    resolutions: Sequence[int], sparse: Sequence[int] = (), reduce: Reduction = "concat", prefix: str = ""
) -> None:
    """Raises ValueError unless a pyramid can have these levels; names in messages begin with ``prefix``."""
    if len(resolutions) == 0 or list(resolutions) != sorted(set(resolutions)) or resolutions[0] < 2:
        raise ArgumentValueError(f"{prefix}resolutions must rise from at least 2, got {list(resolutions)}")
    if reduce == "sum" and any(finer % coarser for coarser, finer in pairwise(resolutions)):
        raise ArgumentValueError(
            f"{prefix}resolutions of levels that are added up must each be a whole multiple of the one before, got "
            f"{list(resolutions)}"
        )
    if list(sparse) != sorted(set(sparse)) or any(finer <= resolutions[-1] for finer in sparse):
        raise ArgumentValueError(
            f"{prefix}sparse_resolutions must rise from above {resolutions[-1]}, the finest of {prefix}resolutions, "
            f"got {list(sparse)}"
        )
