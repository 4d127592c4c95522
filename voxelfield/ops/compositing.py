"""Emission and absorption along packed rays."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from voxelfield import _library
from voxelfield.ops._autograd import MaybeTensor, below_autograd, last_derivative, register_autograd
from voxelfield.ops._checks import (
    FLOATING,
    check_dtype,
    check_fraction,
    check_ray_offsets,
    check_same_device,
    check_tensor,
)
from voxelfield.ops._no_derivative import hold_constant, refuse_vmap
from voxelfield.ops.ray_sums import spread, total, total_ahead, widen

MIN_TRANSMITTANCE = 1e-4
"""Where rays stop unless told otherwise, in all ops."""

_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
_PACK_THEM = "pack the rays of all calls end to end, with one ray_offsets"


class Composite(NamedTuple):
    r"""What :func:`composite` and :func:`composite_alphas` return.

    Attributes:
        rgb: (R, 3) :math:`\sum w_i c_i`, without any background.
        opacity: (R,) :math:`\sum w_i`.
        depth_sum: (R,) :math:`\sum w_i t_i`; divide by ``opacity`` for the mean distance.
        weights: (M,) :math:`w_i`.
        distortion: (R,), or None unless wanted.
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
    dt: Tensor,
    ray_offsets: Tensor,
    *,
    min_transmittance: float = MIN_TRANSMITTANCE,
    distortion: bool = False,
) -> Composite:
    r"""Composites samples along each ray, front to back.

    :math:`T_i = \exp(-\sum_{j<i} \sigma_j \delta_j)`, :math:`w_i = T_i (1 - e^{-\sigma_i \delta_i})`,
    :math:`C = \sum_i w_i c_i` (Mildenhall et al. 2020, eq. 3). A ray stops in front of the first sample with
    :math:`T_i` below ``min_transmittance``: that sample and all behind it have weight zero and receive no gradient.
    The same holds for rows that belong to no ray, before ``ray_offsets[0]`` and from ``ray_offsets[-1]`` on.

    A density that is not finite gives a weight of NaN where its ray reaches it, and a colour that is not finite a pixel
    that is not: a diverged model does not pass for background.

    Distortion is a measure of how far apart the matter on a ray lies, in world units (Barron et al. 2022, "Mip-NeRF
    360", eq. 15): :math:`\sum_{ij} w_i w_j |t_i - t_j| + \frac13 \sum_i w_i^2 \delta_i`, computed in linear time from
    sums over the samples before each (Sun et al. 2022, "Improved direct voxel grid optimization"). As a loss it gathers
    matter on surfaces.

    Args:
        density: (M,) float32, float64, float16 or bfloat16, non-negative, per world unit of length; differentiable.
        rgb: (M, 3) colours; differentiable.
        t: (M,) distance of each sample; not differentiable.
        dt: (M,) length that each sample stands for; not differentiable. ``rgb``, ``t`` and ``dt`` are float64 if
            ``density`` is; otherwise each is float32, float16 or bfloat16.
        ray_offsets: (R + 1,) int64: the samples of ray r are ``ray_offsets[r]:ray_offsets[r + 1]``, near to far. They
            lie in 0..M and never fall. Not checked on CUDA, because that would synchronise: offsets outside are clamped
            to 0..M, a ray that would end before it begins has no samples, and a sample of several rays has the weight
            and gradient of any of them.
        min_transmittance: Where a ray stops, in [0, 1]; 0 never stops.
        distortion: Whether distortion is wanted.

    Returns:
        The sums of each ray and the weights of all samples, in float64 if ``density`` is float64 and in float32
        otherwise, under autocast too. A ray without samples is all zeros. Differentiable once in reverse mode, and in
        forward mode.

    Raises:
        TypeError: An argument is no tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device, or ``min_transmittance`` is out of range; or, on the CPU,
            ``ray_offsets`` fall or leave 0..M.
        NotImplementedError: A second derivative, a tangent of ``t`` or ``dt``, or ``torch.vmap`` is asked for.
    """
    _check("density", density, ray_offsets, min_transmittance, rgb=rgb, t=t, dt=dt)
    t, dt = hold_constant("composite", t=t, dt=dt)
    results = _composite(widen(density), widen(rgb), widen(t), widen(dt), ray_offsets, min_transmittance, distortion)
    return results if distortion else results._replace(distortion=None)


