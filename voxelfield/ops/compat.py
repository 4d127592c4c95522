"""Sampling with the signature of ``torch.nn.functional.grid_sample``."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from voxelfield.foundation.autograd import MaybeTensor, OpFunction, needs_long_path
from voxelfield.foundation.checks import INTEGERS, check_choice, check_field, check_tensor, coordinate_dtype, truth_of
from voxelfield.foundation.errors import ArgumentValueError
from voxelfield.foundation.private_torch import below_autograd
from voxelfield.ops._derivatives import PointGradient, Splat
from voxelfield.ops._grids import PADDINGS, check_grid_dtype, shared_grid
from voxelfield.ops._separable import (
    KERNELS,
    Options,
    as_complex,
    as_real,
    sample_separable,
    separable_options,
    separable_stencil,
)
from voxelfield.ops.grid import sample_trilinear

# Torch's names of the modes, and this library's.
_MODES: dict[str, str] = {"bilinear": "linear", "nearest": "nearest", "bicubic": "convolution"}

# Torch's numbers of modes and of paddings, for the numbers in the options of raw ops.
_TORCH_MODES = {KERNELS[kernel]: number for number, kernel in enumerate(_MODES.values())}
_TORCH_PADDINGS = {PADDINGS[name]: number for number, name in enumerate(("zeros", "border", "reflection"))}

# A volume in NCDHW order with at least this many voxels per point is sampled channel by channel, because rearranging
# all voxels would take longer than reading the few that points need from one place for each channel.
_FEW_POINTS = 32


def grid_sample(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """Samples images and volumes as :func:`torch.nn.functional.grid_sample` does, with the kernels of this library.

    Change the import, and values and gradients stay the same, up to rounding. The differences: this function is twice
    differentiable in every mode, ``"bicubic"`` also samples volumes (with 64 voxels a position), it is deterministic on
    CUDA under ``torch.use_deterministic_algorithms(True)``, positions that are not finite yield zeros with any padding,
    and under autocast the result keeps the dtype of ``input``.

    On the CPU, float32 and float64 images in the default order of dimensions are sampled, and differentiated once, by
    torch's own kernels, which are faster than those of this library. Second derivatives, ``"periodic"`` padding, all
    other dtypes, images that are expanded or have channels last, and calls with a position that is not finite are left
    to the latter.

    Images, and volumes with ``"bicubic"``, are read where they are, in the default order of dimensions or with channels
    last. In the other modes, a volume of one channel, or in ``torch.channels_last_3d``, is read where it is. One in the
    default NCDHW order is copied first, in every call, which can cost more than the sampling: convert a volume that is
    sampled often once, with ``input.to(memory_format=torch.channels_last_3d)``. It is not copied if it has at least 32
    voxels per position: then each channel is sampled as a volume of its own. A volume that is expanded over the batch
    is copied once, not once for each element of the batch. Both hold outside of ``torch.compile`` and ``torch.func``.

    Args:
        input: (N, C, H, W) images or (N, C, D, H, W) volumes; float32, float64, float16, bfloat16, complex64 or
            complex128, on CPU or CUDA. With ``mode="nearest"`` also the integer dtypes of
            :func:`voxelfield.ops.sample_trilinear`. ``F.grid_sample`` takes neither these nor complex numbers. A tensor
            that is expanded over the batch is treated as there.
        grid: (N, H_out, W_out, 2) positions x, y in [-1, 1], or (N, D_out, H_out, W_out, 3) positions x, y, z, where x
            runs along W, y along H and z along D. On the device of ``input``; float32, or float64 for a float64 or
            complex128 ``input``. 16-bit positions, which ``F.grid_sample`` asks for beside a 16-bit ``input``, are
            widened to float32.
        mode: ``"bilinear"`` (trilinear for volumes), ``"nearest"`` or ``"bicubic"`` (a = -0.75).
        padding_mode: ``"zeros"``, ``"border"`` or ``"reflection"``, and ``"periodic"``, which ``F.grid_sample`` does
            not have (:func:`voxelfield.ops.sample_trilinear`).
        align_corners: Whether -1 and 1 are the centres of the outermost voxels (True) or their outer faces (False).
            None is False, with torch's warning.

    Returns:
        (N, C, H_out, W_out) or (N, C, D_out, H_out, W_out) in the dtype of ``input``, contiguous. Differentiable twice
        with respect to both; the gradient in ``input`` has the strides of ``input``, or those of
        ``torch.channels_last_3d`` if a volume was copied.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device, or ``mode`` or ``padding_mode`` is unknown.
        NotImplementedError: A third derivative is requested.
    """
    if align_corners is None:
        warnings.warn(
            "Default grid_sample and affine_grid behavior has changed to align_corners=False since 1.3.0. Please "
            "specify align_corners=True if the old behavior is desired. See the documentation of grid_sample for "
            "details.",
            stacklevel=2,
        )
    _check(input, grid, mode, padding_mode)
    grid = grid.to(coordinate_dtype(input.dtype))
    kernel, align_corners = _MODES[mode], truth_of("align_corners", align_corners)
    if _by_torch(input, grid, kernel, padding_mode):
        options = separable_options(kernel, padding_mode, align_corners, False, True, True)
        return _ImageSample.apply(options, input, grid)
    if kernel == "convolution" or (input.dim() == 4 and input.dtype not in INTEGERS):
        return _sample_where_it_is(input, grid, kernel, padding_mode, align_corners)
    # The axes of the volume are z, y, x: it is read in that order, and the positions are reversed. (grid + 1) / 2 in
    # one pass:
    points = torch.rsub(grid.flip(-1), 0.5, alpha=-0.5)
    shared = shared_grid(input)
    volume = input if shared is None else shared
    # The names and types of arguments have been checked.
    given: dict[str, Any] = {"padding": padding_mode, "align_corners": align_corners, "mode": kernel}
    axes = input.dim() - 2
    *batch, channels = volume.shape[:-axes]
    size = volume.shape[-axes:]
    count = points[..., 0].numel()
    few = axes == 3 and 0 < count * _FEW_POINTS <= math.prod(size) * math.prod(batch)
    if not (few and channels > 1 and volume.is_contiguous()) or needs_long_path():
        sampled = sample_trilinear(volume.movedim(-axes - 1, -1).contiguous(), points, **given)
        return sampled.movedim(-1, 1).contiguous()
    # Each channel is a grid of its own, and the batch of grids has the points of all of them.
    rows = points.view(*batch or (1,), 1, -1, 3).expand(-1, channels, -1, -1).flatten(0, 1)
    sampled = sample_trilinear(volume.reshape(-1, *size, 1), rows, **given)
    if batch:
        return sampled.view(*input.shape[:2], *points.shape[1:-1])
    return sampled.view(channels, *points.shape[:-1]).movedim(0, 1).contiguous()


def _sample_where_it_is(input: Tensor, grid: Tensor, kernel: str, padding: str, align_corners: bool) -> Tensor:
    """Samples by separable kernels, which read a plane for each channel too, and positions in torch's conventions."""
    if input.is_complex():
        real = as_real(input.movedim(1, -1).contiguous()).movedim(-1, 1)
        sampled = _sample_where_it_is(real, grid, kernel, padding, align_corners)
        return as_complex(sampled, 1 - input.dim()).contiguous()
    rows, shared = grid.flatten(1, -2), shared_grid(input)
    source = input if shared is None else shared
    count, axes = rows.shape[1], input.dim() - 2
    if shared is not None:
        rows = rows.flatten(0, 1)
    last = source.movedim(-axes - 1, -1)
    # The gradient of a tensor without channels or of one channel has the strides of the input both ways.
    planar = source.is_contiguous() or not last.is_contiguous()
    options = separable_options(kernel, padding, align_corners, False, planar, True)
    sampled = sample_separable(source if planar else last, rows, *options)
    if shared is not None:
        sampled = sampled.unflatten(-1 if planar else 0, (len(input), count))
        sampled = sampled.movedim(1, 0) if planar else sampled
    sampled = sampled if planar else sampled.movedim(-1, 1)
    return sampled.contiguous().view(*input.shape[:2], *grid.shape[1:-1])


