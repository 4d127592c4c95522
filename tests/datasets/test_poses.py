"""Poses that are no poses, and cameras that look the wrong way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from camera_poses import looking_at

from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.poses import check_cameras_see, check_poses, inverted, likely_mistake, turned_about
from voxelfield.rendering.cameras import Cameras

LEGO = Path(__file__).parents[1] / "fixtures" / "lego"


@pytest.fixture(scope="module")
def cameras() -> Cameras:
    return load_blender(LEGO, LoadOptions(splits=["test"], downscale=4)).test.cameras


def with_poses(cameras: Cameras, c2w: torch.Tensor) -> Cameras:
    return Cameras(c2w, cameras.intrinsics, cameras.width, cameras.height)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pose: pose[0, 0].fill_(torch.nan), "pose 1 must be finite"),
        (lambda pose: pose[:3, 0].mul_(-1), "pose 1 must be a rotation with a translation, not a mirror image"),
        (lambda pose: pose[:3, :3].mul_(1.001), "pose 1 must be a rotation .*, with orthonormal axes"),
        (lambda pose: pose.zero_(), "pose 1 must be a rotation .*, with orthonormal axes"),
        (lambda pose: pose[3, 0].fill_(0.5), r"pose 1 must have \(0, 0, 0, 1\) as its last row"),
        (lambda pose: pose[1, 3].fill_(1e30), r"pose 1 must lie within 1e\+06 world units of the origin"),
    ],
)
def test_what_is_no_pose_is_named(cameras, spoil, message):
    poses = cameras.c2w.double().clone()
    check_poses(lambda index: f"pose {index}", poses)
    spoil(poses[1])
    with pytest.raises(ValueError, match=message):
        check_poses(lambda index: f"pose {index}", poses)


def test_cameras_that_look_past_the_box_are_refused_with_the_likely_reason(cameras):
    box = torch.tensor([[-1.5] * 3, [1.5] * 3])
    check_cameras_see(cameras, box)
    with pytest.raises(
        ValueError, match=r"images must see scene\.aabb, .*, got 4 that do not: the poses seem .*OpenCV"
    ):
        check_cameras_see(with_poses(cameras, turned_about(cameras.c2w)), box)
    with pytest.raises(ValueError, match=r"aabb, \[\[98.*, got 4 that do not: choose another scene\.aabb, or check"):
        check_cameras_see(cameras, box + 100)


def test_one_camera_that_sees_the_box_is_enough(cameras):
    poses = turned_about(cameras.c2w)
    poses[2] = cameras.c2w[2]
    check_cameras_see(with_poses(cameras, poses), torch.tensor([[-1.5] * 3, [1.5] * 3]))


def test_cameras_that_look_away_from_one_another_are_recognised(cameras):
    assert likely_mistake(cameras.c2w) is None
    assert "most cameras look away from one another" in likely_mistake(turned_about(cameras.c2w))
    assert likely_mistake(turned_about(cameras.c2w)[:2]) is None


def test_inverted_matrices_are_suspected(cameras):
    c2w = load_blender(LEGO, LoadOptions(splits=["train"], downscale=4)).train.cameras.c2w
    assert likely_mistake(c2w) is None
    assert "must be camera to world: invert each" in inverted(torch.linalg.inv(c2w))
    assert "negate the second and the third column" in inverted(torch.linalg.inv(turned_about(c2w)))
    assert inverted(turned_about(c2w)) is None
    assert likely_mistake(turned_about(c2w)).startswith("most cameras look away from one another")
    assert inverted(torch.linalg.inv(c2w)[:2]) is None, "of two nothing can be told"


def test_a_place_is_not_taken_for_inverted():
    generator = torch.Generator().manual_seed(0)
    angle = torch.linspace(0, 4, 40)
    c2w = looking_at((0.0, 0.0, 0.0), torch.stack((angle.cos(), angle.sin(), torch.zeros(40)), dim=-1))
    for middle in ([0.0, 0.0, 0.0], [3.0, 0.0, -9.0], [0.0, 20.0, 5.0]):
        c2w[:, :3, 3] = torch.tensor(middle) + torch.randn(40, 3, generator=generator)
        assert inverted(c2w) is None
