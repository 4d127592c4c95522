"""The raw compositing ops of packed rays: checks, shapes under a compiler, derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from voxelfield import _library
from voxelfield.ops._autograd import (
    MaybeTensor,
    OpFunction,
    below_autograd,
    forward_mode_active,
    last_derivative,
    needs_long_path,
    register_autograd,
    traces_ops,
)
from voxelfield.ops._checks import (
    FLOATING,
    check_dtype,
    check_fraction,
    check_ray_offsets,
    check_same_device,
    check_tensor,
    offsets_fit,
)
from voxelfield.ops._errors import ArgumentValueError
from voxelfield.ops._no_derivative import refuse_vmap
from voxelfield.ops.ray_sums import EXCLUSIVE, scan, spread, total

_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
_PACK_THEM = "pack the rays of all calls end to end, with one ray_offsets"


def check_samples(name: str, values: Tensor, ray_offsets: Tensor, min_transmittance: float, **others: Tensor) -> Tensor:
    """Checks the samples passed to a public function, and loads the kernels for their device.

    Returns:
        The offsets as int64.
    """
    check_tensor(name, values, ("M",))
    check_dtype(name, values, FLOATING)
    wide = values.dtype == torch.float64
    allowed, why = ((torch.float64,), f" as {name} is") if wide else (_SINGLE, f" for {name} that is not float64")
    for other, x in others.items():
        check_tensor(other, x, (values.shape[0], 3) if other == "rgb" else (values.shape[0],))
        check_dtype(other, x, allowed, why)
        check_same_device(other, x, name, values)
    ray_offsets = check_ray_offsets(ray_offsets, values.shape[0], name, values)
    check_fraction("min_transmittance", min_transmittance)
    _library.ensure_loaded(values.device.type)
    return ray_offsets


def _check_widened(density: Tensor, ray_offsets: Tensor, min_transmittance: float, **others: MaybeTensor) -> None:
    """Repeats the checks of the kernels, which do not run on fake tensors."""
    given = {name: x for name, x in others.items() if x is not None}
    check_dtype("density", density, (torch.float32, torch.float64))
    for name, x in given.items():
        check_dtype(name, x, (density.dtype,), " as density is")
    check_samples("density", density, ray_offsets, min_transmittance, **given)


def run_eagerly(
    function: type[OpFunction], trained: tuple[Tensor, ...], constant: tuple[Tensor, ...], *inputs: Any
) -> Any:
    """Runs an op in the common case; returns None if the slow path must handle the call or report an error.

    Apart from the order of the offsets, which the raw op does not check, only the raw op checks arguments here: the
    checks in Python would take longer than everything else on the host.

    Args:
        function: :class:`RayLight` or :class:`CompositeSamples`.
        trained: The differentiable inputs.
        constant: The inputs without derivative.
        inputs: All inputs of the function. Offsets are the third from the end.
    """
    if needs_long_path():
        return None
    try:
        if trained[0].numel() == 0:  # the raw op checks empty inputs less strictly
            return None
        for x in constant:
            if x.requires_grad:
                return None
        if not offsets_fit(inputs[-3], trained[0].shape[0]):
            return None
        if torch.is_grad_enabled():
            for x in trained:
                if x.requires_grad:
                    return function.record(*inputs)
        return function.forward(*inputs)
    except Exception:  # the slow path raises it again, with a better message
        return None


def run(op: str, function: type[OpFunction], *inputs: Any) -> Any:
    """Runs an op on checked inputs in any situation.

    Args:
        op: Name of the raw op.
        function: Its Function.
        inputs: As both take them.
    """
    if traces_ops():
        return getattr(torch.ops.voxelfield, op).default(*inputs)
    return function.apply(*unwrap_dead_wrappers(inputs))


class RayLight(OpFunction):
    """Weights or transmittances, applied to ``(values, dt, ray_offsets, min_transmittance, transmittance)``."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        with below_autograd():
            light: Tensor = torch.ops.voxelfield.ray_light.default(*inputs)
        return light

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.min_transmittance, ctx.transmittance = inputs
        ctx.save_for_backward(*tensors)
        if forward_mode_active():
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
        transmittance = RayLight.apply(*light, True)
        self.weights: Tensor = RayLight.apply(*light, False)
        if dt is None:
            # Transmittance behind an alpha of 1 is zero, whatever that alpha's tangent.
            passing = 1 - values
            thickness = torch.where(passing > 0, tangent / torch.where(passing > 0, passing, 1), 0)
            of_opacity = transmittance * tangent
        else:
            thickness = tangent * dt
            of_opacity = (transmittance - self.weights) * thickness
        # Samples that the ray does not reach contribute nothing, not even to the sums of the samples behind them.
        reached = transmittance != 0
        ahead = scan(torch.where(reached, thickness, 0)[:, None], None, ray_offsets, EXCLUSIVE)[:, 0]
        self.of_transmittance = -transmittance * ahead
        self.of_weights = torch.where(reached, of_opacity - self.weights * ahead, 0)


class CompositeSamples(OpFunction):
    """All sums, applied to ``(density, rgb, t, dt, ray_offsets, min_transmittance, distortion)``."""

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
        ctx.set_materialize_grads(False)
        if forward_mode_active():
            ctx.save_for_forward(*tensors)

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
    ahead = scan(moments, None, ray_offsets, EXCLUSIVE)
    apart = 2 * ahead + moments - spread(total(moments, ray_offsets), ray_offsets, weights.shape[0])
    return 2 * (t * apart[:, 0] - apart[:, 1] + weights * dt / 3)


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::ray_light")
    def _(
        density: Tensor, dt: MaybeTensor, ray_offsets: Tensor, min_transmittance: float, transmittance: bool
    ) -> Tensor:
        _check_widened(density, ray_offsets, min_transmittance, dt=dt)
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
        _check_widened(density, ray_offsets, min_transmittance, rgb=rgb, t=t, dt=dt)
        if distortion and dt is None:
            raise ArgumentValueError("dt must be given for distortion")
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

    register_autograd("ray_light", RayLight.apply)
    register_autograd("ray_light_backward", _RayLightBackward.apply)
    register_autograd("composite", CompositeSamples.apply)
    register_autograd("composite_backward", _CompositeBackward.apply)
