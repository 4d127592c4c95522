r"""Derivatives of the stencil ops, written once for grids and for cells.

Write :math:`S(f, p) = \sum_k w_k(p) f_k` for sampling. Its adjoint in the features is a splat
:math:`S^*(v, p)_k = \sum w_k(p) v`, its gradient in the point is :math:`P(v, f, p)_a = \sum_k \partial_a w_k(p)
\langle v, f_k \rangle`. Replacing the weights :math:`w_k` by their derivative along a direction :math:`d`,
:math:`\sum_a d_a \partial_a w_k`, gives :math:`S_d, S^*_d, P_d`. The weights depend on nothing but the point, so
first and second derivatives of all of them are again one of these six: the table below is complete up to second
order, backwards (``backward``, towards the inputs) and forwards (``jvp``, along tangents).

These are autograd Functions with ``setup_context``, so that ``torch.func`` can transform them. The public functions
call them; :func:`register_autograd` puts them beneath the registered ops too, for a compiler to trace.
``torch.library.register_autograd`` would not do: under it forward-mode differentiation loses tangents silently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function

from voxelfield.ops._vmap import Folding

Shapes = tuple[tuple[int, ...], ...]
MaybeTensor = Tensor | None

# torch's manual for custom operators has a kernel of autograd's call the kernels below it in this way. The second key
# only keeps track of views: a view that is returned from a Function could not be changed in place.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


class Stencil(Protocol):
    """Where the corners of a point are found: the options of one call, and the raw ops that understand them."""

    with_gradient: bool
    """Whether values and results are stacked with their three derivatives in a leading dimension of 4."""

    batched: bool
    """Whether sources, points and values have a batch dimension in front (behind that of ``with_gradient``)."""

    shareable: ClassVar[bool]
    """Whether all points of a batch's element read one and the same source."""

    def gather(self, sources: Sequence[Tensor], points: Tensor, direction: MaybeTensor) -> Tensor:
        """Runs the raw op :math:`S`."""
        ...

    def splat(self, values: Tensor, points: Tensor, direction: MaybeTensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """Runs the raw op :math:`S^*` for sources of these shapes."""
        ...

    def point_gradient(
        self, values: Tensor, sources: Sequence[Tensor], points: Tensor, direction: MaybeTensor
    ) -> Tensor:
        """Runs the raw op :math:`P`."""
        ...

    def select(self, values: Tensor, shapes: Shapes, wanted: Sequence[bool]) -> Tensor:
        """Returns those columns of ``values`` that belong to the wanted ones of the sources."""
        ...

    def as_batch(self) -> Stencil:
        """Returns the same with ``batched``."""
        ...


def sample(sources: Sequence[Tensor], points: Tensor, stencil: Stencil) -> Tensor:
    """Samples sources at points, differentiably: what the public functions call."""
    if torch.compiler.is_compiling():
        return stencil.gather(sources, points, None)
    sampled: Tensor = Gather.apply(*sources, points, None, stencil)
    return sampled


class _StencilFunction(Function):
    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        """Does what torch's ``apply`` does, without binding inputs to a signature: that takes longer than the rest."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*inputs)
        return super(Function, cls).apply(*unwrap_dead_wrappers(inputs))  # type: ignore[misc]


class Gather(_StencilFunction):
    """:math:`S`, applied to ``(*sources, points, direction, stencil)``."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        *sources, points, direction, stencil = inputs
        with below_autograd():
            gathered: Tensor = stencil.gather(sources, points, direction)
        return gathered

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *sources, points, direction, ctx.stencil = inputs
        ctx.shapes = tuple(source.shape for source in sources)
        *_, needs_points, needs_direction, _ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        # The features matter to the gradient in the point alone: do not keep them alive for nothing.
        ctx.save_for_backward(points, direction, *(sources if needs_points or needs_direction else ()))
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
        *sources, points, direction, stencil = inputs
        *source_dims, points_dim, direction_dim, _ = in_dims
        folding = Folding(stencil, info.batch_size, source_dims)
        gathered = Gather.apply(
            *folding.sources(sources, source_dims),
            folding.points(points, points_dim),
            folding.points(direction, direction_dim),
            folding.stencil,
        )
        return folding.unfold_values(gathered)


class Splat(_StencilFunction):
    """:math:`S^*`, applied to ``(values, points, direction, shapes, stencil)``: one sum for each of ``shapes``."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        values, points, direction, shapes, stencil = inputs
        with below_autograd():
            sums: tuple[Tensor, ...] = stencil.splat(values, points, direction, shapes)
        return sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        values, points, direction, ctx.shapes, ctx.stencil = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(values, points, direction)
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
        values, points, direction, shapes, stencil = inputs
        values_dim, points_dim, direction_dim, *_ = in_dims
        folding = Folding(stencil, info.batch_size)
        sums = Splat.apply(
            folding.values(values, values_dim),
            folding.points(points, points_dim),
            folding.points(direction, direction_dim),
            tuple(folding.shape(shape) for shape in shapes),
            folding.stencil,
        )
        return tuple(folding.unfold(x) for x in sums), (0,) * len(sums)


class PointGradient(_StencilFunction):
    """:math:`P`, applied to ``(values, *sources, points, direction, stencil)``."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        values, *sources, points, direction, stencil = inputs
        with below_autograd():
            gradient: Tensor = stencil.point_gradient(values, sources, points, direction)
        return gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.stencil = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
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
        values, *sources, points, direction, stencil = inputs
        values_dim, *source_dims, points_dim, direction_dim, _ = in_dims
        folding = Folding(stencil, info.batch_size, source_dims)
        gradient = PointGradient.apply(
            folding.values(values, values_dim),
            *folding.sources(sources, source_dims),
            folding.points(points, points_dim),
            folding.points(direction, direction_dim),
            folding.stencil,
        )
        return folding.unfold_points(gradient)


def register_autograd(op: str, apply: Callable[..., Any]) -> None:
    """Makes autograd run a registered op by way of the Functions.

    Args:
        op: Name of the op.
        apply: Takes the op's arguments, applies one of the Functions to them, returns the op's result.
    """

    def kernel(*args: Any) -> Any:
        # torch.func runs this in the midst of one of its levels, where no Function can be applied.
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"torch.ops.voxelfield.{op} cannot be transformed by torch.func (grad, jvp, vmap, ...); the functions "
                "in voxelfield.ops can, outside of torch.compile(fullgraph=True)"
            )
        return apply(*args)

    _fragment.impl(op, kernel, "Autograd")


