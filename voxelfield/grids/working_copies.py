"""Samples of several grids, and working copies of these for training.

Sampling then reads 16-bit copies, and gradients are added in place to float32 tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from voxelfield import ops
from voxelfield.foundation.autograd import needs_long_path
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError
from voxelfield.grids.sparse_grid import SparseGrid
from voxelfield.ops._derivatives import PointGradient
from voxelfield.ops._grids import Padding, Reduction, grid_options, grid_stencil, joined
from voxelfield.ops._internal.stencil import accumulate_trilinear_

_ALL = [slice(None)]


@dataclass(frozen=True)
class Combination:
    """How the features of several levels are combined at a sample.

    Attributes:
        reduce: ``"concat"`` or ``"sum"``, as for :func:`voxelfield.ops.sample_pyramid`.
        channels: For each level of a sum, the rising numbers of the features to which it adds, or None if it has all of
            them, as the first level must. Empty if all levels have all.
    """

    reduce: Reduction = "concat"
    channels: tuple[tuple[int, ...] | None, ...] = ()

    def sample(self, levels: Sequence[Tensor], points: Tensor, padding: Padding) -> Tensor:
        """Samples the first levels (X_l, Y_l, Z_l, C_l), as :func:`voxelfield.ops.sample_pyramid` does."""
        (first, _), *others = self._groups(len(levels))
        sampled = ops.sample_pyramid(levels[first], points, reduce=self.reduce, padding=padding)
        for part, columns in others:
            dtype = levels[part][0].dtype
            if dtype != sampled.dtype:
                raise ArgumentTypeError(f"levels must be of one dtype, got {sampled.dtype} and {dtype}")
            values = ops.sample_pyramid(levels[part], points, reduce="sum", padding=padding)
            widths = [sampled[:, column].shape[1] for column in columns]
            for column, more in zip(columns, values.split(widths, dim=1), strict=True):
                # Not in place: a frozen coarse level, or one that torch.func does not transform, could not be written.
                total = sampled[:, column] + more
                sampled = torch.slice_scatter(sampled, total, 1, column.start, column.stop, column.step or 1)
        return sampled

    def accumulate(
        self,
        sums: Sequence[Tensor],
        values: Tensor,
        points: Tensor,
        padding: Padding,
        slabs: Sequence[tuple[int, int]] | None,
    ) -> None:
        """Adds the gradients ``values`` of :meth:`sample` to ``sums``, or to slabs of these.

        Arguments are as for :func:`voxelfield.ops._internal.stencil.accumulate_trilinear_`.
        """
        for part, columns in self._groups(len(sums)):
            some = slabs and slabs[part]
            taken = _taken(values, columns)
            accumulate_trilinear_(sums[part], taken, points, reduce=self.reduce, padding=padding, slabs=some)

    def point_gradient(self, levels: Sequence[Tensor], values: Tensor, points: Tensor, padding: Padding) -> Tensor:
        """Returns the gradient of the points (N, 3), given the gradient of :meth:`sample`."""
        stencil = grid_stencil(*grid_options(padding, True, "linear", self.reduce == "sum", False))
        gradients = [
            PointGradient.forward(stencil, None, _taken(values, columns), points, *levels[part])
            for part, columns in self._groups(len(levels))
        ]
        return sum(gradients[1:], start=gradients[0])

    def _groups(self, levels: int) -> Iterator[tuple[slice, list[slice]]]:
        """Yields consecutive levels with the same channels, and the columns of a sample for these channels."""
        begin = 0
        for channels, same in groupby(self.channels[:levels] or (None,) * levels):
            end = begin + len(list(same))
            yield slice(begin, end), _ALL if channels is None else _progressions(channels)
            begin = end


def _progressions(numbers: Sequence[int]) -> list[slice]:
    """Returns rising numbers as arithmetic progressions; an index tensor could not be copied during graph capture."""
    found: list[slice] = []
    start = 0
    while start < len(numbers):
        end, step = start + 1, 1
        if end < len(numbers):
            step = numbers[end] - numbers[start]
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        found.append(slice(numbers[start], numbers[end - 1] + 1, step))
        start = end
    return found


def _taken(values: Tensor, columns: list[slice]) -> Tensor:
    return values if columns is _ALL else joined([values[:, column] for column in columns])


def copies_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of the grids' working copies: float16 on CUDA with a 16-bit ``trainer.precision``."""
    return torch.float16 if device.type == "cuda" and precision != "float32" else torch.float32


