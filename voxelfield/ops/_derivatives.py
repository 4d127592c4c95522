r"""Derivatives of the stencil ops, written once for grids and for cells.

Write :math:`S(f, p) = \sum_k w_k(p) f_k` for sampling. Its adjoint in the features is a splat
:math:`S^*(v, p)_k = \sum w_k(p) v`, its gradient in the point is :math:`P(v, f, p)_a = \sum_k \partial_a w_k(p)
\langle v, f_k \rangle`. Replacing the weights :math:`w_k` by their derivative along a direction :math:`d`,
:math:`\sum_a d_a \partial_a w_k`, gives :math:`S_d, S^*_d, P_d`. The weights depend on nothing but the point, so
first and second derivatives of all of them are again one of these six: the table below is complete up to second
order, backwards (``backward``, towards the inputs) and forwards (``jvp``, along tangents).

These are autograd Functions with ``setup_context``, so that ``torch.func`` can transform them. The public functions
call them; :func:`register_autograd` also makes them the autograd kernels of the raw ops, which a compiler traces.
``torch.library.register_autograd`` cannot be used: with it, forward-mode differentiation silently loses tangents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from voxelfield.foundation.autograd import MaybeTensor, OpFunction, forward_mode_active, traces_ops
from voxelfield.foundation.private_torch import below_autograd, unwrap_dead_wrappers
from voxelfield.ops._registration import register_autograd, register_batching

Apply = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]


class Stencil(Protocol):
    """The rule that finds the corners of a point: the options of one call and the raw ops that take them."""

    @property
    def with_gradient(self) -> bool:
        """Whether values and results are stacked with their three derivatives in a leading dimension of 4."""

    shareable: ClassVar[bool]
    """Whether all points of one element of a batch read the same source."""

    def batched(self, point_dims: int) -> bool:
        """Tells whether sources and points have a leading batch dimension, given the points' number of dimensions."""

    def gather(self, sources: Sequence[Tensor], points: Tensor, direction: MaybeTensor) -> Tensor:
        """Runs the raw op :math:`S`."""

    def splat(self, values: Tensor, points: Tensor, direction: MaybeTensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """Runs the raw op :math:`S^*` for sources of these shapes."""

    def point_gradient(
        self, values: Tensor, sources: Sequence[Tensor], points: Tensor, direction: MaybeTensor
    ) -> Tensor:
        """Runs the raw op :math:`P`."""

    def select(self, values: Tensor, shapes: Shapes, wanted: Sequence[bool]) -> Tensor:
        """Returns the columns of ``values`` that belong to the wanted sources."""


class Folding:
    """Turns the inputs of ``size`` mapped calls into inputs of a single call, and unfolds its result.

    Sources that are the same in all calls are not repeated if points can share them: the points of all calls then
    become more points of the same source. Otherwise the calls become elements of the batch. ``batched`` tells whether
    the mapped calls have a batch dimension themselves; ``source_dims`` is None if the op has no sources.
    """

    def __init__(
        self, stencil: Stencil, size: int, batched: bool, source_dims: Sequence[int | None] | None = None
    ) -> None:
        self._size = size
        self._shared = source_dims is not None and stencil.shareable and all(dim is None for dim in source_dims)
        self._axis = int(self._shared and batched)
        self._merges = self._shared or batched
        self._lead = int(stencil.with_gradient)

    def points(self, x: MaybeTensor, dim: int | None) -> MaybeTensor:
        """Folds points, or directions."""
        return None if x is None else self._fold(x, dim, self._axis)

    def values(self, x: Tensor, dim: int | None) -> Tensor:
        """Folds values."""
        return self._fold(x, dim, self._axis + self._lead)

    def sources(self, sources: Sequence[Tensor], dims: Sequence[int | None]) -> Sequence[Tensor]:
        """Folds sources."""
        return sources if self._shared else [self._fold(x, dim, 0) for x, dim in zip(sources, dims, strict=True)]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a folded source, given its shape in a mapped call."""
        return (self._size * shape[0], *shape[1:]) if self._merges else (self._size, *shape)

    def unfold_points(self, x: Tensor) -> tuple[Tensor, int]:
        """Returns a result shaped like points with its mapped dimension restored, and the index of that dimension."""
        return self.unfold(x, self._axis), self._axis

    def unfold_values(self, x: Tensor) -> tuple[Tensor, int]:
        """Returns a result shaped like values with its mapped dimension restored, and the index of that dimension."""
        return self.unfold(x, self._axis + self._lead), self._axis + self._lead

    def unfold(self, x: Tensor, axis: int = 0) -> Tensor:
        """Returns a result with the mapped dimension restored at ``axis``."""
        return x.unflatten(axis, (self._size, x.shape[axis] // self._size)) if self._merges else x

    def _fold(self, x: Tensor, dim: int | None, axis: int) -> Tensor:
        if dim is None:
            x = x.unsqueeze(axis).expand(*x.shape[:axis], self._size, *x.shape[axis:])
        else:
            x = x.movedim(dim, axis)
        return x.flatten(axis, axis + 1) if self._merges else x


def sample(sources: Sequence[Tensor], points: Tensor, stencil: Stencil) -> Tensor:
    """Samples sources at points, differentiably, in every situation."""
    if traces_ops():
        return stencil.gather(sources, points, None)
    sampled: Tensor = Gather.apply(*unwrap_dead_wrappers((*sources, points)), None, stencil)
    return sampled


def sample_eagerly(sources: Sequence[Tensor], points: Tensor, stencil: Stencil) -> Tensor:
    """Samples sources at points, differentiably in reverse mode, with the least work on the host.

    Must not be used if :func:`voxelfield.foundation.autograd.needs_long_path`. Only the raw op checks the arguments.
    """
    if torch.is_grad_enabled() and (points.requires_grad or any(source.requires_grad for source in sources)):
        sampled: Tensor = Gather.record(*sources, points, None, stencil)
        return sampled
    with below_autograd():
        return stencil.gather(sources, points, None)


class Gather(OpFunction):
    """:math:`S`, applied to ``(*sources, points, direction, stencil)``."""

    @staticmethod
    def call(*inputs: Any) -> Tensor:
        """Runs the raw op."""
        *sources, points, direction, stencil = inputs
        gathered: Tensor = stencil.gather(sources, points, direction)
        return gathered

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        with below_autograd():
            return Gather.call(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *sources, points, direction, ctx.stencil = inputs
        ctx.shapes = tuple(source.shape for source in sources)
        *_, needs_points, needs_direction, _ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        # Only the gradient in the points reads the features. Otherwise they need not be kept alive.
        ctx.save_for_backward(points, direction, *(sources if needs_points or needs_direction else ()))
        if forward_mode_active():
            ctx.save_for_forward(points, direction, *sources)

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor) -> tuple[MaybeTensor, ...]:
        shapes, stencil = ctx.shapes, ctx.stencil
        if grad is None:
            return (None,) * (len(shapes) + 3)
        points, direction, *sources = ctx.saved_tensors
        *wanted, needs_points, needs_direction, _ = ctx.needs_input_grad
        return (
            *_splat(grad, points, direction, shapes, stencil, wanted),
            PointGradient.apply(grad, *sources, points, direction, stencil) if needs_points else None,
            PointGradient.apply(grad, *sources, points, None, stencil) if needs_direction else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: MaybeTensor) -> Tensor:
        points, direction, *sources = ctx.saved_tensors
        *d_sources, d_points, d_direction, _ = tangents
        stencil = ctx.stencil
        terms = []
        if _any(d_sources):
            terms.append(Gather.apply(*_complete(d_sources, sources), points, direction, stencil))
        if d_points is not None:
            _refuse_two_directions(direction)
            _refuse_second_with_gradient(stencil)
            terms.append(Gather.apply(*sources, points, d_points, stencil))
        if d_direction is not None:
            terms.append(Gather.apply(*sources, points, d_direction, stencil))
        return _total(terms)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return Gather.map(Gather.apply, info.batch_size, in_dims, *inputs)

    @staticmethod
    def map(apply: Apply, size: int, in_dims: Sequence[Any], *inputs: Any) -> tuple[Tensor, int]:
        """Makes mapped calls one: ``apply`` is this Function's, or ``call`` in the batching rule of the raw op."""
        *sources, points, direction, stencil = inputs
        *source_dims, points_dim, direction_dim, _ = in_dims
        folding = Folding(stencil, size, _batched(stencil, points, points_dim), source_dims)
        gathered = apply(
            *folding.sources(sources, source_dims),
            folding.points(points, points_dim),
            folding.points(direction, direction_dim),
            stencil,
        )
        return folding.unfold_values(gathered)


class Splat(OpFunction):
    """:math:`S^*`, applied to ``(values, points, direction, shapes, stencil)``: one sum for each of ``shapes``."""

    @staticmethod
    def call(*inputs: Any) -> tuple[Tensor, ...]:
        """Runs the raw op."""
        values, points, direction, shapes, stencil = inputs
        sums: tuple[Tensor, ...] = stencil.splat(values, points, direction, shapes)
        return sums

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            return Splat.call(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        values, points, direction, ctx.shapes, ctx.stencil = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, points, direction)
        if forward_mode_active():
            ctx.save_for_forward(values, points, direction)

    @staticmethod
    def backward(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        if not _any(grads):
            return (None,) * 5
        values, points, direction = ctx.saved_tensors
        sources = [values.new_zeros(s) if g is None else g for g, s in zip(grads, ctx.shapes, strict=True)]
        needs_values, needs_points, needs_direction, *_ = ctx.needs_input_grad
        stencil = ctx.stencil
        return (
            Gather.apply(*sources, points, direction, stencil) if needs_values else None,
            PointGradient.apply(values, *sources, points, direction, stencil) if needs_points else None,
            PointGradient.apply(values, *sources, points, None, stencil) if needs_direction else None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: MaybeTensor) -> tuple[Tensor, ...]:
        values, points, direction = ctx.saved_tensors
        d_values, d_points, d_direction, *_ = tangents
        shapes, stencil = ctx.shapes, ctx.stencil
        terms = []
        if d_values is not None:
            terms.append(Splat.apply(d_values, points, direction, shapes, stencil))
        if d_points is not None:
            _refuse_two_directions(direction)
            _refuse_second_with_gradient(stencil)
            terms.append(Splat.apply(values, points, d_points, shapes, stencil))
        if d_direction is not None:
            terms.append(Splat.apply(values, points, d_direction, shapes, stencil))
        return tuple(_total(parts) for parts in zip(*terms, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return Splat.map(Splat.apply, info.batch_size, in_dims, *inputs)

    @staticmethod
    def map(
        apply: Apply, size: int, in_dims: Sequence[Any], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Makes mapped calls one: ``apply`` is this Function's, or ``call`` in the batching rule of the raw op."""
        values, points, direction, shapes, stencil = inputs
        values_dim, points_dim, direction_dim, *_ = in_dims
        folding = Folding(stencil, size, _batched(stencil, points, points_dim))
        sums = apply(
            folding.values(values, values_dim),
            folding.points(points, points_dim),
            folding.points(direction, direction_dim),
            tuple(folding.shape(shape) for shape in shapes),
            stencil,
        )
        return tuple(folding.unfold(x) for x in sums), (0,) * len(sums)


class PointGradient(OpFunction):
    """:math:`P`, applied to ``(values, *sources, points, direction, stencil)``."""

    @staticmethod
    def call(*inputs: Any) -> Tensor:
        """Runs the raw op."""
        values, *sources, points, direction, stencil = inputs
        gradient: Tensor = stencil.point_gradient(values, sources, points, direction)
        return gradient

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        with below_autograd():
            return PointGradient.call(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.stencil = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if forward_mode_active():
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor) -> tuple[MaybeTensor, ...]:
        needs_values, *wanted, needs_points, _, _ = ctx.needs_input_grad
        if grad is None:
            return (None,) * (len(wanted) + 4)
        values, *sources, points, direction = ctx.saved_tensors
        stencil = ctx.stencil
        _refuse_third(direction)
        _refuse_second_with_gradient(stencil)
        shapes = tuple(source.shape for source in sources)
        return (
            Gather.apply(*sources, points, grad, stencil) if needs_values else None,
            *_splat(values, points, grad, shapes, stencil, wanted),
            PointGradient.apply(values, *sources, points, grad, stencil) if needs_points else None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: MaybeTensor) -> Tensor:
        values, *sources, points, direction = ctx.saved_tensors
        d_values, *d_sources, d_points, d_direction, _ = tangents
        stencil = ctx.stencil
        terms = []
        if d_values is not None:
            terms.append(PointGradient.apply(d_values, *sources, points, direction, stencil))
        if _any(d_sources):
            terms.append(PointGradient.apply(values, *_complete(d_sources, sources), points, direction, stencil))
        if d_points is not None:
            _refuse_third(direction)
            _refuse_second_with_gradient(stencil)
            terms.append(PointGradient.apply(values, *sources, points, d_points, stencil))
        if d_direction is not None:
            terms.append(PointGradient.apply(values, *sources, points, d_direction, stencil))
        return _total(terms)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        return PointGradient.map(PointGradient.apply, info.batch_size, in_dims, *inputs)

    @staticmethod
    def map(apply: Apply, size: int, in_dims: Sequence[Any], *inputs: Any) -> tuple[Tensor, int]:
        """Makes mapped calls one: ``apply`` is this Function's, or ``call`` in the batching rule of the raw op."""
        values, *sources, points, direction, stencil = inputs
        values_dim, *source_dims, points_dim, direction_dim, _ = in_dims
        folding = Folding(stencil, size, _batched(stencil, points, points_dim), source_dims)
        gradient = apply(
            folding.values(values, values_dim),
            *folding.sources(sources, source_dims),
            folding.points(points, points_dim),
            folding.points(direction, direction_dim),
            stencil,
        )
        return folding.unfold_points(gradient)


def register_lookup(
    op: str, function: type[Gather | PointGradient], count: int, make_stencil: Callable[..., Stencil]
) -> None:
    """Registers the derivative and the batching rule of a raw op that reads sources.

    Args:
        op: Its name.
        function: The Function that applies it.
        count: The number of its arguments before the options: tensors, and lists of tensors.
        make_stencil: Returns the stencil for given options.
    """

    def flat(arguments: Sequence[Any]) -> list[Any]:
        return [x for each in arguments[:count] for x in (each if isinstance(each, (list, tuple)) else (each,))]

    def apply(*arguments: Any) -> Any:
        return function.apply(*flat(arguments), make_stencil(*arguments[count:]))

    def rule(info: Any, dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        inputs = (*flat(arguments), make_stencil(*arguments[count:]))
        return function.map(function.call, info.batch_size, (*flat(dims), None), *inputs)

    register_autograd(op, apply)
    register_batching(op, rule)


def _splat(
    values: Tensor,
    points: Tensor,
    direction: MaybeTensor,
    shapes: Shapes,
    stencil: Stencil,
    wanted: Sequence[bool],
) -> Sequence[MaybeTensor]:
    """Splats only into the wanted sources."""
    if all(wanted):
        sums: tuple[Tensor, ...] = Splat.apply(values, points, direction, shapes, stencil)
        return sums
    if not any(wanted):
        return [None] * len(wanted)
    columns = stencil.select(values, shapes, wanted)
    kept = iter(Splat.apply(columns, points, direction, tuple(itertools.compress(shapes, wanted)), stencil))
    return [next(kept) if want else None for want in wanted]


def _refuse_third(direction: MaybeTensor) -> None:
    """Raises where a formula would need the derivative of weights that are second derivatives already."""
    if direction is not None:
        raise NotImplementedError("trilinear sampling is differentiable twice; a third derivative was asked for")


def _refuse_second_with_gradient(stencil: Stencil) -> None:
    """Raises where a formula would need values, gradients and their derivatives at once."""
    if stencil.with_gradient:
        raise NotImplementedError(
            "sampling with_gradient=True is differentiable once; a second derivative was asked for. Sample without "
            "with_gradient and take the gradient by torch.autograd.grad(..., create_graph=True): that is "
            "differentiable again"
        )


def _refuse_two_directions(direction: MaybeTensor) -> None:
    """Raises if forward mode is applied twice in the points, which would need weights with two directions."""
    if direction is not None:
        raise NotImplementedError(
            "forward-mode differentiation of trilinear sampling in the points is possible once; for a second "
            "derivative take one of the two in reverse mode, as torch.func.hessian does"
        )


def _batched(stencil: Stencil, points: Tensor, mapped: int | None) -> bool:
    return stencil.batched(points.dim() - (mapped is not None))


def _any(tensors: Sequence[MaybeTensor]) -> bool:
    return any(x is not None for x in tensors)


def _complete(tangents: Sequence[MaybeTensor], primals: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if t is None else t for t, x in zip(tangents, primals, strict=True)]


def _total(terms: Sequence[Tensor]) -> Tensor:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first