def last_derivative(op: str, refusal: str) -> type[Function]:
    """Makes the Function of a backward op that has no derivative of its own.

    Args:
        op: Name of the op.
        refusal: Message of the NotImplementedError that asking for one raises.
    """

    class LastDerivative(Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            with below_autograd():
                return getattr(torch.ops.voxelfield, op).default(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> None:
            raise NotImplementedError(refusal)

        @staticmethod
        def jvp(ctx: Any, *tangents: MaybeTensor) -> None:
            raise NotImplementedError(refusal)

        @staticmethod
        def vmap(*_: object) -> None:
            raise NotImplementedError(f"{op} cannot be mapped by torch.vmap")

    return LastDerivative


_fragment = torch.library.Library("voxelfield", "FRAGMENT")


def _splat(
    values: Tensor,
    points: Tensor,
    direction: MaybeTensor,
    shapes: Shapes,
    stencil: Stencil,
    wanted: Sequence[bool],
) -> Sequence[MaybeTensor]:
    """Splats into the wanted ones of the sources alone."""
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
    """Raises where forward mode is taken twice in the points: that would weigh the corners along two directions."""
    if direction is not None:
        raise NotImplementedError(
            "forward-mode differentiation of trilinear sampling in the points is possible once; for a second "
            "derivative take one of the two in reverse mode, as torch.func.hessian does"
        )


def _any(tensors: Sequence[MaybeTensor]) -> bool:
    return any(x is not None for x in tensors)


def _complete(tangents: Sequence[MaybeTensor], primals: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if t is None else t for t, x in zip(tangents, primals, strict=True)]


def _total(terms: Sequence[Tensor]) -> Tensor:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first
