"""Scenes as photographed by cameras that vignette, expose unevenly, and by two cameras of different responses."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.datasets.scene import Scene, Split
from voxelfield.rendering.pixels import linear_light
from voxelfield.rendering.rigid import exp_se3

CORNER = 0.3
"""Share of the light that is left in the corners of a vignetted image."""

EXPONENTS = torch.tensor([1.6, 1.4, 1.2])
"""Exponents of the second camera's response, by channel, on encoded values."""


def turned(scene: Scene, degrees: float = 9.0) -> Scene:
    """Returns the scene as photographed by cameras that are turned at random, so that the subject is beside the middle.

    Where the subject is always in the middle of the images, as in the bundled scene, its vignetting is constant.
    """
    generator = torch.Generator().manual_seed(0)
    splits = {}
    for name, split in scene.splits.items():
        cameras, images = split.cameras, []
        twists = torch.zeros(len(split), 6)
        twists[:, :2] = math.radians(degrees) * (2 * torch.rand(len(split), 2, generator=generator) - 1)
        c2w = cameras.c2w @ exp_se3(twists)
        moved = replace(cameras, c2w=c2w)
        for index in range(len(split)):
            # Where the given camera sees the directions of the turned one.
            directions = moved.image_rays(index, scene.aabb).directions @ cameras.c2w[index, :3, :3]
            focal, middle = cameras.intrinsics[index].split(2)
            points = torch.tensor([1.0, -1.0]) * directions[:, :2] / -directions[:, 2:] * focal + middle
            grid = (2 * points / torch.tensor(cameras.size(index)) - 1).view(1, cameras.height, cameras.width, 2)
            rgb, alpha = (split.image(index).float().movedim(-1, 0)[None]).split((3, 1), dim=1)
            drawn = F.grid_sample(torch.cat((rgb * alpha, alpha), dim=1), grid, align_corners=False)[0]
            straight = drawn[:3] / drawn[3:].clamp(min=1e-3)
            images.append(torch.cat((straight, drawn[3:])).clamp(0, 255).round().to(torch.uint8).movedim(0, -1))
        splits[name] = replace(split, images=torch.stack(images), cameras=moved)
    return replace(scene, splits=splits, all_poses=None)


def vignetted(scene: Scene) -> Scene:
    """Returns the scene as photographed with cos^4 vignetting, which in linear light leaves :data:`CORNER`."""
    return _with_images(scene, _vignetted)


def two_cameras(scene: Scene, exponents: Tensor = EXPONENTS) -> Scene:
    """Returns the scene as photographed by two cameras in turn; the second has a response and an image of its own.

    The images of the second camera are cut at their right, and so its principal point is not in their middle.
    """
    splits = {}
    for name, split in scene.splits.items():
        second = torch.arange(len(split)) % 2 == 1
        images, sizes = split.images.clone(), split.cameras.all_sizes().clone()
        colors = (images[second, ..., :3].float() / 255) ** exponents
        images[second, ..., :3] = (255 * colors).round().to(torch.uint8)
        sizes[second, 0] -= 4
        splits[name] = replace(split, images=images, cameras=replace(split.cameras, sizes=sizes))
    return replace(scene, splits=splits)


def smooth_gains(count: int, height: int, width: int, deviation: float) -> Tensor:
    """Gains (count, H, W, 1) that vary over each image: exponentials of random quadratic polynomials of the place."""
    draw = torch.Generator().manual_seed(5)
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    terms = torch.stack((torch.ones_like(x), x, y, x.square() - 1 / 3, y.square() - 1 / 3, x * y))
    return torch.einsum("nk,khw->nhw", deviation * torch.randn(count, 6, generator=draw), terms).exp()[..., None]


def unevenly_exposed(split: Split, deviation: float) -> Split:
    """Returns photographs whose exposure varies within each, by the standard deviation of the coefficients."""
    rgb = split.images[..., :3] * smooth_gains(len(split), *split.images.shape[1:3], deviation)
    return replace(split, images=torch.cat((rgb.clamp(0, 255).round().byte(), split.images[..., 3:]), dim=-1))


def _vignetted(split: Split) -> Tensor:
    height, width = split.images.shape[1:3]
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    squared = ((x - width / 2).square() + (y - height / 2).square()) / (width**2 + height**2) * 4
    light = (1 + squared * (CORNER**-0.5 - 1)) ** -2  # the fourth power of the cosine
    colors = light[..., None] * linear_light(split.images[..., :3].float() / 255)
    encoded = torch.where(colors <= 0.0031308, 12.92 * colors, 1.055 * colors.clamp(min=1e-9) ** (1 / 2.4) - 0.055)
    return torch.cat(((255 * encoded).round().to(torch.uint8), split.images[..., 3:]), dim=-1)


def _with_images(scene: Scene, change) -> Scene:
    return replace(scene, splits={name: replace(split, images=change(split)) for name, split in scene.splits.items()})