class _ImageSample(OpFunction):
    """Samples images (N, C, H, W) by torch's kernels, and differentiates once by them; second derivatives are ours."""

    @staticmethod
    def forward(options: Options, images: Tensor, grid: Tensor) -> Tensor:
        with below_autograd():
            return torch.grid_sampler(images, grid, *_torch_options(options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options, images, grid = inputs
        # The kernel of torch's backward pass takes an image also where no derivative needs one, and none is kept then.
        ctx.save_for_backward(grid, images if ctx.needs_input_grad[2] else images.new_zeros(()).expand(images.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[MaybeTensor, ...]:
        grid, images = ctx.saved_tensors
        _, *wanted = ctx.needs_input_grad
        if not torch.is_grad_enabled():
            backward = torch.ops.aten.grid_sampler_2d_backward
            to_images, to_grid = backward(grad, images, grid, *_torch_options(ctx.options), wanted)
            return None, to_images if wanted[0] else None, to_grid if wanted[1] else None
        stencil, values, points = separable_stencil(*ctx.options), grad.flatten(2), grid.flatten(1, 2)
        to_images = Splat.apply(stencil, (images.shape,), values, points)[0] if wanted[0] else None
        to_points = PointGradient.apply(stencil, None, values, points, images) if wanted[1] else None
        return None, to_images, None if to_points is None else to_points.view(grid.shape)


def _torch_options(options: Options) -> tuple[int, int, bool]:
    kernel, padding, align_corners, *_ = options
    return _TORCH_MODES[kernel], _TORCH_PADDINGS[padding], align_corners


def _by_torch(input: Tensor, grid: Tensor, kernel: str, padding: str) -> bool:
    """Tells whether torch's kernels sample this input, and sample it as this library does."""
    if input.dim() != 4 or input.device.type != "cpu" or input.dtype not in (torch.float32, torch.float64):
        return False
    if padding == "periodic" or not input.is_contiguous() or needs_long_path():
        return False
    # Outside of the image, where "zeros" makes all positions equal, the nearest pixel needs no test. A sum is finite
    # only if all terms are.
    return (kernel == "nearest" and padding == "zeros") or math.isfinite(grid.detach().sum().item())


def _check(input: Tensor, grid: Tensor, mode: str, padding_mode: str) -> None:
    """Raises what :func:`grid_sample` promises; the kernels know its arguments by other names and shapes."""
    axes = 2 if isinstance(input, Tensor) and input.dim() == 4 else 3
    check_tensor("input", input, ("N", "C", *("D", "H", "W")[-axes:]))
    check_choice("mode", mode, _MODES)
    check_choice("padding_mode", padding_mode, PADDINGS)
    if not input.is_complex():
        check_grid_dtype("input", input, copied=mode == "nearest")
    if 0 in input.shape[2:]:
        raise ArgumentValueError(f"input must have at least one voxel along each axis, got shape {tuple(input.shape)}")
    dtypes = (coordinate_dtype(input.dtype), torch.float16, torch.bfloat16)
    shape: tuple[int | str, ...] = (input.shape[0], *("D_out", "H_out", "W_out")[-axes:], axes)
    check_field("grid", grid, shape, dtypes, "input", input, f" for {input.dtype} input")
