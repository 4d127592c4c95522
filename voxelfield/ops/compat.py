"""Sampling with the signature of ``torch.nn.functional.grid_sample``."""

from __future__ import annotations

import math
import warnings
from typing import Any, cast

import torch
from torch import Tensor

from voxelfield.foundation.autograd import MaybeTensor, OpFunction
from voxelfield.foundation.checks import (
    check_choice,
    check_dtype,
    check_same_device,
    check_tensor,
    coordinate_dtype,
    truth_of,
)
from voxelfield.foundation.errors import ArgumentValueError
from voxelfield.foundation.private_torch import below_autograd
from voxelfield.ops._derivatives import PointGradient, Splat, run_or_check
from voxelfield.ops._grids import PADDINGS, Mode, Padding, check_grid_dtype, known_stencil, shared_grid
from voxelfield.ops.grid import sample_trilinear

# Torch's names of the modes, and this library's.
_MODES: dict[str, Mode] = {"bilinear": "linear", "nearest": "nearest"}

# A volume in NCDHW order with at least this many voxels per point is sampled channel by channel, because rearranging
# all voxels would take longer than reading the few that points need from one place for each channel.
_FEW_POINTS = 32


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
    with ``input.to(memory_format=torch.channels_last_3d)``. It is not copied if it has at least 32 voxels per position:
    then each channel is sampled as a volume of its own. A volume that is expanded over the batch is copied once, not
    once for each element of the batch. Both hold outside of ``torch.compile`` and ``torch.func``.

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
        the gradient in ``input`` has the strides of ``torch.channels_last_3d``, or of ``input`` if that was not copied.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape (4-D ``input`` too: pictures are not sampled here), is on another
            device, or ``mode`` or ``padding_mode`` is unknown.
        NotImplementedError: A third derivative is requested.
    """
    if align_corners is None:
        warnings.warn(
            "Default grid_sample and affine_grid behavior has changed to align_corners=False since 1.3.0. Please "
            "specify align_corners=True if the old behavior is desired. See the documentation of grid_sample for "
            "details.",
            stacklevel=2,
        )
    arguments = (input, grid, mode, padding_mode, align_corners)
    return run_or_check(_sample_volume, _check_and_sample, lambda *_: {"input": input, "grid": grid}, *arguments)


def _check_and_sample(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool | None) -> Tensor:
    """Samples volumes in any situation, or raises what :func:`grid_sample` promises."""
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
    # The axes of the volume are z, y, x: it is read in that order, and the positions are reversed.
    points = _unit_points(grid.to(wide))
    shared = shared_grid(input)
    volume = (input if shared is None else shared).movedim(-4, -1).contiguous()
    # The names and types of arguments have been checked: only strings of PADDINGS get here.
    outermost = truth_of("align_corners", align_corners)
    sampled = sample_trilinear(
        volume, points, padding=cast(Padding, padding_mode), align_corners=outermost, mode=_MODES[mode]
    )
    return sampled.movedim(-1, 1).contiguous()


def _unit_points(grid: Tensor) -> Tensor:
    """Returns positions in the unit cube, in the order z, y, x, for positions x, y, z in [-1, 1]."""
    return torch.rsub(grid.flip(-1), 0.5, alpha=-0.5)  # (grid + 1) / 2 in one pass


def _sample_volume(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool | None) -> Tensor:
    """Samples volumes in the common case; raises LookupError in others. The raw op checks all but the shapes."""
    fits = (
        align_corners is not None
        and input.dim() == grid.dim() == 5
        and input.is_floating_point()
        and grid.dtype == coordinate_dtype(input.dtype)
        and (grid.shape[0], grid.shape[-1]) == (input.shape[0], 3)
        and input.numel() > 0
        and grid.numel() > 0
    )
    if not fits:
        raise LookupError
    stencil = known_stencil(padding_mode, bool(align_corners), _MODES[mode], False, False)
    shared = shared_grid(input)
    sampled: Tensor = _SampleVolume.apply(input if shared is None else shared, grid, stencil)[0]
    return sampled


class _SampleVolume(OpFunction):
    """Samples volumes (N, C, D, H, W), or one volume (C, D, H, W) for all of N, in NCDHW order.

    Applied to ``(volume, grid, stencil)``. Returns the values, and the points as the kernels read them. One Function
    around all conversions takes much less time on the host than one for each of them. It must not be used if
    :func:`voxelfield.foundation.autograd.needs_long_path`.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        volume, grid, stencil = inputs
        with below_autograd():
            layout = _Layout(volume, grid)
            points = layout.points(grid)
            return layout.values(stencil.gather((layout.source(volume),), points)), points

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        volume, grid, ctx.stencil = inputs
        ctx.layout = _Layout(volume, grid)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        # Only the gradient in the points reads the volume. Otherwise it need not be kept alive.
        ctx.save_for_backward(grid, output[1], volume if ctx.needs_input_grad[1] else None)

    @staticmethod
    def backward(ctx: Any, grad: MaybeTensor, _: None) -> tuple[MaybeTensor, MaybeTensor, None]:
        if grad is None:
            return None, None, None
        grid, points, volume = ctx.saved_tensors
        layout, stencil = ctx.layout, ctx.stencil
        if torch.is_grad_enabled():  # a second derivative needs to know how points depend on the grid
            points = layout.points(grid)
        rows = layout.rows(grad)
        of_volume = of_grid = None
        if ctx.needs_input_grad[0]:
            (summed,) = Splat.apply(rows, points, (layout.source_shape,), stencil)
            of_volume = layout.volume(summed)
        if ctx.needs_input_grad[1]:
            gradient = PointGradient.apply(rows, layout.source(volume), points, stencil)
            of_grid = layout.grid(gradient)
        return of_volume, of_grid, None


