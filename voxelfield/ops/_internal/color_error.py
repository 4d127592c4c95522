"""Squared errors of pixels' colours, and of the colours of the samples along their rays."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from voxelfield.foundation.autograd import MaybeTensor
from voxelfield.foundation.checks import check_index
from voxelfield.ops._table import declare


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
    error: Tensor = _color_error(pixels, truth, None, None, rays_per_pixel, rays_kept)
    return error


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
    rays = truth.shape[0] * rays_per_pixel
    check_index("ray_index", ray_index, rays, f"for {truth.shape[0]} pixels of {rays_per_pixel} rays")
    error: Tensor = _color_error(sample_rgb, truth, weights, ray_index, rays_per_pixel, rays_kept)
    return error


def _gradients(
    grad: Tensor,
    colors: Tensor,
    truth: Tensor,
    weights: MaybeTensor,
    ray_index: MaybeTensor,
    rays_per_pixel: int,
    rays_kept: MaybeTensor,
) -> dict[str, Any]:
    return {"colors": _color_error_backward(grad, colors, truth, weights, ray_index, rays_per_pixel, rays_kept)}


_color_error = declare(
    "color_error",
    lambda colors: colors.new_empty(()),
    gradients=_gradients,
    constants=("truth", "weights"),
    public="an error of colours",
)
_color_error_backward = declare(
    "color_error_backward",
    lambda colors: colors.new_empty(colors.shape),
    public="an error of colours",
    refusal="errors of colours are differentiable once; a second derivative was asked for",
)
