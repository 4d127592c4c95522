r"""Derivatives of the stencil ops, written once for grids and for cells.

Write :math:`S(f, p) = \sum_k w_k(p) f_k` for sampling. Its adjoint in the features is a splat
:math:`S^*(v, p)_k = \sum w_k(p) v`, its gradient in the point is :math:`P(v, f, p)_a = \sum_k \partial_a w_k(p)
\langle v, f_k \rangle`. Their derivatives in the point along a direction :math:`d` are the same with the weights
:math:`\sum_a d_a \partial_a w_k`. The ops ``with_gradient``, which use the weights and their three derivatives side by
side, compute them: :math:`S_d(f, p)` is the sum of the three derivatives that they return times :math:`d`, and
:math:`S^*_d(v, p)` and :math:`P_d(v, f, p)` are what they make of the values :math:`(0, d_1 v, d_2 v, d_3 v)`. So the
table below is complete up to second order, backwards (``backward``, towards the inputs) and forwards (``jvp``, along
tangents).

These are autograd Functions with ``setup_context``, so that ``torch.func`` can transform them. The public functions
apply them, and :func:`declare_lookup` makes them the autograd kernels of the raw ops, which a compiler traces.
``torch.library.register_autograd`` cannot be used: with it, forward-mode differentiation silently loses tangents.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from voxelfield.foundation.autograd import MaybeTensor, OpFunction, forward_mode_active
from voxelfield.foundation.private_torch import below_autograd
from voxelfield.ops._table import TABLE, Op, declare

Shapes = tuple[tuple[int, ...], ...]


class Stencil(Protocol):
    """The rule that finds the corners of a point: the options of one call and the raw ops that take them.

    It is a frozen dataclass.
    """

    of_grids: ClassVar[bool]
    """Whether the raw ops take a list of sources that all points read, instead of one with a cell for each point."""
    gather: ClassVar[str]
    """The name of the raw op :math:`S`."""
    point_gradient: ClassVar[str]
    """The name of the raw op :math:`P`."""

    @property
    def options(self) -> Sequence[Any]:
        """The last arguments of these two ops."""

    @property
    def with_gradient(self) -> bool:
        """Whether values and results are stacked with their three derivatives in a leading dimension of 4."""

    @property
    def differentiated(self) -> bool:
        """Whether it is ``with_gradient`` because an op without gradient is differentiated in the points."""

    def batched(self, point_dims: int) -> bool:
        """Tells whether sources and points have a leading batch dimension, given the points' number of dimensions."""

    def splat(self, values: Tensor, points: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """Runs the raw op :math:`S^*` for sources of these shapes."""

    def select(self, values: Tensor, shapes: Shapes, wanted: Sequence[bool]) -> Tensor:
        """Returns the columns of ``values`` that belong to the wanted sources."""


AnyStencil = TypeVar("AnyStencil", bound=Stencil)


class Named(NamedTuple):
    """The inputs of a Function below by name, or what belongs to each of them, such as its tangent.

    A Function is applied to those that it has, in this order, with the sources one by one and then the stencil.
    """

    values: Any = None
    sources: Sequence[Any] = ()
    points: Any = None
    shapes: Any = None


class StencilFunction(OpFunction):
    """A Function of tensors and a stencil, which can be mapped."""

    @staticmethod
    def named(inputs: Sequence[Any]) -> Named:
        """Returns inputs by name."""
        raise NotImplementedError

    @staticmethod
    def call(*inputs: Any) -> Any:
        """Runs the raw op."""
        raise NotImplementedError

    @classmethod
    def forward(cls, *inputs: Any) -> Any:
        with below_autograd():
            return cls.call(*inputs)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        return cls.map(cls.apply, info.batch_size, in_dims, *inputs)

    @classmethod
    def map(cls, apply: Callable[..., Any], size: int, in_dims: Sequence[Any], *inputs: Any) -> tuple[Any, Any]:
        """Makes ``size`` mapped calls one: ``apply`` is that of this Function, or ``call`` in the rule of the raw op.

        Sources that are the same in all calls are not repeated if points can share them: the points of all calls then
        become more points of the same source. Otherwise the calls become elements of the batch.
        """
        stencil, given, dims = inputs[-1], cls.named(inputs), cls.named(in_dims)
        of_one = given.points.shape if dims.points is None else given.points.movedim(dims.points, 0).shape[1:]
        # Whether the mapped calls have a batch dimension themselves.
        batched = stencil.batched(len(of_one))
        shared = bool(given.sources) and stencil.of_grids and all(dim is None for dim in dims.sources)
        merges = shared or batched
        of_points = int(shared and batched)
        of_values = of_points + int(stencil.with_gradient)

        def fold(x: Tensor, dim: int | None, axis: int) -> Tensor:
            if dim is None:
                x = x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:])
            else:
                x = x.movedim(dim, axis)
            return x.flatten(axis, axis + 1) if merges else x

        folded: list[Any] = []
        if given.values is not None:
            folded.append(fold(given.values, dims.values, of_values))
        if shared:
            folded.extend(given.sources)
        else:
            folded.extend(fold(x, dim, 0) for x, dim in zip(given.sources, dims.sources, strict=True))
        folded.append(fold(given.points, dims.points, of_points))
        if given.shapes is not None:
            folded.append(tuple((size * s[0], *s[1:]) if merges else (size, *s) for s in given.shapes))
        result = apply(*folded, stencil)

        axis = {Gather: of_values, Splat: 0, PointGradient: of_points}[cls]

        def unfold(x: Tensor) -> Tensor:
            return x.unflatten(axis, (size, of_one[of_points])) if merges else x

        if isinstance(result, Tensor):
            return unfold(result), axis
        return tuple(unfold(x) for x in result), (axis,) * len(result)


