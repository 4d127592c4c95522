"""Trilinear interpolation in individual cells, each given by the features of its eight corners."""

from __future__ import annotations

import functools

from torch import Tensor

from voxelfield.foundation.checks import FLOATING, as_coordinates, check_field, coordinate_dtype
from voxelfield.ops._derivatives import Shapes, Stencil, declare_lookups, declare_splat


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
    return _interpolate(feats, as_coordinates(points, feats), False)


def _check(feats: Tensor, points: Tensor) -> None:
    check_field("feats", feats, ("N", 8, "C"), FLOATING)
    check_field("points", points, (feats.shape[0], 3), coordinate_dtype(feats.dtype), "feats", feats)


class CellStencil(Stencil):
    """A :class:`voxelfield.ops._derivatives.Stencil` in which point n lies in cell n."""

    of_grids = False
    gather = "interpolate_cells"
    point_gradient = "point_gradient_cells"

    def splat(self, values: Tensor, points: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """Distributes each value to the corners of its cell."""
        return (_splat.raw(values, points, *self.options),)


@functools.cache
def _stencil(with_gradient: bool) -> CellStencil:
    return CellStencil((with_gradient,))


def _interpolated(feats: Tensor, points: Tensor, with_gradient: bool) -> Tensor:
    sets = (4,) if with_gradient else ()
    return feats.new_empty(*sets, points.shape[0], feats.shape[2])


_interpolate = declare_lookups(
    CellStencil, _stencil, results=_interpolated, check=_check, public="trilinear_interpolate"
)
_splat = declare_splat(
    "splat_cells",
    lambda values, points, with_gradient: (_stencil(with_gradient), ((points[0], 8, values[-1]),)),
    lambda sums: sums[0],
    lambda values, points: values.new_empty(points.shape[0], 8, values.shape[-1]),
)
