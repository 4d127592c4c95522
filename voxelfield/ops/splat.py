"""Sums of values at points in new grids: the adjoints of sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield.foundation.checks import (
    FLOATING,
    check_choice,
    check_dense,
    check_dtype,
    check_field,
    coordinate_dtype,
    truth_of,
    widen_positions,
)
from voxelfield.foundation.errors import ArgumentValueError
from voxelfield.ops._grids import MODES, Mode, Padding, grid_size, grid_stencil, splat_grids
from voxelfield.ops._separable import as_complex, as_real, separable_options, splat_separable
from voxelfield.ops.cubic import CUBIC_KERNELS, CubicKernel


def splat_trilinear(
    values: Tensor,
    points: Tensor,
    resolution: int | Sequence[int],
    *,
    weights: Tensor | None = None,
    padding: Padding = "border",
    align_corners: bool = True,
    mode: Mode = "linear",
    with_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Adds values at points up in a new grid: the adjoint of :func:`voxelfield.ops.sample_trilinear`.

    Each value is distributed to the vertices around its point, by the weights with which they would be interpolated
    there. So :math:`\langle S g, v \rangle = \langle g, S^* v \rangle` for sampling :math:`S` and this :math:`S^*`
    with equal options, and the sum over all vertices is that of the values, but for what ``"zeros"`` drops outside.

    Args:
        values: (N, C), or (B, N, C) for a batch of grids; float32, float64, float16, bfloat16, complex64 or complex128,
            on CPU or CUDA.
        points: (N, D) or (B, N, D) positions in the unit cube, on the device of ``values`` and of the dtypes of
            :func:`voxelfield.ops.sample_trilinear`. D is the number of axes of the grid: 1, 2 or 3. Values of points
            that are not finite are dropped.
        resolution: Number of vertices along each of the D axes; a single int means the same along all.
        weights: (N,) or (B, N), real: a factor of all values of each point. None is 1.
        padding: As for :func:`voxelfield.ops.sample_trilinear`, as are the next two.
        align_corners: See ``padding``.
        mode: See ``padding``.
        with_weights: Whether to also return the sums of the weights, from the same pass: sums of values divided by
            these are weighted means.

    Returns:
        (X, Y, Z, C), (X, Y, C) or (X, C), with a leading B for a batch, in the dtype of ``values``; sums of 16-bit
        values are computed in float32. Differentiable twice with respect to ``values``, ``weights`` and ``points``.

        With ``with_weights``, a pair of this and the sums of the weights, (X, Y, Z) or as above, real.

        Sums are bit-reproducible on the CPU, and on CUDA under ``torch.use_deterministic_algorithms(True)``. Along one
        or two axes, terms are rounded there to multiples of about 2^-61 of the sum of all of them: a value that is not
        finite makes the whole grid not finite.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device, or an option is unknown.
        NotImplementedError: A third derivative is requested.
        RuntimeError: On CUDA, reproducible sums of 2^27 or more points along three axes are requested.
    """
    check_choice("mode", mode, MODES)
    return _splat(values, points, resolution, mode, weights, padding, align_corners, with_weights)


def splat_cubic(
    values: Tensor,
    points: Tensor,
    resolution: int | Sequence[int],
    kernel: CubicKernel = "bspline",
    *,
    weights: Tensor | None = None,
    padding: Padding = "border",
    align_corners: bool = True,
    with_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Adds values at points up in a new grid by a cubic kernel: the adjoint of :func:`voxelfield.ops.sample_cubic`.

    ``kernel``, ``padding`` and ``align_corners`` are as for that function. Other arguments, the result and errors are
    as for :func:`voxelfield.ops.splat_trilinear`; what is said there of one or two axes holds for three too.
    """
    check_choice("kernel", kernel, CUBIC_KERNELS)
    return _splat(values, points, resolution, kernel, weights, padding, align_corners, with_weights)


def _splat(
    values: Tensor,
    points: Tensor,
    resolution: int | Sequence[int],
    kernel: str,
    weights: Tensor | None,
    padding: str,
    align_corners: bool,
    with_weights: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    options = separable_options(kernel, padding, align_corners, False)
    check_dense("values", values)
    is_complex = values.is_complex()
    real = as_real(values) if is_complex else values
    check_dtype("values", real, FLOATING)
    dtype, wide = real.dtype, coordinate_dtype(real.dtype)
    if values.dim() not in (2, 3):
        raise ArgumentValueError(f"values must have shape (N, C) or (B, N, C), got {tuple(values.shape)}")
    check_field("points", points, (*values.shape[:-1], "D"), FLOATING, "values", values)
    if not 1 <= points.shape[-1] <= 3:
        raise ArgumentValueError(f"points must have 1 to 3 coordinates, got shape {tuple(points.shape)}")
    points = widen_positions("points", points, wide).to(wide)
    size = grid_size("resolution", resolution, points.shape[-1])
    columns = real
    if weights is not None:
        check_field("weights", weights, tuple(values.shape[:-1]), FLOATING, "values", values)
        columns = real.to(wide) * weights.to(wide).unsqueeze(-1)
    if with_weights:
        ones = columns.new_ones(real.shape[:-1], dtype=wide) if weights is None else weights.to(wide)
        columns = torch.cat((columns.to(wide), ones.unsqueeze(-1)), dim=-1)
    if len(size) == 3 and kernel in MODES:
        stencil = grid_stencil(*options[1:3], kernel == "nearest", False, False)
        (sums,) = stencil.splat(columns, points, ((*points.shape[:-2], *size, columns.shape[-1]),), splat_grids)
    else:
        sums = splat_separable(columns, points, size, options)
    sums = sums.to(dtype)
    if not truth_of("with_weights", with_weights):
        return as_complex(sums) if is_complex else sums
    total, of_weights = sums[..., :-1], sums[..., -1]
    return as_complex(total) if is_complex else total.contiguous(), of_weights.contiguous()
