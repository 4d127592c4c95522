"""The raw grid ops: options, shapes under a compiler, derivatives. Schemas: extension/module/library.cpp."""

from __future__ import annotations

import builtins
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from voxelfield import _library
from voxelfield.foundation import constants
from voxelfield.foundation.autograd import MaybeTensor, OpFunction, forward_mode_active, needs_long_path
from voxelfield.foundation.checks import (
    FLOATING,
    INTEGERS,
    check_choice,
    check_dtype,
    check_field,
    check_points,
    check_same_device,
    check_tensor,
    coordinate_dtype,
    truth_of,
)
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError
from voxelfield.foundation.private_torch import below_autograd
from voxelfield.ops._derivatives import (
    Gather,
    PointGradient,
    Shapes,
    Splat,
    declare_lookup,
    run_or_check,
    sample,
    sample_directly,
)
from voxelfield.ops._table import declare

Padding = Literal["border", "zeros", "reflection", "periodic"]
Mode = Literal["linear", "nearest"]
PADDINGS: dict[str, int] = {"border": 0, "zeros": 1, "reflection": 2, "periodic": 3}
_PERIODIC, _PERIODIC_CLOSED = 3, 4  # of the second, each axis ends with a copy of its first vertex
MODES: tuple[str, ...] = ("linear", "nearest")


