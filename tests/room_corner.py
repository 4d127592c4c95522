"""Photographs of the corner of a room whose walls are covered with blotches, with the poses they were taken from."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from camera_poses import looking_at
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from voxelfield.rendering.cameras import Cameras

ROOM = torch.tensor([[0.0, 0.0, 0.0], [4.0, 4.0, 4.0]])


def corner_cameras(count: int, width: int = 320, height: int = 240) -> Cameras:
    angles = torch.linspace(0.35, 1.2, count)
    origins = torch.stack((3 * angles.cos(), 3 * angles.sin(), 1.4 + 0.5 * (3 * angles).sin()), dim=-1)
    intrinsics = torch.tensor([300.0, 300.0, width / 2, height / 2]).repeat(count, 1)
    return Cameras(looking_at((0.4, 0.4, 0.8), origins), intrinsics, width, height)


def blotches(generator: torch.Generator) -> Tensor:
    """(1, 3, 512, 512) of random detail at several scales, in [0, 1]."""
    layers = [
        F.interpolate(torch.rand(1, 3, size, size, generator=generator), (512, 512), mode="bicubic")
        for size in (8, 32, 64, 128)
    ]
    return torch.stack(layers).mean(dim=0).sub(0.5).mul(2).add(0.5).clamp(0, 1)


def photograph(cameras: Cameras) -> list[Image.Image]:
    """Views from within the room, of its walls x = 0 and y = 0 and of its floor."""
    generator = torch.Generator().manual_seed(0)
    walls = [blotches(generator) for _ in range(3)]
    pictures = []
    for index in range(len(cameras)):
        rays = cameras.image_rays(index, ROOM)
        steps = torch.where(rays.directions < 0, -rays.origins / rays.directions, torch.inf)
        distance, wall = steps.min(dim=-1)
        points = rays.origins + distance[:, None] * rays.directions
        color = torch.zeros(len(points), 3)
        for axis, texture in enumerate(walls):
            hit = wall == axis
            across = points[hit][:, [other for other in range(3) if other != axis]] / 2 - 1
            color[hit] = F.grid_sample(texture, across[None, None], align_corners=False)[0, :, 0].T
        pixels = color.view(cameras.height, cameras.width, 3).mul(255).round().byte()
        pictures.append(Image.fromarray(pixels.numpy()))
    return pictures


def write_photographs(folder: Path, cameras: Cameras) -> None:
    folder.mkdir(parents=True)
    for index, picture in enumerate(photograph(cameras)):
        picture.save(folder / f"view_{index:02d}.png")


def write_transforms(folder: Path, cameras: Cameras, zoom: float = 1.0) -> None:
    """Writes nerfstudio's file of cameras whose photographs lie in ``images``, with other focal lengths if wanted."""
    fx, fy, cx, cy = cameras.intrinsics[0].tolist()
    frames = [
        {"file_path": f"images/view_{index:02d}.png", "transform_matrix": pose.tolist()}
        for index, pose in enumerate(cameras.c2w)
    ]
    lens = {"w": cameras.width, "h": cameras.height, "fl_x": zoom * fx, "fl_y": zoom * fy, "cx": cx, "cy": cy}
    (folder / "transforms.json").write_text(json.dumps({**lens, "frames": frames}))
