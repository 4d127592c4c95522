r"""Volume rendering along rays, for packed samples and for equally many samples of each ray.

Functions of packed samples take either ``packed_info`` or ``ray_indices`` and ``n_rays``. Without either, samples of a
ray lie along the last dimension. Everything is differentiable, distances included, except for visibility.
Transmittance is :math:`T_i = \exp(-\sum_{j<i} \sigma_j \delta_j) = \prod_{j<i} (1 - \alpha_j)` (Max 1995).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.compat.nerfacc.pack import offsets_of
from voxelfield.foundation.checks import check_tensor

_SamplesFn = Callable[..., tuple[Tensor, Tensor]]


def rendering(
    t_starts: Tensor,
    t_ends: Tensor,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    rgb_sigma_fn: _SamplesFn | None = None,
    rgb_alpha_fn: _SamplesFn | None = None,
    render_bkgd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Renders rays through the field that a function evaluates.

    Args:
        t_starts: (all_samples,) packed or (n_rays, n_samples), where samples begin, world units.
        t_ends: Where they end.
        ray_indices: (all_samples,) int64, never falling; None if not packed.
        n_rays: Number of rays; needed with ``ray_indices``.
        rgb_sigma_fn: Maps ``(t_starts, t_ends, ray_indices)`` to colours (..., 3) and densities (...) of the shape of
            ``t_starts``. It is not called without samples.
        rgb_alpha_fn: The same with opacities; used if there is no ``rgb_sigma_fn``.
        render_bkgd: Colour of the background (3,) or (n_rays, 3).

    Returns:
        Colours (n_rays, 3), opacities (n_rays, 1), mean distances (n_rays, 1) with 0 for rays that meet nothing, and a
        dict of the samples' ``weights``, ``trans``, ``alphas``, ``rgbs`` and, with ``rgb_sigma_fn``, ``sigmas``.

    Raises:
        TypeError: A result of the function has the wrong dtype.
        ValueError: An argument or a result has the wrong shape, or there is no function.
    """
    _check_samples("t_ends", t_ends, t_starts)
    if ray_indices is not None:
        _check_samples("ray_indices", ray_indices, t_starts)
        if n_rays is None:
            raise ValueError("n_rays must be given with ray_indices, got None")
    evaluate = rgb_sigma_fn if rgb_sigma_fn is not None else rgb_alpha_fn
    if evaluate is None:
        raise ValueError("rgb_sigma_fn or rgb_alpha_fn must be given, got neither")
    if t_starts.shape[0] != 0:
        rgbs, values = evaluate(t_starts, t_ends, ray_indices)
    else:
        rgbs, values = t_starts.new_empty(*t_starts.shape, 3), t_starts.new_empty(t_starts.shape)
    name = "sigmas" if rgb_sigma_fn is not None else "alphas"
    _check_samples(name, values, t_starts)
    check_tensor("rgbs", rgbs, (*t_starts.shape, 3))

    offsets = offsets_of(None, ray_indices, n_rays, t_starts)
    begins, ends, colors = (x.to(torch.promote_types(x.dtype, values.dtype)) for x in (t_starts, t_ends, rgbs))
    flat, middle = values.flatten(), ((begins + ends) * 0.5).flatten()
    if rgb_sigma_fn is not None:
        dt = (ends - begins).flatten()
        pixels = ops.composite(flat, colors.flatten(0, -2), middle, dt, offsets, min_transmittance=0.0)
        trans = ops.ray_transmittance(flat, dt, offsets, min_transmittance=0.0)
        extras = {"sigmas": values, "alphas": -torch.expm1(-values * (ends - begins))}
    else:
        pixels = ops.composite_alphas(flat, colors.flatten(0, -2), middle, offsets, min_transmittance=0.0)
        trans = ops.alpha_transmittance(flat, offsets, min_transmittance=0.0)
        extras = {"alphas": values}
    extras |= {"rgbs": rgbs, "weights": pixels.weights.view_as(t_starts), "trans": trans.view_as(t_starts)}

    rays = t_starts.shape[:-1] if ray_indices is None else (n_rays,)
    opacities = pixels.opacity.view(*rays, 1)
    depths = pixels.depth_sum.view(*rays, 1) / opacities.clamp_min(torch.finfo(rgbs.dtype).eps)
    colors = pixels.rgb.view(*rays, 3)
    if render_bkgd is not None:
        colors = colors + render_bkgd * (1.0 - opacities)
    return colors, opacities, depths, extras