@dataclass(frozen=True)
class GridStencil:
    """Options of one call of the grid ops, as in their schemas; see :class:`voxelfield.ops._derivatives.Stencil`.

    Attributes:
        method: How a gradient is summed; None follows torch's settings when the backward pass runs.
        options: The first five fields, in schema order.
    """

    shareable: ClassVar[bool] = True

    padding: int
    align_corners: bool
    nearest: bool
    sum: bool
    with_gradient: bool
    method: int | None = None
    differentiated: bool = False
    options: tuple[int, bool, bool, bool, bool] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        options = (self.padding, self.align_corners, self.nearest, self.sum, self.with_gradient)
        object.__setattr__(self, "options", options)

    def batched(self, point_dims: int) -> bool:
        """Tells whether there is a batch dimension."""
        return point_dims == 3

    def gather(self, sources: Sequence[Tensor], points: Tensor) -> Tensor:
        """Samples ``sources`` at ``points``."""
        sampled: Tensor = _SAMPLE.raw(sources, points, *self.options)
        return sampled

    def splat(self, values: Tensor, points: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """Adds ``values`` up in grids of ``shapes``."""
        periodic = self.padding == _PERIODIC
        options = self.options
        if periodic:
            shapes = tuple((*shape[:-4], *(size + 1 for size in shape[-4:-1]), shape[-1]) for shape in shapes)
            options = (_PERIODIC_CLOSED, *options[1:])
            dtype, values = values.dtype, values.to(coordinate_dtype(values.dtype))
        sizes = [size for shape in shapes for size in shape[-4:]]
        method = self.method
        if method is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
            method = constants.DETERMINISTIC if deterministic else constants.AUTOMATIC
        sums: list[Tensor] = _SPLAT.raw(values, points, sizes, *options, method)
        return tuple(_opened(total).to(dtype) for total in sums) if periodic else tuple(sums)

    def point_gradient(self, values: Tensor, sources: Sequence[Tensor], points: Tensor) -> Tensor:
        """Returns the gradient in the points."""
        gradient: Tensor = _POINT_GRADIENT.raw(values, sources, points, *self.options)
        return gradient

    def select(self, values: Tensor, shapes: Shapes, wanted: Sequence[bool]) -> Tensor:
        """Returns the columns of some levels."""
        if self.sum:
            return values
        columns = values.split([shape[-1] for shape in shapes], dim=-1)
        return torch.cat(list(itertools.compress(columns, wanted)), dim=-1)


def _opened(closed: Tensor) -> Tensor:
    """Adds the last vertices of a closed periodic grid to the first ones, of which they are copies, and drops them."""
    for axis in (-4, -3, -2):
        closed, copies = closed.split((closed.shape[axis] - 1, 1), axis)
        closed.narrow(axis, 0, 1).add_(copies)
    return closed.contiguous()


def make_stencil(padding: str, align_corners: bool, mode: str, add: bool, with_gradient: bool) -> GridStencil:
    """Checks the options of a public function and translates them."""
    check_choice("padding", padding, PADDINGS)
    check_choice("mode", mode, MODES)
    nearest, with_gradient = mode == "nearest", truth_of("with_gradient", with_gradient)
    if with_gradient and nearest:
        raise ArgumentValueError("with_gradient=True needs mode='linear', got mode='nearest': that has no gradient")
    return GridStencil(PADDINGS[padding], truth_of("align_corners", align_corners), nearest, add, with_gradient)


known_stencil = functools.cache(make_stencil)


class SampleInBox(OpFunction):
    """Samples one grid at world positions, applied to ``(grid, points, aabb, stencil)``; points get no gradient.

    Returns the values, and where the points lie in the unit cube.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        grid, points, aabb, stencil = inputs
        with below_autograd():
            sampled: tuple[Tensor, Tensor] = _SAMPLE_IN_BOX.raw(grid, points, aabb, stencil.padding)
        return sampled

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        grid, *_, ctx.stencil = inputs
        ctx.shape = grid.shape
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor, _: None) -> tuple[MaybeTensor, None, None, None]:
        if grad is None:
            return None, None, None, None
        (unit,) = ctx.saved_tensors
        (summed,) = Splat.apply(grad, unit, (ctx.shape,), ctx.stencil)
        return summed, None, None, None


def sample_in_box_eagerly(grid: Tensor, points: Tensor, aabb: Tensor, padding: str) -> Tensor:
    """Samples a grid (X, Y, Z, C) over a box at world positions (N, 3), with the least work on the host.

    Differentiable in the grid. Must not be used if :func:`voxelfield.foundation.autograd.needs_long_path`, nor for
    positions or boxes that require a gradient. Only the raw op checks the arguments.
    """
    stencil = known_stencil(padding, True, "linear", False, False)
    sampled: Tensor = SampleInBox.apply(grid, points, aabb, stencil)[0]
    return sampled


def shared_grid(grids: Tensor) -> Tensor | None:
    """Returns the one grid that every element of a batch repeats, if the batch is an expanded tensor.

    The gradient of an expanded tensor would have to be stored once for each element of the batch. This function returns
    a differentiable view of the tensor that was expanded instead, which receives one gradient. None if the batch is not
    expanded, its own gradient is requested, an autograd Function of the caller lies between the batch and that tensor,
    or the batch is traced or transformed.
    """
    if grids.stride(0) != 0 or grids.shape[0] < 2 or needs_long_path():
        return None
    if not (grids.requires_grad and torch.is_grad_enabled()):
        return grids[0]
    base = grids._base
    if base is None or not base.requires_grad or base.dtype != grids.dtype:
        return None
    if grids.is_leaf or grids.retains_grad or grids._backward_hooks:
        return None
    # Functions such as gradient reversal return views too, but their backward does more than a view's.
    node, end = grids.grad_fn, base.grad_fn
    while node is not end and node is not None and node.next_functions:
        if isinstance(node, BackwardCFunction):
            return None
        node = node.next_functions[0][0]
    one = grids.detach()[0]
    # The gradient of view() costs nothing, and the gradient of as_strided() a pass over the base.
    if one.is_contiguous() and base.is_contiguous() and one.numel() == base.numel():
        return base.view(one.shape)
    return base.as_strided(one.shape, one.stride(), one.storage_offset())


def sample_grids(
    name: str,
    grids: Sequence[Tensor],
    points: Tensor,
    add: bool,
    padding: str,
    align_corners: bool,
    mode: str,
    with_gradient: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Samples ``grids`` of fitting shapes in any situation, or raises what the public functions promise.

    ``name`` is that of the argument: ``"grid"``, or ``"grids"`` if it is a sequence.
    """
    options = (padding, align_corners, mode, add, with_gradient)
    sampled = run_or_check(_sample, _check_and_sample, _named_inputs, name, grids, points, options)
    return (sampled[0], sampled[1:].movedim(0, -1)) if with_gradient else sampled


def _sample(_: str, grids: Sequence[Tensor], points: Tensor, options: tuple[Any, ...]) -> Tensor:
    return sample_directly(grids, points, known_stencil(*options))


def _check_and_sample(name: str, grids: Sequence[Tensor], points: Tensor, options: tuple[Any, ...]) -> Tensor:
    stencil, named = make_stencil(*options), _named(name, grids)
    _check_grids(named, stencil.nearest, stencil.sum)
    first = grids[0]
    points = check_points(points, (*first.shape[:-4], "N", 3), next(iter(named)), first)
    _library.ensure_loaded(first.device.type)
    return sample(grids, points, stencil)


def _named_inputs(name: str, grids: Sequence[Tensor], points: Tensor, _: tuple[Any, ...]) -> dict[str, Tensor]:
    return {"points": points, **_named(name, grids)}


def _named(name: str, grids: Sequence[Tensor]) -> dict[str, Tensor]:
    return {name if name == "grid" else f"{name}[{level}]": grid for level, grid in enumerate(grids)}


def _check_grids(grids: dict[str, Tensor], nearest: bool, add: bool) -> None:
    """Raises unless grids have at least one vertex, a dtype that kernels exist for, and fit together."""
    first_name, first = next(iter(grids.items()))
    batch: tuple[int | str, ...] = ("B",) if isinstance(first, Tensor) and first.dim() == 5 else ()
    channels: int | str = "C"
    for name, grid in grids.items():
        check_tensor(name, grid, (*batch, "X", "Y", "Z", channels))
        check_grid_dtype(name, grid, copied=nearest and not add)
        if grid is not first:
            check_dtype(name, grid, (first.dtype,), f" as {first_name} is")
            check_same_device(name, grid, first_name, first)
        if 0 in grid.shape[-4:-1]:
            raise ArgumentValueError(
                f"{name} must have at least one vertex along each axis, got shape {tuple(grid.shape)}"
            )
        batch = grid.shape[:-4]
        channels = grid.shape[-1] if add else "C"


def check_grid_dtype(name: str, grid: Tensor, copied: bool) -> None:
    """Raises unless kernels exist for the dtype of a grid. Integers can only be ``copied``, not interpolated."""
    if grid.dtype in INTEGERS and not copied:
        raise ArgumentTypeError(
            f"{name} must be float32 or float64 or float16 or bfloat16 to be interpolated, got "
            f"{str(grid.dtype).removeprefix('torch.')}: convert it with .float(), or keep integers with mode='nearest'"
        )
    check_dtype(name, grid, FLOATING + INTEGERS)


def _sampled(grids: list[Tensor], points: Tensor, nearest: bool, sum: bool, with_gradient: bool) -> Tensor:
    # The kernels check their arguments, but do not run on fake tensors.
    _check_grids(_named("grids", grids), nearest, sum)
    first = grids[0]
    check_field("points", points, (*first.shape[:-4], "N", 3), coordinate_dtype(first.dtype), "grids[0]", first)
    channels = first.shape[-1] if sum else builtins.sum(grid.shape[-1] for grid in grids)
    sets = (4,) if with_gradient else ()
    return first.new_empty(*sets, *points.shape[:-1], channels)


def _sampled_in_box(grid: Tensor, points: Tensor, aabb: Tensor) -> tuple[Tensor, Tensor]:
    check_tensor("grids", grid, ("X", "Y", "Z", "C"))
    check_dtype("grids", grid, FLOATING)
    check_field("points", points, ("N", 3), coordinate_dtype(grid.dtype), "grids", grid)
    check_field("aabb", aabb, (2, 3), coordinate_dtype(grid.dtype), "grids", grid)
    return grid.new_empty(points.shape[0], grid.shape[-1]), points.new_empty(points.shape)


def _sample_in_box(grid: Tensor, points: Tensor, aabb: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    stencil = GridStencil(padding, True, False, False, False)
    if not (points.requires_grad or aabb.requires_grad or forward_mode_active()):
        in_box: tuple[Tensor, Tensor] = SampleInBox.apply(grid, points, aabb, stencil)
        return in_box
    low, high = aabb
    unit = (points - low) / (high - low)
    return Gather.apply(grid, unit, stencil), unit


def _shapes(points: Sequence[int], sizes: Sequence[int]) -> Shapes:
    """Returns the shapes of grids of these sizes, X, Y, Z, C of each, given the shape of points."""
    return tuple((*points[:-2], *sizes[i : i + 4]) for i in range(0, len(sizes), 4))


def _splat(values: Tensor, points: Tensor, sizes: Sequence[int], *options: Any) -> list[Tensor]:
    return list(Splat.apply(values, points, _shapes(points.shape, sizes), GridStencil(*options)))


def _map_splat(info: Any, dims: Any, values: Tensor, points: Tensor, sizes: Sequence[int], *options: Any) -> Any:
    # Points that are mapped over have one dimension more than the points of one call.
    of_one = points.shape if dims[1] is None else points.movedim(dims[1], 0).shape[1:]
    inputs = (values, points, _shapes(of_one, sizes), GridStencil(*options))
    sums, at = Splat.map(Splat.call, info.batch_size, (*dims[:2], None, None), *inputs)
    return list(sums), list(at)


_SAMPLE = declare_lookup(
    "sample_trilinear", _sampled, Gather, lambda grids, points, *options: (*grids, points, GridStencil(*options))
)
_SAMPLE_IN_BOX = declare("sample_in_box", _sampled_in_box, formula=_sample_in_box)
_SPLAT = declare(
    "splat_trilinear",
    lambda values, points, sizes: [values.new_empty(shape) for shape in _shapes(points.shape, sizes)],
    formula=_splat,
    batching=_map_splat,
)
_POINT_GRADIENT = declare_lookup(
    "point_gradient_trilinear",
    lambda points: points.new_empty(points.shape),
    PointGradient,
    lambda values, grids, points, *options: (values, *grids, points, GridStencil(*options)),
)
