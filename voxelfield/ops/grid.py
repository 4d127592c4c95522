"""Trilinear sampling of a dense grid."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops._checks import FLOATING, check_dtype, check_points, check_tensor
from voxelfield.ops._derivatives import StencilFamily, register_derivatives

Padding = Literal["border", "zeros"]
PADDINGS: dict[str, int] = {"border": 0, "zeros": 1}


def sample_trilinear(grid: Tensor, points: Tensor, *, padding: Padding = "border") -> Tensor:
    r"""Samples a dense grid at points by trilinear interpolation.

    With :math:`u = p \cdot (R - 1)` on each axis, :math:`i = \lfloor u \rfloor` and :math:`f = u - i`, the result is
    :math:`\sum_{abc \in \{0,1\}} \prod (1 - f \text{ or } f)\; g_{i+a,\,j+b,\,k+c}`: the eight vertices of the point's
    cell, weighted by the volume opposite to each. The same as ``F.grid_sample`` with ``align_corners=True`` after
    mapping [0, 1] to [-1, 1] and reversing the axes of the grid.

    Args:
        grid: (X, Y, Z, C), channels last; vertex 0 lies at coordinate 0 and vertex R-1 at 1. float32, float64, float16
            or bfloat16, on CPU or CUDA, of any strides (a non-contiguous one is copied).
        points: (N, 3) x, y, z in the unit cube, on the grid's device, float32 (float64 for a float64 grid). A point
            with a NaN or infinite coordinate yields zeros and receives no gradient.
        padding: What lies outside: ``"border"`` repeats the nearest face, ``"zeros"`` continues with zero vertices.

    Returns:
        (N, C) in the grid's dtype; the arithmetic is at least float32. Differentiable twice with respect to both
        ``grid`` and ``points``; gradients of 16-bit grids are summed in float32. On the CPU the gradient is
        bit-reproducible for any number of threads.

    Raises:
        TypeError: An argument is no tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape, is on another device, or ``padding`` is unknown.
    """
    check_tensor("grid", grid, ("X", "Y", "Z", "C"))
    check_dtype("grid", grid, FLOATING)
    if 0 in grid.shape[:3]:
        raise ValueError(f"grid must have at least one vertex along each axis, got shape {tuple(grid.shape)}")
    check_points(points, "grid", grid)
    if padding not in PADDINGS:
        raise ValueError(f"padding must be one of {sorted(PADDINGS)}, got {padding!r}")
    _library.ensure_loaded(grid.device.type)
    sampled: Tensor = torch.ops.voxelfield.sample_trilinear(grid, points, None, PADDINGS[padding])
    return sampled


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::sample_trilinear")
    def _(grid: Tensor, points: Tensor, direction: Tensor | None, padding: int) -> Tensor:
        return grid.new_empty(points.shape[0], grid.shape[3])

    @torch.library.register_fake("voxelfield::splat_trilinear")
    def _(values: Tensor, points: Tensor, direction: Tensor | None, resolution: list[int], padding: int) -> Tensor:
        return values.new_empty(*resolution, values.shape[1])

    @torch.library.register_fake("voxelfield::point_gradient_trilinear")
    def _(values: Tensor, grid: Tensor, points: Tensor, direction: Tensor | None, padding: int) -> Tensor:
        return points.new_empty(points.shape)

    register_derivatives(
        StencilFamily(
            gather="sample_trilinear",
            splat="splat_trilinear",
            point_gradient="point_gradient_trilinear",
            splat_extra=lambda shape, extra: (list(shape[:3]), *extra),
            gather_extra=lambda extra: extra[1:],
        )
    )
