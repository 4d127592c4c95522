"""Emission and absorption along rays, packed or of equally many samples."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from voxelfield.ops._compositing import composite_packed, int64_offsets, light_packed, per_sample
from voxelfield.ops._packing import pack_equal_rays
from voxelfield.ops.ray_sums import widen

MIN_TRANSMITTANCE = 1e-4
"""Default transmittance below which rays stop, in all ops."""


class Composite(NamedTuple):
    r"""The result of :func:`composite` and :func:`composite_alphas`.

    Attributes:
        rgb: (R, C) :math:`\sum w_i c_i`, without any background.
        opacity: (R,) :math:`\sum w_i`.
        depth_sum: (R,) :math:`\sum w_i t_i`; divide by ``opacity`` for the mean distance.
        weights: (M,), or (R, S) for rays of S samples each, :math:`w_i`.
        distortion: (R,), or None if not requested.
    """

    rgb: Tensor
    opacity: Tensor
    depth_sum: Tensor
    weights: Tensor
    distortion: Tensor | None


def composite(
    density: Tensor,
    rgb: Tensor,
    t: Tensor,
    dt: Tensor | float,
    ray_offsets: Tensor | None = None,
    *,
    min_transmittance: float = MIN_TRANSMITTANCE,
    distortion: bool = False,
) -> Composite:
    r"""Composites samples along each ray, front to back.

    :math:`T_i = \exp(-\sum_{j<i} \sigma_j \delta_j)`, :math:`w_i = T_i (1 - e^{-\sigma_i \delta_i})`,
    :math:`C = \sum_i w_i c_i` (Mildenhall et al. 2020, eq. 3). A ray stops in front of the first sample with
    :math:`T_i` below ``min_transmittance``: that sample and all behind it have weight zero and receive no gradient.
    The same holds for rows that belong to no ray, before ``ray_offsets[0]`` and from ``ray_offsets[-1]`` on.

    A density that is not finite gives a weight of NaN if its ray reaches it, and a colour that is not finite gives a
    pixel that is not finite, so that a diverged model cannot be mistaken for background.

    Distortion measures how widely the weights of a ray are spread, in world units (Barron et al. 2022, "Mip-NeRF
    360", eq. 15): :math:`\sum_{ij} w_i w_j |t_i - t_j| + \frac13 \sum_i w_i^2 \delta_i`, computed in linear time from
    sums over the samples before each (Sun et al. 2022, "Improved direct voxel grid optimization"). As a loss it
    concentrates density at surfaces.

    Samples are packed by ray, M in all, or R rays have S samples each: without ``ray_offsets``, M below stands for two
    dimensions R, S, as in an ``rgb`` of (R, S, C).

    Args:
        density: (M,) float32, float64, float16 or bfloat16, non-negative, per world unit of length; differentiable.
        rgb: (M, C) colours, or any C >= 1 features to be summed like colours; differentiable. C = 3 is fastest.
        t: (M,) distance of each sample; differentiable.
        dt: (M,) length of each sample's interval, or one length for all samples; differentiable. ``rgb``, ``t`` and
            ``dt`` are float64 if ``density`` is; otherwise each is float32, float16 or bfloat16.
        ray_offsets: (R + 1,) int64, or int32, which is converted: the samples of ray r are
            ``ray_offsets[r]:ray_offsets[r + 1]``, near to far. They lie in 0..M and never fall. Not checked on CUDA,
            because that would synchronise: offsets outside are clamped to 0..M, a ray that would end before it begins
            has no samples, and a sample of several rays has the weight and gradient of any of them. None: the samples
            of ray r are row r of (R, S).
        min_transmittance: Transmittance below which a ray stops, in [0, 1]; 0 never stops it.
        distortion: Whether to compute the distortion.

    Returns:
        The sums of each ray and the weights of all samples, in float64 if ``density`` is float64 and in float32
        otherwise, under autocast too. A ray without samples is all zeros.

        Differentiable any number of times, in both modes. Values and first derivatives in reverse mode come from one
        kernel each. Forward mode, backward passes with ``create_graph=True`` and ``torch.func`` use several scans and
        sums along rays instead, which take longer. ``torch.vmap`` maps over all tensors in one call of the kernel.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device, or ``min_transmittance`` is out of range; or, on the CPU,
            ``ray_offsets`` fall or leave 0..M.
    """
    return _composite("density", density, rgb, t, dt, ray_offsets, min_transmittance, distortion)


def composite_alphas(
    alpha: Tensor,
    rgb: Tensor,
    t: Tensor,
    ray_offsets: Tensor | None = None,
    *,
    min_transmittance: float = MIN_TRANSMITTANCE,
) -> Composite:
    r"""Composites samples of given opacities along each ray, front to back.

    :math:`T_i = \prod_{j<i} (1 - \alpha_j)`, :math:`w_i = T_i \alpha_i`, :math:`C = \sum_i w_i c_i`: the same as
    :func:`composite` with :math:`\alpha_i = 1 - e^{-\sigma_i \delta_i}`.

    Args:
        alpha: (M,) in [0, 1], in the dtypes of :func:`composite`; differentiable. Samples behind an alpha of 1 have
            weight zero, receive no gradient and contribute none to that alpha. An alpha above 1, or NaN, gives a
            weight of NaN.
        rgb: As for :func:`composite`; differentiable.
        t: As for :func:`composite`; differentiable.
        ray_offsets: As for :func:`composite`.
        min_transmittance: As for :func:`composite`.

    The result, without distortion, and errors are those of :func:`composite`.
    """
    return _composite("alpha", alpha, rgb, t, None, ray_offsets, min_transmittance, False)


def ray_weights(
    density: Tensor,
    dt: Tensor | float,
    ray_offsets: Tensor | None = None,
    *,
    min_transmittance: float = MIN_TRANSMITTANCE,
) -> Tensor:
    """Returns the weights, (M,) or (R, S), of :func:`composite` alone: each sample's share of its pixel.

    Arguments, derivatives and errors are those of :func:`composite`.
    """
    return _light("density", density, dt, ray_offsets, min_transmittance, transmittance=False)


def ray_transmittance(
    density: Tensor,
    dt: Tensor | float,
    ray_offsets: Tensor | None = None,
    *,
    min_transmittance: float = MIN_TRANSMITTANCE,
) -> Tensor:
    """Returns the share of light, (M,) or (R, S), that reaches each sample; 0 where a ray has stopped.

    Arguments, derivatives and errors are those of :func:`composite`, but a density that is not finite is ignored here:
    it shows in the weights.
    """
    return _light("density", density, dt, ray_offsets, min_transmittance, transmittance=True)


def alpha_weights(
    alpha: Tensor, ray_offsets: Tensor | None = None, *, min_transmittance: float = MIN_TRANSMITTANCE
) -> Tensor:
    """Returns the weights, (M,) or (R, S), of :func:`composite_alphas` alone.

    Arguments, derivatives and errors are those of :func:`composite_alphas`.
    """
    return _light("alpha", alpha, None, ray_offsets, min_transmittance, transmittance=False)


def alpha_transmittance(
    alpha: Tensor, ray_offsets: Tensor | None = None, *, min_transmittance: float = MIN_TRANSMITTANCE
) -> Tensor:
    """Returns the share of light, (M,) or (R, S), that reaches samples of given opacity; 0 where a ray has stopped.

    Arguments, derivatives and errors are those of :func:`composite_alphas`.
    """
    return _light("alpha", alpha, None, ray_offsets, min_transmittance, transmittance=True)


def _composite(
    name: str,
    values: Tensor,
    rgb: Tensor,
    t: Tensor,
    dt: Any,
    ray_offsets: Tensor | None,
    min_transmittance: float,
    distortion: bool,
) -> Composite:
    """Composites samples whose values are the argument ``density``, or ``alpha``, for which ``dt`` is None."""
    if ray_offsets is None:
        flat, rgb, t, dt, offsets = pack_equal_rays(name, values, rgb=rgb, t=t, dt=dt)
        result = _composite(name, flat, rgb, t, dt, offsets, min_transmittance, distortion)
        return result._replace(weights=result.weights.view(values.shape))
    lengths = None if name == "alpha" else widen(per_sample(dt, values))
    samples = widen(values), widen(rgb), widen(t), lengths, int64_offsets(ray_offsets, name, values)
    rgb, opacity, depth_sum, weights, of_distortion = composite_packed(*samples, min_transmittance, distortion)
    return Composite(rgb, opacity, depth_sum, weights, of_distortion if distortion else None)


def _light(
    name: str, values: Tensor, dt: Any, ray_offsets: Tensor | None, min_transmittance: float, *, transmittance: bool
) -> Tensor:
    """Returns weights or transmittances of values called ``density``, or ``alpha``, which have no ``dt``."""
    if ray_offsets is None:
        packed, dt, ray_offsets = pack_equal_rays(name, values, dt=dt)
        return _light(name, packed, dt, ray_offsets, min_transmittance, transmittance=transmittance).view(values.shape)
    dt = None if name == "alpha" else widen(per_sample(dt, values))
    return light_packed(widen(values), dt, int64_offsets(ray_offsets, name, values), min_transmittance, transmittance)