def composite_alphas(
    alpha: Tensor, rgb: Tensor, t: Tensor, ray_offsets: Tensor, *, min_transmittance: float = MIN_TRANSMITTANCE
) -> Composite:
    r"""Composites samples of given opacities along each ray, front to back.

    :math:`T_i = \prod_{j<i} (1 - \alpha_j)`, :math:`w_i = T_i \alpha_i`, :math:`C = \sum_i w_i c_i`: the same as
    :func:`composite` with :math:`\alpha_i = 1 - e^{-\sigma_i \delta_i}`.

    Args:
        alpha: (M,) in [0, 1], in the dtypes of :func:`composite`; differentiable. Behind an alpha of 1 nothing is seen,
            and nothing receives a gradient, nor passes one on to that alpha. An alpha above 1, or NaN, gives a weight
            of NaN.
        rgb: As for :func:`composite`; differentiable.
        t: As for :func:`composite`; not differentiable.
        ray_offsets: As for :func:`composite`.
        min_transmittance: As for :func:`composite`.

    Returns:
        As :func:`composite`, without distortion.

    Raises:
        TypeError: As for :func:`composite`.
        ValueError: As for :func:`composite`.
        NotImplementedError: As for :func:`composite`.
    """
    _check("alpha", alpha, ray_offsets, min_transmittance, rgb=rgb, t=t)
    (t,) = hold_constant("composite_alphas", t=t)
    results = _composite(widen(alpha), widen(rgb), widen(t), None, ray_offsets, min_transmittance, False)
    return results._replace(distortion=None)


def ray_weights(
    density: Tensor, dt: Tensor, ray_offsets: Tensor, *, min_transmittance: float = MIN_TRANSMITTANCE
) -> Tensor:
    """Returns the weights (M,) of :func:`composite` alone: each sample's share of its pixel.

    Args:
        density: As for :func:`composite`; differentiable, once in reverse mode, and in forward mode.
        dt: As for :func:`composite`; not differentiable.
        ray_offsets: As for :func:`composite`.
        min_transmittance: As for :func:`composite`.

    Raises:
        TypeError: As for :func:`composite`.
        ValueError: As for :func:`composite`.
        NotImplementedError: As for :func:`composite`.
    """
    return _light("ray_weights", density, dt, ray_offsets, min_transmittance, transmittance=False)


def ray_transmittance(
    density: Tensor, dt: Tensor, ray_offsets: Tensor, *, min_transmittance: float = MIN_TRANSMITTANCE
) -> Tensor:
    """Returns the share of light (M,) that reaches each sample past the ones ahead of it; 0 where a ray has stopped.

    Args:
        density: As for :func:`composite`; differentiable, once in reverse mode, and in forward mode. One that is not
            finite does not count: its weight tells.
        dt: As for :func:`composite`; not differentiable.
        ray_offsets: As for :func:`composite`.
        min_transmittance: As for :func:`composite`.

    Raises:
        TypeError: As for :func:`composite`.
        ValueError: As for :func:`composite`.
        NotImplementedError: As for :func:`composite`.
    """
    return _light("ray_transmittance", density, dt, ray_offsets, min_transmittance, transmittance=True)


def alpha_weights(alpha: Tensor, ray_offsets: Tensor, *, min_transmittance: float = MIN_TRANSMITTANCE) -> Tensor:
    """Returns the weights (M,) of :func:`composite_alphas` alone.

    Args:
        alpha: As for :func:`composite_alphas`; differentiable, once in reverse mode, and in forward mode.
        ray_offsets: As for :func:`composite`.
        min_transmittance: As for :func:`composite`.

    Raises:
        TypeError: As for :func:`composite`.
        ValueError: As for :func:`composite`.
        NotImplementedError: As for :func:`composite`.
    """
    return _light("alpha_weights", alpha, None, ray_offsets, min_transmittance, transmittance=False)


