"""The recipe of docs/cameras.md for poses of a network, and camera=adjust where they are off by a degree."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import voxelfield
from voxelfield.components.refinement import CameraRefinement
from voxelfield.rendering.alignment import pose_errors
from voxelfield.rendering.rigid import exp_se3
from voxelfield.settings.presets import preset

COUNT, SIDE = 24, 100
SETTINGS = ("trainer=smoke", "trainer.steps=400", "trainer.preview_every=0", "trainer.checkpoint_every=0")


def network(folder: Path) -> dict[str, object]:
    """What a network says of bricks: poses off by a degree and a hundredth of the distance, other focal lengths."""
    train = voxelfield.load_scene("bricks", image_size=SIDE).train
    generator = torch.Generator().manual_seed(0)
    turns, moves = F.normalize(torch.randn(2, COUNT, 3, generator=generator), dim=-1)
    c2w = train.cameras.c2w[:COUNT] @ exp_se3(torch.cat((math.radians(1.0) * turns, torch.zeros(COUNT, 3)), dim=1))
    c2w[:, :3, 3] += 0.01 * 4 * moves
    c2w[:, :3, 1:3] *= -1
    intrinsics = torch.eye(3).repeat(COUNT, 1, 1)
    intrinsics[:, [0, 1, 0, 1], [0, 1, 2, 2]] = train.cameras.intrinsics[:COUNT]
    intrinsics[:, [0, 1], [0, 1]] *= 1 + 0.02 * torch.rand(COUNT, 1, generator=generator)
    (folder / "images").mkdir(parents=True)
    for index in range(COUNT):
        Image.fromarray(train.images[index].numpy()).save(folder / "images" / f"{index:02d}.png")
    return {
        "names": [f"{index:02d}.png" for index in range(COUNT)],
        "extrinsics": torch.linalg.inv(c2w.double())[:, :3].numpy(),
        "intrinsics": intrinsics.double().numpy(),
        **{"width": SIDE, "height": SIDE},
    }


@pytest.mark.slow
def test_poses_of_a_network_are_read_as_the_guide_says_and_adjusted(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "cameras.md").read_text(encoding="utf-8")
    given = network(tmp_path / "my_capture")
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1], given)
    scene = voxelfield.load_scene("my_capture", holdout=0, aabb=[[-1.2] * 3, [1.2] * 3])
    intrinsics = torch.from_numpy(given["intrinsics"])[:, [0, 1, 0, 1], [0, 1, 2, 2]].float()
    torch.testing.assert_close(scene.train.cameras.intrinsics, intrinsics)
    truth = voxelfield.load_scene("bricks", image_size=SIDE).train.cameras[list(range(COUNT))]
    fitted = []
    for camera in (["camera=none"], ["camera=adjust", "camera.pose_lr=1e-3"]):
        session = voxelfield.Session(scene, preset(*SETTINGS, *camera, device="cpu", name="train"))
        assert session.fit()
        fitted.append(session.evaluate("train", views=6).psnr)
    assert fitted[1] > fitted[0] + 2
    before, after = (
        pose_errors(cameras, truth)[0].mean()
        for cameras in (scene.train.cameras, session.component(CameraRefinement).refined())
    )
    assert 0.9 < before < 1.1
    assert after < 0.9 * before
