"""Adds the gradient of sampling to existing sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops import _constants
from voxelfield.ops._checks import (
    FLOATING,
    check_choice,
    check_dtype,
    check_points,
    check_same_device,
    check_tensor,
    coordinate_dtype,
)
from voxelfield.ops._errors import ArgumentTypeError, ArgumentValueError
from voxelfield.ops._grids import PADDINGS, Padding, known_stencil
from voxelfield.ops.pyramid import REDUCTIONS, Reduction


def accumulate_trilinear_(
    sums: Sequence[Tensor],
    values: Tensor,
    points: Tensor,
    *,
    reduce: Reduction = "concat",
    padding: Padding = "border",
    align_corners: bool = True,
) -> None:
    """Adds the gradient of :func:`voxelfield.ops.sample_pyramid` in its grids to existing tensors, in one pass.

    Autograd would allocate and clear a gradient and then add it. This op adds 16-bit values to float32 sums directly
    and touches only the vertices around the points. With ``torch.use_deterministic_algorithms(True)`` it computes the
    gradient first, reproducibly, and then adds it. Not differentiable.

    Args:
        sums: 1 to 16 tensors (X_l, Y_l, Z_l, C_l), contiguous, float32 (float64 for float64 ``values``); changed in
            place.
        values: (N, sum of C_l), or (N, C) for ``"sum"``: the gradient in the samples; any floating dtype.
        points: (N, 3) positions of the samples, as for :func:`voxelfield.ops.sample_trilinear`. Points that are not
            finite add nothing.
        reduce: The option that the samples were taken with.
        padding: The option that the samples were taken with.
        align_corners: The option that the samples were taken with.

    Raises:
        TypeError: An argument is not a tensor (``sums``: not a sequence of tensors), or has the wrong dtype.
        ValueError: An argument has the wrong shape or device, or a sum is not contiguous.
    """
    if isinstance(sums, Tensor) or not isinstance(sums, Sequence):
        raise ArgumentTypeError(f"sums must be a sequence of torch.Tensors, got {type(sums).__name__}")
    if not 1 <= len(sums) <= _constants.MAX_LEVELS:
        raise ArgumentValueError(f"sums must be 1 to {_constants.MAX_LEVELS} tensors, got {len(sums)}")
    check_tensor("values", values, ("N", "C"))
    check_dtype("values", values, FLOATING)
    for level, total in enumerate(sums):
        name = f"sums[{level}]"
        check_tensor(name, total, ("X", "Y", "Z", "C"))
        check_dtype(name, total, (coordinate_dtype(values.dtype),), f" for {values.dtype} values")
        check_same_device(name, total, "values", values)
        if not total.is_contiguous():
            raise ArgumentValueError(f"{name} must be contiguous, got strides {total.stride()}")
    check_choice("reduce", reduce, REDUCTIONS)
    add = reduce == "sum"
    columns = sums[0].shape[-1] if add else sum(total.shape[-1] for total in sums)
    check_tensor("values", values, ("N", columns))
    for level, total in enumerate(sums):
        if add and total.shape[-1] != columns:
            raise ArgumentValueError(
                f'sums[{level}] must have {columns} channels as sums[0] for "sum", got {total.shape[-1]}'
            )
    points = check_points(points, (values.shape[0], 3), "values", values)
    check_choice("padding", padding, PADDINGS)
    _library.ensure_loaded(values.device.type)
    with torch.no_grad():
        if padding == "periodic" or (values.is_cuda and torch.are_deterministic_algorithms_enabled()):
            stencil = known_stencil(padding, bool(align_corners), "linear", add, False)
            fresh = stencil.splat(values.to(sums[0].dtype), points, None, tuple(total.shape for total in sums))
            for total, part in zip(sums, fresh, strict=True):
                total.add_(part)
        else:
            options = (PADDINGS[padding], bool(align_corners), False)
            for group in [[total] for total in sums] if add else [list(sums)]:
                torch.ops.voxelfield.accumulate_trilinear_(group, values, points, *options)


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::accumulate_trilinear_")
    def _(sums: list[Tensor], values: Tensor, points: Tensor, padding: int, align_corners: bool, nearest: bool) -> None:
        return None
