"""Working copies for training: sampling reads 16-bit copies, and gradients are added in place to float32 tensors."""

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
    """Samples working copies of float32 grids, and accumulates gradients in the grids' own ``grad``.

    A training step then neither allocates nor clears a gradient, and moves half the bytes: the mixed precision of
    Micikevicius et al. 2018 (float32 masters, 16-bit copies) with the gradient accumulation fused into the backward
    pass. The optimizer must update the copies and clear ``grad`` (:class:`voxelfield.grids.adam.GridAdam` does both in
    its own pass); call :meth:`refresh` after any other change of the grids.

    Because ``grad`` is changed during the backward pass itself, ``torch.autograd.grad`` returns nothing for these
    grids, their hooks do not run, and second derivatives are not available.

    Args:
        grids: Parameters (X_l, Y_l, Z_l, C_l), float32; each gets a ``grad`` of zeros.
        dtype: Dtype of the copies: float16, bfloat16, or float32 for the grids themselves.
        reduce: Whether samples of several grids are concatenated or summed, as for
            :func:`voxelfield.ops.sample_pyramid`.
        sparse: The sparse grids whose features are the last of ``grids``; their samples are concatenated to the others.

    Attributes:
        copies: One tensor for each grid, of the same shape.

    Raises:
        TypeError: A grid is not float32, or ``dtype`` is not one of the three.
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
        """Copies the grids into the copies."""
        for grid, copy in zip(self._grids, self.copies, strict=True):
            copy.copy_(grid)

    def sample(self, points: Tensor, padding: Padding) -> Tensor:
        """Samples all grids.

        Args:
            points: (N, 3) float32 in the unit cube. Differentiable once.
            padding: As for :func:`voxelfield.ops.sample_trilinear`.

        Returns:
            (N, sum of C_l), or (N, C) for ``reduce="sum"``, in the copies' dtype.
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
    """Samples grids, the last of which may be sparse.

    Args:
        levels: The dense grids' features, then the sparse grids' atlases, or copies of these.
        sparse: The sparse grids.
        points: (N, 3) float32 in the unit cube; sparse grids give them no gradient.
        reduce: How the dense grids are combined, as for :func:`voxelfield.ops.sample_pyramid`.
        padding: Padding of the dense grids, as for :func:`voxelfield.ops.sample_trilinear`.

    Returns:
        (N, C): the samples of the dense grids, followed by those of each sparse one.
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
        # Not saved through autograd: the optimizer changes the copies in place, though only after the backward pass.
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
    """Adds the gradients with respect to the grids to their ``grad``."""
    sums = []
    for owner in owners:
        if owner.grad is None:  # zero_grad() was called in the meantime
            owner.grad = torch.zeros_like(owner)
        sums.append(owner.grad)
    dense = len(sums) - len(sparse)
    column = values.shape[-1] - sum(grid.channels for grid in sparse)
    accumulate_trilinear_(sums[:dense], values[:, :column], points, reduce=reduce, padding=padding)
    for grid, total in zip(sparse, sums[dense:], strict=True):
        accumulate_trilinear_([total], values[:, column : column + grid.channels], grid.places(points))
        column += grid.channels
