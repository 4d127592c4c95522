"""Trilinear sampling of dense grids, of one or of several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from voxelfield.foundation import constants
from voxelfield.foundation.checks import as_coordinates, check_choice, coordinate_dtype
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError
from voxelfield.ops._grids import (
    MODES,
    REDUCTIONS,
    GridOptions,
    Mode,
    Padding,
    PyramidOptions,
    Reduction,
    grid_options,
    sample_lookup,
    value_and_gradient,
)
from voxelfield.ops._separable import sample_along

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def sample_trilinear(
    grid: Tensor, points: Tensor, *, with_gradient: Literal[False] = ..., **options: Unpack[GridOptions]
) -> Tensor: ...
@overload
def sample_trilinear(
    grid: Tensor, points: Tensor, *, with_gradient: Literal[True], **options: Unpack[GridOptions]
) -> tuple[Tensor, Tensor]: ...
def sample_trilinear(
    grid: Tensor,
    points: Tensor,
    *,
    padding: Padding = "border",
    align_corners: bool = True,
    mode: Mode = "linear",
    with_gradient: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Samples a dense grid at points by trilinear interpolation; along two axes it is bilinear, along one linear.

    With :math:`u = p \cdot (R - 1)` on each axis, :math:`i = \lfloor u \rfloor` and :math:`f = u - i`, the result is
    :math:`\sum_{abc \in \{0,1\}} \prod (1 - f \text{ or } f)\; g_{i+a,\,j+b,\,k+c}`: the eight vertices of the point's
    cell, each weighted by the volume opposite to it. This equals ``F.grid_sample`` with the same ``align_corners``
    after mapping [0, 1] to [-1, 1] and reversing the axes of the grid.

    Args:
        grid: (X, Y, Z, C), channels last, or a batch (B, X, Y, Z, C); an image (X, Y, C) or a table (X, C), or a batch
            of these, if points have two or one coordinates. float32, float64, float16, bfloat16, complex64 or
            complex128, on CPU or CUDA, with any strides (a non-contiguous grid is copied). With ``mode="nearest"`` also
            bool, uint8, int8, int16, int32 or int64, such as labels. A grid that is expanded over the batch,
            ``grid[None].expand(B, -1, -1, -1, -1)``, is read where it is, and the tensor of which it is a view receives
            one gradient. No view of that tensor is then part of the graph: ask for the gradient of the tensor itself,
            and register hooks on it, not on a view between the two.
        points: (..., 3) x, y, z in the unit cube, or (B, ..., 3) for a batch, on the grid's device; (..., 2) for images
            and (..., 1) for tables. float32 or float64; they are converted to float64 for a float64 or complex128 grid
            and to float32 otherwise, and 16-bit points are widened with a warning. A point with a NaN or infinite
            coordinate yields zeros and receives no gradient.
        padding: Values outside the grid: ``"border"`` repeats the nearest face, ``"zeros"`` continues with zero
            vertices, ``"reflection"`` mirrors the grid at its faces repeatedly, and ``"periodic"`` repeats the grid:
            vertex i is vertex :math:`i \bmod R`, and the last vertex is followed by the first one. A period is thus R
            cells, which is 1 in the coordinates of ``points`` with ``align_corners=False``, and :math:`R / (R - 1)`
            with ``align_corners=True``.
        align_corners: Where the unit cube ends. True: at the outermost vertices, vertex 0 lies at coordinate 0 and
            vertex R-1 at 1. False: half a cell beyond them, vertex i lies at (i + 1/2) / R.
        mode: ``"linear"``, or ``"nearest"`` for the value of the nearest vertex alone (half-way positions round to
            even); the gradient in ``points`` is then zero.
        with_gradient: Whether to also return the derivative of the result with respect to the point, from the same pass
            over the grid. Not supported with ``mode="nearest"``.

    Returns:
        (..., C), or (B, ..., C) for a batch, in the grid's dtype; the arithmetic is at least float32. Differentiable
        twice with respect to both ``grid`` and ``points``, also by ``torch.func``; gradients of 16-bit grids are summed
        in float32. The values of integer grids have no derivatives.

        With ``with_gradient``, a pair of this result and its gradient (..., C, 3), or (..., C, 2) or (..., C, 1), in
        unit coordinates (divide by the grid's extent for world units) and in the grid's dtype. Both are differentiable
        once with respect to ``grid`` and ``points``, which suffices to train through normals or an eikonal loss. At a
        vertex, where the slope is discontinuous, the gradient is the same as autograd's.

        The gradient in the grid is bit-reproducible on the CPU, for any number of threads. On CUDA it is reproducible
        under ``torch.use_deterministic_algorithms(True)``, which is read when the backward pass runs.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device, or an option is unknown.
        NotImplementedError: A third derivative is requested, or a second one with ``with_gradient``.
        RuntimeError: On CUDA, a reproducible gradient is requested for 2^27 or more points in one call.

    Note:
        An infinite feature yields NaN rather than infinity where its vertex also replaces a missing neighbour: at the
        last face of the grid, and with ``mode="nearest"``.
    """
    if _is_common(grid, points):
        options = grid_options(padding, align_corners, mode, False, with_gradient)
        sampled: Tensor = sample_lookup((grid,), points, *options)
        return value_and_gradient(sampled) if with_gradient else sampled
    check_choice("mode", mode, MODES)
    return sample_along(grid, points, mode, padding, align_corners, with_gradient)


