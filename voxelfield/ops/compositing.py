"""Emission and absorption along packed rays."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops._checks import check_dtype, check_ray_offsets, check_same_device, check_tensor


class Composite(NamedTuple):
    """What :func:`composite` returns: per ray, and the weight of each sample. ``distortion`` is None unless wanted."""

    rgb: Tensor
    opacity: Tensor
    depth: Tensor
    weights: Tensor
    distortion: Tensor | None


def composite(
    density: Tensor,
    rgb: Tensor,
    t: Tensor,
    dt: Tensor,
    ray_offsets: Tensor,
    *,
    min_transmittance: float = 1e-4,
    distortion: bool = False,
) -> Composite:
    r"""Composites samples along each ray, front to back.

    :math:`T_i = \exp(-\sum_{j<i} \sigma_j \delta_j)`, :math:`w_i = T_i (1 - e^{-\sigma_i \delta_i})`,
    :math:`C = \sum_i w_i c_i` (Mildenhall et al. 2020, eq. 3). A sample with :math:`T_i` below ``min_transmittance``
    and all behind it count for nothing and receive no gradient. So do rows that belong to no ray, before
    ``ray_offsets[0]`` and from ``ray_offsets[-1]`` on.

    Distortion is how far apart the matter on a ray lies, in world units (Barron et al. 2022, "Mip-NeRF 360", eq. 15):
    :math:`\sum_{ij} w_i w_j |t_i - t_j| + \frac13 \sum_i w_i^2 \delta_i`, in linear time by sums over the samples
    before each (Sun et al. 2022, "Improved direct voxel grid optimization"). As a loss it gathers matter on surfaces.

    Args:
        density: (M,) float32 or float64, non-negative, per world unit of length; differentiable.
        rgb: (M, 3) colours, dtype of ``density``; differentiable.
        t: (M,) distance of each sample, dtype of ``density``; not differentiable.
        dt: (M,) length that each sample stands for, dtype of ``density``; not differentiable.
        ray_offsets: (R + 1,) int64: the samples of ray r are ``ray_offsets[r]:ray_offsets[r + 1]``, near to far. They
            lie in 0..M and never fall. On CUDA nobody waits to look: what lies outside is taken for 0 or M, a ray that
            would end before it begins has no samples, and a sample of several rays has the weight and gradient of any.
        min_transmittance: Where a ray stops; 0 never stops.
        distortion: Whether distortion is wanted.

    Returns:
        rgb (R, 3) without any background, opacity (R,) :math:`\sum w_i`, depth (R,) :math:`\sum w_i t_i` (divide by
        opacity for the mean distance), weights (M,) and distortion (R,). A ray without samples is all zeros.

    Raises:
        TypeError: An argument is no tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device; or, on the CPU, ``ray_offsets`` fall or leave 0..M.
    """
    _check(density, dt, ray_offsets)
    for name, value, shape in (("rgb", rgb, (density.shape[0], 3)), ("t", t, (density.shape[0],))):
        check_tensor(name, value, shape)
        check_dtype(name, value, (density.dtype,), " as density is")
        check_same_device(name, value, "density", density)
    results = Composite(
        *torch.ops.voxelfield.composite(density, rgb, t, dt, ray_offsets, min_transmittance, distortion)
    )
    return results if distortion else results._replace(distortion=None)


def ray_weights(density: Tensor, dt: Tensor, ray_offsets: Tensor, *, min_transmittance: float = 1e-4) -> Tensor:
    """Returns the weights (M,) of :func:`composite` alone, without gradient: which samples can be seen at all.

    Args:
        density: As for :func:`composite`.
        dt: As for :func:`composite`.
        ray_offsets: As for :func:`composite`.
        min_transmittance: As for :func:`composite`.

    Raises:
        TypeError: An argument is no tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device; or, on the CPU, ``ray_offsets`` fall or leave 0..M.
    """
    _check(density, dt, ray_offsets)
    with torch.no_grad():
        weights: Tensor = torch.ops.voxelfield.ray_weights(density, dt, ray_offsets, min_transmittance)
    return weights


def _check(density: Tensor, dt: Tensor, ray_offsets: Tensor) -> None:
    check_tensor("density", density, ("M",))
    check_dtype("density", density, (torch.float32, torch.float64))
    check_tensor("dt", dt, (density.shape[0],))
    check_dtype("dt", dt, (density.dtype,), " as density is")
    check_same_device("dt", dt, "density", density)
    check_ray_offsets(ray_offsets, density.shape[0], "density", density)
    _library.ensure_loaded(density.device.type)


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::ray_weights")
    def _(density: Tensor, dt: Tensor, ray_offsets: Tensor, min_transmittance: float) -> Tensor:
        return density.new_empty(density.shape)

    @torch.library.register_fake("voxelfield::composite")
    def _(
        density: Tensor,
        rgb: Tensor,
        t: Tensor,
        dt: Tensor,
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
        grad_rgb: Tensor | None,
        grad_opacity: Tensor | None,
        grad_depth: Tensor | None,
        grad_weights: Tensor | None,
        grad_distortion: Tensor | None,
        density: Tensor,
        rgb: Tensor,
        t: Tensor,
        dt: Tensor,
        ray_offsets: Tensor,
        ray_rgb: Tensor,
        opacity: Tensor,
        depth: Tensor,
        distortion: Tensor,
        min_transmittance: float,
    ) -> tuple[Tensor, Tensor]:
        return density.new_empty(density.shape), rgb.new_empty(rgb.shape)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.min_transmittance, ctx.distortion = inputs
        ray_rgb, opacity, depth, _, spread = output
        ctx.save_for_backward(*tensors, ray_rgb, opacity, depth, spread)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *others, of_distortion = grads
        d_density, d_rgb = torch.ops.voxelfield.composite_backward(
            *others, of_distortion if ctx.distortion else None, *ctx.saved_tensors, ctx.min_transmittance
        )
        return d_density, d_rgb, None, None, None, None, None

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError("compositing is differentiable once; a second derivative was asked for")

    torch.library.register_autograd("voxelfield::composite", backward, setup_context=save)
    torch.library.register_autograd("voxelfield::composite_backward", refuse)
