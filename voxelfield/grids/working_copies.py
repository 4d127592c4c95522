"""Sampling as training wants it: from 16-bit copies, with gradients added to float32 sums in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from voxelfield import ops
from voxelfield.ops._grids import Padding
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

    Attributes:
        copies: One tensor for each grid, in its shape.

    Raises:
        TypeError: A grid is not float32, or ``dtype`` is none of the three.
    """

    def __init__(self, grids: Sequence[nn.Parameter], dtype: torch.dtype, reduce: Reduction = "concat") -> None:
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
        for index, grid in enumerate(grids):
            if grid.dtype != torch.float32:
                raise TypeError(f"grids[{index}] must be float32, got {grid.dtype}")
            grid.grad = torch.zeros_like(grid)
        self._grids = tuple(grids)
        self._reduce = reduce
        self.copies = [grid.detach().to(dtype) for grid in grids]

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the copies equal to the grids again."""
        for grid, copy in zip(self._grids, self.copies, strict=True):
            copy.copy_(grid)

    def sample(self, points: Tensor, padding: Padding) -> Tensor:
        """Samples all grids.

        Args:
            points: (N, 3) float32 in the unit cube; no gradient reaches them.
            padding: As for :func:`voxelfield.ops.sample_trilinear`.

        Returns:
            (N, sum of C_l), or (N, C) for sums, in the copies' dtype.

        Raises:
            NotImplementedError: A gradient in ``points`` is wanted.
        """
        if not torch.is_grad_enabled():
            return ops.sample_pyramid(self.copies, points, reduce=self._reduce, padding=padding)
        if points.requires_grad:
            raise NotImplementedError("fused sampling gives no gradient in the points; sample without it for that")
        sampled: Tensor = _Sample.apply(points, self._reduce, padding, self.copies, self._grids, *self._grids)
        return sampled


class _Sample(Function):
    @staticmethod
    def forward(
        ctx: Any,
        points: Tensor,
        reduce: Reduction,
        padding: Padding,
        copies: list[Tensor],
        owners: tuple[nn.Parameter, ...],
        *grids: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(points)
        ctx.reduce, ctx.padding, ctx.owners = reduce, padding, owners
        return ops.sample_pyramid(copies, points, reduce=reduce, padding=padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (points,) = ctx.saved_tensors
        for owner in ctx.owners:
            if owner.grad is None:  # zero_grad() was called since
                owner.grad = torch.zeros_like(owner)
        sums = [owner.grad for owner in ctx.owners]
        accumulate_trilinear_(sums, grad, points, reduce=ctx.reduce, padding=ctx.padding)
        return (None,) * (5 + len(ctx.owners))