def _is_common(grid: Tensor, points: Tensor) -> bool:
    """Tells whether the arguments are those of the kernels, so that nothing is to be prepared."""
    return (
        isinstance(grid, Tensor)
        and isinstance(points, Tensor)
        and grid.dim() == 4
        and points.dim() == 2
        and points.dtype is coordinate_dtype(grid.dtype)
        and points.shape[1] == 3
        and not grid.is_complex()
    )


@overload
def sample_pyramid(
    grids: Sequence[Tensor], points: Tensor, *, with_gradient: Literal[False] = ..., **options: Unpack[PyramidOptions]
) -> Tensor: ...
@overload
def sample_pyramid(
    grids: Sequence[Tensor], points: Tensor, *, with_gradient: Literal[True], **options: Unpack[PyramidOptions]
) -> tuple[Tensor, Tensor]: ...
def sample_pyramid(
    grids: Sequence[Tensor],
    points: Tensor,
    *,
    reduce: Reduction = "concat",
    padding: Padding = "border",
    align_corners: bool = True,
    mode: Mode = "linear",
    with_gradient: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Samples several grids over the same unit cube at the same points, in one pass.

    This is equivalent to calling :func:`voxelfield.ops.sample_trilinear` for each grid and concatenating (or adding up)
    the results, but without intermediate tensors; sums are rounded to a 16-bit dtype once instead of for each grid.

    Args:
        grids: 1 to 16 grids (X_l, Y_l, Z_l, C_l), or batches (B, X_l, Y_l, Z_l, C_l), of any resolutions, all of one
            dtype and device; otherwise as for :func:`voxelfield.ops.sample_trilinear`.
        points: (N, 3), or (B, N, 3) for batches, as for :func:`voxelfield.ops.sample_trilinear`.
        reduce: ``"concat"`` lays the grids' channels side by side, in the order of ``grids``; ``"sum"`` adds them up
            (all C_l must be equal).
        padding: As for :func:`voxelfield.ops.sample_trilinear`.
        align_corners: As for :func:`voxelfield.ops.sample_trilinear`.
        mode: As for :func:`voxelfield.ops.sample_trilinear`.
        with_gradient: As for :func:`voxelfield.ops.sample_trilinear`.

    Returns:
        (N, sum of C_l) for ``"concat"`` or (N, C) for ``"sum"``, with a leading B for batches; with ``with_gradient``
        a pair of that and its gradient (..., 3). Dtype, derivatives and reproducibility are those of
        :func:`voxelfield.ops.sample_trilinear`; only grids that require a gradient get one computed.

    Raises:
        TypeError: An argument is not a tensor (or ``grids`` not a sequence of tensors), or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on a different device from the first grid, there are too many
            or no grids, or an option is unknown.
        NotImplementedError: A third derivative is requested, or a second one with ``with_gradient``.
    """
    if isinstance(grids, Tensor) or not isinstance(grids, Sequence):
        raise ArgumentTypeError(f"grids must be a sequence of torch.Tensors, got {type(grids).__name__}")
    if not 1 <= len(grids) <= constants.MAX_LEVELS:
        raise ArgumentValueError(f"grids must be 1 to {constants.MAX_LEVELS} tensors, got {len(grids)}")
    check_choice("reduce", reduce, REDUCTIONS)
    points = as_coordinates(points, grids[0])
    options = grid_options(padding, align_corners, mode, reduce == "sum", with_gradient)
    sampled: Tensor = sample_lookup(grids, points, *options)
    return value_and_gradient(sampled) if with_gradient else sampled
