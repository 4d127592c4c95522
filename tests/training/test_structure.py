"""Weights of pixels in the structural loss, against windows written out in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from voxelfield.components.structure import structure_weights
from voxelfield.datasets.scene import Split
from voxelfield.models.pixel_sampler import PixelSampler, opaque_where_masked
from voxelfield.rendering.cameras import Cameras

HEIGHT, WIDTH = 9, 20
BOX = torch.tensor([[-2.0, -2.0, -2.0], [2.0, 2.0, 2.0]])


def photographs() -> torch.Tensor:
    images = torch.randint(0, 256, (2, HEIGHT, WIDTH, 4), dtype=torch.uint8)
    images[..., :10, :3] = 90 + images[..., :10, :3] // 40
    images[0, ..., 3] = 255
    return images


def reference(image: torch.Tensor) -> torch.Tensor:
    """The weights of an image (H, W, 4), one window after another."""
    color = image[..., :3].double() / 255 * (image[..., 3:].double() / 255)
    offsets = range(-5, 6)
    weights = torch.zeros(HEIGHT, WIDTH)
    gauss = torch.tensor([[math.exp(-(y * y + x * x) / 4.5) for x in offsets] for y in offsets]).double()
    gauss /= gauss.sum()
    for row in range(HEIGHT):
        for column in range(WIDTH):
            rows = torch.tensor([min(max(row + y, 0), HEIGHT - 1) for y in offsets])
            columns = torch.tensor([min(max(column + x, 0), WIDTH - 1) for x in offsets])
            window = color[rows][:, columns]
            mean = (gauss[..., None] * window).sum((0, 1))
            variance = (gauss[..., None] * (window - mean).square()).sum((0, 1))
            weights[row, column] = (9e-4 / (2 * variance + 9e-4)).mean()
    return weights


def split_of(images: torch.Tensor) -> Split:
    cameras = Cameras(torch.eye(4).repeat(2, 1, 1), torch.tensor([[9.0, 9.0, 10.0, 5.0]] * 2), WIDTH, HEIGHT)
    return Split(images, cameras, ("a", "b"))


def test_weights_are_high_where_a_photograph_has_little_contrast(device):
    images = photographs()
    weights = structure_weights(images.to(device))
    assert weights.device.type == "cpu"
    assert weights.dtype == torch.uint8
    for image, found in zip(images, weights, strict=True):
        torch.testing.assert_close(found.float(), (255 * reference(image)).float(), atol=0.51, rtol=0)
    assert weights[0, :, :4].float().mean() > 230
    assert weights[0, :, 16:].float().mean() < 20


@pytest.mark.cuda
def test_weights_do_not_depend_on_the_device_of_the_images():
    images = photographs()
    difference = structure_weights(images.to("cuda")).int() - structure_weights(images).int()
    assert difference.abs().max() <= 1, "but for rounding"


@pytest.mark.parametrize("masked", [False, True])
def test_a_sampler_returns_the_weights_of_the_pixels_that_it_draws(device, masked):
    images = photographs()
    split, seen = split_of(images), images.clone()
    if masked:
        # Excluded pixels count as opaque, also for the weights of their neighbours.
        split = replace(split, masks=torch.rand(2, HEIGHT, WIDTH) < 0.5)
        seen[..., 3][~split.masks] = 255
        assert not torch.equal(structure_weights(seen), structure_weights(images))
    assert torch.equal(opaque_where_masked(split), seen)
    sampler = PixelSampler(split, device)
    sampler.carry("structure", structure_weights(sampler.images, sampler.sizes))
    batch = sampler.batch(200, BOX.to(device), "black")
    rgba, index = batch.rgba, batch.pixels
    assert torch.equal(batch["structure"].cpu(), structure_weights(seen.to(device)).view(-1)[index.cpu()])
    assert torch.equal((rgba[:, 0] * 255).round().to(torch.uint8).cpu(), images.view(-1, 4)[index.cpu(), 0])


@pytest.mark.cuda
def test_weights_on_the_host_are_the_same():
    device = torch.device("cuda")
    split, index = split_of(photographs()), torch.arange(2 * HEIGHT * WIDTH, device=device)
    samplers = [PixelSampler(split, device, images=images) for images in ("device", "host")]
    for sampler in samplers:
        sampler.carry("structure", structure_weights(sampler.images, sampler.sizes))
    on_device, on_host = (sampler.look_up("structure", index) for sampler in samplers)
    assert torch.equal(on_device, on_host)
