"""The raw grid ops: options, shapes under a compiler, derivatives. Schemas: extension/module/library.cpp."""

from __future__ import annotations

import builtins
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from voxelfield.foundation import constants
from voxelfield.foundation.autograd import MaybeTensor, OpFunction, needs_long_path
from voxelfield.foundation.checks import (
    FLOATING,
    INTEGERS,
    check_at_least_one,
    check_choice,
    check_dtype,
    check_field,
    check_same_device,
    check_tensor,
    coordinate_dtype,
    truth_of,
    widen_positions,
)
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError, shown
from voxelfield.ops._derivatives import Gather, PointGradient, Shapes, Splat, Stencil, declare_lookups, declare_splat
from voxelfield.ops._errors import element_name
from voxelfield.ops._table import declare, run_raw

Padding = Literal["border", "zeros", "reflection", "periodic"]
Mode = Literal["linear", "nearest"]
PADDINGS: dict[str, int] = {"border": 0, "zeros": 1, "reflection": 2, "periodic": 3}
_LARGEST = 1 << 40  # vertices of a grid, which no memory holds
_PERIODIC, _PERIODIC_CLOSED = 3, 4  # of the second, each axis ends with a copy of its first vertex
MODES: tuple[str, ...] = ("linear", "nearest")
Reduction = Literal["concat", "sum"]
REDUCTIONS: tuple[str, ...] = ("concat", "sum")


class GridOptions(TypedDict, total=False):
    """Options of :func:`voxelfield.ops.sample_trilinear`."""

    padding: Padding
    align_corners: bool
    mode: Mode


class PyramidOptions(GridOptions, total=False):
    """Options of :func:`voxelfield.ops.sample_pyramid`."""

    reduce: Reduction


@dataclass(frozen=True)
class GridStencil(Stencil):
    """A :class:`voxelfield.ops._derivatives.Stencil` of grids.

    Attributes:
        options: padding, align_corners, nearest, sum and with_gradient, as in the schemas.
        method: How a gradient is summed; None follows torch's settings when the backward pass runs.
    """

    of_grids = lists = True
    gather = "sample_trilinear"
    point_gradient = "point_gradient_trilinear"

    method: int | None = None

    def splat(
        self, values: Tensor, points: Tensor, shapes: Shapes, run: Callable[..., list[Tensor]] | None = None
    ) -> tuple[Tensor, ...]:
        """Adds ``values`` up in grids of ``shapes``, by the raw op or, recorded, by :data:`splat_grids` as ``run``."""
        padding, *options = self.options
        dtype, periodic = values.dtype, padding == _PERIODIC
        if periodic:
            shapes = tuple((*shape[:-4], *(size + 1 for size in shape[-4:-1]), shape[-1]) for shape in shapes)
            padding, values = _PERIODIC_CLOSED, values.to(coordinate_dtype(dtype))
        sizes = [size for shape in shapes for size in shape[-4:]]
        method = summation_method() if self.method is None else self.method
        sums = (run or splat_grids.raw)(values, points, sizes, padding, *options, method)
        return tuple(_opened(total).to(dtype) for total in sums) if periodic else tuple(sums)

    def select(self, values: Tensor, shapes: Shapes, wanted: Sequence[bool]) -> Tensor:
        """Returns the columns of some levels, or all of sums."""
        if self.options[3]:
            return values
        columns = values.split([shape[-1] for shape in shapes], dim=-1)
        return joined(list(itertools.compress(columns, wanted)))


