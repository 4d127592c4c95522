"""Loss terms, each a scalar tensor.

Each term on rendered rays is a function of the :class:`Outputs` for a :class:`Batch` and is listed in
``WEIGHTED_TERMS``; its weight has the same name in :class:`voxelfield.training.config.LossConfig`. Terms on the grid
itself belong to the models (:meth:`voxelfield.models.model_config.ModelConfig.grid_losses`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from voxelfield.evaluation.metrics import C2, ssim_of_windows
from voxelfield.models.model import Model
from voxelfield.ops._internal.color_error import pixel_color_error, sample_color_error
from voxelfield.training.batch import Batch, Outputs
from voxelfield.training.config import LossConfig

STRUCTURE = "structure"
"""Name of the pixel data that :func:`structure` reads: the weights of :mod:`voxelfield.training.structure`."""


def photometric(outputs: Outputs, batch: Batch) -> Tensor:
    """Mean squared error of colours (Mildenhall et al. 2020, eq. 6), over pixels all of whose rays were kept."""
    return _pixel_error(outputs.pixels, batch.truth, outputs, batch)


def structure(outputs: Outputs, batch: Batch) -> Tensor:
    """Squared errors relative to the photographs' local variance, averaged over pixels all of whose rays were kept.

    For small errors whose mean over each window is zero, this is about 1 - SSIM, so fine texture of low contrast counts
    as much as edges do. Unlike SSIM, it counts a constant offset in full. Unlike :func:`ssim`, it needs no patches; the
    pixels of a patch tell less about the scene than as many pixels drawn from all photographs. The weights are those of
    :func:`voxelfield.training.structure.structure_weights`, which the batch carries as ``"structure"``.

    Raises:
        KeyError: The batch has no such weights.
    """
    # The operator takes no weights. Scaling both colours by a root scales their squared difference by the weight.
    root = (batch[STRUCTURE].float() / 255).sqrt()[:, None]
    return _pixel_error(root * outputs.pixels, root * batch.truth, outputs, batch) / C2


def sample_rgb(outputs: Outputs, batch: Batch) -> Tensor:
    """Squared colour error of each single sample, so that a ray cannot mix the right colour from wrong ones."""
    rendering = outputs.rendering
    return sample_color_error(
        rendering.weights,
        rendering.sample_rgb,
        rendering.samples.ray_index,
        outputs.field_truth,
        batch.rays_per_pixel,
        rays_kept=rendering.rays_kept,
    )


def distortion(outputs: Outputs, batch: Batch) -> Tensor:
    """Mean distortion of the rays: how far apart the weights of a ray lie.

    Raises:
        ValueError: The rays were rendered without distortion.
    """
    if outputs.rendering.distortion is None:
        raise ValueError("rays must be rendered with their distortion where config.distortion is positive")
    # The distortion of rays that did not fit is zero.
    return outputs.rendering.distortion.sum() / outputs.ray_count


def opacity_entropy(outputs: Outputs, batch: Batch) -> Tensor:
    """Mean binary entropy of the rays' opacities: a pixel shows the scene or its background (Sun et al. 2022)."""
    o = outputs.rendering.opacity.clamp(1e-5, 1 - 1e-5)
    return outputs.mean_over_rays(-(o * o.log() + (1 - o) * (1 - o).log()))


def sparsity(outputs: Outputs, batch: Batch) -> Tensor:
    """Cauchy penalty on the densities of samples, summed and divided by the number of rays (Plenoxels)."""
    density = outputs.zero_unused(outputs.rendering.density)
    return torch.log1p(2 * density.square()).sum() / outputs.ray_count


def ssim(outputs: Outputs, batch: Batch) -> Tensor:
    """1 - SSIM (Wang et al. 2004) over patches all of whose rays were kept; sees structure beyond single pixels.

    Raises:
        ValueError: The batch has no patches.
    """
    if batch.patches == 0:
        raise ValueError("batches must begin with patches where config.ssim is positive")
    side = batch.patch_size
    pixels = batch.patches * side * side
    images = (outputs.pixels, batch.truth)
    x, y = (image[:pixels].float().view(-1, side, side, 3).permute(0, 3, 1, 2) for image in images)
    dissimilarity = 1 - ssim_of_windows(x, y).mean(dim=(1, 2, 3))
    whole = (outputs.rendering.rays_kept // (side * side * batch.rays_per_pixel)).clamp(max=batch.patches)
    counts = torch.arange(batch.patches, device=whole.device) < whole
    return torch.where(counts, dissimilarity, 0.0).sum() / whole.clamp(min=1)


def _pixel_error(pixels: Tensor, truth: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
    kept = outputs.rendering.rays_kept
    return pixel_color_error(pixels, truth, rays_per_pixel=batch.rays_per_pixel, rays_kept=kept)


WEIGHTED_TERMS: dict[str, Callable[[Outputs, Batch], Tensor]] = {
    term.__name__: term for term in (structure, sample_rgb, ssim, distortion, opacity_entropy, sparsity)
}
"""The terms with a weight of the same name in :class:`LossConfig`; each returns an unweighted scalar."""


def rendering_terms(config: LossConfig, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
    """Returns the weighted terms on rendered rays, by name; terms of weight zero are left out.

    Args:
        config: The terms' weights; ``photometric`` is always included, with weight 1.
        outputs: The rendered rays.
        batch: The pixels to which they belong.

    Raises:
        ValueError: The weight of a term is positive, but its inputs are missing: distortion or patches.
        KeyError: The weight of ``structure`` is positive, but the batch has no such weights.
    """
    terms = {"photometric": photometric(outputs, batch)}
    for name, term in WEIGHTED_TERMS.items():
        weight = getattr(config, name)
        if weight > 0:
            terms[name] = weight * term(outputs, batch)
    return terms


def photometric_only() -> LossConfig:
    """Returns weights of zero for all terms but :func:`photometric`."""
    config = LossConfig(exposure=0.0)
    for name in WEIGHTED_TERMS:
        setattr(config, name, 0.0)
    return config


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


def grid_terms(config: LossConfig, model: Model, step: int) -> dict[str, Tensor]:
    """Returns the weighted terms on the grid itself that are due at a step.

    Args:
        config: The terms' weights, positive only for terms that the model has (:attr:`ModelConfig.grid_terms`).
        model: The model.
        step: Number of steps done.
    """
    weights = {name: grid_weight(config, name, step) for name in model.config.grid_terms}
    due = {name: weight for name, weight in weights.items() if weight > 0}
    return model.grid_losses(due) if due else {}


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
