"""LPIPS, with random weights in place of VGG16's, which nothing here downloads; torchmetrics is the judge."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from voxelfield.evaluation.metrics import Lpips, check_lpips, vgg16_blocks, weights_file
from voxelfield.installed import MissingPackageError


@pytest.fixture
def network(monkeypatch, tmp_path) -> nn.Sequential:
    """The layers of a random VGG16, whose weights lie where those of the real one would."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    weights_file().parent.mkdir()
    layers = nn.Sequential(*(layer for block in vgg16_blocks() for layer in block))
    weights = {f"features.{name}": value for name, value in layers.state_dict().items()}
    torch.save(weights | {"classifier.0.bias": torch.zeros(3)}, weights_file())
    return layers


@pytest.mark.parametrize("size", [(40, 32), (16, 31)])
def test_lpips_agrees_with_torchmetrics(network, device, monkeypatch, size):
    import torchmetrics.functional.image.lpips as judge  # takes seconds, in every process that collects tests

    monkeypatch.setattr(judge, "_get_tv_model_features", lambda net, pretrained: {"vgg16": network}[net])
    truth = torch.rand(*size, 3)
    prediction = (truth + 0.2 * torch.randn_like(truth)).clamp(0, 1)
    pair = (image.movedim(-1, 0)[None] for image in (prediction, truth))
    expected = judge.learned_perceptual_image_patch_similarity(*pair, net_type="vgg", normalize=True).item()
    assert expected > 0
    lpips = Lpips(device)
    found = lpips(prediction.to(device), truth.to(device))
    assert found.device.type == device.type
    assert found.item() == pytest.approx(expected, rel=1e-2 if device.type == "cuda" else 1e-5)
    assert lpips(truth.to(device), truth.to(device)).item() == 0


def test_the_layers_are_numbered_as_torchvision_numbers_them(network):
    # configuration D of the paper: 13 convolutions, and poolings at 4, 9, 16 and 23
    assert [index for index, layer in enumerate(network) if isinstance(layer, nn.MaxPool2d)] == [4, 9, 16, 23]
    convolutions = [index for index, layer in enumerate(network) if isinstance(layer, nn.Conv2d)]
    assert convolutions == [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]


def test_an_image_that_poolings_would_leave_nothing_of_is_refused(network):
    with pytest.raises(ValueError, match=r"prediction must have H, W >= 16 for LPIPS, got \(15, 40, 3\)"):
        Lpips(torch.device("cpu"))(torch.rand(15, 40, 3), torch.rand(15, 40, 3))


def test_weights_that_are_not_there_are_named_with_the_command_that_fetches_them(network):
    weights_file().unlink()
    with pytest.raises(FileNotFoundError, match=r"vgg16-397923af\.pth: no such file.*: curl .*https") as error:
        check_lpips()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"features.0.weight": torch.zeros(3)}, "must have the weights of VGG16, got others"),
        (None, "unreadable weights"),
    ],
)
def test_weights_that_are_others_or_damaged_are_named(network, content, message):
    if content is None:
        weights_file().write_bytes(weights_file().read_bytes()[:1000])
    else:
        torch.save(content, weights_file())
    with pytest.raises(ValueError, match=rf"vgg16-397923af\.pth: {message}") as error:
        Lpips(torch.device("cpu"))
    assert "\n" not in str(error.value)


def test_a_package_that_is_not_installed_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r'^torchmetrics must .*: pip install "voxelfield\[lpips\]"$'):
        Lpips(torch.device("cpu"))
