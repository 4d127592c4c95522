"""Scenes from tensors in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from camera_poses import looking_at
from torch.nn import functional as F

import voxelfield
from voxelfield import Cameras, scene_from_arrays

FIXTURES = Path(__file__).parents[1] / "fixtures"


def around(count, radius=4.0):
    """Cameras on a ring that look at the origin, OpenGL axes."""
    angle = torch.arange(count) * 2 * torch.pi / count
    backward = F.normalize(torch.stack((angle.cos(), angle.sin(), torch.full_like(angle, 0.5)), dim=-1), dim=-1)
    c2w = looking_at((0.0, 0.0, 0.0), radius * backward)
    return Cameras(c2w, torch.tensor([[12.0, 12, 6, 5]]).expand(count, 4), 12, 10)


def photographs(count=9, channels=3):
    return torch.randint(0, 256, (count, 10, 12, channels), generator=torch.Generator().manual_seed(0)).byte()


def test_a_scene_is_the_one_that_its_files_give():
    files = voxelfield.load_scene(FIXTURES / "lego", splits=("train",))
    split = files.train
    scene = scene_from_arrays(split.images, split.cameras, names=split.names, holdout=0)
    assert list(scene.splits) == ["train"]
    assert torch.equal(scene.train.images, split.images)
    assert scene.train.names == split.names
    assert torch.equal(scene.aabb, files.aabb)
    assert scene.bounded
    colors = split.images.float() / 255
    assert torch.equal(scene_from_arrays(colors, split.cameras, holdout=0).train.images, split.images)


def test_photographs_become_opaque_and_have_nested_boxes():
    cameras = around(9)
    images = photographs()
    scene = scene_from_arrays(images, cameras)
    assert scene.train.names == tuple("1234567")
    assert scene.test.names == ("0", "8")
    assert torch.equal(scene.train.images[..., :3], images[1:8])
    assert (scene.train.images[..., 3] == 255).all()
    assert torch.equal(scene.test.cameras.c2w, cameras.c2w[[0, 8]])
    assert (scene.bounded, scene.estimated) == (False, True)
    small = scene_from_arrays(images, cameras, aabb=((-1, -1, -1), (1, 1, 1)))
    assert small.bounded
    assert small.aabb.tolist() == [[-1, -1, -1], [1, 1, 1]]


def test_what_belongs_to_a_view_follows_it():
    masks = torch.rand(9, 10, 12) < 0.9
    extras = {"time": torch.arange(9.0), "normal": torch.rand(9, 10, 12, 3)}
    for test in ([2, 5], torch.tensor([5, 2]), np.array([2, 5])):
        scene = scene_from_arrays(photographs(), around(9), masks=masks, extras=extras, test=test)
        assert scene.test.extras["time"].tolist() == [2, 5]
        assert scene.train.extras["time"].tolist() == [0, 1, 3, 4, 6, 7, 8]
        assert torch.equal(scene.test.masks, masks[[2, 5]])
        assert torch.equal(scene.test.extras["normal"], extras["normal"][[2, 5]])
    assert list(scene_from_arrays(photographs(), around(9), test=[]).splits) == ["train"]


def test_the_given_tensors_stay_as_they_are():
    images = photographs(channels=4)
    images[..., 3] = 255
    images[0, 0, 0, 3] = 0
    before = images.clone()
    scene = scene_from_arrays(images, around(9), holdout=0)
    assert torch.equal(images, before)
    assert scene.train.masks.sum() == scene.train.masks.numel() - 1, "a photograph's transparent pixels do not count"


def wrong_pose():
    cameras = around(9)
    return dataclasses.replace(cameras, c2w=cameras.c2w * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": photographs(8)}, r"^Split\.images must have shape \(9, 10, 12, 4\), as the cameras say"),
        ({"images": photographs(channels=2)}, r"^images must have shape \(N, H, W, 3\), got \(9, 10, 12, 2\)"),
        ({"images": photographs().float()}, r"^images must lie in \[0, 1\] if they are .*, got 0\.\.255$"),
        ({"cameras": wrong_pose()}, r"^cameras\.c2w\[0\] must be a rotation with a translation"),
        (
            {"cameras": Cameras(around(9).c2w, torch.zeros(9, 4), 12, 10)},
            r"^cameras\.intrinsics\[0\]: focal lengths must be finite and at least",
        ),
        ({"test": [9]}, r"^test must lie in 0\.\.8, the views, got 9\.\.9$"),
        ({"test": list(range(9))}, "^test must leave at least one view for training, got 9 test views of 9$"),
        ({"holdout": 1}, r"^holdout must be 0, or a whole number of at least 2, got 1$"),
        ({"masks": torch.zeros(9, 10, 12, dtype=torch.bool)}, r"^Split\.masks must leave some pixels"),
        ({"extras": {"time": torch.zeros(8)}}, r"^Split\.extras\['time'\] must have shape \(9\), got \(8,\)$"),
        ({"points": torch.zeros(4, 2)}, r"^points must have shape \(P, 3\), got \(4, 2\)$"),
        ({"names": ["a"] * 9}, r"^Split\.names must differ, got 'a' 9 times$"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        scene_from_arrays(**{"images": photographs(), "cameras": around(9)} | change)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([1], r"^images must be a torch\.Tensor, got list$"),
        (photographs().long(), r"^images must be uint8, or floating point in \[0, 1\], got int64$"),
    ],
)
def test_images_of_another_type_are_named(images, message):
    with pytest.raises(TypeError, match=message):
        scene_from_arrays(images, around(9))
