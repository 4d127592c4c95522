"""Exact images of a painted ball before a painted background, and what is saved of trainings on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import voxelfield
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.rays import Rays
from voxelfield.trained.model_file import save_model
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.training.session import Session


def paint(points: torch.Tensor) -> torch.Tensor:
    """Smooth colours of places."""
    return 0.5 + 0.4 * torch.sin(points @ torch.tensor([[1.1, 0.3, -0.7], [-0.4, 1.3, 0.6], [0.8, -0.5, 1.2]]))


def along_and_beside(rays: Rays, centre: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Minus the distance at which each ray is closest to a point, and the square of its distance from there, (R,)."""
    away = rays.origins - centre
    along = (away * rays.directions).sum(dim=-1)
    return along, away.square().sum(dim=-1) - along.square()


def photograph(
    cameras: Cameras, radius: float, centre: torch.Tensor, behind: Callable[[Rays], torch.Tensor], scale: float
) -> torch.Tensor:
    """Images of the ball, (N, H, W, 4) uint8.

    Args:
        cameras: N cameras, all of whose rays reach the background.
        radius: That of the ball.
        centre: (3,) that of the ball.
        behind: Returns the distances (R,) of the background along rays.
        scale: Of the pattern of the background; that of the ball is 2.
    """
    box = torch.tensor([[-30.0] * 3, [30.0] * 3])
    images = []
    for camera in range(len(cameras)):
        rays = cameras.image_rays(camera, box)
        along, beside = along_and_beside(rays, centre)
        ball = -along - (radius**2 - beside).clamp(min=0).sqrt()
        at_ball, at_behind = (rays.origins + t[:, None] * rays.directions for t in (ball, behind(rays)))
        rgb = torch.where((beside < radius**2)[:, None], paint(2 * at_ball), paint(scale * at_behind))
        images.append(torch.cat((rgb, torch.ones(len(rgb), 1)), dim=-1))
    return (torch.stack(images).view(-1, cameras.height, cameras.width, 4) * 255).round().to(torch.uint8)


def check_saved_alike(trained: Session, cameras: Cameras, points: torch.Tensor, folder: Path) -> TrainedModel:
    """Compares a session with its loaded run, which is returned, and with its model file."""
    expected, run = trained.result().render(cameras, 1), voxelfield.load(trained.output, "cpu")
    for name in ("rgb", "opacity", "depth"):
        assert torch.equal(getattr(run.render(cameras, 1), name), getattr(expected, name)), name
    assert torch.equal(run.density(points), trained.result().density(points))
    save_model(folder / "model.safetensors", run, quality="exact")
    small = voxelfield.load(folder / "model.safetensors", "cpu")
    torch.testing.assert_close(small.render(cameras, 1).rgb, expected.rgb, atol=0.02, rtol=0)
    return run
