r"""Derivatives of the stencil ops, written once for grids and for cells.

Write :math:`S(f, p) = \sum_k w_k(p) f_k` for sampling. Its adjoint in the features is a splat
:math:`S^*(v, p)_k = \sum w_k(p) v`, its gradient in the point is :math:`P(v, f, p)_a = \sum_k \partial_a w_k(p)
\langle v, f_k \rangle`. Their derivatives in the point along a direction :math:`d` are the same with the weights
:math:`\sum_a d_a \partial_a w_k`. The ops ``with_gradient``, which use the weights and their three derivatives side by
side, compute them: :math:`S_d(f, p)` is the sum of the three derivatives that they return times :math:`d`, and
:math:`S^*_d(v, p)` and :math:`P_d(v, f, p)` are what they make of the values :math:`(0, d_1 v, d_2 v, d_3 v)`. So the
rules of :class:`StencilFunction` are complete up to second order, backwards (``backward``, towards the inputs) and
forwards (``jvp``, along tangents).

These are autograd Functions with ``setup_context``, so that ``torch.func`` can transform them. The public functions
apply them, and :func:`declare_lookups` makes them the autograd kernels of the raw ops, which a compiler traces.
``torch.library.register_autograd`` cannot be used: with it, forward-mode differentiation silently loses tangents.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from voxelfield.foundation.autograd import MaybeTensor, OpFunction, forward_mode_active
from voxelfield.foundation.private_torch import below_autograd
from voxelfield.ops._table import TABLE, Op, declare

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Stencil:
    """The rule that finds the corners of a point: the raw ops that know it, and the options of one call.

    Attributes:
        of_grids: Whether all points read the same source, instead of a cell for each point.
        lists: Whether the raw ops take a list of sources.
        gather: The name of the raw op :math:`S`.
        point_gradient: The name of the raw op :math:`P`.
        options: The last arguments of these two ops. The last one of all is ``with_gradient``: whether values and
            results are stacked with their derivatives in a leading dimension.
        differentiated: Whether it is ``with_gradient`` because an op without gradient is differentiated in the points.
        subject: What cannot be differentiated any further, in error messages.
    """

    of_grids: ClassVar[bool]
    lists: ClassVar[bool] = False
    subject: ClassVar[str] = "trilinear sampling"
    gather: ClassVar[str]
    point_gradient: ClassVar[str]

    options: tuple[Any, ...]
    differentiated: bool = False

    @property
    def planar(self) -> bool:
        """Whether values have their channels before the points."""
        return False

    def batched(self, point_dims: int) -> bool:
        """Tells whether sources and points have a leading batch dimension, given the points' number of dimensions."""
        return not self.of_grids or point_dims == 3

    def splat(self, values: Tensor, points: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """Runs the raw op :math:`S^*` for sources of these shapes."""
        raise NotImplementedError

    def select(self, values: Tensor, shapes: Shapes, wanted: Sequence[bool]) -> Tensor:
        """Returns the columns of ``values`` that belong to the wanted sources; all of them, if there is but one."""
        return values


class StencilFunction(OpFunction):
    r"""One of the three gradients of :math:`\langle v, S(f, p) \rangle`: in :math:`v`, :math:`f` or :math:`p`.

    Applied to ``(stencil, shapes, values, points, *sources)``: :math:`v`, :math:`p`, :math:`f`, and the shapes of
    :math:`f` where that is not read. What a Function does not read is None, or no sources.
    """

    @staticmethod
    def call(*inputs: Any) -> Any:
        """Runs the raw op."""
        raise NotImplementedError

    @classmethod
    def forward(cls, *inputs: Any) -> Any:
        with below_autograd():
            return cls.call(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.stencil, shapes, values, points, *sources = inputs
        ctx.shapes = tuple([source.shape for source in sources]) if shapes is None else shapes
        ctx.set_materialize_grads(False)
        # Values alone, or features alone, are read by the gradient in the points only, and need not be kept without it.
        both = ctx.needs_input_grad[3] or (values is not None and sources)
        ctx.save_for_backward(points, *((values, *sources) if both else ()))
        if forward_mode_active():
            ctx.save_for_forward(points, values, *sources)

    @classmethod
    def backward(cls, ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        _, _, of_values, of_points, *of_sources = ctx.needs_input_grad
        if not _any(grads):
            return (None,) * len(ctx.needs_input_grad)
        points, *features = ctx.saved_tensors
        values, *sources = features or [None]
        stencil: Stencil = ctx.stencil
        direction: Any = None
        if cls is Gather:
            (values,) = grads
        elif cls is Splat:
            like = next(grad for grad in grads if grad is not None)
            sources = [like.new_zeros(s) if grad is None else grad for grad, s in zip(grads, ctx.shapes, strict=True)]
        else:
            stencil, (direction,) = _differentiated(stencil, _THIRD), grads
            if of_points or any(of_sources):
                values = _stacked_along(stencil, values, direction)
            sources = _wide(sources, direction)
        sampled = Gather.apply(stencil, None, None, points, *sources) if of_values else None
        sums = _splat(stencil, ctx.shapes, values, points, of_sources)
        if direction is not None:
            sampled = None if sampled is None else _along(stencil, sampled, direction).to(features[0].dtype)
            sums = [None if total is None else total.to(features[0].dtype) for total in sums]
        of_points = PointGradient.apply(stencil, None, values, points, *sources) if of_points else None
        return None, None, sampled, of_points, *sums

    @classmethod
    def jvp(cls, ctx: Any, *tangents: MaybeTensor) -> Any:
        points, values, *sources = ctx.saved_tensors
        _, _, d_values, d_points, *d_sources = tangents
        stencil, shapes = ctx.stencil, ctx.shapes if cls is Splat else None
        terms = []
        if d_values is not None:
            terms.append(cls.apply(stencil, shapes, d_values, points, *sources))
        if _any(d_sources):
            changes = [torch.zeros_like(x) if d is None else d for d, x in zip(d_sources, sources, strict=True)]
            terms.append(cls.apply(stencil, shapes, values, points, *changes))
        if d_points is not None:
            stencil = _differentiated(stencil, _THIRD if cls is PointGradient else _TWO_DIRECTIONS)
            stacked = None if values is None else _stacked_along(stencil, values, d_points)
            change = cls.apply(stencil, shapes, stacked, points, *_wide(sources, d_points))
            if cls is Gather:
                change = _along(stencil, change, d_points).to(sources[0].dtype)
            elif cls is Splat:
                change = tuple(total.to(values.dtype) for total in change)
            terms.append(change)
        return tuple(map(_total, zip(*terms, strict=True))) if cls is Splat else _total(terms)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return cls.map(cls.apply, info.batch_size, in_dims, *inputs)

    @classmethod
    def map(cls, apply: Callable[..., Any], size: int, in_dims: Sequence[Any], *inputs: Any) -> tuple[Any, Any]:
        """Makes ``size`` mapped calls one: ``apply`` is that of this Function, or ``call`` in the rule of the raw op.

        Sources that are the same in all calls are not repeated if points can share them: the points of all calls then
        become more points of the same source. Otherwise the calls become elements of the batch.
        """
        stencil, shapes, values, points, *sources = inputs
        _, _, of_values, of_points, *of_sources = in_dims
        of_one = points.shape if of_points is None else points.movedim(of_points, 0).shape[1:]
        # Whether the mapped calls have a batch dimension themselves.
        batched = stencil.batched(len(of_one))
        shared = bool(sources) and stencil.of_grids and not stencil.planar and all(dim is None for dim in of_sources)
        merges = shared or batched
        point_axis = int(shared and batched)
        value_axis = point_axis + int(stencil.options[-1])

        def fold(x: Tensor, dim: int | None, axis: int) -> Tensor:
            if dim is None:
                x = x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:])
            else:
                x = x.movedim(dim, axis)
            return x.flatten(axis, axis + 1) if merges else x

        if shapes is not None:
            shapes = tuple((size * s[0], *s[1:]) if merges else (size, *s) for s in shapes)
        if not shared:
            sources = [fold(x, dim, 0) for x, dim in zip(sources, of_sources, strict=True)]
        values = None if values is None else fold(values, of_values, value_axis)
        result = apply(stencil, shapes, values, fold(points, of_points, point_axis), *sources)

        axis = {Gather: value_axis, Splat: 0, PointGradient: point_axis}[cls]

        def unfold(x: Tensor) -> Tensor:
            return x.unflatten(axis, (size, of_one[point_axis])) if merges else x

        if isinstance(result, Tensor):
            return unfold(result), axis
        return tuple(unfold(x) for x in result), (axis,) * len(result)


class Gather(StencilFunction):
    """:math:`S`: reads points and sources."""

    @staticmethod
    def call(*inputs: Any) -> Any:
        stencil, _, _, points, *sources = inputs
        return TABLE[stencil.gather].raw(sources if stencil.lists else sources[0], points, *stencil.options)

    @staticmethod
    def forward(*inputs: Any) -> Any:  # written out, because most training steps begin with it
        stencil, _, _, points, *sources = inputs
        with below_autograd():
            return TABLE[stencil.gather].kernel(sources if stencil.lists else sources[0], points, *stencil.options)


class Splat(StencilFunction):
    """:math:`S^*`: reads values and points, and returns one sum for each of ``shapes``."""

    @staticmethod
    def call(*inputs: Any) -> Any:
        stencil, shapes, values, points = inputs
        return stencil.splat(values, points, shapes)


class PointGradient(StencilFunction):
    """:math:`P`: reads values, points and sources."""

    @staticmethod
    def call(*inputs: Any) -> Any:
        stencil, _, values, points, *sources = inputs
        given = sources if stencil.lists else sources[0]
        return TABLE[stencil.point_gradient].raw(values, given, points, *stencil.options)


def declare_lookups(kind: type[Stencil], stencil: Callable[..., Stencil], **row: Any) -> Op:
    """Declares the raw ops :math:`P` and :math:`S` of a kind of stencils, the latter with the fields of ``row``.

    ``stencil`` makes the stencil of the options of a call. Returns :math:`S`.
    """

    def declare_one(name: str, function: type[StencilFunction], inputs: Callable[..., Any], **row: Any) -> Op:
        def batching(info: Any, dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
            return function.map(function.call, info.batch_size, inputs(*dims), *inputs(*arguments))

        return declare(name, function=function, inputs=inputs, batching=batching, **row)

    def inputs_of(values: Any, sources: Any, points: Tensor, *options: Any) -> tuple[Any, ...]:
        return stencil(*options), None, values, points, *(sources if kind.lists else (sources,))

    declare_one(kind.point_gradient, PointGradient, inputs_of, results=lambda points: points.new_empty(points.shape))
    return declare_one(kind.gather, Gather, functools.partial(inputs_of, None), **row)


def declare_splat(
    name: str, rule: Callable[..., tuple[Stencil, Shapes]], unpack: Callable[[Any], Any], results: Callable[..., Any]
) -> Op:
    """Declares a raw op that returns sums, which ``unpack`` makes of a tuple of them.

    ``rule`` makes the stencil, and the shapes of the sums, of the shapes of values and points and the other arguments.
    """

    def inputs(values: Tensor, points: Tensor, *options: Any) -> tuple[Any, ...]:
        return *rule(values.shape, points.shape, *options), values, points

    def batching(info: Any, dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        mapped = zip(arguments[:2], dims, strict=False)
        of_one = (x.shape if dim is None else x.movedim(dim, 0).shape[1:] for x, dim in mapped)
        given = *rule(*of_one, *arguments[2:]), *arguments[:2]
        sums, axes = Splat.map(Splat.call, info.batch_size, (None, None, *dims[:2]), *given)
        return unpack(sums), unpack(axes)

    return declare(name, results, function=Splat, inputs=inputs, unpack=unpack, batching=batching)


def _splat(
    stencil: Stencil, shapes: Shapes, values: Any, points: Tensor, wanted: Sequence[bool]
) -> Sequence[MaybeTensor]:
    """Splats only into the wanted sources."""
    if not any(wanted):
        return [None] * len(wanted)
    if all(wanted):
        return Splat.apply(stencil, shapes, values, points)
    columns = stencil.select(values, shapes, wanted)
    kept = iter(Splat.apply(stencil, tuple(itertools.compress(shapes, wanted)), columns, points))
    return [next(kept) if want else None for want in wanted]


# --- derivatives along a direction, in the dtype of directions: products of 16-bit values with them would lose digits


_THIRD = "{} is differentiable twice; a third derivative was asked for"
_TWO_DIRECTIONS = (
    "forward-mode differentiation of {} in the points is possible once; for a second derivative take one of the two in "
    "reverse mode, as torch.func.hessian does"
)
_SECOND_WITH_GRADIENT = (
    "sampling with_gradient=True is differentiable once; a second derivative was asked for. Sample without "
    "with_gradient and take the gradient by torch.autograd.grad(..., create_graph=True): that is differentiable again"
)


def _differentiated(stencil: Stencil, refusal: str) -> Stencil:
    """Returns the stencil with the weights' derivatives; refuses those of weights that are derivatives already."""
    if stencil.differentiated:
        raise NotImplementedError(refusal.format(stencil.subject))
    if stencil.options[-1]:
        raise NotImplementedError(_SECOND_WITH_GRADIENT)
    return dataclasses.replace(stencil, options=(*stencil.options[:-1], True), differentiated=True)


def _along(stencil: Stencil, sampled: Tensor, direction: Tensor) -> Tensor:
    """Returns the derivative along a direction (..., D) of what is sampled with its D derivatives."""
    return (sampled[1:] * direction.movedim(-1, 0).unsqueeze(-1 - stencil.planar)).sum(0)


def _stacked_along(stencil: Stencil, values: Tensor, direction: Tensor) -> Tensor:
    """Returns :math:`(0, d_1 v, ..., d_D v)`."""
    return values * torch.nn.functional.pad(direction, (1, 0)).movedim(-1, 0).unsqueeze(-1 - stencil.planar)


def _wide(sources: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    return [source.to(like.dtype) for source in sources]


def _any(tensors: Sequence[MaybeTensor]) -> bool:
    return any(x is not None for x in tensors)


def _total(terms: Sequence[Tensor]) -> Tensor:
    first, *others = terms
    return sum(others, start=first)
