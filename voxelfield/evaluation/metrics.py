"""Image quality metrics with the conventions of the NeRF literature: PSNR, SSIM, LPIPS, also for an unknown exposure.

LPIPS is optional. ``pip install "voxelfield[lpips]"`` installs torchmetrics, which contains the metric's weights.
The weights of VGG16 must be installed by the user, so that an evaluation never downloads half a gigabyte unasked.
torchvision is not required, because it would have to match the installed torch exactly.
"""

from __future__ import annotations

import importlib.util
import math
import pickle
from pathlib import Path

import torch
from torch import nn

from voxelfield.foundation.checks import FLOATING, check_dtype, check_tensor
from voxelfield.installed import MissingPackageError

WINDOW = 11
"""Side in pixels of the Gaussian window of :func:`ssim`."""

C2 = 0.03**2
"""Stabilises the structural term of :func:`ssim` where an image has no contrast."""

_SIGMA = 1.5
_C1 = 0.01**2

# Added to the mean squares of colours and opacities, so that a half without contrast, or without any pixel that counts,
# has a solution: the one closest to no correction.
_RIDGE = 1e-6


WEIGHTS_URL = "https://download.pytorch.org/models/vgg16-397923af.pth"
"""Download address of torchvision's weights of VGG16."""

MIN_SIDE = 16
"""Smallest image side in pixels that is not reduced to nothing by the pooling layers."""

# Widths of the convolutions between two poolings; the last outputs before each pooling are compared.
_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
# Mean and standard deviation of the network's training images, scaled to [-1, 1].
_LPIPS_MEAN, _LPIPS_SPREAD = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


def mse_to_psnr(mse: torch.Tensor) -> torch.Tensor:
    """Converts mean squared errors of values in [0, 1] to PSNR in dB, as NeRF (Mildenhall et al., 2020) reports it."""
    return -10 * torch.log10(mse)


def psnr(prediction: torch.Tensor, truth: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the peak signal-to-noise ratio in dB of values in [0, 1], which are not clamped; infinite if equal.

    The mask, of their shape less the last dimension, marks those that count. Half precision is evaluated in float32.

    Raises:
        TypeError: An argument is not floating point.
        ValueError: The shapes differ or the tensors are empty.
    """
    prediction, truth = _check_pair(prediction, truth)
    error = (prediction - truth).square()
    if mask is None:
        return mse_to_psnr(error.mean())
    check_tensor("mask", mask, tuple(error.shape[:-1]))
    # Masked by multiplication, because selection by index would synchronise.
    return mse_to_psnr(torch.where(mask[..., None], error, 0).sum() / (mask.sum() * error.shape[-1]))


def ssim(prediction: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Computes the structural similarity of two images (Wang et al., 2004, Eq. 13).

    Uses the settings of NeRF papers: Gaussian window of 11x11 pixels with sigma 1.5, K1 = 0.01, K2 = 0.03, data range
    1, mean over channels and over the windows that lie fully inside the image. Images are (H, W, 3) with values in
    [0, 1], which are not clamped.

    Raises:
        TypeError: An argument is not floating point.
        ValueError: The shapes differ, are not (H, W, 3), or no 11x11 window fits.
    """
    prediction, truth = _check_pair(prediction, truth)
    if prediction.ndim != 3 or prediction.shape[-1] != 3 or min(prediction.shape[:2]) < WINDOW:
        raise ValueError(f"prediction must have shape (H, W, 3), H, W >= {WINDOW}, got {tuple(prediction.shape)}")
    # float64, because the variances are differences of moments.
    x, y = (image.to(torch.float64).movedim(-1, 0) for image in (prediction, truth))
    mean_x, mean_y, xx, yy, xy = window_means(torch.stack((x, y, x * x, y * y, x * y)))
    var_x, var_y, covariance = xx - mean_x * mean_x, yy - mean_y * mean_y, xy - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x * mean_x + mean_y * mean_y + _C1)
    contrast_and_structure = (2 * covariance + C2) / (var_x + var_y + C2)
    return (luminance * contrast_and_structure).mean().to(torch.float32)


