"""Loss terms, each a scalar tensor.

Each term on rendered rays is a function of a :class:`RenderedBatch` and is listed in ``WEIGHTED_TERMS``; its weight has
the same name in :class:`voxelfield.training.config.LossConfig`. Terms on the grid itself belong to the recipes
(:meth:`voxelfield.models.recipe.Recipe.grid_losses`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from voxelfield.evaluation.metrics import C2, ssim_of_windows
from voxelfield.fields.field import RadianceField
from voxelfield.models.recipe import Recipe
from voxelfield.ops._internal.color_error import pixel_color_error, sample_color_error
from voxelfield.rendering.render import Rendering
from voxelfield.training.config import LossConfig


@dataclass(frozen=True, eq=False)
class RenderedBatch:
    """The inputs of a step's loss terms.

    On CUDA, rays from ``rendering.rays_kept`` on did not fit, and rows of ``rendering.samples`` from the last offset on
    are unused. Terms must exclude both. Their numbers stay on the device, because reading them would synchronise.

    Attributes:
        rendering: R rays; the rays of each pixel are consecutive.
        pixels: (P, 3) the pixels' colours over the background.
        truth: (P, 3) the true colours over the same background; R is a multiple of P.
        patches: Number of square patches that the first pixels form, patch by patch and row by row.
        patch_size: Side of the patches in pixels.
        field_truth: (P, 3) the true colours without the exposure of their images, for comparison with the field's own
            colours; None if they equal ``truth``.
        structure_weights: (P,) float32 in [0, 1], the weights of the pixels in :func:`structure`; None if that term is
            not used.
    """

    rendering: Rendering
    pixels: Tensor
    truth: Tensor
    patches: int = 0
    patch_size: int = 1
    field_truth: Tensor | None = None
    structure_weights: Tensor | None = None

    @property
    def rays_per_pixel(self) -> int:
        """Number of rays per pixel."""
        return self.rendering.opacity.shape[0] // self.truth.shape[0]

    @property
    def ray_count(self) -> Tensor:
        """Number of rays that were kept, () int64, at least 1 so that it can be a divisor."""
        return self.rendering.rays_kept.clamp(min=1)

    def mean_over_rays(self, values: Tensor) -> Tensor:
        """Returns the mean of values (R,) over the kept rays."""
        counts = torch.arange(values.shape[0], device=values.device) < self.rendering.rays_kept
        return torch.where(counts, values, 0.0).sum() / self.ray_count

    def zero_unused(self, values: Tensor) -> Tensor:
        """Returns values (M,) of samples, with zeros in unused rows."""
        rows = torch.arange(values.shape[0], device=values.device)
        return torch.where(rows < self.rendering.samples.ray_offsets[-1], values, 0.0)


def photometric(batch: RenderedBatch) -> Tensor:
    """Mean squared error of colours (Mildenhall et al. 2020, eq. 6), over pixels all of whose rays were kept."""
    return pixel_color_error(
        batch.pixels, batch.truth, rays_per_pixel=batch.rays_per_pixel, rays_kept=batch.rendering.rays_kept
    )


def structure(batch: RenderedBatch) -> Tensor:
    """Squared errors relative to the photographs' local variance, averaged over pixels all of whose rays were kept.

    For small errors whose mean over each window is zero, this is about 1 - SSIM, so fine texture of low contrast counts
    as much as edges do. Unlike SSIM, it counts a constant offset in full. Unlike :func:`ssim`, it needs no patches; the
    pixels of a patch tell less about the scene than as many pixels drawn from all photographs. The weights are those of
    :func:`voxelfield.training.structure.structure_weights`.

    Raises:
        ValueError: The batch has no such weights.
    """
    if batch.structure_weights is None:
        raise ValueError("batches must have structure_weights where config.structure is positive")
    # The operator takes no weights. Scaling both colours by a root scales their squared difference by the weight.
    root = batch.structure_weights.sqrt()[:, None]
    error = pixel_color_error(
        root * batch.pixels,
        root * batch.truth,
        rays_per_pixel=batch.rays_per_pixel,
        rays_kept=batch.rendering.rays_kept,
    )
    return error / C2


def sample_rgb(batch: RenderedBatch) -> Tensor:
    """Squared colour error of each single sample, so that a ray cannot mix the right colour from wrong ones."""
    rendering = batch.rendering
    return sample_color_error(
        rendering.weights,
        rendering.sample_rgb,
        rendering.samples.ray_index,
        batch.truth if batch.field_truth is None else batch.field_truth,
        batch.rays_per_pixel,
        rays_kept=rendering.rays_kept,
    )


def distortion(batch: RenderedBatch) -> Tensor:
    """Mean distortion of the rays: how far apart the weights of a ray lie.

    Raises:
        ValueError: The rays were rendered without distortion.
    """
    if batch.rendering.distortion is None:
        raise ValueError("rays must be rendered with their distortion where config.distortion is positive")
    # The distortion of rays that did not fit is zero.
    return batch.rendering.distortion.sum() / batch.ray_count


def opacity_entropy(batch: RenderedBatch) -> Tensor:
    """Mean binary entropy of the rays' opacities: a pixel shows the scene or its background (Sun et al. 2022)."""
    o = batch.rendering.opacity.clamp(1e-5, 1 - 1e-5)
    return batch.mean_over_rays(-(o * o.log() + (1 - o) * (1 - o).log()))


