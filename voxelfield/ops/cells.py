"""Trilinear interpolation in individual cells, each given by the features of its eight corners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.foundation.autograd import needs_long_path
from voxelfield.foundation.checks import (
    FLOATING,
    check_dtype,
    check_points,
    check_same_device,
    check_tensor,
    coordinate_dtype,
)
from voxelfield.foundation.errors import EXPLAINED_LATER, ArgumentValueError, explain_memory, stop_if_out_of_memory
from voxelfield.ops._derivatives import Gather, PointGradient, Shapes, Splat, register_lookup, sample, sample_eagerly
from voxelfield.ops._registration import fake, register_autograd, register_batching


def trilinear_interpolate(feats: Tensor, points: Tensor) -> Tensor:
    r"""Interpolates the eight corner features of each cell at one point.

    With :math:`u = (p + 1) / 2` the result is
    :math:`\sum_{ijk \in \{0,1\}} w_i(u_x)\, w_j(u_y)\, w_k(u_z)\; f_{4i+2j+k}` where :math:`w_1(u) = u` and
    :math:`w_0(u) = 1 - u`.

    Args:
        feats: (N, 8, C) features of the corners in binary order: corner ``4*i + 2*j + k`` lies at the upper end of x
            if i is 1, of y if j is 1 and of z if k is 1. This is the memory order of 2 x 2 x 2 vertices of an
            (X, Y, Z, C) grid. float32, float64, float16 or bfloat16, on CPU or CUDA, with any strides.
        points: (N, 3) x, y, z in the cell's own coordinates, -1 at the lower and 1 at the upper end of each axis.
            Outside the cell the interpolant is extrapolated linearly. On the device of ``feats``, float32 (float64 for
            float64 ``feats``). A point with a NaN or infinite coordinate yields zeros and receives no gradient.

    Returns:
        (N, C) in the dtype of ``feats``, computed in float32, or in float64 for float64 ``feats``. Differentiable twice
        with respect to both arguments.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device.
        NotImplementedError: A third derivative is requested.
    """
    if not needs_long_path():
        try:
            sampled = sample_eagerly((feats,), points, _STENCIL)
        except EXPLAINED_LATER as error:
            stop_if_out_of_memory(error, feats=feats)
        else:
            if sampled.numel() > 0:  # the raw op checks empty inputs less strictly
                return sampled
    check_tensor("feats", feats, ("N", 8, "C"))
    check_dtype("feats", feats, FLOATING)
    points = check_points(points, ("N", 3), "feats", feats)
    if points.shape[0] != feats.shape[0]:
        raise ArgumentValueError(
            f"points must have one row for each of the {feats.shape[0]} cells of feats, got {tuple(points.shape)}"
        )
    _library.ensure_loaded(feats.device.type)
    with explain_memory(feats=feats):
        return sample([feats], points, _STENCIL)


@dataclass(frozen=True)
class CellStencil:
    """A :class:`voxelfield.ops._derivatives.Stencil` in which point n lies in cell n."""

    shareable: ClassVar[bool] = False

    with_gradient: bool = False
    differentiated: bool = False

    def batched(self, point_dims: int) -> bool:
        """Returns True, because the first dimension of cells is a batch dimension."""
        return True

    def gather(self, sources: Sequence[Tensor], points: Tensor) -> Tensor:
        """Interpolates each cell at its point."""
        interpolated: Tensor = torch.ops.voxelfield.interpolate_cells.default(*sources, points, self.with_gradient)
        return interpolated

    def splat(self, values: Tensor, points: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """Distributes each value to the corners of its cell."""
        return (torch.ops.voxelfield.splat_cells.default(values, points, self.with_gradient),)

    def point_gradient(self, values: Tensor, sources: Sequence[Tensor], points: Tensor) -> Tensor:
        """Returns the gradient with respect to the points."""
        gradient: Tensor = torch.ops.voxelfield.point_gradient_cells.default(
            values, *sources, points, self.with_gradient
        )
        return gradient

    def select(self, values: Tensor, shapes: Shapes, wanted: Sequence[bool]) -> Tensor:
        """Returns all values, because there is only one source."""
        return values


_STENCIL = CellStencil()


@fake("interpolate_cells")
def _(feats: Tensor, points: Tensor, with_gradient: bool) -> Tensor:
    # The kernels check their arguments, but do not run on fake tensors.
    check_tensor("feats", feats, ("N", 8, "C"))
    check_tensor("points", points, (feats.shape[0], 3))
    check_dtype("points", points, (coordinate_dtype(feats.dtype),))
    check_same_device("points", points, "feats", feats)
    sets = (4,) if with_gradient else ()
    return feats.new_empty(*sets, points.shape[0], feats.shape[2])


def _cells(values: Tensor, points: Tensor) -> tuple[int, int, int]:
    """Returns the shape of the cells of points with such values."""
    return (points.shape[0], 8, values.shape[-1])


fake("splat_cells")(lambda values, points, _: values.new_empty(_cells(values, points)))
fake("point_gradient_cells")(lambda values, feats, points, _: points.new_empty(points.shape))


def _apply_splat(values: Tensor, points: Tensor, with_gradient: bool) -> Tensor:
    spread: Tensor
    (spread,) = Splat.apply(values, points, (_cells(values, points),), CellStencil(with_gradient))
    return spread


def _map_splat(info: Any, dims: Any, values: Tensor, points: Tensor, with_gradient: bool) -> Any:
    one = [x if dim is None else x.movedim(dim, 0)[0] for x, dim in zip((values, points), dims, strict=False)]
    inputs = (values, points, (_cells(*one),), CellStencil(with_gradient))
    (spread,), (at,) = Splat.map(Splat.call, info.batch_size, (*dims[:2], None, None), *inputs)
    return spread, at


register_lookup("interpolate_cells", Gather, 2, CellStencil)
register_autograd("splat_cells", _apply_splat)
register_batching("splat_cells", _map_splat)
register_lookup("point_gradient_cells", PointGradient, 3, CellStencil)