def alpha_transmittance(alpha: Tensor, ray_offsets: Tensor, *, min_transmittance: float = MIN_TRANSMITTANCE) -> Tensor:
    """Returns the share of light (M,) that reaches each sample of given opacity; 0 where a ray has stopped.

    Args:
        alpha: As for :func:`composite_alphas`; differentiable, once in reverse mode, and in forward mode.
        ray_offsets: As for :func:`composite`.
        min_transmittance: As for :func:`composite`.

    Raises:
        TypeError: As for :func:`composite`.
        ValueError: As for :func:`composite`.
        NotImplementedError: As for :func:`composite`.
    """
    return _light("alpha_transmittance", alpha, None, ray_offsets, min_transmittance, transmittance=True)


def _check(name: str, values: Tensor, ray_offsets: Tensor, min_transmittance: float, **others: Tensor) -> None:
    check_tensor(name, values, ("M",))
    check_dtype(name, values, FLOATING)
    wide = values.dtype == torch.float64
    allowed, why = ((torch.float64,), f" as {name} is") if wide else (_SINGLE, f" for {name} that is not float64")
    for other, x in others.items():
        check_tensor(other, x, (values.shape[0], 3) if other == "rgb" else (values.shape[0],))
        check_dtype(other, x, allowed, why)
        check_same_device(other, x, name, values)
    check_ray_offsets(ray_offsets, values.shape[0], name, values)
    check_fraction("min_transmittance", min_transmittance)
    _library.ensure_loaded(values.device.type)


def _composite(*inputs: Any) -> Composite:
    run = torch.ops.voxelfield.composite.default if torch.compiler.is_compiling() else _Composite.apply
    return Composite(*run(*inputs))


def _light(
    op: str,
    values: Tensor,
    dt: MaybeTensor,
    ray_offsets: Tensor,
    min_transmittance: float,
    *,
    transmittance: bool,
) -> Tensor:
    if dt is None:
        _check("alpha", values, ray_offsets, min_transmittance)
    else:
        _check("density", values, ray_offsets, min_transmittance, dt=dt)
        (dt,) = hold_constant(op, dt=dt)
        dt = widen(dt)
    run = torch.ops.voxelfield.ray_light.default if torch.compiler.is_compiling() else _RayLight.apply
    light: Tensor = run(widen(values), dt, ray_offsets, min_transmittance, transmittance)
    return light


class _RayLight(Function):
    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        with below_autograd():
            light: Tensor = torch.ops.voxelfield.ray_light.default(*inputs)
        return light

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.min_transmittance, ctx.transmittance = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[MaybeTensor, ...]:
        settings = ctx.min_transmittance, ctx.transmittance
        return _RayLightBackward.apply(grad, *ctx.saved_tensors, *settings), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        values, dt, ray_offsets = ctx.saved_tensors
        light = _Tangents(values, dt, ray_offsets, ctx.min_transmittance, tangent)
        return light.of_transmittance if ctx.transmittance else light.of_weights

    vmap = refuse_vmap("ray_weights", _PACK_THEM)


_RayLightBackward = last_derivative(
    "ray_light_backward", "ray_weights is differentiable once in reverse mode; a second derivative was asked for"
)


class _Tangents:
    """The light along rays and its derivative along a tangent of the densities, or of the alphas where dt is None."""

    def __init__(
        self, values: Tensor, dt: MaybeTensor, ray_offsets: Tensor, min_transmittance: float, tangent: Tensor
    ) -> None:
        light = (values, dt, ray_offsets, min_transmittance)
        transmittance = _RayLight.apply(*light, True)
        self.weights: Tensor = _RayLight.apply(*light, False)
        if dt is None:
            # Behind an alpha of 1 everything is dark, whatever that alpha's tangent.
            passing = 1 - values
            thickness = torch.where(passing > 0, tangent / torch.where(passing > 0, passing, 1), 0)
            of_opacity = transmittance * tangent
        else:
            thickness = tangent * dt
            of_opacity = (transmittance - self.weights) * thickness
        # Samples that a ray does not reach have no say, not even in the sums for those behind them.
        reached = transmittance != 0
        ahead = total_ahead(torch.where(reached, thickness, 0)[:, None], ray_offsets)[:, 0]
        self.of_transmittance = -transmittance * ahead
        self.of_weights = torch.where(reached, of_opacity - self.weights * ahead, 0)


