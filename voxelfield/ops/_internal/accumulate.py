"""Adds the gradient of sampling to existing sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops._checks import check_points
from voxelfield.ops._grids import PADDINGS, Padding, known_stencil
from voxelfield.ops.pyramid import Reduction


@torch.no_grad()
def accumulate_trilinear_(
    sums: Sequence[Tensor],
    values: Tensor,
    points: Tensor,
    *,
    reduce: Reduction = "concat",
    padding: Padding = "border",
    align_corners: bool = True,
    slabs=None,
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
        reduce: This and the other options are those that the samples were taken with.
        padding: See ``reduce``.
        align_corners: See ``reduce``.
    """
    if slabs is not None:
        wholes = [t.new_zeros(n, *t.shape[1:]) for t, (b, n) in zip(sums, slabs)]
        for w, t, (b, n) in zip(wholes, sums, slabs):
            w[b : b + len(t)] = t
        accumulate_trilinear_(wholes, values, points, reduce=reduce, padding=padding, align_corners=align_corners)
        for w, t, (b, n) in zip(wholes, sums, slabs):
            t.copy_(w[b : b + len(t)])
        return
    points = check_points(points, (values.shape[0], 3), "values", values)
    add = reduce == "sum"
    _library.ensure_loaded(values.device.type)
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
    torch.library.register_fake("voxelfield::accumulate_trilinear_", lambda *_: None)
