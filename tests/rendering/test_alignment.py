"""Alignment finds a similarity that is known, and measures poses by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from voxelfield.rendering.alignment import Similarity, align_cameras, pose_errors
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.rigid import exp_se3

BOX = torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])


def some_cameras(count: int = 9) -> Cameras:
    c2w = exp_se3(torch.cat((torch.randn(count, 3), 3 * torch.randn(count, 3)), dim=1))
    return Cameras(c2w, torch.tensor([[30.0, 31.0, 16.0, 12.0]]).repeat(count, 1), 32, 24)


def some_similarity() -> Similarity:
    matrix = exp_se3(torch.randn(1, 6, dtype=torch.float64))[0]
    return Similarity(1.7, matrix[:3, :3], 2 * matrix[:3, 3])


def assert_equal(found: Similarity, wanted: Similarity) -> None:
    assert found.scale == pytest.approx(wanted.scale, rel=1e-5)
    torch.testing.assert_close(found.rotation, wanted.rotation, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.translation, wanted.translation, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rotations", [True, False])
def test_a_known_similarity_is_found(rotations, device):
    cameras, wanted = some_cameras().to(device), some_similarity()
    moved = wanted.cameras(cameras)
    assert moved.c2w.device.type == device.type
    assert_equal(align_cameras(cameras, moved, rotations=rotations), wanted)


@pytest.mark.parametrize("count", [1, 2])
def test_axes_make_up_for_too_few_positions(count):
    cameras, wanted = some_cameras(count), some_similarity()
    found = align_cameras(cameras, wanted.cameras(cameras))
    torch.testing.assert_close(found.rotation, wanted.rotation, rtol=0, atol=1e-5)
    assert found.scale == pytest.approx(1.0 if count == 1 else wanted.scale, rel=1e-4)


def test_a_mirror_image_is_no_rotation():
    cameras = some_cameras()
    mirrored = cameras.c2w.clone()
    mirrored[:, 0, 3] *= -1
    found = align_cameras(cameras, replace(cameras, c2w=mirrored), rotations=False)
    assert float(torch.linalg.det(found.rotation)) == pytest.approx(1.0)


def test_cameras_that_were_moved_see_the_scene_that_was_moved():
    cameras, similarity = some_cameras(), some_similarity()
    index, pixels = torch.arange(9), 20 * torch.rand(9, 2)

    def through(seen: Cameras, t: float) -> torch.Tensor:
        rays: Rays = seen.rays(index, pixels, BOX)
        return (rays.origins + t * rays.directions).double()

    moved = similarity.scale * through(cameras, 2.0) @ similarity.rotation.T + similarity.translation
    found = through(similarity.cameras(cameras), 2.0 * similarity.scale)
    torch.testing.assert_close(found, moved, rtol=0, atol=1e-5)


def test_errors_are_what_is_left_after_alignment():
    cameras = some_cameras()
    angles, away = pose_errors(some_similarity().cameras(cameras), cameras)
    assert float(angles.max()) < 1e-3
    assert float(away.max()) < 1e-5
    turned = cameras.c2w.clone()
    turned[4] = turned[4] @ exp_se3(torch.tensor([[0.0, 0.1, 0.0, 0.0, 0.0, 0.0]]))[0]
    angles, away = pose_errors(replace(cameras, c2w=turned), cameras)
    assert float(angles[4]) == pytest.approx(5.7296, abs=1e-3)
    assert float(angles.sum() - angles[4]) < 1e-3


def test_numbers_of_cameras_must_agree():
    with pytest.raises(ValueError, match="target must have as many cameras as source, at least one, got 2 and 3"):
        align_cameras(some_cameras(3), some_cameras(2))
    with pytest.raises(ValueError, match="at least one, got 0 and 0"):
        align_cameras(some_cameras(0), some_cameras(0))
