"""Squared errors of pixels' colours, and of the colours of the samples along their rays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from voxelfield import _library
from voxelfield.foundation.autograd import (
    MaybeTensor,
    hold_constant,
    last_derivative,
    refuse_jvp,
    refuse_vmap,
    run_raw,
)
from voxelfield.foundation.checks import check_index
from voxelfield.ops._registration import fake, register_autograd


def pixel_color_error(
    pixels: Tensor, truth: Tensor, *, rays_per_pixel: int = 1, rays_kept: Tensor | None = None
) -> Tensor:
    """Returns the mean squared error of pixels' colours, over pixels and channels.

    The result is the same to the bit in every run, because the sums have a fixed order.

    Args:
        pixels: (P, 3) float32 or float64; differentiable once.
        truth: (P, 3) true colours, in the dtype of ``pixels``; not differentiable.
        rays_per_pixel: The number of rays of each pixel, at least 1.
        rays_kept: () int64, the number of rays that count; these are the first of the ``P * rays_per_pixel`` rays. A
            pixel counts only if all of its rays do. None: all rays count.

    Returns:
        () in the dtype of ``pixels``; 0 if no pixel counts.
    """
    (truth,) = hold_constant("pixel_color_error", truth=truth)
    return _error(pixels, truth, None, None, rays_per_pixel, rays_kept)


def sample_color_error(
    weights: Tensor,
    sample_rgb: Tensor,
    ray_index: Tensor,
    truth: Tensor,
    rays_per_pixel: int,
    *,
    rays_kept: Tensor | None = None,
) -> Tensor:
    """Returns the weighted squared error of each sample's own colour, added up and divided by the number of rays.

    The "per-point rgb loss" of DirectVoxGO (Sun et al. 2022). The result is the same to the bit in every run.

    Args:
        weights: (M,) weights of the samples in their rays, in the dtype of ``sample_rgb``; not differentiable. A sample
            of weight 0 adds nothing, even if its colour is not finite.
        sample_rgb: (M, 3) float32 or float64; differentiable once.
        ray_index: (M,) int64, the ray of each sample, in [0, P * rays_per_pixel). Not checked on CUDA, because that
            would synchronise: a sample whose index lies outside adds nothing.
        truth: (P, 3) true colours of the pixels, in the dtype of ``sample_rgb``; not differentiable.
        rays_per_pixel: The number of rays of each pixel, at least 1; rays of a pixel are consecutive.
        rays_kept: () int64, the number of rays to divide by, if some rays were dropped for lack of room. None: all.

    Returns:
        () in the dtype of ``sample_rgb``.
    """
    weights, truth = hold_constant("sample_color_error", weights=weights, truth=truth)
    rays = truth.shape[0] * rays_per_pixel
    check_index("ray_index", ray_index, rays, f"for {truth.shape[0]} pixels of {rays_per_pixel} rays")
    return _error(sample_rgb, truth, weights, ray_index, rays_per_pixel, rays_kept)


def _error(colors: Tensor, *others: MaybeTensor | int) -> Tensor:
    _library.ensure_loaded(colors.device.type)
    run = torch.ops.voxelfield.color_error.default if torch.compiler.is_compiling() else _ColorError.apply
    error: Tensor = run(colors, *others)
    return error


class _ColorError(Function):
    forward = run_raw("color_error")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.rays_per_pixel, rays_kept = inputs
        ctx.save_for_backward(*tensors, rays_kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[MaybeTensor, ...]:
        *tensors, rays_kept = ctx.saved_tensors
        d_colors = None
        if ctx.needs_input_grad[0]:
            d_colors = _ColorErrorBackward.apply(grad, *tensors, ctx.rays_per_pixel, rays_kept)
        return d_colors, None, None, None, None, None

    jvp = refuse_jvp("pixel_color_error and sample_color_error")
    vmap = refuse_vmap("pixel_color_error and sample_color_error", "call them once with all colours")


_ColorErrorBackward = last_derivative(
    "color_error_backward", "errors of colours are differentiable once; a second derivative was asked for"
)


fake("color_error")(lambda colors, *_: colors.new_empty(()))
fake("color_error_backward")(lambda grad, colors, *_: colors.new_empty(colors.shape))
register_autograd("color_error", _ColorError.apply)
register_autograd("color_error_backward", _ColorErrorBackward.apply)
