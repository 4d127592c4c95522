"""Sums, running sums and running products of values along packed rays."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from voxelfield.foundation.autograd import MaybeTensor, OpFunction
from voxelfield.foundation.checks import (
    FLOATING,
    NARROW,
    check_dtype,
    check_field,
    check_ray_offsets,
    check_same_device,
    check_tensor,
)
from voxelfield.ops._table import declare, run_raw


def sum_along_rays(values: Tensor, ray_offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Adds up values along each ray: :math:`\sum_i w_i v_i`, such as normals or features with :func:`ray_weights`.

    Sums have a fixed order, so that every run returns the same bits. Differentiable any number of times, in both modes;
    ``torch.vmap`` maps over ``values`` and ``weights``.

    Args:
        values: (M,) or (M, C), float32, float64, float16 or bfloat16; differentiable.
        ray_offsets: (R + 1,) int64 or int32, as for :func:`composite`. Rows that belong to no ray are ignored.
        weights: (M,), differentiable; None for ones. Weights that are not float64 go with values that are not.

    Returns:
        (R,) or (R, C), float64 for float64 values and float32 for all others, in which sums are computed. A ray without
        samples gets zeros.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device; or, on the CPU, ``ray_offsets`` fall or leave 0..M.
    """
    rows, ray_offsets = _checked_rows(values, ray_offsets)
    if weights is not None:
        check_tensor("weights", weights, (rows.shape[0],), " as values has rows")
        check_dtype("weights", weights, FLOATING)
        weights = widen(weights)
        check_dtype("weights", weights, (rows.dtype,), " as values is, or 16-bit")
        check_same_device("weights", weights, "values", values)
        rows = rows * weights[:, None]
    sums = total(rows, ray_offsets)
    return sums[:, 0] if values.dim() == 1 else sums


def inclusive_sum(values: Tensor, ray_offsets: Tensor) -> Tensor:
    r"""Sums up to each sample of its ray: :math:`\sum_{j \le i} v_j`.

    The order of summation is fixed. Differentiable any number of times, in both modes; ``torch.vmap`` maps over
    ``values``.

    Args:
        values: (M,) or (M, C), float32, float64, float16 or bfloat16; differentiable.
        ray_offsets: (R + 1,) int64 or int32, as for :func:`composite`. Rows that belong to no ray get zeros.

    Returns:
        The shape of ``values``, float64 for float64 values and float32 for all others, in which sums are computed.

    Errors are those of :func:`sum_along_rays`.
    """
    return _scan_values(values, ray_offsets, INCLUSIVE, product=False)


def exclusive_sum(values: Tensor, ray_offsets: Tensor) -> Tensor:
    r"""Sums over the samples before each one on its ray: :math:`\sum_{j < i} v_j`, 0 for the first.

    Arguments, result and errors are those of :func:`inclusive_sum`.
    """
    return _scan_values(values, ray_offsets, EXCLUSIVE, product=False)


def inclusive_prod(values: Tensor, ray_offsets: Tensor) -> Tensor:
    r"""Multiplies up to each sample of its ray: :math:`\prod_{j \le i} v_j`.

    Derivatives are computed without dividing by values, so they are right where values are zero. Arguments, result and
    errors are those of :func:`inclusive_sum`.
    """
    return _scan_values(values, ray_offsets, INCLUSIVE, product=True)


def exclusive_prod(values: Tensor, ray_offsets: Tensor) -> Tensor:
    r"""Multiplies the samples before each one on its ray: :math:`\prod_{j < i} v_j`, 1 for the first.

    With ``1 - alpha`` as values, this is the transmittance. Derivatives, arguments, result and errors are those of
    :func:`inclusive_prod`.
    """
    return _scan_values(values, ray_offsets, EXCLUSIVE, product=True)


def _scan_values(values: Tensor, ray_offsets: Tensor, form: int, *, product: bool) -> Tensor:
    rows, ray_offsets = _checked_rows(values, ray_offsets)
    scanned = scan(None, rows, ray_offsets, form) if product else scan(rows, None, ray_offsets, form)
    return scanned[:, 0] if values.dim() == 1 else scanned


def _checked_rows(values: Tensor, ray_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Checks the arguments of a public function.

    Returns:
        The values as (M, C), widened if they are 16-bit, and the offsets as int64.
    """
    check_field("values", values, ("M", "C") if isinstance(values, Tensor) and values.dim() != 1 else ("M",), FLOATING)
    ray_offsets = check_ray_offsets(ray_offsets, values.shape[0], "values", values)
    rows = widen(values)
    return rows[:, None] if rows.dim() == 1 else rows, ray_offsets


def widen(x: Any) -> Any:
    """Returns 16-bit numbers as float32, and anything else as it is."""
    return x.float() if isinstance(x, Tensor) and x.dtype in NARROW else x


# The forms of a scan, as in extension/volume/ray_sums_ops.h.
EXCLUSIVE, INCLUSIVE, TRANSPOSED = 0, 1, 2


def scan(values: MaybeTensor, factors: MaybeTensor, ray_offsets: Tensor, form: int, reverse: bool = False) -> Tensor:
    r"""Returns the recurrence :math:`y_i = v_i + f_i y_{i-1}` along each ray, from its first sample or its last one.

    Without factors it is a sum, which begins with 0. Without values it is a product, which begins with 1.

    Args:
        values: (M, C), or None for zeros.
        factors: (M, C), or None for ones.
        ray_offsets: (R + 1,).
        form: ``EXCLUSIVE``: :math:`y_{i-1}`. ``INCLUSIVE``: :math:`y_i`. ``TRANSPOSED``:
            :math:`y_i = v_i + f_{i-1} y_{i-1}`, which in the other direction is the adjoint of ``INCLUSIVE``.
        reverse: Whether the scan begins with the last sample.

    Returns:
        (M, C); zeros for rows of no ray.
    """
    return _scan_along_rays(values, factors, ray_offsets, form, reverse)


class _AlongRays(OpFunction):
    """An op that is linear in values (N, C) and independent per column: a mapped dimension becomes more columns."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, ray_offsets, *ctx.samples = inputs
        ctx.rows = values.shape[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ray_offsets)
        ctx.save_for_forward(ray_offsets)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], values: Tensor, *others: Any) -> tuple[Tensor, int]:
        _refuse_mapped_offsets(in_dims[1])
        values = values.movedim(in_dims[0], 2)
        return cls.apply(values.flatten(1), *others).unflatten(1, values.shape[1:]), 2