class WorkingCopies:
    """Samples working copies of float32 grids, and accumulates gradients in the grids' own ``grad``.

    A training step then neither allocates nor clears a gradient, and moves half the bytes: the mixed precision of
    Micikevicius et al. 2018 (float32 masters, 16-bit copies) with the gradient accumulation fused into the backward
    pass. :class:`voxelfield.grids.adam.GridAdam` updates the copies and clears ``grad`` in its own pass.

    Copies are refreshed before they are read if a grid was changed in another way: in place, as its version counter
    shows; by a new tensor in ``data``; or possibly by an optimizer, because a backward pass has accumulated gradients
    and no GridAdam updates the copies (torch's fused optimizers do not advance version counters). This cannot show that
    ``grid.data`` itself was changed in place; call :meth:`refresh` after that.

    Because ``grad`` is changed during the backward pass itself, ``torch.autograd.grad`` and tensor hooks of the grids
    are refused, and so are second derivatives. Hooks after the accumulation, such as those by which
    ``DistributedDataParallel`` reduces gradients, see them.

    A graph that is compiled by ``torch.compile``, and a function that ``torch.func`` or forward-mode differentiation
    transforms, sample the grids themselves and round the result.

    Copying or pickling this object makes copies of the copied or unpickled grids.

    Args:
        grids: Parameters (X_l, Y_l, Z_l, C_l), float32.
        dtype: Dtype of the copies: float16, bfloat16, or float32 for the grids themselves.
        combination: How samples of several grids are put together.
        sparse: The sparse grids whose features are the last of ``grids``; their samples are concatenated to the others.

    Attributes:
        copies: One tensor for each grid, of the same shape. Read them by :meth:`current`.
        division: The :class:`voxelfield.distributed.division.DividedGrids` that divides the grids over processes: it
            keeps the copies up to date and adds up the gradients. None where the grids are whole.

    Raises:
        TypeError: A grid is not a float32 parameter, or ``dtype`` is not one of the three.
    """

    def __init__(
        self,
        grids: Sequence[nn.Parameter],
        dtype: torch.dtype,
        combination: Combination = Combination(),
        sparse: Sequence[SparseGrid] = (),
    ) -> None:
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
        self.grids = tuple(grids)
        self.dtype = dtype
        self.combination = combination
        self.sparse = tuple(sparse)
        self.copies: list[Tensor] = []
        self.division: Any = None
        self._may_change = False  # whether an optimizer may have changed the grids since the copies were last read
        with torch.inference_mode(False):  # inference tensors cannot be written to outside inference mode
            self.refresh()

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkingCopies, (self.grids, self.dtype, self.combination, self.sparse)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the grids into the copies."""
        for index, grid in enumerate(self.grids):
            if not isinstance(grid, nn.Parameter):
                raise TypeError(f"grids[{index}] must be a parameter, got a tensor computed from others")
            if grid.dtype != torch.float32:
                raise TypeError(f"grids[{index}] must be float32, got {grid.dtype}")
        # These share the grids' memory and prevent its release, so other memory has another address.
        self._sources = [grid.detach() for grid in self.grids]
        self._addresses = [source.data_ptr() for source in self._sources]
        previous, self.copies[:] = list(self.copies), self._sources
        if self.dtype == torch.float32:
            return
        for index, source in enumerate(self._sources):
            copy = previous[index] if previous else None
            if copy is not None and copy.shape == source.shape and copy.device == source.device:
                self.copies[index] = copy.copy_(source)
            else:
                self.copies[index] = source.to(self.dtype)
            mark_current(self.copies[index], source)

    @property
    def channels(self) -> int:
        """Number of features of a sample."""
        dense = [grid.shape[3] for grid in self.grids[: len(self.grids) - len(self.sparse)]]
        summed = dense[:1] if self.combination.reduce == "sum" else dense
        return sum(summed) + sum(grid.channels for grid in self.sparse)

    def forget_grids(self) -> None:
        """Lets the memory of the grids go, where a division keeps the copies up to date."""
        self._sources.clear()

    def current(self, grids: Sequence[Tensor]) -> list[Tensor]:
        """Returns the copies of the module's present grids, refreshed if one has changed; does not synchronise."""
        if len(grids) != len(self.grids) or any(map(operator.is_not, grids, self.grids)):
            raise ArgumentValueError(
                "features must be the parameters that enable_copies copied, got others (fully_shard, functional_call, "
                "parametrizations and pruning replace them): do not call enable_copies for such a module"
            )
        if self.division is not None:
            return self.copies
        if self._may_change:
            for copy in self.copies:
                if not vars(copy).get("managed"):
                    vars(copy)["version_of_grid"] = None
            self._may_change = False
        rounded = self.dtype != torch.float32
        for grid, address, copy in zip(self.grids, self._addresses, self.copies, strict=True):
            if grid.data_ptr() != address or (rounded and not is_current(copy, grid)):
                break
        else:
            return self.copies
        if self.grids[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "copies must be up to date while a graph is captured, got features that have changed: pass the copies "
                "to GridAdam.set_working, or call refresh_copies() (inside of the graph if an optimizer steps there)"
            )
        self.refresh()
        return self.copies

    def sample(self, grids: Sequence[Tensor], points: Tensor, padding: Padding) -> Tensor:
        """Samples the module's present grids at points (N, 3) float32, in the copies' dtype; differentiable once."""
        if needs_long_path():
            self._may_change = self._may_change or torch.is_grad_enabled()
            return sample_levels(grids, self.sparse, points, self.combination, padding).to(self.dtype)
        self.current(grids)
        if not torch.is_grad_enabled():
            return self.read(points, padding)
        return _Sample.apply(points, self, padding, *self.grids)

    def read(self, points: Tensor, padding: Padding) -> Tensor:
        """Samples the copies as they are; arguments as for :meth:`sample`."""
        return sample_levels(self.copies, self.sparse, points, self.combination, padding)

    def point_gradient(self, copies: Sequence[Tensor], values: Tensor, points: Tensor, padding: Padding) -> Tensor:
        """Returns the gradient of the points (N, 3), given the gradient of samples of these copies."""
        dense = len(copies) - len(self.sparse)
        column = values.shape[-1] - sum(grid.channels for grid in self.sparse)
        total = self.combination.point_gradient(copies[:dense], values[:, :column], points, padding)
        stencil = grid_stencil(*grid_options("border", True, "linear", False, False))
        for copy, grid in zip(copies[dense:], self.sparse, strict=True):
            part = values[:, column : column + grid.channels].contiguous()
            slopes = grid.atlas_slopes(points)
            total = total + slopes * PointGradient.forward(stencil, None, part, grid.atlas_positions(points), copy)
            column += grid.channels
        return total

    def accumulate(self, wanted: Sequence[bool], values: Tensor, points: Tensor, padding: Padding) -> None:
        """Adds the gradients of samples to the ``grad`` of those grids whose gradient is wanted."""
        slabs: list[tuple[int, int]] | None = None
        samples: Iterable[Sequence[Tensor]] = [(values, points)]
        if self.division is not None:
            samples = self.division.receive([values, points])
            sums, slabs = self.division.targets()
            sums = [total if wants else torch.zeros_like(total) for total, wants in zip(sums, wanted, strict=True)]
        else:
            sums = [
                _sum_of(grid) if wants else torch.zeros_like(grid)
                for grid, wants in zip(self.grids, wanted, strict=True)
            ]
        dense = len(sums) - len(self.sparse)
        for some_values, some_points in samples:
            self.combination.accumulate(sums[:dense], some_values, some_points, padding, slabs and slabs[:dense])
            column = values.shape[-1] - sum(grid.channels for grid in self.sparse)
            for index, grid in enumerate(self.sparse, dense):
                part, positions = slabs and slabs[index : index + 1], grid.atlas_positions(some_points)
                accumulate_trilinear_([sums[index]], some_values, positions, slabs=part, column=column)
                column += grid.channels
        self._may_change = True