class Gather(StencilFunction):
    """:math:`S`, applied to ``(*sources, points, stencil)``."""

    @staticmethod
    def named(inputs: Sequence[Any]) -> Named:
        *sources, points, _ = inputs
        return Named(sources=sources, points=points)

    @staticmethod
    def call(*inputs: Any) -> Any:
        *sources, points, stencil = inputs
        return TABLE[stencil.gather].raw(sources if stencil.of_grids else sources[0], points, *stencil.options)

    @staticmethod
    def forward(*inputs: Any) -> Any:  # written out, because most training steps begin with it
        *sources, points, stencil = inputs
        with below_autograd():
            return TABLE[stencil.gather].kernel(sources if stencil.of_grids else sources[0], points, *stencil.options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *sources, points, ctx.stencil = inputs
        ctx.shapes = tuple([source.shape for source in sources])
        ctx.set_materialize_grads(False)
        *_, needs_points, _ = ctx.needs_input_grad
        # Only the gradient in the points reads the features. Otherwise they need not be kept alive.
        ctx.save_for_backward(points, *(sources if needs_points else ()))
        if forward_mode_active():
            ctx.save_for_forward(points, *sources)

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor) -> tuple[MaybeTensor, ...]:
        needs = Gather.named(ctx.needs_input_grad)
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        points, *sources = ctx.saved_tensors
        return (
            *_splat(grad, points, ctx.shapes, ctx.stencil, needs.sources),
            PointGradient.apply(grad, *sources, points, ctx.stencil) if needs.points else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: MaybeTensor) -> Tensor:
        points, *sources = ctx.saved_tensors
        along = Gather.named(tangents)
        terms = []
        if _any(along.sources):
            terms.append(Gather.apply(*_complete(along.sources, sources), points, ctx.stencil))
        if along.points is not None:
            stencil = _differentiated(ctx.stencil, _TWO_DIRECTIONS)
            terms.append(_gather_along(sources, points, along.points, stencil))
        return _total(terms)


