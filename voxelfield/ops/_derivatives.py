r"""Derivatives of the stencil ops, written once for grids and for cells.

Write :math:`S(f, p) = \sum_k w_k(p) f_k` for sampling. Its adjoint in the features is a splat
:math:`S^*(v, p)_k = \sum w_k(p) v`, its gradient in the point is :math:`P(v, f, p)_a = \sum_k \partial_a w_k(p)
\langle v, f_k \rangle`. Replacing the weights :math:`w_k` by their derivative along a direction :math:`d`,
:math:`\sum_a d_a \partial_a w_k`, gives :math:`S_d, S^*_d, P_d`. The weights depend on nothing but the point, so
first and second derivatives of all of them are again one of these six: the table below is complete up to second
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Extra = tuple[Any, ...]


class StencilFamily(NamedTuple):
    """Names of three registered ops, and how their trailing arguments follow from one another."""

    gather: str
    splat: str
    point_gradient: str
    splat_extra: Callable[[torch.Size, Extra], Extra]
    gather_extra: Callable[[Extra], Extra]


def register_derivatives(family: StencilFamily) -> None:
    """Registers the derivatives of a family's three ops with autograd."""
    namespace = torch.ops.voxelfield
    gather = getattr(namespace, family.gather)
    splat = getattr(namespace, family.splat)
    point_gradient = getattr(namespace, family.point_gradient)

    def save_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        source, points, direction, *extra = inputs
        moves = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        # The features matter to the gradient in the point alone: do not keep them alive for nothing.
        ctx.save_for_backward(source if moves else None, points, direction)
        ctx.source_shape, ctx.extra = source.shape, tuple(extra)

    def gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        source, points, direction = ctx.saved_tensors
        needs, extra = ctx.needs_input_grad, ctx.extra
        splat_extra = family.splat_extra(ctx.source_shape, extra)
        return (
            splat(grad, points, direction, *splat_extra) if needs[0] else None,
            point_gradient(grad, source, points, direction, *extra) if needs[1] else None,
            point_gradient(grad, source, points, None, *extra) if needs[2] else None,
            *(None for _ in extra),
        )

    def save_splat(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, points, direction, *extra = inputs
        ctx.save_for_backward(values, points, direction)
        ctx.extra = tuple(extra)

    def splat_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        values, points, direction = ctx.saved_tensors
        needs, extra = ctx.needs_input_grad, family.gather_extra(ctx.extra)
        return (
            gather(grad, points, direction, *extra) if needs[0] else None,
            point_gradient(values, grad, points, direction, *extra) if needs[1] else None,
            point_gradient(values, grad, points, None, *extra) if needs[2] else None,
            *(None for _ in ctx.extra),
        )

    def save_point_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, source, points, direction, *extra = inputs
        ctx.save_for_backward(values, source, points)
        ctx.directional, ctx.extra = direction is not None, tuple(extra)

    def point_gradient_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.directional:
            raise NotImplementedError("trilinear sampling is differentiable twice; a third derivative was asked for")
        values, source, points = ctx.saved_tensors
        needs, extra = ctx.needs_input_grad, ctx.extra
        splat_extra = family.splat_extra(source.shape, extra)
        return (
            gather(source, points, grad, *extra) if needs[0] else None,
            splat(values, points, grad, *splat_extra) if needs[1] else None,
            point_gradient(values, source, points, grad, *extra) if needs[2] else None,
            None,
            *(None for _ in extra),
        )

    for name, backward, save in (
        (family.gather, gather_backward, save_gather),
        (family.splat, splat_backward, save_splat),
        (family.point_gradient, point_gradient_backward, save_point_gradient),
    ):
        torch.library.register_autograd(f"voxelfield::{name}", backward, setup_context=save)
