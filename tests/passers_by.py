"""People who walk through the photographs of a scene, and photographs that are blurred."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.datasets.scene import Scene


def with_images(scene: Scene, images: Tensor) -> Scene:
    """The scene with other training images."""
    return replace(scene, splits=scene.splits | {"train": replace(scene.train, images=images)})


def with_passers_by(scene: Scene, every: int = 3, seed: int = 0) -> tuple[Scene, Tensor]:
    """Puts a person or two in front of each ``every``-th training photograph, at other places in each.

    A person is an ellipse with a head, opaque, and striped in colours of their own.

    Returns:
        The scene, and which pixels (N, H, W) of its training images show a person.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    images = scene.train.images.clone()
    count, height, width = images.shape[:3]
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    people = torch.zeros(count, height, width, dtype=torch.bool)
    for index in range(0, count, every):
        for _ in range(1 + index % 2):
            tall = random(0.45, 0.75) * height
            left, top = random(0.25, 0.75) * width, random(0.3, 0.7) * height
            u, v = (x - left) / (0.16 * tall), (y - top) / (0.36 * tall)
            person = (u.square() + v.square() < 1) | (u.square() / 0.3 + ((v + 1.15) / 0.25).square() < 1)
            colors = 255 * torch.rand(2, 3, generator=generator)
            stripes = 0.5 + 0.5 * torch.sin(random(0.2, 0.8) * (y * random(-1, 1) + x * random(-1, 1)))
            shown = colors[0] + stripes[..., None] * 0.5 * (colors[1] - colors[0])
            images[index, ..., :3][person] = shown[person].to(torch.uint8)
            images[index, ..., 3][person] = 255
            people[index] |= person
    return with_images(scene, images), people


def with_blur(scene: Scene, every: int = 4, sigma: float = 2.0) -> Scene:
    """Blurs every ``every``-th training photograph by a Gaussian of a standard deviation in pixels."""
    images = scene.train.images.clone()
    reach = torch.arange(-int(3 * sigma), int(3 * sigma) + 1)
    window = torch.exp(-0.5 * (reach / sigma).square())
    window = (window / window.sum()).view(1, 1, 1, -1)
    for image in images[::every]:
        rgb, alpha = (image.float() / 255).split((3, 1), dim=-1)
        planes = torch.cat((rgb * alpha, alpha), dim=-1).movedim(-1, 0)[:, None]
        for weights in (window, window.mT):
            margin = [weights.shape[3] // 2] * 2 + [weights.shape[2] // 2] * 2
            planes = F.conv2d(F.pad(planes, margin, mode="replicate"), weights)
        rgb, alpha = planes[:, 0].movedim(0, -1).split((3, 1), dim=-1)
        image.copy_((255 * torch.cat((rgb / alpha.clamp(min=1e-3), alpha), dim=-1)).round().clamp(0, 255).byte())
    return with_images(scene, images)
