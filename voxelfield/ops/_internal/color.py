"""Colours of samples and pixels, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from voxelfield.foundation.checks import check_choice, check_index, coordinate_dtype
from voxelfield.ops._table import declare


def append_view(geometry: Tensor, directions: Tensor, ray_index: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """Concatenates geometry and the spherical harmonics of each sample's viewing direction, in one pass.

    The harmonics are as in :func:`voxelfield.fields.decoders.spherical_harmonics`; the layout is as in Instant-NGP's
    colour network (Mueller et al. 2022, section 5.4).

    Args:
        geometry: (M, G), any floating dtype; column 0 is raw density. Differentiable.
        directions: (R, 3) float32 (float64 for float64 ``geometry``), the rays' unit directions, world frame.
        ray_index: (M,) int64, the ray of each sample, in [0, R); 0 where R is 0, as :class:`PackedSamples` has it. On
            CUDA not checked, because that would synchronise: an index outside selects the direction (0, 0, 0).
        degree: Highest band of the harmonics, 0 to 3.

    Returns:
        inputs (M, G + (degree + 1)**2) in the dtype of ``geometry``, and its first column (M,) in float32 (float64 for
        float64). Differentiable once, in ``geometry``.
    """
    rays = directions.shape[0]
    check_index("ray_index", ray_index, max(rays, 1), f"for {rays} directions")
    return _append_view(geometry, directions, ray_index, degree)


def _results(geometry: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    rows, size = geometry.shape
    inputs = geometry.new_empty(rows, size + (degree + 1) ** 2)
    return inputs, geometry.new_empty(rows, dtype=coordinate_dtype(geometry.dtype))


_append_view = declare(
    "append_view",
    _results,
    gradients=lambda geometry, backward: backward(geometry_size=geometry.shape[1]),
    differentiable=("geometry",),
)
_append_view_backward = declare(
    "append_view_backward",
    lambda grad_inputs, geometry_size: grad_inputs.new_empty(grad_inputs.shape[0], geometry_size),
    refusal="append_view is differentiable once; a second derivative was asked for",
)


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
    return _pixel_colors(rgb, opacity, background, rays_per_pixel, pixel_averaging == "linear_light")


def _gradients(
    grad: Tensor,
    opacity: Tensor,
    background: Tensor,
    rays_per_pixel: int,
    needs: set[str],
    backward: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    found = backward() if needs & {"rgb", "opacity"} else {}
    if "background" in needs:
        through = 1 - opacity.unflatten(0, (-1, rays_per_pixel)).mean(dim=1)
        found["background"] = (through[:, None] * grad).sum_to_size(background.shape)
    return found


_pixel_colors = declare(
    "pixel_colors",
    lambda rgb, rays_per_pixel: rgb.new_empty(rgb.shape[0] // rays_per_pixel, 3),
    gradients=_gradients,
    differentiable=("rgb", "opacity", "background"),
)
_pixel_colors_backward = declare(
    "pixel_colors_backward",
    lambda rgb, opacity: (rgb.new_empty(rgb.shape), rgb.new_empty(opacity.shape)),
    refusal="pixel_colors is differentiable once; a second derivative was asked for",
)


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
    return _color_error(pixels, truth, None, None, rays_per_pixel, rays_kept)


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
    return _color_error(sample_rgb, truth, weights, ray_index, rays_per_pixel, rays_kept)


_color_error = declare(
    "color_error",
    lambda colors: colors.new_empty(()),
    gradients=lambda backward: backward(),
    differentiable=("colors",),
    public="pixel_color_error and sample_color_error",
)
_color_error_backward = declare(
    "color_error_backward",
    lambda colors: colors.new_empty(colors.shape),
    public="pixel_color_error and sample_color_error",
    refusal="errors of colours are differentiable once; a second derivative was asked for",
)