class _Layout:
    """How the kernels read and write one call: volumes as grids, channels last, or each channel as a grid of its own.

    Attributes:
        source_shape: Shape of the grids, (B, D, H, W, C) or (D, H, W, C).
    """

    def __init__(self, volume: Tensor, grid: Tensor) -> None:
        *batch, channels, depth, height, width = volume.shape
        self._shared = not batch
        self._volume_shape = volume.shape
        self._channels = channels
        self._outer = grid.shape[:-1]
        count = math.prod(self._outer)
        voxels = volume.numel() // channels
        self._by_channel = channels > 1 and voxels >= _FEW_POINTS * count and volume.is_contiguous()
        if self._by_channel:
            self.source_shape = torch.Size((math.prod(batch) * channels, depth, height, width, 1))
        else:
            self.source_shape = torch.Size((*batch, depth, height, width, channels))

    def source(self, volume: Tensor) -> Tensor:
        """Returns volumes as grids."""
        if self._by_channel:
            return volume.view(self.source_shape)
        return volume.movedim(-4, -1).contiguous()

    def points(self, grid: Tensor) -> Tensor:
        """Returns positions in [-1, 1] as points of the grids."""
        points = _unit_points(grid)
        if not self._by_channel:
            return points.view(-1, 3) if self._shared else points.flatten(1, -2)
        if self._shared:
            return points.view(1, -1, 3).repeat(self._channels, 1, 1)
        return points.view(self._outer[0], -1, 3).repeat_interleave(self._channels, 0)

    def values(self, sampled: Tensor) -> Tensor:
        """Returns samples of the grids as (N, C, D_out, H_out, W_out)."""
        if not self._by_channel:
            return sampled.view(*self._outer, self._channels).movedim(-1, 1).contiguous()
        if self._shared:
            return sampled.view(self._channels, *self._outer).movedim(0, 1).contiguous()
        return sampled.view(self._outer[0], self._channels, *self._outer[1:])

    def rows(self, grad: Tensor) -> Tensor:
        """Returns a gradient of :meth:`values` as one of the samples; the inverse of that method."""
        if not self._by_channel:
            shape = (-1, self._channels) if self._shared else (self._outer[0], -1, self._channels)
            return grad.movedim(1, -1).reshape(shape)
        if self._shared:
            return grad.movedim(1, 0).reshape(self._channels, -1, 1)
        return grad.reshape(self._outer[0] * self._channels, -1, 1)

    def volume(self, summed: Tensor) -> Tensor:
        """Returns a gradient of the grids as one of the volumes; the inverse of :meth:`source`."""
        return summed.view(self._volume_shape) if self._by_channel else summed.movedim(-1, -4)

    def grid(self, gradient: Tensor) -> Tensor:
        """Returns a gradient of the points as one of the positions."""
        if self._by_channel:
            batch = 1 if self._shared else self._outer[0]
            gradient = gradient.view(batch, self._channels, -1, 3).sum(1)
        return 0.5 * gradient.view(*self._outer, 3).flip(-1)
