"""Sampling as training wants it: from 16-bit copies, with gradients added to float32 sums in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from voxelfield import ops
from voxelfield.grids.sparse_grid import SparseGrid
from voxelfield.ops._grids import Padding, known_stencil
from voxelfield.ops._internal.accumulate import accumulate_trilinear_
from voxelfield.ops.pyramid import Reduction


class WorkingCopies:
    """Reads working copies of float32 grids, and adds what comes back to the grids' own ``grad``.

    A training step then neither allocates nor clears a gradient, and moves half the bytes: the mixed precision of
    Micikevicius et al. 2018 (float32 masters, 16-bit copies) with the gradient accumulation fused into the backward
    pass. The optimizer is to update copies and clear ``grad`` (:class:`voxelfield.grids.adam.GridAdam` does both in its
    own pass); after any other change of the grids call :meth:`refresh`.

    Because ``grad`` changes during the backward pass itself, ``torch.autograd.grad`` returns nothing for these grids,
    hooks on them do not run, and derivatives end at the first.

    Args:
        grids: Parameters (X_l, Y_l, Z_l, C_l), float32; each gets a ``grad`` of zeros.
        dtype: Of the copies: float16, bfloat16, or float32 for the grids themselves.
        reduce: Whether samples of several grids lie side by side or are added up, as for
            :func:`voxelfield.ops.sample_pyramid`.
        sparse: The sparse grids whose features the last of ``grids`` are; their samples lie beside those of the others.

    Attributes:
        copies: One tensor for each grid, in its shape.

    Raises:
        TypeError: A grid is not float32, or ``dtype`` is none of the three.
    """

    def __init__(
        self,
        grids: Sequence[nn.Parameter],
        dtype: torch.dtype,
        reduce: Reduction = "concat",
        sparse: Sequence[SparseGrid] = (),
    ) -> None:
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
        for index, grid in enumerate(grids):
            if grid.dtype != torch.float32:
                raise TypeError(f"grids[{index}] must be float32, got {grid.dtype}")
            grid.grad = torch.zeros_like(grid)
        self._grids = tuple(grids)
        self._reduce = reduce
        self._sparse = tuple(sparse)
        self.copies = [grid.detach().to(dtype) for grid in grids]

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the copies equal to the grids again."""
        for grid, copy in zip(self._grids, self.copies, strict=True):
            copy.copy_(grid)

    def sample(self, points: Tensor, padding: Padding) -> Tensor:
        """Samples all grids.

        Args:
            points: (N, 3) float32 in the unit cube. Differentiable once.
            padding: As for :func:`voxelfield.ops.sample_trilinear`.

        Returns:
            (N, sum of C_l), or (N, C) for sums, in the copies' dtype.
        """
        if not torch.is_grad_enabled():
            return sample_levels(self.copies, self._sparse, points, self._reduce, padding)
        if points.requires_grad and self._sparse:
            raise NotImplementedError("sparse levels give no gradient in the points, which must not require one")
        sampled: Tensor = _Sample.apply(
            points, self._reduce, padding, self.copies, self._sparse, self._grids, *self._grids
        )
        return sampled


def sample_levels(
    levels: Sequence[Tensor], sparse: Sequence[SparseGrid], points: Tensor, reduce: Reduction, padding: Padding
) -> Tensor:
    """Samples grids of which the last ones may be sparse.

    Args:
        levels: The dense grids' features, then the sparse ones' atlases, or copies of these.
        sparse: The sparse grids.
        points: (N, 3) float32 in the unit cube; no gradient reaches them from sparse grids.
        reduce: Of the dense grids; as for :func:`voxelfield.ops.sample_pyramid`.
        padding: Of the dense grids; as for :func:`voxelfield.ops.sample_trilinear`.

    Returns:
        (N, C): the samples of the dense grids, and beside them those of each sparse one.
    """
    dense = len(levels) - len(sparse)
    sampled = ops.sample_pyramid(levels[:dense], points, reduce=reduce, padding=padding)
    if not sparse:
        return sampled
    beside = [
        ops.sample_trilinear(atlas, grid.places(points)) for atlas, grid in zip(levels[dense:], sparse, strict=True)
    ]
    return torch.cat((sampled, *beside), dim=-1)


class _Sample(Function):
    @staticmethod
    def forward(
        ctx: Any,
        points: Tensor,
        reduce: Reduction,
        padding: Padding,
        copies: list[Tensor],
        sparse: tuple[SparseGrid, ...],
        owners: tuple[nn.Parameter, ...],
        *grids: Tensor,
    ) -> Tensor:
        # Copies are not saved by autograd: the optimizer changes them in place, but not before the backward pass.
        ctx.save_for_backward(points)
        ctx.reduce, ctx.padding, ctx.sparse, ctx.owners, ctx.copies = reduce, padding, sparse, owners, copies
        return sample_levels(copies, sparse, points, reduce, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (points,) = ctx.saved_tensors
        of_points = None
        if ctx.needs_input_grad[0]:
            stencil = known_stencil(ctx.padding, True, "linear", ctx.reduce == "sum", False)
            of_points = stencil.point_gradient(grad, ctx.copies, points, None)
        if any(ctx.needs_input_grad[6:]):
            _accumulate(ctx.owners, ctx.sparse, grad, points, ctx.reduce, ctx.padding)
        return (of_points, *(None,) * (5 + len(ctx.owners)))


def _accumulate(
    owners: tuple[nn.Parameter, ...],
    sparse: tuple[SparseGrid, ...],
    values: Tensor,
    points: Tensor,
    reduce: Reduction,
    padding: Padding,
) -> None:
    """Adds the gradient in the grids to their own."""
    sums = []
    for owner in owners:
        if owner.grad is None:  # zero_grad() was called since
            owner.grad = torch.zeros_like(owner)
        sums.append(owner.grad)
    dense = len(sums) - len(sparse)
    column = values.shape[-1] - sum(grid.channels for grid in sparse)
    accumulate_trilinear_(sums[:dense], values[:, :column], points, reduce=reduce, padding=padding)
    for grid, total in zip(sparse, sums[dense:], strict=True):
        accumulate_trilinear_([total], values[:, column : column + grid.channels], grid.places(points))
        column += grid.channels
