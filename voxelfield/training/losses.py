"""Loss terms, each a scalar tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.ops._internal.color_error import pixel_color_error, sample_color_error
from voxelfield.rendering.render import Rendering
from voxelfield.training.config import LossConfig


def opacity_entropy(opacity: Tensor, rays_kept: Tensor | None = None) -> Tensor:
    """Mean binary entropy of ray opacities (R,): a pixel shows the scene or its background (Sun et al. 2022).

    Args:
        opacity: (R,) in [0, 1].
        rays_kept: One integer: only that many of the first rays count; all if None.
    """
    o = opacity.clamp(1e-5, 1 - 1e-5)
    return _mean(-(o * o.log() + (1 - o) * (1 - o).log()), rays_kept)


def sparsity(density: Tensor, rays: int | Tensor) -> Tensor:
    """Cauchy penalty on the densities of samples (M,), summed and divided by the number of rays (Plenoxels)."""
    return torch.log1p(2 * density.square()).sum() / rays


def rendering_terms(config: LossConfig, rendering: Rendering, pixels: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Returns the weighted terms that rendered rays give rise to; terms of weight zero are left out.

    ``photometric`` is the mean squared error of colours (Mildenhall et al. 2020, eq. 6). ``sample_rgb`` is that of each
    sample's own colour, so that no mixture of wrong colours passes for a right one. Rays that had no room do not count,
    nor does for ``photometric`` a pixel that has one of them.

    Args:
        config: The terms' weights.
        rendering: R rays, those of a pixel together.
        pixels: (P, 3) their pixels' colours over the background.
        truth: (P, 3) what these should be, over the same background; R a multiple of P.

    Raises:
        ValueError: Distortion is asked of rays that were rendered without it.
    """
    rays_kept, rays = rendering.rays_kept, rendering.opacity.shape[0]
    rays_per_pixel = rays // truth.shape[0]
    terms = {"photometric": pixel_color_error(pixels, truth, rays_per_pixel=rays_per_pixel, rays_kept=rays_kept)}
    if config.sample_rgb > 0:
        error = sample_color_error(
            rendering.weights,
            rendering.sample_rgb,
            rendering.samples.ray_index,
            truth,
            rays_per_pixel,
            rays_kept=rays_kept,
        )
        terms["sample_rgb"] = config.sample_rgb * error
    if config.distortion > 0:
        if rendering.distortion is None:
            raise ValueError("rays must be rendered with their distortion where config.distortion is positive")
        # That of rays without room is zero.
        terms["distortion"] = config.distortion * rendering.distortion.sum() / _rays(rays, rays_kept)
    if config.opacity_entropy > 0:
        terms["opacity_entropy"] = config.opacity_entropy * opacity_entropy(rendering.opacity, rays_kept)
    if config.sparsity > 0:
        # Where there is room for more samples than there are, the rest reads the density of a zero feature.
        rows = torch.arange(rendering.density.shape[0], device=rendering.density.device)
        density = torch.where(rows < rendering.samples.ray_offsets[-1], rendering.density, 0.0)
        terms["sparsity"] = config.sparsity * sparsity(density, _rays(rays, rays_kept))
    return terms


class _ScaledGradients(torch.autograd.Function):
    """Of several losses a stand-in, whose gradient in each of them is one given factor."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, *losses: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.count = len(losses)
        return losses[0].view_as(losses[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = ctx.saved_tensors
        return None, *[factor] * ctx.count


def backpropagate(losses: Sequence[Tensor], factor: Tensor) -> None:
    """Adds the gradients of the losses' sum, times a factor.

    ``torch.autograd.backward`` with ``grad_tensors`` does the same, but imports sympy first, which takes seconds.

    Args:
        losses: At least one, () each.
        factor: () on their device.
    """
    _ScaledGradients.apply(factor, *losses).backward()


def _rays(drawn: int, rays_kept: Tensor | None) -> int | Tensor:
    return drawn if rays_kept is None else rays_kept.clamp(min=1)


def _mean(values: Tensor, rays_kept: Tensor | None) -> Tensor:
    if rays_kept is None:
        return values.mean()
    counts = torch.arange(values.shape[0], device=values.device) < rays_kept
    return torch.where(counts, values, 0.0).sum() / _rays(values.shape[0], rays_kept)


def grid_terms(config: LossConfig, recipe: Recipe, field: RadianceField, step: int) -> dict[str, Tensor]:
    """Returns the weighted terms on the grid itself that are due at a step.

    Args:
        config: The terms' weights, positive only for terms that the recipe has (:attr:`Recipe.grid_terms`).
        recipe: What built the field.
        field: The field.
        step: Number of steps done.
    """
    if step >= config.tv_until or step % config.tv_every != 0:
        return {}
    weights = {name: config.tv_every * getattr(config, name) for name in recipe.grid_terms}
    return recipe.grid_losses(field, {name: weight for name, weight in weights.items() if weight > 0})