def window_means(images: torch.Tensor) -> torch.Tensor:
    """Computes Gaussian-weighted means (..., H - 10, W - 10) of the windows of :func:`ssim` in images (..., H, W)."""
    weights = [math.exp(-0.5 * ((i - WINDOW // 2) / _SIGMA) ** 2) for i in range(WINDOW)]
    weights = [weight / sum(weights) for weight in weights]
    for axis in (-2, -1):
        windows = images.shape[axis] - WINDOW + 1
        # Shifted views instead of a convolution, which is slow in float64 with cuDNN.
        shifted = [images.narrow(axis, i, windows) for i in range(WINDOW)]
        images = shifted[0] * weights[0]
        for view, weight in zip(shifted[1:], weights[1:], strict=True):
            images = torch.add(images, view, alpha=weight)
    return images


def cross_fitted(
    rgb: torch.Tensor,
    opacity: torch.Tensor,
    truth: torch.Tensor,
    background: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Corrects the colours of a rendered view by a fit to its photograph; no pixel influences its own correction.

    A view that was not trained on has no learned correction
    (:class:`voxelfield.components.exposure.AffineExposure`). Here a gain and an offset per channel minimise the
    squared error over the left half of the image, and correct the right half; a fit to the right half corrects the left
    half. NeRF in the Wild (Martin-Brualla et al. 2021) fits its appearance codes to left halves and evaluates right
    halves; with both directions, all pixels are evaluated, as without a fit.

    With the emitted colour :math:`c = \mathrm{rgb} - (1 - o)\, \mathrm{background}` and the gain :math:`1 + g`, the
    corrected pixel is :math:`\mathrm{rgb} + g\,c + b\,o`, which is linear in g and b.

    Colours are (H, W, 3) over the background (3,), in [0, 1], those of the result as float32; opacity and ``mask``, the
    pixels that count in a fit, are (H, W).
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


def _fit(
    emitted: torch.Tensor, opacity: torch.Tensor, error: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the least-squares gains (3,), less 1, and offsets (3,), from the normal equations."""
    total = counts.sum().clamp(min=1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(counts > 0, values, 0).sum(dim=(0, 1)) / total

    cc, co, oo = mean(emitted.square()) + _RIDGE, mean(emitted * opacity), mean(opacity.square()) + _RIDGE
    ce, oe = mean(emitted * error), mean(opacity * error)
    determinant = cc * oo - co.square()
    return (oo * ce - co * oe) / determinant, (cc * oe - co * ce) / determinant


def _check_pair(prediction: torch.Tensor, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Validates two images and converts them to at least float32."""
    for name, image in (("prediction", prediction), ("truth", truth)):
        check_dtype(name, image, FLOATING, " with values in [0, 1]")
    check_tensor("truth", truth, tuple(prediction.shape), ", as prediction has")
    if prediction.numel() == 0:
        raise ValueError(f"prediction must not be empty, got shape {tuple(prediction.shape)}")
    dtype = torch.promote_types(torch.promote_types(prediction.dtype, truth.dtype), torch.float32)
    return prediction.to(dtype), truth.to(dtype)


def weights_file() -> Path:
    """Returns the required location of the weights of VGG16: the one that torchvision uses, under ``$TORCH_HOME``."""
    return Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS_URL.rpartition("/")[2]


def check_lpips() -> Path:
    """Returns the file of the metric's weights; raises if it, torchmetrics or the weights of VGG16 are missing."""
    package = importlib.util.find_spec("torchmetrics")
    if package is None or package.origin is None:
        raise MissingPackageError('torchmetrics must be installed to compute LPIPS: pip install "voxelfield[lpips]"')
    linear, network = Path(package.origin).parent / "functional" / "image" / "lpips_models" / "vgg.pth", weights_file()
    if not network.is_file():
        command = f"curl --create-dirs -o {network} {WEIGHTS_URL}"
        raise FileNotFoundError(f"{network}: no such file; LPIPS needs the weights of VGG16 there: {command}")
    if not linear.is_file():
        raise FileNotFoundError(f"{linear}: no such file; LPIPS needs a torchmetrics that includes it")
    return linear


class Lpips(nn.Module):
    """Computes LPIPS (Zhang et al., 2018) between two images, with VGG16 features, as reported in NeRF papers.

    Args:
        device: Device of the images.

    Raises:
        MissingPackageError: torchmetrics is not installed.
        FileNotFoundError: A file of weights does not exist.
        ValueError: A file of weights is damaged, or has other weights.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        linear = _read_weights(check_lpips())
        with torch.device("meta"):
            blocks = vgg16_blocks()
            network = nn.Sequential(*(layer for block in blocks for layer in block))
        weights = _read_weights(weights_file())
        try:
            network.load_state_dict({name: weights[f"features.{name}"] for name in network.state_dict()}, assign=True)
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"{weights_file()}: must have the weights of VGG16, got others") from error
        self.blocks = nn.ModuleList(blocks)
        # (1, C, 1, 1): the weight of each channel of a block.
        self.channel_weights = [linear[f"lin{index}.model.1.weight"].to(device) for index in range(len(blocks))]
        self.mean, self.spread = torch.tensor([_LPIPS_MEAN, _LPIPS_SPREAD], device=device).view(2, 3, 1, 1)
        self.requires_grad_(False).to(device)

    @torch.no_grad()
    def forward(self, prediction: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Compares two images (H, W, 3) in [0, 1]; returns a scalar, 0 if they are equal.

        Raises ValueError if a side is below 16 pixels.
        """
        if min(prediction.shape[:2]) < MIN_SIDE:
            raise ValueError(f"prediction must have H, W >= {MIN_SIDE} for LPIPS, got {tuple(prediction.shape)}")
        features = (torch.stack((prediction, truth)).float().movedim(-1, 1) * 2 - 1 - self.mean) / self.spread
        total = features.new_zeros(())
        for block, weights in zip(self.blocks, self.channel_weights, strict=True):
            features = block(features)
            unit = features / (features.square().sum(dim=1, keepdim=True) + 1e-8).sqrt()
            total += ((unit[:1] - unit[1:]).square() * weights).sum(dim=1).mean()
        return total


def vgg16_blocks() -> list[nn.Sequential]:
    """Returns the convolutional layers of VGG16 (Simonyan and Zisserman, 2015), in blocks that end before a pooling."""
    blocks, width = [], 3
    for index, widths in enumerate(_BLOCKS):
        layers: list[nn.Module] = [] if index == 0 else [nn.MaxPool2d(2)]
        for wider in widths:
            layers += [nn.Conv2d(width, wider, 3, padding=1), nn.ReLU()]
            width = wider
        blocks.append(nn.Sequential(*layers))
    return blocks


def _read_weights(file: Path) -> dict[str, torch.Tensor]:
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file}: unreadable weights ({str(error).splitlines()[0][:200]})") from error
    return dict(weights)