# The version of the grid that was copied, and whether a GridAdam updates the copy, are attributes of the copy, because
# it is all that the optimizer and the modules have in common.


def mark_current(copy: Tensor, grid: Tensor) -> None:
    """Records that a copy has the present values of its grid."""
    vars(copy)["version_of_grid"] = grid._version


def is_current(copy: Tensor, grid: Tensor) -> bool:
    """Returns whether a copy is known to have the present values of its grid."""
    return vars(copy).get("version_of_grid") == grid._version


def mark_managed(copy: Tensor, managed: bool) -> None:
    """Records whether a GridAdam updates a copy."""
    vars(copy)["managed"] = managed


def sample_levels(
    levels: Sequence[Tensor], sparse: Sequence[SparseGrid], points: Tensor, combination: Combination, padding: Padding
) -> Tensor:
    """Samples the dense grids' features, followed by the sparse grids' atlases, or copies of these.

    ``combination`` and ``padding`` apply to the dense grids.
    """
    dense = len(levels) - len(sparse)
    sampled = [combination.sample(levels[:dense], points, padding)]
    for atlas, grid in zip(levels[dense:], sparse, strict=True):
        sampled.append(ops.sample_trilinear(atlas, grid.atlas_positions(points)))
    return joined(sampled) if sparse else sampled[0]


