"""How much the errors of single pixels reduce the structural similarity (SSIM) with a photograph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.evaluation.metrics import C2, WINDOW, window_means


def structure_weights(images: Tensor, device: torch.device, sizes: Tensor | None = None) -> Tensor:
    """Computes the weight of each pixel's squared error in :func:`voxelfield.training.losses.structure`.

    Apart from its factor for luminance, the dissimilarity 1 - SSIM of a window is ``var(e) / (var(x) + var(y) + C2)``,
    where e is the difference of the images x and y (Wang et al. 2004, Eq. 13, rearranged). If errors are small, both
    variances are nearly that of the photograph, which is known before training. If their mean over the window is zero,
    ``var(e)`` is the mean of their squares. The weight of a pixel's square is therefore ``C2 / (2 * var(x) + C2)`` in
    the window around it: 1 where the photograph is flat, and little at edges.

    The computation needs about 100 bytes of temporary memory for each pixel of one image.

    Args:
        images: (N, H, W, 4) uint8 RGBA, straight alpha, on any device. Transparent pixels count as black.
        device: Device of the computation, which takes one image at a time.
        sizes: (N, 2) widths and heights of images that lie at the top left; None: all are W x H.

    Returns:
        (N, H, W) uint8 on the images' device: the weights times 255, averaged over the channels; 0 beside an image that
        is smaller than H x W. Beyond the border, windows see the outermost pixels repeated.
    """
    weights = torch.zeros(images.shape[:3], dtype=torch.uint8, device=images.device)
    margin = [WINDOW // 2] * 4
    ends = [images.shape[2:0:-1]] * len(images) if sizes is None else sizes.tolist()
    for image, weight, (width, height) in zip(images, weights, ends, strict=True):
        rgb, alpha = (image[:height, :width].to(device).float() / 255).split((3, 1), dim=-1)
        padded = F.pad((rgb * alpha).movedim(-1, 0), margin, mode="replicate")
        mean, mean_square = window_means(torch.stack((padded, padded * padded)))
        variance = (mean_square - mean * mean).clamp(min=0)
        weight[:height, :width] = (255 * C2 / (2 * variance + C2)).mean(dim=0).round()
    return weights
