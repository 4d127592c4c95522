"""LPIPS (Zhang et al., 2018) with VGG16 features, as reported in NeRF papers.

LPIPS is optional. ``pip install "voxelfield[lpips]"`` installs torchmetrics, which contains the metric's weights.
The weights of VGG16 must be installed by the user, so that an evaluation never downloads half a gigabyte unasked.
torchvision is not required, because it would have to match the installed torch exactly.
"""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import torch
from torch import Tensor, nn

from voxelfield.installed import MissingPackageError

WEIGHTS_URL = "https://download.pytorch.org/models/vgg16-397923af.pth"
"""Download address of torchvision's weights of VGG16."""

MIN_SIDE = 16
"""Smallest image side in pixels that is not reduced to nothing by the pooling layers."""

# Widths of the convolutions between two poolings; the last outputs before each pooling are compared.
_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
# Mean and standard deviation of the network's training images, scaled to [-1, 1].
_MEAN, _SPREAD = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


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
    """Computes LPIPS between two images.

    Args:
        device: Device of the images.

    Raises:
        MissingPackageError: torchmetrics is not installed.
        FileNotFoundError: A file of weights does not exist.
        ValueError: A file of weights is damaged, or has other weights.
    """

    mean: Tensor
    spread: Tensor

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
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("spread", torch.tensor(_SPREAD).view(3, 1, 1), persistent=False)
        self.requires_grad_(False).to(device)

    @torch.no_grad()
    def forward(self, prediction: Tensor, truth: Tensor) -> Tensor:
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


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file}: unreadable weights ({str(error).splitlines()[0][:200]})") from error
    return dict(weights)