class _Sample(Function):
    @staticmethod
    def forward(ctx: Any, points: Tensor, owner: WorkingCopies, padding: Padding, *grids: nn.Parameter) -> Tensor:
        # Only the gradient of the points reads the copies, which must then not have changed.
        ctx.save_for_backward(points, *(owner.copies if ctx.needs_input_grad[0] else ()))
        ctx.owner, ctx.padding = owner, padding
        return owner.read(points, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        points, *copies = ctx.saved_tensors
        of_points = None
        if ctx.needs_input_grad[0]:
            of_points = ctx.owner.point_gradient(copies, grad, points, ctx.padding)
        wanted = [_is_wanted(accumulator) for accumulator, _ in ctx.next_functions[1:]]
        if any(wanted):
            ctx.owner.accumulate(wanted, grad, points, ctx.padding)
        return (of_points, *(None,) * (2 + len(wanted)))


def _is_wanted(accumulator: Any) -> bool:
    """Returns whether the present backward pass accumulates the gradient of a parameter, given its autograd node."""
    if accumulator is None:  # the parameter requires no gradient
        return False
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:  # raised for leaves in torch.autograd.grad
        raise NotImplementedError(
            "torch.autograd.grad cannot return gradients of features with copies (enable_copies), which are added to "
            "their grad: call backward()"
        ) from None


def _sum_of(grid: nn.Parameter) -> Tensor:
    """Returns the tensor to which the gradient of a grid is added."""
    if grid._backward_hooks:
        raise NotImplementedError(
            "features with copies (enable_copies) must have no tensor hooks, which would not see their gradient: use "
            "register_post_accumulate_grad_hook"
        )
    if grid.grad is None:  # zero_grad() was called in the meantime
        grid.grad = torch.zeros_like(grid)
    return grid.grad
