"""Trilinear interpolation of points that bring the features of their own cell's eight corners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops._checks import FLOATING, check_dtype, check_points, check_tensor
from voxelfield.ops._derivatives import (
    Gather,
    MaybeTensor,
    PointGradient,
    Shapes,
    Splat,
    register_autograd,
    sample,
)


def trilinear_interpolate(feats: Tensor, points: Tensor) -> Tensor:
    r"""Interpolates eight corner features at a point inside each cell.

    With :math:`u = (p + 1) / 2` the result is
    :math:`\sum_{ijk \in \{0,1\}} w_i(u_x)\, w_j(u_y)\, w_k(u_z)\; f_{4i+2j+k}` where :math:`w_1(u) = u` and
    :math:`w_0(u) = 1 - u`.

    Args:
        feats: (N, 8, C) features of the corners in binary order: corner ``4*i + 2*j + k`` is the upper one along
            x, y, z where i, j, k are 1. That is the memory order of a 2x2x2 block of an (X, Y, Z, C) grid. float32,
            float64, float16 or bfloat16, on CPU or CUDA, of any strides.
        points: (N, 3) x, y, z in the cell's own coordinates: -1 at the lower, 1 at the upper corner; beyond that the
            interpolant is continued linearly. On the device of ``feats``, float32 (float64 for float64 ``feats``). A
            point with a NaN or infinite coordinate yields zeros and receives no gradient.

    Returns:
        (N, C) in the dtype of ``feats``; the arithmetic is at least float32. Differentiable twice with respect to both.

    Raises:
        TypeError: An argument is no tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device.
        NotImplementedError: A third derivative is asked for.
    """
    check_tensor("feats", feats, ("N", 8, "C"))
    check_dtype("feats", feats, FLOATING)
    check_points(points, ("N", 3), "feats", feats)
    if points.shape[0] != feats.shape[0]:
        raise ValueError(
            f"points must have one row for each of the {feats.shape[0]} cells of feats, got {tuple(points.shape)}"
        )
    _library.ensure_loaded(feats.device.type)
    return sample([feats], points, CellStencil())


class CellStencil:
    """Point n lies in cell n; see :class:`voxelfield.ops._derivatives.Stencil`."""

    with_gradient = False
    batched = True
    shareable: ClassVar[bool] = False

    def gather(self, sources: Sequence[Tensor], points: Tensor, direction: MaybeTensor) -> Tensor:
        """Interpolates each cell at its point."""
        interpolated: Tensor = torch.ops.voxelfield.interpolate_cells.default(*sources, points, direction)
        return interpolated

    def splat(self, values: Tensor, points: Tensor, direction: MaybeTensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """Spreads each value over the corners of its cell."""
        return (torch.ops.voxelfield.splat_cells.default(values, points, direction),)

    def point_gradient(
        self, values: Tensor, sources: Sequence[Tensor], points: Tensor, direction: MaybeTensor
    ) -> Tensor:
        """Returns the gradient in the points."""
        gradient: Tensor = torch.ops.voxelfield.point_gradient_cells.default(values, *sources, points, direction)
        return gradient

    def select(self, values: Tensor, shapes: Shapes, wanted: Sequence[bool]) -> Tensor:
        """Returns all values: there is one source."""
        return values

    def as_batch(self) -> CellStencil:
        """Returns the same: N cells are a batch already."""
        return self


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::interpolate_cells")
    def _(feats: Tensor, points: Tensor, direction: Tensor | None) -> Tensor:
        return feats.new_empty(points.shape[0], feats.shape[2])

    @torch.library.register_fake("voxelfield::splat_cells")
    def _(values: Tensor, points: Tensor, direction: Tensor | None) -> Tensor:
        return values.new_empty(values.shape[0], 8, values.shape[1])

    @torch.library.register_fake("voxelfield::point_gradient_cells")
    def _(values: Tensor, feats: Tensor, points: Tensor, direction: Tensor | None) -> Tensor:
        return points.new_empty(points.shape)

    def interpolate(feats: Tensor, points: Tensor, direction: MaybeTensor) -> Tensor:
        interpolated: Tensor = Gather.apply(feats, points, direction, CellStencil())
        return interpolated

    def splat(values: Tensor, points: Tensor, direction: MaybeTensor) -> Tensor:
        spread: Tensor
        (spread,) = Splat.apply(values, points, direction, ((values.shape[0], 8, *values.shape[1:]),), CellStencil())
        return spread

    def point_gradient(values: Tensor, feats: Tensor, points: Tensor, direction: MaybeTensor) -> Tensor:
        gradient: Tensor = PointGradient.apply(values, feats, points, direction, CellStencil())
        return gradient

    register_autograd("interpolate_cells", interpolate)
    register_autograd("splat_cells", splat)
    register_autograd("point_gradient_cells", point_gradient)
