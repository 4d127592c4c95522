"""Loss terms, each a scalar tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.grids import VoxelGrid
from voxelfield.rendering import Rendering
from voxelfield.training.config import LossConfig


def photometric(prediction: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error of colours (R, 3) over the background (Mildenhall et al. 2020, eq. 6)."""
    return F.mse_loss(prediction, truth)


def sample_rgb(rendering: Rendering, truth: Tensor) -> Tensor:
    """Weighted squared error of each sample's own colour, so that no mixture of wrong colours passes for a right one.

    The "per-point rgb loss" of DirectVoxGO (Sun et al. 2022).

    Args:
        rendering: The rendered rays.
        truth: (R, 3) colours of the rays; composited over the background like the rendering.
    """
    error = (rendering.sample_rgb - truth[rendering.samples.ray_index]).square().sum(-1)
    return (rendering.weights.detach() * error).sum() / truth.shape[0]


def opacity_entropy(opacity: Tensor) -> Tensor:
    """Mean binary entropy of ray opacities (R,): a pixel shows the scene or its background (Sun et al. 2022)."""
    o = opacity.clamp(1e-5, 1 - 1e-5)
    return -(o * o.log() + (1 - o) * (1 - o).log()).mean()


def sparsity(density: Tensor, rays: int) -> Tensor:
    """Cauchy penalty on the densities of samples (M,), summed and divided by the number of rays (Plenoxels)."""
    return torch.log1p(2 * density.square()).sum() / rays


def rendering_terms(config: LossConfig, rendering: Rendering, prediction: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Returns the weighted terms that rendered rays give rise to; terms of weight zero are left out."""
    terms = {"photometric": photometric(prediction, truth)}
    if config.sample_rgb > 0:
        terms["sample_rgb"] = config.sample_rgb * sample_rgb(rendering, truth)
    if config.opacity_entropy > 0:
        terms["opacity_entropy"] = config.opacity_entropy * opacity_entropy(rendering.opacity)
    if config.sparsity > 0:
        terms["sparsity"] = config.sparsity * sparsity(rendering.density, truth.shape[0])
    return terms


def grid_terms(config: LossConfig, grid: VoxelGrid, step: int) -> dict[str, Tensor]:
    """Returns the weighted terms on the grid itself that are due at a step."""
    if step >= config.tv_until or step % config.tv_every != 0:
        return {}
    terms = {}
    if config.tv_density > 0:
        scale = config.tv_density * config.tv_every
        terms["tv_density"] = scale * grid.total_variation(channels=slice(0, 1))
    if config.tv_color > 0:
        scale = config.tv_color * config.tv_every
        terms["tv_color"] = scale * grid.total_variation(channels=slice(1, None))
    return terms
