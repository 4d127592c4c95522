"""The raw grid ops: options, shapes under a compiler, derivatives. Schemas: extension/module/library.cpp."""

from __future__ import annotations

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
from voxelfield.foundation.autograd import MaybeTensor, OpFunction, below_autograd, forward_mode_active, needs_long_path
from voxelfield.foundation.checks import (
    FLOATING,
    INTEGERS,
    check_choice,
    check_dtype,
    check_points,
    check_same_device,
    check_tensor,
    coordinate_dtype,
)
from voxelfield.foundation.errors import (
    EXPLAINED_LATER,
    ArgumentTypeError,
    ArgumentValueError,
    explain_memory,
    stop_if_out_of_memory,
)
from voxelfield.ops import _derivatives
from voxelfield.ops._derivatives import Gather, PointGradient, Shapes, Splat, register_lookup
from voxelfield.ops._registration import fake, register_autograd, register_batching

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
        sampled: Tensor = torch.ops.voxelfield.sample_trilinear.default(sources, points, *self.options)
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
        sums: list[Tensor] = torch.ops.voxelfield.splat_trilinear.default(values, points, sizes, *options, method)
        return tuple(_opened(total).to(dtype) for total in sums) if periodic else tuple(sums)

    def point_gradient(self, values: Tensor, sources: Sequence[Tensor], points: Tensor) -> Tensor:
        """Returns the gradient in the points."""
        gradient: Tensor = torch.ops.voxelfield.point_gradient_trilinear.default(values, sources, points, *self.options)
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
    nearest = mode == "nearest"
    if with_gradient and nearest:
        raise ArgumentValueError("with_gradient=True needs mode='linear', got mode='nearest': that has no gradient")
    return GridStencil(PADDINGS[padding], bool(align_corners), nearest, add, bool(with_gradient))


known_stencil = functools.cache(make_stencil)