def joined(features: Sequence[Tensor]) -> Tensor:
    """Concatenates features of one dtype, which autocast would refuse for the 16-bit dtype that it does not cast to."""
    device_type = "cuda" if features[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(device_type):
        return torch.cat(list(features), dim=-1)
    with torch.autocast(device_type, enabled=False):
        return torch.cat(list(features), dim=-1)


def summation_method() -> int:
    """Returns how torch's settings ask gradients to be summed."""
    return constants.DETERMINISTIC if torch.are_deterministic_algorithms_enabled() else constants.AUTOMATIC


def _opened(closed: Tensor) -> Tensor:
    """Adds the last vertices of a closed periodic grid to the first ones, of which they are copies, and drops them."""
    for axis in (-4, -3, -2):
        first, others, copies = closed.split((1, closed.shape[axis] - 2, 1), axis)
        closed = torch.cat((first + copies, others), axis)
    return closed


@functools.cache
def grid_stencil(*options: Any) -> GridStencil:
    """Returns the stencil of the five options, and of a method that may follow these."""
    return GridStencil(options[:5], method=options[5] if len(options) > 5 else None)


def grid_options(
    padding: str, align_corners: bool, mode: str, add: bool, with_gradient: bool
) -> tuple[int, bool, bool, bool, bool]:
    """Checks the options of a public function and returns those of the raw ops."""
    check_choice("padding", padding, PADDINGS)
    check_choice("mode", mode, MODES)
    nearest, with_gradient = mode == "nearest", truth_of("with_gradient", with_gradient)
    if with_gradient and nearest:
        raise ArgumentValueError("with_gradient=True needs mode='linear', got mode='nearest': that has no gradient")
    return PADDINGS[padding], truth_of("align_corners", align_corners), nearest, add, with_gradient


class SampleInBox(OpFunction):
    """Samples one grid at world positions; returns the values, and where the points lie in the unit cube."""

    forward = run_raw("sample_in_box")

    @classmethod
    def apply_transformed(cls, *inputs: Any) -> tuple[Tensor, Tensor]:
        """See :class:`OpFunction`."""
        grid, points, aabb, padding = inputs
        unit = (points - aabb[0]) / (aabb[1] - aabb[0])
        return Gather.apply(grid_stencil(padding, True, False, False, False), None, None, unit, grid), unit

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        grid, _, aabb, padding = inputs
        ctx.shape, ctx.stencil = grid.shape, grid_stencil(padding, True, False, False, False)
        ctx.set_materialize_grads(False)
        if any(ctx.needs_input_grad[1:3]):
            ctx.save_for_backward(output[1], grid, aabb)
        else:
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor, grad_unit: MaybeTensor) -> tuple[MaybeTensor, ...]:
        of_grid, of_points, of_aabb = None, None, None
        unit, *others = ctx.saved_tensors
        if grad is not None and ctx.needs_input_grad[0]:
            (of_grid,) = Splat.apply(ctx.stencil, (ctx.shape,), grad, unit)
        if others and (grad is not None or grad_unit is not None):
            grid, (low, high) = others
            of_unit = torch.zeros_like(unit) if grad_unit is None else grad_unit
            if grad is not None:
                of_unit = of_unit + PointGradient.apply(ctx.stencil, None, grad, unit, grid)
            of_points = of_unit / (high - low)
            of_aabb = torch.stack(((of_points * (unit - 1)).sum(0), -(of_points * unit).sum(0)))
        return of_grid, of_points, of_aabb, None


def grid_size(name: str, resolution: int | Sequence[int], axes: int = 3) -> tuple[int, ...]:
    """Returns numbers of vertices along some axes, of which one may stand for all; raises unless they are that."""
    size = tuple(resolution) if isinstance(resolution, Sequence) else (resolution,) * axes
    if len(size) != axes:
        raise ArgumentValueError(f"{name} must be one int, or {axes} for as many coordinates, got {shown(resolution)}")
    for number in size:
        check_at_least_one(name, number)
    if math.prod([int(number) for number in size]) > _LARGEST:
        raise ArgumentValueError(f"{name} must be a grid of at most 2^40 vertices, got {shown(resolution)}")
    return size


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


def as_rows(grid: Tensor, points: Tensor, axes: int) -> tuple[Tensor, Tensor]:
    """Returns kernel inputs: points as (N, D), or (B, N, D) for a batch, and one grid if a batch repeats it.

    What are not tensors, or are no grids, are left to the checks of the kernels.
    """
    if not (isinstance(grid, Tensor) and isinstance(points, Tensor) and 1 <= grid.dim() - axes <= 2):
        return grid, points
    if grid.layout is not torch.strided or points.layout is not torch.strided:
        return grid, points
    wide = coordinate_dtype(grid.dtype)
    batch = grid.shape[: -axes - 1]
    count = len(batch)
    if points.dim() <= count or points.shape[-1] != axes or points.shape[:count] != batch:
        wanted = ", ".join(map(str, (*batch, "...", axes)))
        raise ArgumentValueError(
            f"points must have shape ({wanted}) for grid of shape {tuple(grid.shape)}, got {tuple(points.shape)}"
        )
    if points.dtype in (torch.float32, torch.float64):
        points = points.to(wide)
    points = widen_positions("points", points, wide)
    if not grid.dtype.is_floating_point:
        points = points.detach()  # integers have no derivatives
    one = shared_grid(grid) if count == 1 else None
    if one is not None:
        return one, points.reshape(-1, axes)
    missing = count + 2 - points.dim()
    if missing > 0:
        return grid, points.unsqueeze(count)
    return grid, points if missing == 0 else points.flatten(count, -2)