def sparsity(batch: RenderedBatch) -> Tensor:
    """Cauchy penalty on the densities of samples, summed and divided by the number of rays (Plenoxels)."""
    density = batch.zero_unused(batch.rendering.density)
    return torch.log1p(2 * density.square()).sum() / batch.ray_count


def ssim(batch: RenderedBatch) -> Tensor:
    """1 - SSIM (Wang et al. 2004) over patches all of whose rays were kept; sees structure beyond single pixels.

    Raises:
        ValueError: The batch has no patches.
    """
    if batch.patches == 0:
        raise ValueError("batches must begin with patches where config.ssim is positive")
    side = batch.patch_size
    pixels = batch.patches * side * side
    x, y = (image[:pixels].float().view(-1, side, side, 3).permute(0, 3, 1, 2) for image in (batch.pixels, batch.truth))
    dissimilarity = 1 - ssim_of_windows(x, y).mean(dim=(1, 2, 3))
    whole = (batch.rendering.rays_kept // (side * side * batch.rays_per_pixel)).clamp(max=batch.patches)
    counts = torch.arange(batch.patches, device=whole.device) < whole
    return torch.where(counts, dissimilarity, 0.0).sum() / whole.clamp(min=1)


WEIGHTED_TERMS: dict[str, Callable[[RenderedBatch], Tensor]] = {
    term.__name__: term for term in (structure, sample_rgb, ssim, distortion, opacity_entropy, sparsity)
}
"""The terms with a weight of the same name in :class:`LossConfig`; each returns an unweighted scalar."""


def rendering_terms(config: LossConfig, batch: RenderedBatch) -> dict[str, Tensor]:
    """Returns the weighted terms on rendered rays, by name; terms of weight zero are left out.

    Args:
        config: The terms' weights; ``photometric`` is always included, with weight 1.
        batch: The rendered rays.

    Raises:
        ValueError: The weight of a term is positive, but the batch lacks its inputs: distortion, patches or
            structure weights.
    """
    terms = {"photometric": photometric(batch)}
    for name, term in WEIGHTED_TERMS.items():
        weight = getattr(config, name)
        if weight > 0:
            terms[name] = weight * term(batch)
    return terms


class _ScaledGradients(torch.autograd.Function):
    """Stands in for the sum of several losses; its gradient with respect to each of them is the given factor."""

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
    """Accumulates the gradients of the losses' sum, multiplied by a factor.

    Equivalent to ``torch.autograd.backward`` with ``grad_tensors``, which would import sympy and take seconds.

    Args:
        losses: At least one loss, each ().
        factor: () on the losses' device.
    """
    _ScaledGradients.apply(factor, *losses).backward()


def grid_terms(config: LossConfig, recipe: Recipe, field: RadianceField, step: int) -> dict[str, Tensor]:
    """Returns the weighted terms on the grid itself that are due at a step.

    Args:
        config: The terms' weights, positive only for terms that the recipe has (:attr:`Recipe.grid_terms`).
        recipe: The recipe that built the field.
        field: The field.
        step: Number of steps done.
    """
    weights = {name: grid_weight(config, name, step) for name in recipe.grid_terms}
    due = {name: weight for name, weight in weights.items() if weight > 0}
    return recipe.grid_losses(field, due) if due else {}


def grid_weight(config: LossConfig, name: str, step: int) -> float:
    """Returns the weight of a term on the grid itself at a step, 0 where it is not due.

    Args:
        config: The terms' weights and schedule.
        name: The term.
        step: Number of steps done.
    """
    due = step < config.tv_until and step % config.tv_every == 0
    weight: float = config.tv_every * getattr(config, name) if due else 0.0
    return weight
