"""A squared error that counts as much as it reduces the structural similarity (SSIM) with a photograph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import NotNegative
from voxelfield.evaluation.metrics import C2, WINDOW, window_means
from voxelfield.models.batch import Batch, Outputs
from voxelfield.models.component import Component, LossTerms
from voxelfield.models.losses import photometric


@dataclass(frozen=True)
class StructureSettings(ComponentSettings):
    """The setting of a term for fine texture, :func:`variance_weighted_mse`.

    Attributes:
        structure: Squared error relative to the local variance of the photographs, for sharper texture of low contrast.
            Where a photograph is flat, a weight of 9e-4 doubles the photometric loss; where it has contrast, it adds
            less. ``trainer=many_photographs`` uses 2.5e-3; 0.0135 was too much on the same capture. Meant for opaque
            photographs: transparent pixels count as black. Keeps one byte for each training pixel.
    """

    name = "structure"
    pixel_bytes = 1
    structure: NotNegative = key("trainer.loss.structure", 0.0, off=0)

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component; batches then carry the weights of :func:`structure_weights` as ``"structure"``."""
        training.pixels.carry(self.name, structure_weights(training.pixels.images, training.pixels.sizes))
        terms = {self.name: lambda outputs, batch: self.structure * variance_weighted_mse(outputs, batch)}
        return [LossTerms(terms, self.name)]


def variance_weighted_mse(outputs: Outputs, batch: Batch) -> Tensor:
    """Squared errors relative to the photographs' local variance, averaged over pixels all of whose rays fit.

    For small errors whose mean over each window is zero, this is about 1 - SSIM, so fine texture of low contrast counts
    as much as edges do. Unlike SSIM, it counts a constant offset in full, and needs no patches: the pixels of a patch
    contain less information about the scene than as many pixels drawn from all photographs.

    Raises:
        KeyError: The batch carries no weights (:func:`structure_weights`) as ``"structure"``.
    """
    return photometric(outputs, batch, batch["structure"].float() / 255) / C2


def structure_weights(images: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Computes the weight of each pixel's squared error in :func:`variance_weighted_mse`.

    Apart from its factor for luminance, the dissimilarity 1 - SSIM of a window is ``var(e) / (var(x) + var(y) + C2)``,
    where e is the difference of the images x and y (Wang et al. 2004, Eq. 13, rearranged). If errors are small, both
    variances are nearly that of the photograph, which is known before training. If their mean over the window is zero,
    ``var(e)`` is the mean of their squares. The weight of a pixel's square is therefore ``C2 / (2 * var(x) + C2)`` in
    the window around it: 1 where the photograph is flat, and little at edges.

    The computation needs about 100 bytes of temporary memory for each pixel of one image.

    Args:
        images: (N, H, W, 4) uint8 RGBA, straight alpha, on the device of the computation, which takes one image at a
            time. Transparent pixels count as black.
        sizes: (N, 2) widths and heights of images that lie at the top left; None: all are W x H.

    Returns:
        (N, H, W) uint8 on the CPU: the weights times 255, averaged over the channels; 0 beside an image that is smaller
        than H x W. Beyond the border, windows see the outermost pixels repeated.
    """
    weights = torch.zeros(images.shape[:3], dtype=torch.uint8)
    margin = [WINDOW // 2] * 4
    ends = [images.shape[2:0:-1]] * len(images) if sizes is None else sizes.tolist()
    for image, weight, (width, height) in zip(images, weights, ends, strict=True):
        rgb, alpha = (image[:height, :width].float() / 255).split((3, 1), dim=-1)
        padded = F.pad((rgb * alpha).movedim(-1, 0), margin, mode="replicate")
        mean, mean_square = window_means(torch.stack((padded, padded * padded)))
        variance = (mean_square - mean * mean).clamp(min=0)
        weight[:height, :width] = (255 * C2 / (2 * variance + C2)).mean(dim=0).round()
    return weights
