"""Scenes whose photographs are rendered: by cameras that move while they expose row after row, and all round."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from camera_poses import random_rotations
from torch import Tensor

from voxelfield.datasets.scene import Scene, Split
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.rendering.rigid import pose_matrices


def photographed(renderer: FieldRenderer, cameras: Cameras) -> Split:
    """The photographs that cameras take of a field, with straight alpha; the renderer's background must be black."""
    images = []
    for index in range(len(cameras)):
        view = renderer.view(cameras, index)
        images.append(torch.cat((view.rgb / view.opacity.clamp(min=1e-3)[..., None], view.opacity[..., None]), dim=-1))
    stack = (255 * torch.stack(images)).round().clamp(0, 255).to(torch.uint8).cpu()
    return Split(stack, cameras, tuple(map(str, range(len(cameras)))))


def with_rolling_shutter(scene: Scene, renderer: FieldRenderer, turn: float, move: float, seed: int = 0) -> Scene:
    """The scene with training photographs of cameras that turn and move, each in a direction of its own.

    Each row is the photograph of another camera, one pixel high, whose pose is computed here, by the exponential of a
    matrix. The cameras of the scene say how they move.

    Args:
        scene: A scene of square pixels, whose images have one size.
        renderer: Renders what the photographs show, before black.
        turn: Angle from the first to the last row, radians.
        move: Distance from the first to the last row, world units.
        seed: Seed of the directions.
    """
    split, generator = scene.train, torch.Generator().manual_seed(seed)
    cameras, (width, height) = split.cameras, split.cameras.size(0)
    axes = torch.nn.functional.normalize(torch.randn(len(split), 2, 3, generator=generator), dim=-1).double()
    motion = axes * torch.tensor([[turn], [move]], dtype=torch.float64) / height
    shots = []
    for index, (rotation, step) in enumerate(motion):
        x, y, z = rotation.tolist()
        cross = torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64)
        time = torch.arange(height) + 0.5 - height / 2
        relative = torch.eye(4, dtype=torch.float64).repeat(height, 1, 1)
        relative[:, :3, :3] = torch.linalg.matrix_exp(time[:, None, None] * cross)
        relative[:, :3, 3] = time[:, None] * step
        intrinsics = cameras.intrinsics[index].repeat(height, 1)
        intrinsics[:, 3] -= torch.arange(height)
        rows = Cameras((cameras.c2w[index].double() @ relative).float(), intrinsics, width, 1)
        shots.append(photographed(renderer, rows).images[:, 0])
    middle = torch.full((len(split), 1), height / 2)
    rolling = torch.cat((motion.view(-1, 6).float(), middle), dim=1)
    taken = replace(split, images=torch.stack(shots), cameras=replace(cameras, rolling=rolling))
    return replace(scene, splits=scene.splits | {"train": taken})


def spheres_at(positions: Tensor, width: int, generator: torch.Generator) -> Cameras:
    """Equirectangular cameras of whole spheres, ``width`` x ``width / 2`` pixels, that are turned at random."""
    c2w = pose_matrices(random_rotations(len(positions), generator), positions)
    focal, lens = width / (2 * math.pi), Lens("equirectangular", torch.zeros(len(positions), 0))
    intrinsics = torch.tensor([[focal, focal, width / 2, width / 4]]).repeat(len(positions), 1)
    return Cameras(c2w, intrinsics, width, width // 2, lens)
