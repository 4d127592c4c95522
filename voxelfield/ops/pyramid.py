"""Trilinear sampling of several grids at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from voxelfield.foundation import constants
from voxelfield.foundation.checks import as_coordinates, check_choice
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError
from voxelfield.ops._grids import Mode, Padding, grid_options, sample_lookup, value_and_gradient

Reduction = Literal["concat", "sum"]
REDUCTIONS: tuple[str, ...] = ("concat", "sum")


@overload
def sample_pyramid(
    grids: Sequence[Tensor],
    points: Tensor,
    *,
    reduce: Reduction = ...,
    padding: Padding = ...,
    align_corners: bool = ...,
    mode: Mode = ...,
    with_gradient: Literal[False] = ...,
) -> Tensor: ...
@overload
def sample_pyramid(
    grids: Sequence[Tensor],
    points: Tensor,
    *,
    reduce: Reduction = ...,
    padding: Padding = ...,
    align_corners: bool = ...,
    mode: Mode = ...,
    with_gradient: Literal[True],
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
