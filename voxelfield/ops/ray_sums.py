"""Sums of values over the samples of packed rays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from voxelfield import _library
from voxelfield.ops._autograd import MaybeTensor, below_autograd, register_autograd
from voxelfield.ops._checks import FLOATING, check_dtype, check_ray_offsets, check_same_device, check_tensor


def sum_along_rays(values: Tensor, ray_offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Adds up values along each ray: :math:`\sum_i w_i v_i`, such as normals or features with :func:`ray_weights`.

    Sums have a fixed order, so that every run returns the same bits. Differentiable any number of times, in both modes;
    ``torch.vmap`` maps over ``values`` and ``weights``.

    Args:
        values: (M,) or (M, C), float32, float64, float16 or bfloat16; differentiable.
        ray_offsets: (R + 1,) int64, as for :func:`composite`. Rows that belong to no ray are ignored.
        weights: (M,), differentiable; None for ones. Weights that are not float64 go with values that are not.

    Returns:
        (R,) or (R, C), float64 for float64 values and float32 for all others, in which sums are computed. A ray without
        samples gets zeros.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device; or, on the CPU, ``ray_offsets`` fall or leave 0..M.
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"values must be a torch.Tensor, got {type(values).__name__}")
    check_tensor("values", values, ("M",) if values.dim() == 1 else ("M", "C"))
    check_dtype("values", values, FLOATING)
    count = values.shape[0]
    check_ray_offsets(ray_offsets, count, "values", values)
    values = widen(values)
    if weights is not None:
        check_tensor("weights", weights, (count,), " as values has rows")
        check_dtype("weights", weights, FLOATING)
        weights = widen(weights)
        check_dtype("weights", weights, (values.dtype,), " as values is, or 16-bit")
        check_same_device("weights", weights, "values", values)
    _library.ensure_loaded(values.device.type)
    rows = values[:, None] if values.dim() == 1 else values
    if weights is not None:
        rows = rows * weights[:, None]
    sums = total(rows, ray_offsets)
    return sums[:, 0] if values.dim() == 1 else sums


def widen(x: Tensor) -> Tensor:
    """Returns 16-bit numbers as float32, and others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def total(values: Tensor, ray_offsets: Tensor) -> Tensor:
    """Returns the sum (R, C) of each ray's rows of (M, C)."""
    if torch.compiler.is_compiling():
        return _kernels().sum_along_rays.default(values, ray_offsets)
    sums: Tensor = _Total.apply(values, ray_offsets)
    return sums


def total_ahead(values: Tensor, ray_offsets: Tensor) -> Tensor:
    """Returns for each row of (M, C) the sum of the rows before it on its ray; zeros for rows of no ray."""
    if torch.compiler.is_compiling():
        return _kernels().exclusive_sum_along_rays.default(values, ray_offsets)
    sums: Tensor = _TotalAhead.apply(values, ray_offsets)
    return sums


def spread(values: Tensor, ray_offsets: Tensor, samples: int) -> Tensor:
    """Returns for each sample its ray's row of (R, C); zeros for samples of no ray."""
    rows: Tensor = _Spread.apply(values, ray_offsets, samples)
    return rows


def _kernels() -> Any:
    return torch.ops.voxelfield


class _AlongRays(Function):
    """An op that is linear in values (N, C) and independent per column: a mapped dimension becomes more columns."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, ray_offsets, *_ = inputs
        ctx.rows = values.shape[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ray_offsets)
        ctx.save_for_forward(ray_offsets)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], values: Tensor, *others: Any) -> tuple[Tensor, int]:
        if in_dims[1] is not None:
            raise NotImplementedError("sum_along_rays cannot be mapped over ray_offsets by torch.vmap: map over values")
        values = values.movedim(in_dims[0], 2)
        return cls.apply(values.flatten(1), *others).unflatten(1, values.shape[1:]), 2


class _Total(_AlongRays):
    @staticmethod
    def forward(values: Tensor, ray_offsets: Tensor) -> Tensor:
        with below_autograd():
            sums: Tensor = _kernels().sum_along_rays.default(values, ray_offsets)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor) -> tuple[MaybeTensor, None]:
        (ray_offsets,) = ctx.saved_tensors
        return None if grad is None else spread(grad, ray_offsets, ctx.rows), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return total(tangent, *ctx.saved_tensors)


class _Spread(_AlongRays):
    @staticmethod
    def forward(values: Tensor, ray_offsets: Tensor, samples: int) -> Tensor:
        with below_autograd():
            rows: Tensor = _kernels().spread_along_rays.default(values, ray_offsets, samples)
        return rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _AlongRays.setup_context(ctx, inputs, output)
        ctx.samples = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor) -> tuple[MaybeTensor, None, None]:
        return None if grad is None else total(grad, *ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (ray_offsets,) = ctx.saved_tensors
        return spread(tangent, ray_offsets, ctx.samples)


class _TotalAhead(_AlongRays):
    @staticmethod
    def forward(values: Tensor, ray_offsets: Tensor) -> Tensor:
        with below_autograd():
            sums: Tensor = _kernels().exclusive_sum_along_rays.default(values, ray_offsets)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor) -> tuple[MaybeTensor, None]:
        if grad is None:
            return None, None
        (ray_offsets,) = ctx.saved_tensors
        # The sum over the samples behind each one. Rows of no ray contribute nothing and receive zeros.
        everything = spread(total(grad, ray_offsets), ray_offsets, ctx.rows)
        ones = grad.new_ones(ray_offsets.shape[0] - 1, grad.shape[1])
        on_rays = spread(ones, ray_offsets, ctx.rows)
        return everything - on_rays * grad - total_ahead(grad, ray_offsets), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return total_ahead(tangent, *ctx.saved_tensors)


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::sum_along_rays")
    def _(values: Tensor, ray_offsets: Tensor) -> Tensor:
        return values.new_empty(ray_offsets.shape[0] - 1, values.shape[1])

    @torch.library.register_fake("voxelfield::exclusive_sum_along_rays")
    def _(values: Tensor, ray_offsets: Tensor) -> Tensor:
        return values.new_empty(values.shape)

    @torch.library.register_fake("voxelfield::spread_along_rays")
    def _(values: Tensor, ray_offsets: Tensor, samples: int) -> Tensor:
        return values.new_empty(samples, values.shape[1])

    register_autograd("sum_along_rays", _Total.apply)
    register_autograd("exclusive_sum_along_rays", _TotalAhead.apply)
    register_autograd("spread_along_rays", _Spread.apply)