class Splat(StencilFunction):
    """:math:`S^*`, applied to ``(values, points, shapes, stencil)``: one sum for each of ``shapes``."""

    @staticmethod
    def named(inputs: Sequence[Any]) -> Named:
        values, points, shapes, _ = inputs
        return Named(values, points=points, shapes=shapes)

    @staticmethod
    def call(*inputs: Any) -> Any:
        values, points, shapes, stencil = inputs
        return stencil.splat(values, points, shapes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        values, points, ctx.shapes, ctx.stencil = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, points)
        if forward_mode_active():
            ctx.save_for_forward(values, points)

    @staticmethod
    def backward(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        if not _any(grads):
            return (None,) * 4
        values, points = ctx.saved_tensors
        sources = [values.new_zeros(s) if g is None else g for g, s in zip(grads, ctx.shapes, strict=True)]
        needs_values, needs_points, *_ = ctx.needs_input_grad
        return (
            Gather.apply(*sources, points, ctx.stencil) if needs_values else None,
            PointGradient.apply(values, *sources, points, ctx.stencil) if needs_points else None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: MaybeTensor) -> tuple[Tensor, ...]:
        values, points = ctx.saved_tensors
        d_values, d_points, *_ = tangents
        terms = []
        if d_values is not None:
            terms.append(Splat.apply(d_values, points, ctx.shapes, ctx.stencil))
        if d_points is not None:
            stencil = _differentiated(ctx.stencil, _TWO_DIRECTIONS)
            sums = Splat.apply(_stacked_along(values, d_points), points, ctx.shapes, stencil)
            terms.append([total.to(values.dtype) for total in sums])
        return tuple(_total(parts) for parts in zip(*terms, strict=True))


class PointGradient(StencilFunction):
    """:math:`P`, applied to ``(values, *sources, points, stencil)``."""

    @staticmethod
    def named(inputs: Sequence[Any]) -> Named:
        values, *sources, points, _ = inputs
        return Named(values, sources, points)

    @staticmethod
    def call(*inputs: Any) -> Any:
        values, *sources, points, stencil = inputs
        given = sources if stencil.of_grids else sources[0]
        return TABLE[stencil.point_gradient].raw(values, given, points, *stencil.options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.stencil = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if forward_mode_active():
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor) -> tuple[MaybeTensor, ...]:
        needs = PointGradient.named(ctx.needs_input_grad)
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        values, *sources, points = ctx.saved_tensors
        stencil = _differentiated(ctx.stencil, _THIRD)
        stacked = _stacked_along(values, grad) if needs.points or any(needs.sources) else values
        shapes = tuple(source.shape for source in sources)
        sums = _splat(stacked, points, shapes, stencil, needs.sources)
        return (
            _gather_along(sources, points, grad, stencil) if needs.values else None,
            *(None if total is None else total.to(values.dtype) for total in sums),
            PointGradient.apply(stacked, *_wide(sources, grad), points, stencil) if needs.points else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: MaybeTensor) -> Tensor:
        values, *sources, points = ctx.saved_tensors
        along = PointGradient.named(tangents)
        terms = []
        if along.values is not None:
            terms.append(PointGradient.apply(along.values, *sources, points, ctx.stencil))
        if _any(along.sources):
            terms.append(PointGradient.apply(values, *_complete(along.sources, sources), points, ctx.stencil))
        if along.points is not None:
            stencil, stacked = _differentiated(ctx.stencil, _THIRD), _stacked_along(values, along.points)
            terms.append(PointGradient.apply(stacked, *_wide(sources, stacked), points, stencil))
        return _total(terms)


def declare_lookup(
    name: str, function: type[StencilFunction], inputs: Callable[..., tuple[Any, ...]], **row: Any
) -> Op:
    """Declares a raw op that reads sources: ``inputs`` makes the inputs of its Function of its arguments."""

    def batching(info: Any, dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        return function.map(function.call, info.batch_size, inputs(*dims), *inputs(*arguments))

    return declare(name, function=function, inputs=inputs, batching=batching, **row)


def _splat(
    values: Tensor, points: Tensor, shapes: Shapes, stencil: Stencil, wanted: Sequence[bool]
) -> Sequence[MaybeTensor]:
    """Splats only into the wanted sources."""
    if all(wanted):
        return Splat.apply(values, points, shapes, stencil)
    if not any(wanted):
        return [None] * len(wanted)
    columns = stencil.select(values, shapes, wanted)
    kept = iter(Splat.apply(columns, points, tuple(itertools.compress(shapes, wanted)), stencil))
    return [next(kept) if want else None for want in wanted]


# --- derivatives along a direction, in the dtype of directions: products of 16-bit values with them would lose digits


_THIRD = "trilinear sampling is differentiable twice; a third derivative was asked for"
_TWO_DIRECTIONS = (
    "forward-mode differentiation of trilinear sampling in the points is possible once; for a second derivative take "
    "one of the two in reverse mode, as torch.func.hessian does"
)
_SECOND_WITH_GRADIENT = (
    "sampling with_gradient=True is differentiable once; a second derivative was asked for. Sample without "
    "with_gradient and take the gradient by torch.autograd.grad(..., create_graph=True): that is differentiable again"
)


def _differentiated(stencil: AnyStencil, refusal: str) -> AnyStencil:
    """Returns the stencil with the weights' derivatives; refuses those of weights that are derivatives already."""
    if stencil.differentiated:
        raise NotImplementedError(refusal)
    if stencil.with_gradient:
        raise NotImplementedError(_SECOND_WITH_GRADIENT)
    return dataclasses.replace(stencil, with_gradient=True, differentiated=True)  # type: ignore[type-var]


def _gather_along(sources: Sequence[Tensor], points: Tensor, direction: Tensor, stencil: Stencil) -> Tensor:
    """Computes :math:`S_d`; the stencil is the differentiated one."""
    sampled = Gather.apply(*_wide(sources, direction), points, stencil)
    along = (sampled[1:] * direction.movedim(-1, 0).unsqueeze(-1)).sum(0)
    return along.to(sources[0].dtype)


def _stacked_along(values: Tensor, direction: Tensor) -> Tensor:
    """Returns :math:`(0, d_1 v, d_2 v, d_3 v)`."""
    return values * torch.nn.functional.pad(direction, (1, 0)).movedim(-1, 0).unsqueeze(-1)


def _wide(sources: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    return [source.to(like.dtype) for source in sources]


def _any(tensors: Sequence[MaybeTensor]) -> bool:
    return any(x is not None for x in tensors)


def _complete(tangents: Sequence[MaybeTensor], primals: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if t is None else t for t, x in zip(tangents, primals, strict=True)]


def _total(terms: Sequence[Tensor]) -> Tensor:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first
