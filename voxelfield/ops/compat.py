"""Sampling with the signature of ``torch.nn.functional.grid_sample``."""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import Tensor

from voxelfield.ops._checks import (
    check_choice,
    check_dtype,
    check_same_device,
    check_tensor,
    coordinate_dtype,
)
from voxelfield.ops._errors import ArgumentValueError, explain_memory
from voxelfield.ops._grids import PADDINGS, Mode, Padding, check_grid_dtype, shared_grid
from voxelfield.ops.grid import sample_trilinear

# Maps torch's names of the modes to those of this library.
_MODES: dict[str, Mode] = {"bilinear": "linear", "nearest": "nearest"}


def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """Samples volumes as :func:`torch.nn.functional.grid_sample` does, with the kernels of this library.

    For code written for ``F.grid_sample`` on 5-D input: change the import, and values and gradients stay the same, up
    to rounding. The differences: this function is twice differentiable with every version of torch, it is deterministic
    on CUDA under ``torch.use_deterministic_algorithms(True)``, positions that are not finite yield zeros with any
    padding, and under autocast the result keeps the dtype of ``input``.

    A volume of one channel, or in ``torch.channels_last_3d``, is read where it is. One in the default NCDHW order is
    copied first, in every call, which can cost more than the sampling: convert a volume that is sampled often once,
    with ``input.to(memory_format=torch.channels_last_3d)``. A volume that is expanded over the batch is copied once,
    not once for each element of the batch, outside of ``torch.compile`` and ``torch.func``.

    Args:
        input: (N, C, D, H, W) volumes; float32, float64, float16 or bfloat16, on CPU or CUDA. With ``mode="nearest"``
            also the integer dtypes of :func:`voxelfield.ops.sample_trilinear`, which ``F.grid_sample`` does not take.
            A volume that is expanded over the batch is treated as there.
        grid: (N, D_out, H_out, W_out, 3) positions x, y, z in [-1, 1], where x runs along W, y along H and z along D.
            On the device of ``input``; float32, or float64 for a float64 ``input``. 16-bit positions, which
            ``F.grid_sample`` asks for beside a 16-bit ``input``, are widened to float32.
        mode: ``"bilinear"`` (trilinear for volumes) or ``"nearest"``.
        padding_mode: ``"zeros"``, ``"border"`` or ``"reflection"``, and ``"periodic"``, which ``F.grid_sample`` does
            not have (:func:`voxelfield.ops.sample_trilinear`).
        align_corners: Whether -1 and 1 are the centres of the outermost voxels (True) or their outer faces (False).
            None is False, with torch's warning.

    Returns:
        (N, C, D_out, H_out, W_out) in the dtype of ``input``, contiguous. Differentiable twice with respect to both;
        the gradient in ``input`` has the strides of ``torch.channels_last_3d``.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape (4-D ``input`` too: pictures are not sampled here), is on another
            device, or ``mode`` or ``padding_mode`` is unknown.
        NotImplementedError: A third derivative is requested.
    """
    if isinstance(input, Tensor) and input.dim() == 4:
        raise ArgumentValueError(
            f"input must have shape (N, C, D, H, W), got {tuple(input.shape)}: this samples volumes; for pictures use "
            "torch.nn.functional.grid_sample"
        )
    check_tensor("input", input, ("N", "C", "D", "H", "W"))
    check_choice("mode", mode, _MODES)
    check_grid_dtype("input", input, copied=mode == "nearest")
    if 0 in input.shape[2:]:
        raise ArgumentValueError(f"input must have at least one voxel along each axis, got shape {tuple(input.shape)}")
    check_tensor("grid", grid, (input.shape[0], "D_out", "H_out", "W_out", 3))
    wide = coordinate_dtype(input.dtype)
    check_dtype("grid", grid, (wide, torch.float16, torch.bfloat16), f" for {input.dtype} input")
    check_same_device("grid", grid, "input", input)
    check_choice("padding_mode", padding_mode, PADDINGS)
    if align_corners is None:
        warnings.warn(
            "Default grid_sample and affine_grid behavior has changed to align_corners=False since 1.3.0. Please "
            "specify align_corners=True if the old behavior is desired. See the documentation of grid_sample for "
            "details.",
            stacklevel=2,
        )
        align_corners = False
    # The axes of the volume are z, y, x: it is read in that order, and the positions are reversed.
    with explain_memory(input=input, grid=grid):
        points = torch.rsub(grid.to(wide).flip(-1), 0.5, alpha=-0.5)  # (grid + 1) / 2 in one pass
        shared = shared_grid(input)
        volume = (input if shared is None else shared).movedim(-4, -1).contiguous()
        # The names and types of arguments have been checked: only strings of PADDINGS get here.
        sampled = sample_trilinear(
            volume, points, padding=cast(Padding, padding_mode), align_corners=align_corners, mode=_MODES[mode]
        )
        return sampled.movedim(-1, 1).contiguous()
