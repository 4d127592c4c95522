"""Colours of pixels from the colours of their rays."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from voxelfield.foundation.checks import check_choice
from voxelfield.ops._table import declare

PIXEL_AVERAGING = ("linear_light", "encoded")
"""The averaged quantity: linear light, decoded by the sRGB transfer function (IEC 61966-2-1), or encoded values."""


def pixel_colors(
    rgb: Tensor, opacity: Tensor, background: Tensor, rays_per_pixel: int, *, pixel_averaging: str = "linear_light"
) -> Tensor:
    r"""Averages the rays of each pixel as a camera does: in linear light instead of in encoded values.

    With straight colours :math:`c_i = \mathrm{rgb}_i / o_i` of the k rays of a pixel, and :math:`d` the function that
    decodes values to light,

    .. math:: L = \frac{\sum_i o_i\, d(c_i)}{\sum_i o_i}, \quad O = \frac1k \sum_i o_i, \quad
        \mathrm{pixel} = O\, d^{-1}(L) + (1 - O)\, \mathrm{background}.

    The background is composited in encoded values, as images with straight alpha are. For values below 0 the linear
    part of sRGB's transfer function is continued, for values above 1 its power law. With
    ``pixel_averaging="encoded"``, or with one ray per pixel, a pixel is the mean of
    :math:`\mathrm{rgb}_i + (1 - o_i)\, \mathrm{background}`.

    Args:
        rgb: (R, 3) float32 or float64, the emitted colour of each ray without background, as :func:`composite` returns
            it: at most ``opacity`` if colours are at most 1. Rays of a pixel are consecutive. Differentiable.
        opacity: (R,) in [0, 1], in the dtype of ``rgb``; differentiable. If light is averaged, the ``rgb`` of a ray of
            opacity 0 is ignored, and it gets the gradient of a black ray.
        background: (P, 3), or (3,) for all pixels, encoded as images are, in the dtype of ``rgb``; differentiable.
        rays_per_pixel: R / P, at least 1.
        pixel_averaging: The averaged quantity: ``linear_light``, or the ``encoded`` values.

    Returns:
        (P, 3) in the dtype of ``rgb``, encoded as images are. Differentiable once.
    """
    check_choice("pixel_averaging", pixel_averaging, PIXEL_AVERAGING)
    colors: Tensor = _pixel_colors(rgb, opacity, background, rays_per_pixel, pixel_averaging == "linear_light")
    return colors


def _gradients(
    grad: Tensor,
    rgb: Tensor,
    opacity: Tensor,
    background: Tensor,
    rays_per_pixel: int,
    srgb: bool,
    needs: set[str],
) -> dict[str, Any]:
    found = {}
    if needs & {"rgb", "opacity"}:
        found["rgb"], found["opacity"] = _pixel_colors_backward(grad, rgb, opacity, background, rays_per_pixel, srgb)
    if "background" in needs:
        through = 1 - opacity.unflatten(0, (-1, rays_per_pixel)).mean(dim=1)
        found["background"] = (through[:, None] * grad).sum_to_size(background.shape)
    return found


_pixel_colors = declare(
    "pixel_colors",
    lambda rgb, rays_per_pixel: rgb.new_empty(rgb.shape[0] // rays_per_pixel, 3),
    gradients=_gradients,
)
_pixel_colors_backward = declare(
    "pixel_colors_backward",
    lambda rgb, opacity: (rgb.new_empty(rgb.shape), rgb.new_empty(opacity.shape)),
    refusal="pixel_colors is differentiable once; a second derivative was asked for",
)