def sample_eagerly(
    grids: Sequence[Tensor],
    points: Tensor,
    add: bool,
    padding: str,
    align_corners: bool,
    mode: str,
    with_gradient: bool,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Samples grids in the common case; None if :func:`sample_grids` must handle the call or report an error.

    Only the raw op checks arguments here: the checks in Python would take longer than everything else on the host.
    """
    if needs_long_path():
        return None
    try:
        stencil = known_stencil(padding, align_corners, mode, add, with_gradient)
        sampled = _derivatives.sample_eagerly(grids, points, stencil)
    except EXPLAINED_LATER as error:  # the slow path raises it again, with a better message
        names = ["grid"] if len(grids) == 1 else [f"grids[{level}]" for level in range(len(grids))]
        stop_if_out_of_memory(error, points=points, **dict(zip(names, grids, strict=True)))
        return None
    if sampled.numel() == 0:  # the raw op checks empty inputs less strictly
        return None
    return _values_and_gradient(sampled) if with_gradient else sampled


class SampleInBox(OpFunction):
    """Samples one grid at world positions, applied to ``(grid, points, aabb, stencil)``; points get no gradient.

    Returns the values, and where the points lie in the unit cube.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        grid, points, aabb, stencil = inputs
        with below_autograd():
            sampled: tuple[Tensor, Tensor] = torch.ops.voxelfield.sample_in_box.default(
                grid, points, aabb, stencil.padding
            )
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
    run = SampleInBox.record if torch.is_grad_enabled() and grid.requires_grad else SampleInBox.forward
    sampled: Tensor = run(grid, points, aabb, stencil)[0]
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
    names: Sequence[str],
    grids: Sequence[Tensor],
    points: Tensor,
    add: bool,
    padding: str,
    align_corners: bool,
    mode: str,
    with_gradient: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs the checks that the public functions share, and samples ``grids`` of fitting shapes in any situation."""
    first = grids[0]
    stencil = make_stencil(padding, align_corners, mode, add, with_gradient)
    _check_grids(names, grids, copied=stencil.nearest and not add)
    points = check_points(points, (first.shape[0], "N", 3) if first.dim() == 5 else ("N", 3), names[0], first)
    _library.ensure_loaded(first.device.type)
    with explain_memory(points=points, **dict(zip(names, grids, strict=True))):
        sampled = _derivatives.sample(grids, points, stencil)
    return _values_and_gradient(sampled) if with_gradient else sampled


def _check_grids(names: Sequence[str], grids: Sequence[Tensor], copied: bool) -> None:
    """Raises unless grids have at least one vertex, a dtype that kernels exist for, and fit together."""
    first = grids[0]
    for name, grid in zip(names, grids, strict=True):
        check_grid_dtype(name, grid, copied)
        if grid is not first:
            check_dtype(name, grid, (first.dtype,), f" as {names[0]} is")
            check_same_device(name, grid, names[0], first)
        if 0 in grid.shape[-4:-1]:
            raise ArgumentValueError(
                f"{name} must have at least one vertex along each axis, got shape {tuple(grid.shape)}"
            )


def check_grid_dtype(name: str, grid: Tensor, copied: bool) -> None:
    """Raises unless kernels exist for the dtype of a grid. Integers can only be ``copied``, not interpolated."""
    if grid.dtype in INTEGERS and not copied:
        raise ArgumentTypeError(
            f"{name} must be float32 or float64 or float16 or bfloat16 to be interpolated, got "
            f"{str(grid.dtype).removeprefix('torch.')}: convert it with .float(), or keep integers with mode='nearest'"
        )
    check_dtype(name, grid, FLOATING + INTEGERS)


def _values_and_gradient(sampled: Tensor) -> tuple[Tensor, Tensor]:
    return sampled[0], sampled[1:].movedim(0, -1)


def _shapes(points: Tensor, sizes: Sequence[int]) -> Shapes:
    return tuple((*points.shape[:-2], *sizes[i : i + 4]) for i in range(0, len(sizes), 4))


@fake("sample_trilinear")
def _(grids: list[Tensor], points: Tensor, *options: Any) -> Tensor:
    # The kernels check their arguments, but do not run on fake tensors.
    batched = grids[0].dim() == 5
    for level, grid in enumerate(grids):
        lead = (grids[0].shape[0],) if batched else ()
        check_tensor(f"grids[{level}]", grid, (*lead, "X", "Y", "Z", "C"))
    *_, nearest, add, with_gradient = options
    _check_grids([f"grids[{level}]" for level in range(len(grids))], grids, copied=nearest and not add)
    check_tensor("points", points, (grids[0].shape[0], "N", 3) if batched else ("N", 3))
    check_dtype("points", points, (coordinate_dtype(grids[0].dtype),))
    check_same_device("points", points, "grids[0]", grids[0])
    channels = grids[0].shape[-1] if add else sum(grid.shape[-1] for grid in grids)
    sets = (4,) if with_gradient else ()
    return grids[0].new_empty(*sets, *points.shape[:-1], channels)


@fake("sample_in_box")
def _(grid: Tensor, points: Tensor, aabb: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    check_tensor("grids", grid, ("X", "Y", "Z", "C"))
    check_dtype("grids", grid, FLOATING)
    for name, x, shape in (("points", points, ("N", 3)), ("aabb", aabb, (2, 3))):
        check_tensor(name, x, shape)
        check_dtype(name, x, (coordinate_dtype(grid.dtype),))
        check_same_device(name, x, "grids", grid)
    return grid.new_empty(points.shape[0], grid.shape[-1]), points.new_empty(points.shape)


@fake("splat_trilinear")
def _(values: Tensor, points: Tensor, sizes: list[int], *options: Any) -> list[Tensor]:
    return [values.new_empty(shape) for shape in _shapes(points, sizes)]


@fake("point_gradient_trilinear")
def _(values: Tensor, grids: list[Tensor], points: Tensor, *options: Any) -> Tensor:
    return points.new_empty(points.shape)


def _apply_splat(values: Tensor, points: Tensor, sizes: list[int], *options: Any) -> list[Tensor]:
    return list(Splat.apply(values, points, _shapes(points, sizes), GridStencil(*options)))


def _apply_sample_in_box(grid: Tensor, points: Tensor, aabb: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    stencil = GridStencil(padding, True, False, False, False)
    if not (points.requires_grad or aabb.requires_grad or forward_mode_active()):
        in_box: tuple[Tensor, Tensor] = SampleInBox.apply(grid, points, aabb, stencil)
        return in_box
    low, high = aabb
    unit = (points - low) / (high - low)
    return Gather.apply(grid, unit, stencil), unit


def _map_splat(info: Any, dims: Any, values: Tensor, points: Tensor, sizes: Any, *options: Any) -> Any:
    # Points that are mapped over have one dimension more than the points of one call.
    lead = points.shape[:-2] if dims[1] is None else points.movedim(dims[1], 0).shape[1:-2]
    shapes = tuple((*lead, *sizes[i : i + 4]) for i in range(0, len(sizes), 4))
    inputs = (values, points, shapes, GridStencil(*options))
    sums, at = Splat.map(Splat.call, info.batch_size, (*dims[:2], None, None), *inputs)
    return list(sums), list(at)


register_lookup("sample_trilinear", Gather, 2, GridStencil)
register_autograd("sample_in_box", _apply_sample_in_box)
register_autograd("splat_trilinear", _apply_splat)
register_batching("splat_trilinear", _map_splat)
register_lookup("point_gradient_trilinear", PointGradient, 3, GridStencil)
