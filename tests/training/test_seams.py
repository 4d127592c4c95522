"""The face of a nested box, where voxels become twice as large, does not show in images of a floor that crosses it."""

from __future__ import annotations

import pytest
import torch
from camera_poses import looking_at
from small_pyramid import settings
from small_sessions import fitted

from voxelfield.datasets.scene import Scene, Split
from voxelfield.rendering.cameras import Cameras
from voxelfield.training.session import Session
from voxelfield.warps.nested_boxes import NestedBoxes

SIZE = 32
BOXES = NestedBoxes(((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0)), 3, near=0.2)
FLOOR = -0.4


def on_floor(cameras: Cameras, index: int) -> torch.Tensor:
    """Returns where the pixels of an image look at the floor, (H, W, 3)."""
    rays = cameras.image_rays(index, torch.tensor(BOXES.outermost))
    along = (FLOOR - rays.origins[:, 2:]) / rays.directions[:, 2:]
    return (rays.origins + along * rays.directions).view(SIZE, SIZE, 3)


def paint(places: torch.Tensor) -> torch.Tensor:
    x, y, _ = places.unbind(-1)
    return 0.5 + 0.3 * torch.stack(((2.5 * x).sin(), (2.5 * y).cos(), (1.7 * (x + y)).sin()), dim=-1)


def above(count: int, radius: float) -> Cameras:
    """Cameras on a circle above the floor that look down."""
    angle = torch.arange(count) * (2 * torch.pi / max(count, 1)) + 0.3
    position = torch.stack((radius * angle.cos(), radius * angle.sin(), 1.7 + 0.3 * (5 * angle).sin()), dim=-1)
    intrinsics = torch.tensor([[20.0, 20.0, SIZE / 2, SIZE / 2]]).repeat(count, 1)
    return Cameras(looking_at((0.0, 0.0, FLOOR), position, up=(0.1, 1.0, 0.0)), intrinsics, SIZE, SIZE)


@pytest.mark.slow
def test_both_sides_of_a_box_face_are_as_right_as_the_floor_around_them():
    splits = {}
    for name, cameras in (("train", above(24, 1.2)), ("test", above(3, 0.7))):
        rgb = torch.stack([paint(on_floor(cameras, index)) for index in range(len(cameras))])
        images = (torch.cat((rgb, torch.ones_like(rgb[..., :1])), dim=-1) * 255).round().to(torch.uint8)
        splits[name] = Split(images, cameras, tuple(f"{name}{index}" for index in range(len(cameras))))
    scene = Scene("floor", torch.tensor(BOXES.aabb), splits, bounded=False)
    session = fitted(Session(scene, settings("trainer.steps=240"), warp=BOXES))
    trained, cameras = session.result(), splits["test"].cameras
    places = torch.stack([on_floor(cameras, index) for index in range(len(cameras))])
    errors = torch.stack([trained.render(cameras, i).rgb for i in range(len(cameras))]) - paint(places)
    reach = places[..., :2].abs().amax(dim=-1)
    inside, outside = (reach > 0.85) & (reach < 1), (reach > 1) & (reach < 1.15)
    around = (reach > 0.5) & (reach < 1.6) & ~(inside | outside)
    for side in (inside, outside):
        assert side.sum() > 50
        assert errors[side].abs().mean() < 1.5 * errors[around].abs().mean()
    # A veil or a gap at the face would change the brightness there.
    assert (errors[inside].mean(dim=0) - errors[outside].mean(dim=0)).abs().max() < 0.02
