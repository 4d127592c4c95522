"""Evaluation of views with unknown exposure: each half of an image is corrected by a fit to the other half."""

from __future__ import annotations

import torch
from torch import Tensor

# Added to the mean squares of colours and opacities, so that a half without contrast, or without any pixel that counts,
# has a solution: the one closest to no correction.
_RIDGE = 1e-6


def cross_fitted(rgb: Tensor, opacity: Tensor, truth: Tensor, background: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Corrects the colours of a rendered view by a fit to its photograph; no pixel influences its own correction.

    A view that was not trained on has no learned correction
    (:class:`voxelfield.training.cameras.exposure.AffineExposure`). Here a gain and an offset per channel minimise the
    squared error over the left half of the image, and correct the right half; a fit to the right half corrects the left
    half. NeRF in the Wild (Martin-Brualla et al. 2021) fits its appearance codes to left halves and evaluates right
    halves; with both directions, all pixels are evaluated, as without a fit.

    With the emitted colour :math:`c = \mathrm{rgb} - (1 - o)\, \mathrm{background}` and the gain :math:`1 + g`, the
    corrected pixel is :math:`\mathrm{rgb} + g\,c + b\,o`, which is linear in g and b.

    Args:
        rgb: (H, W, 3) rendered colours over the background, in [0, 1].
        opacity: (H, W).
        truth: (H, W, 3) the photograph over the same background.
        background: (3,).
        mask: (H, W) bool, the pixels that count in a fit; None for all.

    Returns:
        (H, W, 3) float32 in [0, 1], on the device of ``rgb``.
    """
    colors = rgb.to(torch.float64)
    opacity = opacity.to(colors)[..., None]
    emitted = colors - (1 - opacity) * background.to(colors)
    error = truth.to(colors) - colors
    counts = torch.ones_like(opacity) if mask is None else mask.to(colors)[..., None]
    middle = rgb.shape[1] // 2
    left, right = slice(None, middle), slice(middle, None)
    halves = []
    for here, there in ((left, right), (right, left)):
        gain, offset = _fit(emitted[:, there], opacity[:, there], error[:, there], counts[:, there])
        halves.append(colors[:, here] + gain * emitted[:, here] + offset * opacity[:, here])
    return torch.cat(halves, dim=1).clamp(0, 1).to(torch.float32)


def _fit(emitted: Tensor, opacity: Tensor, error: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the least-squares gains (3,), less 1, and offsets (3,), from the normal equations."""
    total = counts.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return torch.where(counts > 0, values, 0).sum(dim=(0, 1)) / total

    cc, co, oo = mean(emitted.square()) + _RIDGE, mean(emitted * opacity), mean(opacity.square()) + _RIDGE
    ce, oe = mean(emitted * error), mean(opacity * error)
    determinant = cc * oo - co.square()
    return (oo * ce - co * oe) / determinant, (cc * oe - co * ce) / determinant