def value_and_gradient(sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the two parts of what is sampled with gradient."""
    return sampled[0], sampled[1:].movedim(0, -1)


def _check_lookup(grids: Sequence[Tensor], points: Tensor, nearest: bool, sum: bool) -> None:
    """Raises unless grids have at least one vertex, a dtype that kernels exist for, and fit together and points."""
    first_name, first = element_name("grids", 0, len(grids)), grids[0]
    batch: tuple[int | str, ...] = ("B",) if isinstance(first, Tensor) and first.dim() == 5 else ()
    channels: int | str = "C"
    for i, grid in enumerate(grids):
        name = element_name("grids", i, len(grids))
        check_tensor(name, grid, (*batch, "X", "Y", "Z", channels))
        check_grid_dtype(name, grid, copied=nearest and not sum)
        if grid is not first:
            check_dtype(name, grid, (first.dtype,), f" as {first_name} is")
            check_same_device(name, grid, first_name, first)
        check_vertices(name, grid, grid.shape[-4:-1])
        batch = grid.shape[:-4]
        channels = grid.shape[-1] if sum else "C"
    check_field("points", points, (*batch, "N", 3), coordinate_dtype(first.dtype), first_name, first)


def check_vertices(name: str, grid: Tensor, size: Sequence[int]) -> None:
    """Raises if a grid has an axis without vertices; ``size`` are the lengths of its axes."""
    if 0 in size:
        raise ArgumentValueError(f"{name} must have 1 to 2^30 vertices along each axis, got shape {tuple(grid.shape)}")


def check_volumes(grid: Tensor) -> None:
    """Raises unless the argument ``grid`` is one of three axes, or a batch, of floating-point numbers."""
    check_field("grid", grid, ("...",), FLOATING)
    if grid.dim() not in (4, 5):
        raise ArgumentValueError(f"grid must have shape (X, Y, Z, C) or (B, X, Y, Z, C), got {tuple(grid.shape)}")
    check_vertices("grid", grid, grid.shape[-4:-1])


def check_grid_dtype(name: str, grid: Tensor, copied: bool) -> None:
    """Raises unless kernels exist for the dtype of a grid. Integers can only be ``copied``, not interpolated."""
    if grid.dtype in INTEGERS and not copied:
        raise ArgumentTypeError(
            f"{name} must be float32, float64, float16 or bfloat16 to be interpolated, got "
            f"{str(grid.dtype).removeprefix('torch.')}: convert it with .float(), or keep integers with mode='nearest'"
        )
    check_dtype(name, grid, FLOATING + INTEGERS)


def _sampled(grids: list[Tensor], points: Tensor, sum: bool, with_gradient: bool) -> Tensor:
    channels = grids[0].shape[-1] if sum else builtins.sum(grid.shape[-1] for grid in grids)
    sets = (4,) if with_gradient else ()
    return grids[0].new_empty(*sets, *points.shape[:-1], channels)


def _sampled_in_box(grid: Tensor, points: Tensor, aabb: Tensor) -> tuple[Tensor, Tensor]:
    _check_lookup((grid,), points, nearest=False, sum=False)
    check_field("aabb", aabb, (2, 3), coordinate_dtype(grid.dtype), "grid", grid)
    return grid.new_empty(points.shape[0], grid.shape[-1]), points.new_empty(points.shape)


def _shapes(points: Sequence[int], sizes: Sequence[int]) -> Shapes:
    """Returns the shapes of grids of these sizes, X, Y, Z, C of each, given the shape of points."""
    return tuple((*points[:-2], *sizes[i : i + 4]) for i in range(0, len(sizes), 4))


sample_lookup = declare_lookups(GridStencil, grid_stencil, results=_sampled, check=_check_lookup)
sample_in_box = declare("sample_in_box", _sampled_in_box, function=SampleInBox)
splat_grids = declare_splat(
    "splat_trilinear",
    lambda values, points, sizes, *options: (grid_stencil(*options), _shapes(points, sizes)),
    list,
    lambda values, points, sizes: [values.new_empty(shape) for shape in _shapes(points.shape, sizes)],
)
