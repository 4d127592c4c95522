"""Loss terms, each a scalar tensor.

Each term on rendered rays is a function of the :class:`Outputs` for a :class:`Batch`; its weight has the same name in
:class:`voxelfield.models.settings.LossWeights`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from voxelfield.foundation.errors import shown
from voxelfield.models.batch import Batch, Outputs
from voxelfield.models.component import Loss, LossTerms
from voxelfield.models.settings import LossWeights
from voxelfield.ops._internal.color import pixel_color_error, sample_color_error


def photometric(outputs: Outputs, batch: Batch, weights: Tensor | None = None) -> Tensor:
    """Mean squared error of colours (Mildenhall et al. 2020, eq. 6), over pixels all of whose rays fit.

    The squared errors are multiplied by ``batch.weights`` and, if given, by ``weights`` (P,) float32.
    """
    kept, pixels, truth = outputs.rendering.rays_kept, outputs.pixels, batch.truth
    for factors in (weights, batch.weights):
        if factors is not None:
            # The operator takes no weights. Scaling both colours by a root scales their squared difference by the
            # weight.
            root = factors.sqrt()[:, None]
            pixels, truth = root * pixels, root * truth
    return pixel_color_error(pixels, truth, rays_per_pixel=batch.rays_per_pixel, rays_kept=kept)


def sample_rgb(outputs: Outputs, batch: Batch) -> Tensor:
    """Squared colour error of each single sample, so that a ray cannot mix the right colour from wrong ones."""
    rendering = outputs.rendering
    weights = rendering.weights
    if batch.weights is not None:
        weights = weights * batch.for_rays(batch.weights)[rendering.samples.ray_index]
    return sample_color_error(
        weights,
        rendering.sample_rgb,
        rendering.samples.ray_index,
        outputs.field_truth,
        batch.rays_per_pixel,
        rays_kept=rendering.rays_kept,
    )


def distortion(outputs: Outputs, batch: Batch) -> Tensor:
    """Mean distortion of the rays: how far apart the weights of a ray are.

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


def sparsity(outputs: Outputs, batch: Batch, unit: float = 1.0) -> Tensor:
    """Cauchy penalty on samples' densities per unit, summed and divided by the number of rays (Plenoxels)."""
    density = unit * outputs.zero_unused(outputs.rendering.density)
    return torch.log1p(2 * density.square()).sum() / outputs.ray_count


def check_term(name: str, term: object, device: torch.device) -> None:
    """Raises ValueError, whose message has the term's name, unless it is a scalar () on a device."""
    if not isinstance(term, Tensor) or not term.is_floating_point() or term.layout is not torch.strided:
        got = f"a tensor of {term.dtype} and {term.layout}" if isinstance(term, Tensor) else shown(term)
        raise ValueError(f"losses[{name!r}] must return a dense scalar tensor of floats, got {got}")
    if term.dim() > 0 or term.device != device:
        got = f"one of shape {tuple(term.shape)} on {term.device}"
        raise ValueError(f"losses[{name!r}] must return a scalar tensor, of shape (), on {device}, got {got}")


def rendering_terms(weights: LossWeights, unit: float = 1.0) -> LossTerms:
    """Returns ``photometric``, with weight 1, and the terms of positive weight.

    ``unit`` is the length, in world units, that the distortion and densities are measured in. The term of the
    distortion raises ValueError if rays were rendered without it.
    """

    def weighted(term: Loss, weight: float) -> Loss:
        return lambda outputs, batch: weight * term(outputs, batch)

    terms: dict[str, Loss] = {"photometric": photometric}
    for term in (sample_rgb, distortion, opacity_entropy, sparsity):
        weight = getattr(weights, term.__name__)
        if weight > 0:
            measured = partial(sparsity, unit=unit) if term is sparsity else term
            terms[term.__name__] = weighted(measured, weight / unit if term is distortion else weight)
    return LossTerms(terms)
