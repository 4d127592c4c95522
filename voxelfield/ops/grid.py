"""Trilinear sampling of a dense grid."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from voxelfield.ops._checks import check_tensor
from voxelfield.ops._grids import Mode, Padding, sample_eagerly, sample_grids


@overload
def sample_trilinear(
    grid: Tensor,
    points: Tensor,
    *,
    padding: Padding = ...,
    align_corners: bool = ...,
    mode: Mode = ...,
    with_gradient: Literal[False] = ...,
) -> Tensor: ...
@overload
def sample_trilinear(
    grid: Tensor,
    points: Tensor,
    *,
    padding: Padding = ...,
    align_corners: bool = ...,
    mode: Mode = ...,
    with_gradient: Literal[True],
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
    r"""Samples a dense grid at points by trilinear interpolation.

    With :math:`u = p \cdot (R - 1)` on each axis, :math:`i = \lfloor u \rfloor` and :math:`f = u - i`, the result is
    :math:`\sum_{abc \in \{0,1\}} \prod (1 - f \text{ or } f)\; g_{i+a,\,j+b,\,k+c}`: the eight vertices of the point's
    cell, each weighted by the volume opposite to it. This equals ``F.grid_sample`` with the same ``align_corners``
    after mapping [0, 1] to [-1, 1] and reversing the axes of the grid.

    Args:
        grid: (X, Y, Z, C), channels last, or a batch (B, X, Y, Z, C). float32, float64, float16 or bfloat16, on CPU or
            CUDA, with any strides (a non-contiguous grid is copied).
        points: (N, 3) x, y, z in the unit cube, or (B, N, 3) for a batch: N points in each grid. On the grid's device,
            float32 (float64 for a float64 grid). A point with a NaN or infinite coordinate yields zeros and receives
            no gradient.
        padding: Values outside the grid: ``"border"`` repeats the nearest face, ``"zeros"`` continues with zero
            vertices, ``"reflection"`` mirrors the grid at its faces repeatedly.
        align_corners: Where the unit cube ends. True: at the outermost vertices, vertex 0 lies at coordinate 0 and
            vertex R-1 at 1. False: half a cell beyond them, vertex i lies at (i + 1/2) / R.
        mode: ``"linear"``, or ``"nearest"`` for the value of the nearest vertex alone (half-way positions round to
            even); the gradient in ``points`` is then zero.
        with_gradient: Whether to also return the derivative of the result with respect to the point, from the same pass
            over the grid. Not supported with ``mode="nearest"``.

    Returns:
        (N, C), or (B, N, C) for a batch, in the grid's dtype; the arithmetic is at least float32. Differentiable twice
        with respect to both ``grid`` and ``points``, also by ``torch.func``; gradients of 16-bit grids are summed in
        float32.

        With ``with_gradient``, a pair of this result and its gradient (..., N, C, 3), in unit coordinates (divide by
        the grid's extent for world units) and in the grid's dtype. Both are differentiable once with respect to
        ``grid`` and ``points``, which suffices to train through normals or an eikonal loss. At a vertex, where the
        slope is discontinuous, the gradient is the same as autograd's.

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
    sampled = sample_eagerly((grid,), points, False, padding, align_corners, mode, with_gradient)
    if sampled is not None:
        return sampled
    batched = isinstance(grid, Tensor) and grid.dim() == 5
    check_tensor("grid", grid, ("B", "X", "Y", "Z", "C") if batched else ("X", "Y", "Z", "C"))
    return sample_grids(["grid"], [grid], points, False, padding, align_corners, mode, with_gradient)
