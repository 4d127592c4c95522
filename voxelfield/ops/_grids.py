"""The raw grid ops: options, shapes under a compiler, derivatives. Schemas: extension/module/library.cpp."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops import _constants
from voxelfield.ops._checks import FLOATING, check_choice, check_dtype, check_points, check_same_device
from voxelfield.ops._derivatives import (
    Gather,
    MaybeTensor,
    PointGradient,
    Shapes,
    Splat,
    register_autograd,
    sample,
)

Padding = Literal["border", "zeros", "reflection"]
Mode = Literal["linear", "nearest"]
PADDINGS: dict[str, int] = {"border": 0, "zeros": 1, "reflection": 2}
MODES: tuple[str, ...] = ("linear", "nearest")


@dataclass(slots=True)
class GridStencil:
    """Options of one call of the grid ops: those of their schemas, and whether the tensors have a batch dimension."""

    shareable: ClassVar[bool] = True

    padding: int
    align_corners: bool
    nearest: bool
    sum: bool
    with_gradient: bool
    method: int | None = None  # None: as torch's settings ask when the sum is taken
    batched: bool = True

    def gather(self, sources: Sequence[Tensor], points: Tensor, direction: MaybeTensor) -> Tensor:
        """Samples ``sources`` at ``points``; see :class:`voxelfield.ops._derivatives.Stencil`."""
        sampled: Tensor = torch.ops.voxelfield.sample_trilinear.default(
            self._lead_all(sources), *self._lead_all((points, direction)), *self._options()
        )
        return self._strip(sampled, int(self.with_gradient))

    def splat(self, values: Tensor, points: Tensor, direction: MaybeTensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """Adds ``values`` up in grids of ``shapes``; see :class:`voxelfield.ops._derivatives.Stencil`."""
        sizes = list(itertools.chain.from_iterable(shape[-4:] for shape in shapes))
        sums: list[Tensor] = torch.ops.voxelfield.splat_trilinear.default(
            self._lead(values, int(self.with_gradient)),
            *self._lead_all((points, direction)),
            sizes,
            *self._options(),
            self._method(),
        )
        return tuple(self._strip(x) for x in sums)

    def point_gradient(
        self, values: Tensor, sources: Sequence[Tensor], points: Tensor, direction: MaybeTensor
    ) -> Tensor:
        """Returns the gradient in the points; see :class:`voxelfield.ops._derivatives.Stencil`."""
        gradient: Tensor = torch.ops.voxelfield.point_gradient_trilinear.default(
            self._lead(values, int(self.with_gradient)),
            self._lead_all(sources),
            *self._lead_all((points, direction)),
            *self._options(),
        )
        return self._strip(gradient)

    def select(self, values: Tensor, shapes: Shapes, wanted: Sequence[bool]) -> Tensor:
        """Returns the columns of some levels; see :class:`voxelfield.ops._derivatives.Stencil`."""
        if self.sum:
            return values
        columns = values.split([shape[-1] for shape in shapes], dim=-1)
        return torch.cat(list(itertools.compress(columns, wanted)), dim=-1)

    def as_batch(self) -> GridStencil:
        """Returns the same for tensors with a batch dimension."""
        return replace(self, batched=True)

    def _options(self) -> tuple[int, bool, bool, bool, bool]:
        return self.padding, self.align_corners, self.nearest, self.sum, self.with_gradient

    def _method(self) -> int:
        if self.method is not None:
            return self.method
        return _constants.DETERMINISTIC if torch.are_deterministic_algorithms_enabled() else _constants.AUTOMATIC

    def _lead(self, x: Tensor, dim: int = 0) -> Tensor:
        return x if self.batched else x.unsqueeze(dim)

    def _lead_all(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return tensors if self.batched else [None if x is None else x.unsqueeze(0) for x in tensors]

    def _strip(self, x: Tensor, dim: int = 0) -> Tensor:
        return x if self.batched else x.squeeze(dim)


def sample_grids(
    names: Sequence[str],
    grids: Sequence[Tensor],
    points: Tensor,
    batched: bool,
    add: bool,
    padding: str,
    align_corners: bool,
    mode: str,
    with_gradient: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Checks what the public functions have in common, and samples ``grids`` of fitting shapes."""
    first = grids[0]
    for name, grid in zip(names, grids, strict=True):
        check_dtype(name, grid, FLOATING)
        if grid is not first:
            check_dtype(name, grid, (first.dtype,), f" as {names[0]} is")
            check_same_device(name, grid, names[0], first)
        if 0 in grid.shape[-4:-1]:
            raise ValueError(f"{name} must have at least one vertex along each axis, got shape {tuple(grid.shape)}")
    check_points(points, (first.shape[0], "N", 3) if batched else ("N", 3), names[0], first)
    check_choice("padding", padding, PADDINGS)
    check_choice("mode", mode, MODES)
    nearest = mode == "nearest"
    if with_gradient and nearest:
        raise ValueError("with_gradient=True needs mode='linear', got mode='nearest': that has no gradient")
    _library.ensure_loaded(first.device.type)
    stencil = GridStencil(
        PADDINGS[padding], bool(align_corners), nearest, add, bool(with_gradient), method=None, batched=batched
    )
    sampled = sample(grids, points, stencil)
    if not with_gradient:
        return sampled
    return sampled[0], sampled[1:].movedim(0, -1)


def _shapes(points: Tensor, sizes: Sequence[int]) -> Shapes:
    return tuple((points.shape[0], *sizes[i : i + 4]) for i in range(0, len(sizes), 4))


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::sample_trilinear")
    def _(grids: list[Tensor], points: Tensor, direction: MaybeTensor, *options: Any) -> Tensor:
        *_, add, with_gradient = options
        channels = grids[0].shape[4] if add else sum(grid.shape[4] for grid in grids)
        sets = (4,) if with_gradient else ()
        return grids[0].new_empty(*sets, points.shape[0], points.shape[1], channels)

    @torch.library.register_fake("voxelfield::splat_trilinear")
    def _(values: Tensor, points: Tensor, direction: MaybeTensor, sizes: list[int], *options: Any) -> list[Tensor]:
        return [values.new_empty(shape) for shape in _shapes(points, sizes)]

    @torch.library.register_fake("voxelfield::point_gradient_trilinear")
    def _(values: Tensor, grids: list[Tensor], points: Tensor, direction: MaybeTensor, *options: Any) -> Tensor:
        return points.new_empty(points.shape)

    def sample(grids: list[Tensor], points: Tensor, direction: MaybeTensor, *options: Any) -> Tensor:
        sampled: Tensor = Gather.apply(*grids, points, direction, GridStencil(*options))
        return sampled

    def splat(values: Tensor, points: Tensor, direction: MaybeTensor, sizes: list[int], *options: Any) -> list[Tensor]:
        return list(Splat.apply(values, points, direction, _shapes(points, sizes), GridStencil(*options)))

    def point_gradient(
        values: Tensor, grids: list[Tensor], points: Tensor, direction: MaybeTensor, *options: Any
    ) -> Tensor:
        gradient: Tensor = PointGradient.apply(values, *grids, points, direction, GridStencil(*options))
        return gradient

    register_autograd("sample_trilinear", sample)
    register_autograd("splat_trilinear", splat)
    register_autograd("point_gradient_trilinear", point_gradient)
