"""The raw compositing ops of packed rays: shapes under a compiler, and derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from voxelfield.foundation.autograd import MaybeTensor, OpFunction
from voxelfield.foundation.checks import (
    check_dense,
    check_dtype,
    check_field,
    check_fraction,
    check_order,
    check_ray_offsets,
    check_tensor,
    coordinate_dtype,
    lies_within,
)
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError
from voxelfield.foundation.private_torch import (
    below_autograd,
    forward_mode_level,
    functorch_active,
    unwrap_dead_wrappers,
)
from voxelfield.ops._table import declare, run_raw
from voxelfield.ops.ray_sums import EXCLUSIVE, scan, total

Results = tuple[Tensor, ...]


def int64_offsets(ray_offsets: Any, name: str, values: Any) -> Any:
    """Returns offsets as int64 if they are int32; raises if they fall or leave the rows of ``values``, called ``name``.

    That is for Python to look at, because kernels do not wait for the values. All else is left to the kernels, which
    know ``values`` as density.
    """
    check_dense(name, values)
    if isinstance(ray_offsets, Tensor) and ray_offsets.layout is torch.strided:
        if ray_offsets.dtype is torch.int32:
            ray_offsets = ray_offsets.long()
        if ray_offsets.dtype is torch.int64 and ray_offsets.ndim == values.ndim == 1:
            check_order(ray_offsets, values.shape[0], name)
    return ray_offsets


def _check_samples(
    density: Tensor,
    dt: MaybeTensor,
    ray_offsets: Tensor,
    min_transmittance: float,
    rgb: MaybeTensor = None,
    t: MaybeTensor = None,
) -> None:
    name = "alpha" if dt is None else "density"
    check_tensor(name, density, ("M",))
    check_dtype(name, density, (torch.float32, torch.float64))
    why = f" as {name} is" if density.dtype == torch.float64 else f" for {name} that is not float64"
    for other, x, shape in (("dt", dt, ()), ("rgb", rgb, ("C",)), ("t", t, ())):
        if x is not None:
            check_field(other, x, (density.shape[0], *shape), density.dtype, name, density, why)
    if rgb is not None and rgb.shape[1] == 0:
        raise ArgumentValueError("rgb must have at least one channel, got none")
    check_ray_offsets(ray_offsets, density.shape[0], name, density)
    check_fraction("min_transmittance", min_transmittance)


def per_sample(dt: Any, density: Any) -> Any:
    """Returns lengths (M,) if ``dt`` is one length for all samples of ``density``; raises if there is none."""
    if isinstance(dt, Tensor) and dt.dim() > 0:
        return dt
    if dt is None:  # otherwise the densities would be taken for alphas
        raise ArgumentTypeError("dt must be a torch.Tensor, got NoneType")
    check_tensor("density", density, ("M",))
    if isinstance(dt, Tensor):
        return dt.expand(density.shape)
    if isinstance(dt, int | float) and not isinstance(dt, bool):
        lies_within("dt", dt, 0, 1)  # raises if it is too large
        return torch.full_like(density, float(dt), dtype=coordinate_dtype(density.dtype), requires_grad=False)
    return dt


class PackedFunction(OpFunction):
    """An op on packed samples, as a kernel and as a formula of scans and sums along rays.

    Kernels compute values and first derivatives. In forward mode, with ``create_graph`` and under ``torch.func``,
    formulas take their place, because their parts can be differentiated any number of times.
    """

    @classmethod
    def apply_transformed(cls, *inputs: Any) -> Any:
        """Applies the Function, or in forward mode its formula."""
        return cls.formula(*inputs) if forward_mode_level() >= 0 else super().apply_transformed(*inputs)

    @staticmethod
    def formula(*inputs: Any) -> Any:
        """Computes the results from differentiable parts."""
        raise NotImplementedError

    @classmethod
    def differentiate_formula(cls, needs: Sequence[bool], grads: Sequence[MaybeTensor], *inputs: Any) -> Any:
        """Returns gradients of the formula in the inputs that need one, which can be differentiated again."""
        wanted = [i for i, x in enumerate(inputs) if needs[i] and x.is_floating_point()]

        def differentiated(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(wanted, tensors, strict=True))
            results = cls.formula(*[given.get(i, x) for i, x in enumerate(inputs)])
            results = results if isinstance(results, tuple) else (results,)
            return tuple(x for x, grad in zip(results, grads, strict=True) if grad is not None)

        arriving = tuple(grad for grad in grads if grad is not None)
        if functorch_active():
            found = torch.func.vjp(differentiated, *[inputs[i] for i in wanted])[1](arriving)
        else:
            # Views, because one tensor may be two of the inputs. A backward pass of torch.func that has returned leaves
            # wrappers of tensors without a gradient.
            given = unwrap_dead_wrappers(inputs[i] for i in wanted)
            tensors = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in given]
            pairs = [(x, grad) for x, grad in zip(differentiated(*tensors), arriving, strict=True) if x.requires_grad]
            results, arriving = zip(*pairs, strict=True)
            found = torch.autograd.grad(results, tensors, arriving, create_graph=True, allow_unused=True)
        gradients = dict(zip(wanted, found, strict=True))
        return tuple(gradients.get(i) for i in range(len(inputs)))


def _is_transformed() -> bool:
    """Tells whether the backward pass that is running may be differentiated itself, or mapped."""
    return torch.is_grad_enabled() or functorch_active()


class RayLight(PackedFunction):
    """Weights or transmittances, applied to ``(values, dt, ray_offsets, min_transmittance, transmittance)``."""

    forward = run_raw("ray_light")

    @staticmethod
    def formula(*inputs: Any) -> Tensor:
        *samples, transmittance = inputs
        light = _Light(*samples)
        return light.transmittance if transmittance else light.weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.min_transmittance, ctx.transmittance = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[MaybeTensor, ...]:
        samples = (*ctx.saved_tensors, ctx.min_transmittance)
        if _is_transformed():
            return RayLight.differentiate_formula(ctx.needs_input_grad, (grad,), *samples, ctx.transmittance)
        of_lengths = ctx.needs_input_grad[1]
        with below_autograd():
            gradient = _ray_light_backward.kernel(grad, *samples, ctx.transmittance, of_lengths)
        return *(gradient if of_lengths else (gradient, None)), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        values, dt, ray_offsets, *settings = inputs
        calls = _PackedCalls(info.batch_size, values, in_dims[0], ray_offsets, in_dims[2])
        light = RayLight.apply(calls.pack(values, in_dims[0]), calls.pack(dt, in_dims[1]), calls.ray_offsets, *settings)
        return calls.unpack(light), 0


class CompositeSamples(PackedFunction):
    """All sums, applied to ``(density, rgb, t, dt, ray_offsets, min_transmittance, distortion)``."""

    forward = run_raw("composite")

    @staticmethod
    def formula(*inputs: Any) -> Results:
        density, rgb, t, dt, ray_offsets, min_transmittance, distortion = inputs
        light = _Light(density, dt, ray_offsets, min_transmittance)
        rgb, t, weights = light.reach(rgb), light.reach(t), light.weights
        columns = [weights[:, None] * rgb, weights[:, None], (weights * t)[:, None]]
        if distortion:
            assert light.dt is not None
            before = scan(torch.stack((weights, weights * t), dim=1), None, ray_offsets, EXCLUSIVE)
            pairs = 2 * (t * before[:, 0] - before[:, 1]) + weights * light.dt / 3
            columns.append((weights * pairs)[:, None])
        sums = total(torch.cat(columns, dim=1), ray_offsets)
        channels = rgb.shape[1]
        spread_of_weights = sums[:, channels + 2] if distortion else sums.new_zeros(0)
        return sums[:, :channels], sums[:, channels], sums[:, channels + 1], weights, spread_of_weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        *tensors, ctx.min_transmittance, ctx.distortion = inputs
        ray_rgb, opacity, depth_sum, _, distortion = output
        ctx.save_for_backward(*tensors, ray_rgb, opacity, depth_sum, distortion)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        if not ctx.distortion:  # its result is empty
            grads = (*grads[:4], None)
        if _is_transformed():
            inputs = *ctx.saved_tensors[:5], ctx.min_transmittance, ctx.distortion
            return CompositeSamples.differentiate_formula(ctx.needs_input_grad, grads, *inputs)
        of_distances = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        saved = ctx.saved_tensors  # which activation checkpointing computes, with autograd
        with below_autograd():
            gradient, of_rgb = _composite_backward.kernel(*grads, *saved, ctx.min_transmittance, of_distances)
        if not of_distances:
            return gradient, of_rgb, None, None, None, None, None
        of_density, of_t, *of_dt = gradient
        return of_density, of_rgb, of_t, of_dt[0] if of_dt else None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Results, tuple[int, ...]]:
        *samples, ray_offsets, min_transmittance, distortion = inputs
        calls = _PackedCalls(info.batch_size, samples[0], in_dims[0], ray_offsets, in_dims[4])
        packed = [calls.pack(x, mapped) for x, mapped in zip(samples, in_dims, strict=False)]
        results = CompositeSamples.apply(*packed, calls.ray_offsets, min_transmittance, distortion)
        *of_rays, weights, spread_of_weights = results
        last = calls.rays_of(spread_of_weights) if distortion else weights.new_zeros(info.batch_size, 0)
        return (*map(calls.rays_of, of_rays), calls.unpack(weights), last), (0,) * 5


class _Light:
    """The light along rays by differentiable parts. Everything is zero where a ray has stopped, and in rows of no ray.

    ``values`` (M,) are densities, or alphas where ``dt`` is None.
    """

    def __init__(self, values: Tensor, dt: MaybeTensor, ray_offsets: Tensor, min_transmittance: float) -> None:
        self.ray_offsets = ray_offsets
        with torch.no_grad():
            if dt is None:
                sound = (values <= 1) & (values > -torch.inf)
                passing = 1 - values
            else:
                thickness = values * dt
                sound = (values < torch.inf) & (thickness > -torch.inf)
                passing = torch.exp(-thickness)
            light = self._transmittance(torch.where(sound, passing, 1))
            self.reached = (light >= min_transmittance) & (light > 0)
            broken = self.reached & ~sound
        # Numbers that are not used may be anything; they must not meet a derivative, not even one of zero.
        used = self.reached & sound
        self.values = torch.where(used, values, 0)
        if dt is None:
            self.dt: MaybeTensor = None
            self.opacity, self.passing = self.values, 1 - self.values
        else:
            self.dt = torch.where(used, dt, 0)
            thickness = self.values * self.dt
            self.opacity, self.passing = -torch.expm1(-thickness), torch.exp(-thickness)
        # A sample that is not sound shows in its weight and gradient, and does not change the light behind it.
        unsound = torch.where(broken, values if dt is None else values + dt, 0)
        self.opacity = self.opacity + torch.where(broken, torch.nan, 0.0).to(values.dtype) * unsound
        self.transmittance = self.reach(self._transmittance(self.passing))
        self.weights = self.transmittance * self.opacity

    def _transmittance(self, passing: Tensor) -> Tensor:
        return scan(None, passing[:, None], self.ray_offsets, EXCLUSIVE)[:, 0]

    def reach(self, x: Tensor) -> Tensor:
        """Returns (M, ...) with zeros in the rows that no ray reaches."""
        return torch.where(self.reached if x.dim() == 1 else self.reached[:, None], x, 0)


class _PackedCalls:
    """Calls that ``torch.vmap`` maps over, packed into one: the rays of all calls, end to end.

    A ray without results follows the rays of each call. It takes the rows of no ray between them. ``values`` and
    ``ray_offsets`` belong to one call if the dimension that is mapped over is None.
    """

    def __init__(
        self, count: int, values: Tensor, mapped: int | None, ray_offsets: Tensor, offsets_mapped: int | None
    ) -> None:
        self.count = count
        self.samples = values.shape[0 if mapped != 0 else 1]
        offsets = self._of_all(ray_offsets, offsets_mapped).clamp(0, self.samples)
        self.rays = offsets.shape[1] - 1
        rows = torch.arange(self.samples, device=offsets.device)
        self.on_rays = (rows >= offsets[:, :1]) & (rows < offsets[:, -1:])
        starts = self.samples * torch.arange(count + 1, device=offsets.device)
        self.ray_offsets = torch.cat(((offsets + starts[:-1, None]).flatten(), starts[-1:]))

    def _of_all(self, x: Tensor, mapped: int | None) -> Tensor:
        return x.expand(self.count, *x.shape) if mapped is None else x.movedim(mapped, 0)

    def _only_on_rays(self, x: Tensor) -> Tensor:
        return torch.where(self.on_rays if x.dim() == 2 else self.on_rays[..., None], x, 0)

    def pack(self, x: MaybeTensor, mapped: int | None) -> MaybeTensor:
        """Packs the samples of all calls, (M, ...) each."""
        return None if x is None else self._only_on_rays(self._of_all(x, mapped)).flatten(0, 1)

    def unpack(self, x: Tensor) -> Tensor:
        """Returns the samples of each call, (calls, M, ...)."""
        return self._only_on_rays(x.unflatten(0, (self.count, self.samples)))

    def rays_of(self, x: Tensor) -> Tensor:
        """Returns the results for the rays of each call, (calls, R, ...)."""
        return x.unflatten(0, (self.count, self.rays + 1))[:, :-1]


def _sums(density: Tensor, rgb: Tensor, dt: MaybeTensor, ray_offsets: Tensor, distortion: bool) -> Results:
    if distortion and dt is None:
        raise ArgumentValueError("dt must be given for distortion")
    rays, (samples, channels) = ray_offsets.shape[0] - 1, rgb.shape
    shapes = ((rays, channels), (rays,), (rays,), (samples,), (rays if distortion else 0,))
    return tuple(density.new_empty(shape) for shape in shapes)


def _of_samples(density: Tensor, rgb: Tensor, dt: MaybeTensor, of_distances: bool) -> tuple[Tensor, Tensor]:
    rows = (2 if dt is None else 3,) if of_distances else ()
    return density.new_empty(*rows, *density.shape), rgb.new_empty(rgb.shape)


light_packed = declare(
    "ray_light", lambda density: density.new_empty(density.shape), check=_check_samples, function=RayLight
)
_ray_light_backward = declare(
    "ray_light_backward",
    lambda density, of_lengths: density.new_empty((2, *density.shape) if of_lengths else density.shape),
    refusal="the raw op ray_light_backward has no derivative; ops.ray_weights has derivatives of any order",
)
composite_packed = declare("composite", _sums, check=_check_samples, function=CompositeSamples)
_composite_backward = declare(
    "composite_backward",
    _of_samples,
    refusal="the raw op composite_backward has no derivative; ops.composite has derivatives of any order",
)