class _Total(_AlongRays):
    forward = run_raw("sum_along_rays")

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor) -> tuple[MaybeTensor, None]:
        return None if grad is None else spread(grad, *ctx.saved_tensors, ctx.rows), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return total(tangent, *ctx.saved_tensors)


class _Spread(_AlongRays):
    forward = run_raw("spread_along_rays")

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor) -> tuple[MaybeTensor, None, None]:
        return None if grad is None else total(grad, *ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return spread(tangent, *ctx.saved_tensors, *ctx.samples)


class _Scan(OpFunction):
    """:func:`scan` as a Function: its derivatives are scans."""

    forward = run_raw("scan_along_rays")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, factors, ray_offsets, ctx.form, ctx.reverse = inputs
        ctx.set_materialize_grads(False)
        # Of a sum, only the shape matters.
        saved = ray_offsets, factors, None if factors is None else values
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor) -> tuple[MaybeTensor, ...]:
        if grad is None:
            return (None,) * 5
        ray_offsets, factors, values = ctx.saved_tensors
        form, back = ctx.form, not ctx.reverse
        of_values = scan(grad, factors, ray_offsets, _ADJOINT[form], back)
        if factors is None:
            return of_values, None, None, None, None
        of_factors = None
        if ctx.needs_input_grad[1]:
            # Each factor is multiplied by the y of the sample before it, or in the transposed form by its own.
            if form == TRANSPOSED:
                ahead = scan(grad, factors, ray_offsets, EXCLUSIVE, back)
                of_factors = ahead * scan(values, factors, ray_offsets, TRANSPOSED, ctx.reverse)
            else:
                of_factors = of_values * scan(values, factors, ray_offsets, EXCLUSIVE, ctx.reverse)
        return of_values if ctx.needs_input_grad[0] else None, of_factors, None, None, None

    @staticmethod
    def jvp(ctx: Any, of_values: MaybeTensor, of_factors: MaybeTensor, *_: None) -> Tensor:
        ray_offsets, factors, values = ctx.saved_tensors
        form, reverse = ctx.form, ctx.reverse
        terms = [] if of_values is None else [scan(of_values, factors, ray_offsets, form, reverse)]
        if of_factors is not None:
            inner, outer = (TRANSPOSED, EXCLUSIVE) if form == TRANSPOSED else (EXCLUSIVE, form)
            scaled = of_factors * scan(values, factors, ray_offsets, inner, reverse)
            terms.append(scan(scaled, factors, ray_offsets, outer, reverse))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], values: MaybeTensor, factors: MaybeTensor, *others: Any
    ) -> tuple[Tensor, int]:
        _refuse_mapped_offsets(in_dims[2])

        def with_calls_last(x: MaybeTensor, mapped: int | None) -> MaybeTensor:
            if x is None:
                return None
            return x[..., None].expand(*x.shape, info.batch_size) if mapped is None else x.movedim(mapped, 2)

        given = with_calls_last(values, in_dims[0]), with_calls_last(factors, in_dims[1])
        columns: list[Any] = [None if x is None else x.flatten(1) for x in given]
        scanned = scan(*columns, *others)
        shape = next(x.shape for x in given if x is not None)
        return scanned.unflatten(1, shape[1:]), 2


_ADJOINT = {EXCLUSIVE: EXCLUSIVE, INCLUSIVE: TRANSPOSED, TRANSPOSED: INCLUSIVE}


def _refuse_mapped_offsets(mapped: int | None) -> None:
    if mapped is not None:
        raise NotImplementedError(
            "sums along rays, and derivatives of compositing, cannot be mapped over ray_offsets by torch.vmap"
        )


def _like_given(values: MaybeTensor, factors: MaybeTensor) -> Tensor:
    given = factors if values is None else values
    assert given is not None, "values or factors must be given"
    return given.new_empty(given.shape)


total = declare(
    "sum_along_rays",
    lambda values, ray_offsets: values.new_empty(ray_offsets.shape[0] - 1, values.shape[1]),
    function=_Total,
)
"""Returns the sum (R, C) of each ray's rows of (M, C), applied to ``(values, ray_offsets)``."""
spread = declare(
    "spread_along_rays", lambda values, samples: values.new_empty(samples, values.shape[1]), function=_Spread
)
"""Returns for each sample its ray's row of (R, C), applied to ``(values, ray_offsets, samples)``; zeros for others."""
_scan_along_rays = declare("scan_along_rays", _like_given, function=_Scan)
