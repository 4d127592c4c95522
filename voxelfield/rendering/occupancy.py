"""Occupancy grids, which mark the cells of space that contain matter, so that rays are sampled only there.

The density as rendered is zero in cells that are not occupied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from voxelfield import ops
from voxelfield.fields.field import Field, warped_points
from voxelfield.foundation.autograd import traces_ops
from voxelfield.foundation.checks import check_at_least_one, check_field, check_fraction, check_result, check_tensor
from voxelfield.grids.boxes import box_tensor, cell_indices, flat_indices, parse_box, parse_resolution
from voxelfield.ops._internal.rays import empty_distance

# Fraction of the threshold below which cells are empty even in a thin mist.
_LOWEST_FRACTION = 0.01

# For their mean, opacities are rounded down to multiples of the reciprocal of this.
_UNITS = 1 << 24


class OccupancyGrid(nn.Module):
    """A box of cells, each occupied or empty; initially all are occupied.

    Args:
        resolution: Number of cells along x, y, z, or one int for all three.
        aabb: (2, 3) lower and upper corner, world units.

    Attributes:
        occupied: Buffer (X, Y, Z) bool. May be changed in place: :attr:`bits` detects changes.
        allowed: Buffer (X, Y, Z) bool, the cells that may become occupied; see :meth:`restrict` and :meth:`exclude`.
        density_ema_max: Buffer (X, Y, Z) float32, the decayed maximum densities of :meth:`update_from_samples`, per
            world unit.
        aabb: Buffer (2, 3) float32.

    Raises:
        TypeError: A number of cells is not integer.
        ValueError: A number of cells is below 1, or ``aabb`` is not a box.
    """

    occupied: Tensor
    allowed: Tensor
    density_ema_max: Tensor
    aabb: Tensor

    def __init__(self, resolution: int | Sequence[int], aabb: Tensor | Sequence[Sequence[float]]) -> None:
        super().__init__()
        shape = parse_resolution(resolution)
        self._initial_box = parse_box(aabb)
        self.register_buffer("occupied", torch.empty(shape, dtype=torch.bool))
        self.register_buffer("allowed", torch.empty(shape, dtype=torch.bool))
        self.register_buffer("density_ema_max", torch.empty(shape))
        self.register_buffer("aabb", torch.empty(2, 3))
        self.reset_parameters()
        self._cells: Tensor | None = None  # indices (N, 3) of the allowed cells, computed on first use
        self._bits = _Derived(_packed_words)
        self._empty_distance = _Derived(empty_distance)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Restores the state after construction: all cells are occupied, and the box is the one given there.

        Torch's deferred initialisation calls this after ``to_empty``.
        """
        self.occupied.fill_(True)
        self.allowed.fill_(True)
        self.density_ema_max.zero_()
        self.aabb.copy_(box_tensor(self._initial_box, torch.device("cpu")))
        self._cells = None

    @property
    def bits(self) -> ops.OccupancyBits:
        """The occupied cells as a bit mask for :func:`voxelfield.ops.march_rays`.

        Recomputed on access if ``occupied`` has changed, and immediately by :meth:`update_from_vertices`,
        :meth:`update_from_samples`, :meth:`restrict` and :meth:`exclude`. The memory is reused as long as shape and
        device stay the same, so a captured CUDA graph that reads it sees the changes.
        """
        x, y, z = self.occupied.shape
        return ops.OccupancyBits(self._bits.of(self.occupied), (x, y, z))

    @property
    def empty_distance(self) -> Tensor:
        """The distance in cells, in the maximum norm, from each cell to the nearest occupied one.

        (X, Y, Z) uint8, 0 where occupied, at most 32. :func:`voxelfield.ops.render_grid` accepts it in place of
        ``occupied``. Recomputed like :attr:`bits` when ``occupied`` has changed.
        """
        return self._empty_distance.of(self.occupied)

    @torch.no_grad()
    def restrict(self, allowed: Tensor, aabb: Tensor) -> None:
        """Excludes all other cells and resets the allowed ones, which count as occupied until the next update.

        Args:
            allowed: (X, Y, Z) bool of this grid's resolution: the cells to allow, such as a visual hull.
            aabb: (2, 3) the box of these cells, world units; becomes this grid's box.

        Raises:
            TypeError: ``allowed`` is not bool.
            ValueError: ``allowed`` has another shape or device.
        """
        check_field("allowed", allowed, tuple(self.occupied.shape), torch.bool, "occupied", self.occupied)
        self.allowed.copy_(allowed)
        self.density_ema_max.zero_()
        self._cells = None
        self._occupy(allowed, aabb)

    @torch.no_grad()
    def exclude(self, cells: Tensor) -> None:
        """Excludes more cells until the next :meth:`restrict`; the others keep their state.

        Args:
            cells: (X, Y, Z) bool of this grid's resolution.

        Raises:
            TypeError: ``cells`` is not bool.
            ValueError: ``cells`` has another shape or device.
        """
        check_field("cells", cells, tuple(self.occupied.shape), torch.bool, "occupied", self.occupied)
        self.allowed &= ~cells
        self.density_ema_max.masked_fill_(cells, 0)
        self._cells = None
        self._occupy(self.occupied & ~cells, self.aabb)

    @torch.no_grad()
    def update_from_vertices(
        self, density: Tensor, aabb: Tensor, step: float, threshold: float, *, share_of_mean: float | None = None
    ) -> None:
        """Marks the cells in which a sample could reach an opacity, based on a field's densities at its vertices.

        A trilinear field has its extrema at vertices, so a cell is marked empty only if all vertices of all field cells
        that it overlaps stay below the threshold. No single sample of that opacity is missed.

        Args:
            density: (X, Y, Z) densities at the vertices of a dense grid over ``aabb``, per world unit.
            aabb: (2, 3) the field's box, world units; after :meth:`restrict`, it must be the same box.
            step: Distance between samples, world units.
            threshold: Opacity :math:`1 - e^{-density * step}` of one sample, above which a cell counts as occupied.
            share_of_mean: If not None, the threshold is at most this multiple of the mean opacity of the cells that
                are occupied before the call, but at least a hundredth of ``threshold``. A young field is a thin mist,
                all of which may be below the threshold. With a share near 1, each call then empties about half of the
                cells, and matter appears in the others.

        Raises:
            ValueError: ``density`` has another shape, ``threshold`` is outside (0, 1), or ``share_of_mean`` is not
                positive and finite.
        """
        check_tensor("density", density, ("X", "Y", "Z"))
        _check_thresholds(threshold, share_of_mean)
        # Maximum over the vertices of each field cell, then over the field cells that each cell of this grid overlaps.
        cells = density
        for axis, size in enumerate(density.shape):
            if size > 1:  # on a CPU, this is thirty times as fast as F.max_pool3d
                cells = torch.maximum(cells.narrow(axis, 0, size - 1), cells.narrow(axis, 1, size - 1))
        maximum = F.adaptive_max_pool3d(cells[None, None], tuple(self.occupied.shape))[0, 0]
        self._occupy(self._reaches(maximum, step, threshold, share_of_mean) & self.allowed, aabb)

    @torch.no_grad()
    def update_from_samples(
        self,
        density: Callable[[Tensor], Tensor],
        step: float,
        threshold: float,
        decay: float = 0.95,
        chunk: int = 1 << 20,
        cells: int | None = None,
        *,
        share_of_mean: float | None = None,
    ) -> None:
        """Marks the cells in which a field of any kind was observed to reach an opacity.

        The field is evaluated at one random point of each allowed cell, or of some of them; a cell's density is the
        highest value observed there, decayed at each call (Mueller et al. 2022, appendix E.2). Does not synchronise
        with the device, except in the first call after :meth:`restrict` or :meth:`exclude`.

        That appendix evaluates every cell in the first 256 steps of training. Later, it draws half of ``cells`` from
        all cells and half from the occupied ones, as nerfacc does with half as many as there are cells.

        Args:
            density: Maps world positions (M, 3) to densities (M,), per world unit, as float32, float16 or bfloat16.
            step: Distance between samples, world units.
            threshold: Opacity :math:`1 - e^{-density * step}` of one sample, above which a cell counts as occupied.
            decay: Factor applied to the earlier densities, in [0, 1].
            chunk: Number of cells per evaluation, to bound memory.
            cells: Number of allowed cells to draw, with replacement: the first half of them, rounded up, uniformly,
                and the others from the occupied ones, if there are any. None evaluates each allowed cell once.
            share_of_mean: As in :meth:`update_from_vertices`.

        Raises:
            TypeError: ``density`` does not return a tensor of such a dtype.
            ValueError: ``threshold`` is outside (0, 1), ``decay`` outside [0, 1], ``chunk`` or ``cells`` below 1, or
                ``share_of_mean`` not positive and finite, or ``density`` returns a tensor of another shape or device.
        """
        _check_thresholds(threshold, share_of_mean)
        check_fraction("decay", decay)
        for name, count in (("chunk", chunk), ("cells", cells)):
            if count is not None:
                check_at_least_one(name, count)
        if self._cells is None:
            self._cells = self.allowed.nonzero()
        extent = self.aabb[1] - self.aabb[0]
        size = torch.stack([extent[axis] / along for axis, along in enumerate(self.occupied.shape)])
        # After a non-finite density, a cell is occupied until the next update, but not permanently.
        self.density_ema_max.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).mul_(decay)
        highest = self.density_ema_max.view(-1)
        evaluated = self._cells if cells is None else self._draw(cells, self._cells)
        for part in evaluated.split(chunk):
            points = self.aabb[0] + (part + torch.rand(part.shape, device=part.device)) * size
            seen = density(points)
            check_result("density(points)", seen, (points.shape[0],), points)
            index = flat_indices(part, self.occupied.shape)
            if cells is None:
                highest[index] = torch.maximum(highest[index], seen.float())
            else:  # a cell may have been drawn more than once
                highest.scatter_reduce_(0, index, seen.float(), "amax")
        self._occupy(self._reaches(self.density_ema_max, step, threshold, share_of_mean), self.aabb)

    def _reaches(self, density: Tensor, step: float, threshold: float, share_of_mean: float | None) -> Tensor:
        """Returns where one sample may exceed the threshold's opacity, which includes all non-finite densities."""
        opacity = -torch.expm1(-density.float() * step)
        if share_of_mean is None:
            return ~(opacity <= threshold)
        counted = self.occupied & opacity.isfinite()
        # A sum of integers does not depend on their order, so all processes find the same mean of the same opacities.
        units = (torch.where(counted, opacity, 0) * _UNITS).int().sum()
        mean = (units.double() / (_UNITS * counted.sum().clamp(min=1))).float()
        return ~(opacity <= (share_of_mean * mean).clamp(_LOWEST_FRACTION * threshold, threshold))

    def _draw(self, count: int, allowed: Tensor) -> Tensor:
        """Draws allowed cells, half of them from the occupied ones; returns their indices (count, 3)."""
        if len(allowed) == 0:
            return allowed
        uniform = allowed[torch.randint(len(allowed), (count - count // 2,), device=allowed.device)]
        # The number of occupied cells is known only on the device.
        occupied = self.occupied & self.allowed
        ranks = torch.where(occupied.any(), occupied, self.allowed).view(-1).cumsum(0, dtype=torch.int32)
        drawn = torch.randint(1 << 62, (count // 2,), device=ranks.device) % ranks[-1]
        index = torch.searchsorted(ranks, drawn.int(), right=True)
        return torch.cat((uniform, torch.stack(cell_indices(index, occupied.shape), dim=-1)))

    def contains(self, points: Tensor) -> Tensor:
        """Returns which positions lie in an occupied cell.

        Args:
            points: (M, 3) world positions, on this grid's device.

        Returns:
            (M,) bool; False outside the box and for positions that are not finite.
        """
        low, high = self.aabb
        unit = (points - low) / (high - low)
        cells = torch.tensor(self.occupied.shape, device=unit.device)
        x, y, z = (unit.nan_to_num() * cells).long().clamp(cells.new_zeros(()), cells - 1).unbind(-1)
        return self.occupied[x, y, z] & ((unit >= 0) & (unit <= 1)).all(dim=-1)

    def fraction(self) -> float:
        """Returns the fraction of cells that are occupied; synchronises with the device."""
        return float(self.occupied.float().mean())

    def bounds(self) -> Tensor:
        """Returns the bounding box (2, 3) of the occupied cells, world units.

        Raises:
            RuntimeError: No cell is occupied.
        """
        if not bool(self.occupied.any()):
            raise RuntimeError("no cell is occupied: the field is empty everywhere")
        filled = [self.occupied.movedim(axis, 0).flatten(1).any(dim=1).nonzero() for axis in range(3)]
        corners = torch.cat([torch.cat((cells[:1], cells[-1:] + 1)) for cells in filled], dim=1).cpu()
        lower, upper = self.aabb.cpu()
        return lower + corners / torch.tensor(self.occupied.shape) * (upper - lower)

    def _occupy(self, occupied: Tensor, aabb: Tensor) -> None:
        """Sets the occupied cells and their box, in place, because a captured CUDA graph may read them."""
        self.occupied.copy_(occupied)
        self.aabb.copy_(aabb)
        for derived in (self._bits, self._empty_distance):
            if derived.wanted:
                derived.of(self.occupied)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OccupancyGrid:
        before = {"aabb": self.aabb, "density_ema_max": self.density_ema_max}
        super()._apply(fn, recurse)
        self._cells = None
        for name, buffer in before.items():
            if getattr(self, name).dtype != buffer.dtype:  # .half() must not round the geometry
                setattr(self, name, buffer.to(self.aabb.device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "occupied")
        if isinstance(saved, Tensor) and saved.dim() == 3 and saved.shape != self.occupied.shape:
            self.occupied = torch.ones_like(saved, device=self.occupied.device)
            self.allowed = torch.ones_like(self.occupied)
            self.density_ema_max = torch.zeros_like(self.occupied, dtype=torch.float32)
        self._cells = None
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Shows the geometry in ``print(module)``."""
        return f"resolution={tuple(self.occupied.shape)}"


def _packed_words(occupied: Tensor) -> Tensor:
    return ops.pack_occupancy(occupied).words


class _Derived:
    """A tensor derived from the cells: cached until they change, then recomputed into the same memory.

    Args:
        compute: Maps ``occupied`` to a tensor.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        self._compute = compute
        self._value: Tensor | None = None
        self._source: Tensor | None = None
        self._version: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Derived:
        # The version counter of copied cells starts anew, so it cannot tell whether the cached value is still valid.
        return _Derived(self._compute)

    @property
    def wanted(self) -> bool:
        """Whether the value has ever been requested."""
        return self._value is not None

    def of(self, occupied: Tensor) -> Tensor:
        """Returns the value for the present content of ``occupied``; a compiled graph recomputes it in each run."""
        if traces_ops():  # versions cannot be compared in a graph
            return self._compute(occupied)
        parallel = DistributedDataParallel._get_active_ddp_module()
        if parallel is not None and parallel.broadcast_buffers and not occupied.is_inference():
            # It has just overwritten the cells with the cells of process 0, without increasing their version.
            torch.autograd.graph.increment_version(occupied)
        version = None if occupied.is_inference() else occupied._version  # inference tensors have no version counter
        if self._value is None or self._source is not occupied or version is None or self._version != version:
            with torch.inference_mode(False):  # inference tensors cannot be written to outside inference mode
                fresh = self._compute(occupied)
            old = self._value
            if old is not None and old.shape == fresh.shape and old.device == fresh.device:
                old.copy_(fresh)
            else:
                self._value = fresh
            self._source, self._version = occupied, version
        assert self._value is not None
        return self._value


def _check_thresholds(threshold: float, share_of_mean: float | None) -> None:
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must lie in (0, 1), got {threshold}")
    if share_of_mean is not None and not 0 < share_of_mean < math.inf:
        raise ValueError(f"share_of_mean must be positive and finite, or None, got {share_of_mean}")


def occupied_points(field: Field, occupancy: OccupancyGrid, points: Tensor) -> Tensor:
    """Returns which world positions (M, 3) lie in occupied cells of the field's warp, (M,) bool; False outside."""
    return occupancy.contains(warped_points(field, points))


def occupied_density(field: Field, occupancy: OccupancyGrid, points: Tensor) -> Tensor:
    """Returns the density at world positions (M, 3), (M,) float32 per world unit, 0 where no cell is occupied."""
    return torch.where(occupied_points(field, occupancy, points), field.density(points), 0)
