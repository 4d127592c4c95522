"""The bundled bricks under a sky: opaque photographs whose distant part depends on the direction alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from room_corner import write_transforms
from torch import Tensor

import voxelfield
from voxelfield.datasets.scene import Scene, Split


def sky(directions: Tensor) -> Tensor:
    """Returns colours (R, 3) of unit directions (R, 3): blue above, pale at the horizon, with clouds and hills."""
    up = directions[:, 2:]
    zenith, horizon, ground = (torch.tensor(color) for color in ((0.2, 0.4, 0.8), (0.85, 0.85, 0.8), (0.4, 0.35, 0.3)))
    colors = torch.lerp(horizon, torch.where(up > 0, zenith, ground), up.abs().sqrt())
    waves = torch.sin(directions @ torch.tensor([[9.0, 2.0, -3.0], [-4.0, 8.0, 5.0], [3.0, -6.0, 10.0]]))
    return (colors + 0.25 * waves.prod(dim=-1, keepdim=True)).clamp(0, 1)


def under_sky(split: Split) -> Split:
    """Returns the views of a split with the sky behind them, opaque."""
    box = torch.tensor([[-1.0] * 3, [1.0] * 3])
    height, width = split.images.shape[1:3]
    behind = torch.stack([sky(split.cameras.image_rays(view, box).directions) for view in range(len(split))])
    rgb, alpha = (split.images.float() / 255).split((3, 1), dim=-1)
    images = alpha * rgb + (1 - alpha) * behind.view(-1, height, width, 3)
    return replace(split, images=torch.cat((255 * images, torch.full_like(alpha, 255)), dim=-1).round().to(torch.uint8))


def bricks_under_sky(image_size: int, views: int) -> Scene:
    """Returns the bricks under the sky, with some of the training views and a few of the test views."""
    scene = voxelfield.load_scene("bricks", image_size=image_size)
    train, test = scene.train, scene.test
    train, test = (split[:: max(1, len(split) // count)] for split, count in ((train, views), (test, 5)))
    splits = {"train": under_sky(train), "test": under_sky(test)}
    # As structure from motion would find them: there are points on the bricks, and none in the sky.
    points = 2 * torch.rand((500, 3), generator=torch.Generator().manual_seed(0)) - 1
    facts = {"bounded": False, "estimated": True, "points": points, "all_poses": None, "all_cameras": None}
    return replace(scene, splits=splits, **facts)


def write_photographs(folder: Path, image_size: int, views: int) -> None:
    """Writes training views of :func:`bricks_under_sky` as a capture in nerfstudio's format."""
    split = bricks_under_sky(image_size, views).train
    (folder / "images").mkdir(parents=True)
    for index in range(len(split)):
        Image.fromarray(split.image(index)[..., :3].numpy()).save(folder / "images" / f"view_{index:02d}.png")
    write_transforms(folder, split.cameras)