class _Composite(Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            results: tuple[Tensor, ...] = torch.ops.voxelfield.composite.default(*inputs)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.min_transmittance, ctx.distortion = inputs
        ray_rgb, opacity, depth_sum, _, spread = output
        ctx.save_for_backward(*tensors, ray_rgb, opacity, depth_sum, spread)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        *others, of_distortion = grads
        d_density, d_rgb = _CompositeBackward.apply(
            *others, of_distortion if ctx.distortion else None, *ctx.saved_tensors, ctx.min_transmittance
        )
        return d_density, d_rgb, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, d_density: MaybeTensor, d_rgb: MaybeTensor, *_: None) -> tuple[Tensor, ...]:
        density, rgb, t, dt, ray_offsets = ctx.saved_tensors
        tangent = torch.zeros_like(density) if d_density is None else d_density
        light = _Tangents(density, dt, ray_offsets, ctx.min_transmittance, tangent)
        of_color = light.of_weights[:, None] * rgb
        if d_rgb is not None:
            of_color = of_color + light.weights[:, None] * d_rgb
        of_weights = light.of_weights[:, None]
        columns = [of_color, of_weights, of_weights * t[:, None]]
        if ctx.distortion:
            columns.append(of_weights * _distortion_slope(light.weights, t, dt, ray_offsets)[:, None])
        sums = total(torch.cat(columns, dim=1), ray_offsets)
        of_distortion = sums[:, 5] if ctx.distortion else sums.new_zeros(0)
        return sums[:, :3], sums[:, 3], sums[:, 4], light.of_weights, of_distortion

    vmap = refuse_vmap("composite", _PACK_THEM)


_CompositeBackward = last_derivative(
    "composite_backward", "composite is differentiable once in reverse mode; a second derivative was asked for"
)


def _distortion_slope(weights: Tensor, t: Tensor, dt: Tensor, ray_offsets: Tensor) -> Tensor:
    """Returns the derivative of a ray's distortion in each of its weights (M,)."""
    moments = torch.stack((weights, weights * t), dim=1)
    ahead = total_ahead(moments, ray_offsets)
    apart = 2 * ahead + moments - spread(total(moments, ray_offsets), ray_offsets, weights.shape[0])
    return 2 * (t * apart[:, 0] - apart[:, 1] + weights * dt / 3)


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::ray_light")
    def _(
        density: Tensor, dt: MaybeTensor, ray_offsets: Tensor, min_transmittance: float, transmittance: bool
    ) -> Tensor:
        return density.new_empty(density.shape)

    @torch.library.register_fake("voxelfield::ray_light_backward")
    def _(grad: Tensor, density: Tensor, *rest: Any) -> Tensor:
        return density.new_empty(density.shape)

    @torch.library.register_fake("voxelfield::composite")
    def _(
        density: Tensor,
        rgb: Tensor,
        t: Tensor,
        dt: MaybeTensor,
        ray_offsets: Tensor,
        min_transmittance: float,
        distortion: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        rays = ray_offsets.shape[0] - 1
        return (
            density.new_empty(rays, 3),
            density.new_empty(rays),
            density.new_empty(rays),
            density.new_empty(density.shape),
            density.new_empty(rays if distortion else 0),
        )

    @torch.library.register_fake("voxelfield::composite_backward")
    def _(
        grad_rgb: MaybeTensor,
        grad_opacity: MaybeTensor,
        grad_depth_sum: MaybeTensor,
        grad_weights: MaybeTensor,
        grad_distortion: MaybeTensor,
        density: Tensor,
        rgb: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:
        return density.new_empty(density.shape), rgb.new_empty(rgb.shape)

    register_autograd("ray_light", _RayLight.apply)
    register_autograd("ray_light_backward", _RayLightBackward.apply)
    register_autograd("composite", _Composite.apply)
    register_autograd("composite_backward", _CompositeBackward.apply)