def render_transmittance_from_alpha(
    alphas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    prefix_trans: Tensor | None = None,
) -> Tensor:
    """Returns the transmittance in front of each sample.

    Args:
        alphas: (all_samples,) packed or (n_rays, n_samples), opacities.
        packed_info: (n_rays, 2) as :func:`pack_info` returns it.
        ray_indices: (all_samples,) int64, never falling.
        n_rays: Number of rays of ``ray_indices``; None for one more than the highest index.
        prefix_trans: In the shape of ``alphas``, a factor of the result: transmittance in front of these samples.

    Returns:
        The shape of ``alphas``.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape; or, on the CPU, rays do not fit the samples.
    """
    offsets = offsets_of(packed_info, ray_indices, n_rays, alphas)
    trans = ops.exclusive_prod(1 - alphas.flatten(), offsets).view_as(alphas)
    return trans if prefix_trans is None else trans * prefix_trans


def render_transmittance_from_density(
    t_starts: Tensor,
    t_ends: Tensor,
    sigmas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    prefix_trans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the transmittance in front of each sample, and the opacity of each sample.

    Args:
        t_starts: (all_samples,) packed or (n_rays, n_samples), where samples begin, world units.
        t_ends: Where they end.
        sigmas: Densities, per world unit.
        packed_info: As for :func:`render_transmittance_from_alpha`.
        ray_indices: As for :func:`render_transmittance_from_alpha`.
        n_rays: As for :func:`render_transmittance_from_alpha`.
        prefix_trans: As for :func:`render_transmittance_from_alpha`.

    Returns:
        Transmittance and opacities, both in the shape of ``sigmas``.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape; or, on the CPU, rays do not fit the samples.
    """
    _check_samples("sigmas", sigmas, t_starts)
    depth = sigmas * (t_ends - t_starts)
    offsets = offsets_of(packed_info, ray_indices, n_rays, depth)
    trans = torch.exp(-ops.exclusive_sum(depth.flatten(), offsets)).view_as(depth)
    return trans if prefix_trans is None else trans * prefix_trans, -torch.expm1(-depth)


def render_weight_from_alpha(
    alphas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    prefix_trans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the weight of each sample in its pixel, and the transmittance, both in the shape of ``alphas``.

    Arguments and errors are as for :func:`render_transmittance_from_alpha`.
    """
    trans = render_transmittance_from_alpha(alphas, packed_info, ray_indices, n_rays, prefix_trans)
    return trans * alphas, trans


def render_weight_from_density(
    t_starts: Tensor,
    t_ends: Tensor,
    sigmas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    prefix_trans: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weight of each sample in its pixel, transmittance and opacities, all in the shape of ``sigmas``.

    Arguments and errors are as for :func:`render_transmittance_from_density`.
    """
    trans, alphas = render_transmittance_from_density(
        t_starts, t_ends, sigmas, packed_info, ray_indices, n_rays, prefix_trans
    )
    return trans * alphas, trans, alphas


@torch.no_grad()
def render_visibility_from_alpha(
    alphas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    early_stop_eps: float = 1e-4,
    alpha_thre: float = 0.0,
    prefix_trans: Tensor | None = None,
) -> Tensor:
    """Returns which samples are visible, bool in the shape of ``alphas``.

    A sample is visible if the transmittance in front of it is at least ``early_stop_eps``, and its opacity at least
    ``alpha_thre``. The other arguments and the errors are as for :func:`render_transmittance_from_alpha`.
    """
    trans = render_transmittance_from_alpha(alphas, packed_info, ray_indices, n_rays, prefix_trans)
    return _visible(trans, alphas, early_stop_eps, alpha_thre)


@torch.no_grad()
def render_visibility_from_density(
    t_starts: Tensor,
    t_ends: Tensor,
    sigmas: Tensor,
    packed_info: Tensor | None = None,
    ray_indices: Tensor | None = None,
    n_rays: int | None = None,
    early_stop_eps: float = 1e-4,
    alpha_thre: float = 0.0,
    prefix_trans: Tensor | None = None,
) -> Tensor:
    """Returns which samples are visible, bool in the shape of ``sigmas``.

    A sample is visible if the transmittance in front of it is at least ``early_stop_eps``, and its opacity at least
    ``alpha_thre``. The other arguments and the errors are as for :func:`render_transmittance_from_density`.
    """
    trans, alphas = render_transmittance_from_density(
        t_starts, t_ends, sigmas, packed_info, ray_indices, n_rays, prefix_trans
    )
    return _visible(trans, alphas, early_stop_eps, alpha_thre)


def accumulate_along_rays(
    weights: Tensor, values: Tensor | None = None, ray_indices: Tensor | None = None, n_rays: int | None = None
) -> Tensor:
    """Adds up weighted values along each ray.

    Args:
        weights: (all_samples,) packed or (n_rays, n_samples).
        values: (..., D), with the shape of ``weights`` before the last dimension; None for ones.
        ray_indices: (all_samples,) int64, in any order; None if not packed.
        n_rays: Number of rays; needed with ``ray_indices``.

    Returns:
        (n_rays, D), with D = 1 without values.

    Raises:
        ValueError: An argument has the wrong shape, or ``n_rays`` is missing.
    """
    terms = _weighted(weights, values, ray_indices)
    if ray_indices is None:
        return terms.sum(dim=-2)
    if n_rays is None:
        raise ValueError("n_rays must be given with ray_indices, got None")
    return terms.new_zeros(n_rays, terms.shape[-1]).index_add_(0, ray_indices, terms)


def accumulate_along_rays_(
    weights: Tensor, values: Tensor | None = None, ray_indices: Tensor | None = None, outputs: Tensor | None = None
) -> None:
    """Adds weighted values along each ray to ``outputs`` (n_rays, D), in place; D is 1 without values.

    The other arguments and the errors are as for :func:`accumulate_along_rays`.
    """
    terms = _weighted(weights, values, ray_indices)
    if outputs is None or outputs.shape[-1:] != terms.shape[-1:]:
        got = None if outputs is None else tuple(outputs.shape)
        raise ValueError(f"outputs must have shape (n_rays, {terms.shape[-1]}), got {got}")
    if ray_indices is None:
        outputs.add_(terms.sum(dim=-2))
    else:
        outputs.index_add_(0, ray_indices, terms)


def _weighted(weights: Tensor, values: Tensor | None, ray_indices: Tensor | None) -> Tensor:
    if ray_indices is not None and weights.dim() != 1:
        raise ValueError(f"weights must have shape (all_samples,) with ray_indices, got {tuple(weights.shape)}")
    if values is None:
        return weights[..., None]
    if values.shape[:-1] != weights.shape:
        raise ValueError(f"values must have shape {(*weights.shape, 'D')} as weights has, got {tuple(values.shape)}")
    return weights[..., None] * values


def _visible(trans: Tensor, alphas: Tensor, early_stop_eps: float, alpha_thre: float) -> Tensor:
    visible = trans >= early_stop_eps
    return visible & (alphas >= alpha_thre) if alpha_thre > 0 else visible


def _check_samples(name: str, values: Tensor, t_starts: Tensor) -> None:
    if values.shape != t_starts.shape:
        raise ValueError(f"{name} must have the shape of t_starts, {tuple(t_starts.shape)}, got {tuple(values.shape)}")
