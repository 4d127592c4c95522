"""Training on panoramas, and on photographs whose rows have their own poses."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quick_presets import preset
from small_sessions import fitted

import voxelfield
from voxelfield.components.refinement import CameraRefinement, RefinementSettings, write_cameras
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene, Split
from voxelfield.models.pixel_sampler import PixelSampler
from voxelfield.rendering.cameras import Cameras, fraction_through_box
from voxelfield.rendering.lens import Lens
from voxelfield.training.checkpoints import fingerprint
from voxelfield.training.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")

FIXTURE = Path(__file__).parents[1] / "fixtures" / "lego"
TINY = ("model=dense", "trainer=smoke", "trainer.steps=4", "trainer.preview_every=0", "trainer.checkpoint_every=0")
AABB = torch.tensor([[-1.5] * 3, [1.5] * 3])


@pytest.fixture(scope="module")
def still() -> Scene:
    return load_blender(FIXTURE, LoadOptions(image_size=25, splits=("train",)))


def moving(split: Split) -> Split:
    axes = torch.nn.functional.normalize(torch.randn(len(split), 2, 3), dim=-1) * torch.tensor([[0.1], [0.2]])
    rolling = torch.cat((axes.flatten(1) / 25, torch.full((len(split), 1), 12.5)), dim=1)
    return replace(split, cameras=replace(split.cameras, rolling=rolling))


def all_round(split: Split) -> Split:
    """Crops of panoramas, which show the same with hardly any distortion."""
    return replace(split, cameras=replace(split.cameras, lens=Lens("equirectangular", torch.zeros(len(split), 0))))


KINDS = {"rolling shutter": moving, "equirectangular": all_round}


@pytest.fixture(params=KINDS)
def scene(request, still) -> Scene:
    train = KINDS[request.param](still.train)
    return replace(still, splits={"train": train, "test": train[:2]})


@pytest.mark.parametrize("supersampling", [1, 2])
def test_batches_have_the_rays_of_their_cameras(scene, device, supersampling):
    sampler = PixelSampler(scene.train, device, supersampling)
    batch = sampler.batch(50, AABB.to(device), "white")
    index, square = batch.pixels, supersampling**2
    row, column = index // 25 % 25, index % 25
    points = torch.stack((column, row), dim=1).float()[:, None]
    places = {1: [[0.5, 0.5]], 2: [[0.125, 0.375], [0.625, 0.125], [0.375, 0.875], [0.875, 0.625]]}
    points = (points + torch.tensor(places[supersampling], device=device)).view(-1, 2)
    cameras = scene.train.cameras.to(device)
    expected = cameras.rays((index // 625).repeat_interleave(square), points, AABB.to(device))
    for name in ("origins", "directions", "near", "far"):
        torch.testing.assert_close(getattr(batch.rays, name), getattr(expected, name), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("camera", ["camera=none", "camera=refine"])
def test_fields_are_trained_and_evaluated(scene, device, camera):
    session = fitted(Session(scene, preset(*TINY, camera, device=str(device))))
    assert session.evaluate(progress=False).psnr > 5
    before, after = (fingerprint(split)["cameras"] for split in (scene.train, load_still(scene)))
    assert not torch.equal(before, after), "a run must not go on with other rays"


def load_still(scene: Scene) -> Split:
    return replace(scene.train, cameras=replace(scene.train.cameras, rolling=None, lens=None))


def test_refined_poses_take_their_rows_along(still, tmp_path):
    cameras = moving(still.train).cameras
    refinement = CameraRefinement(cameras, RefinementSettings(pose_lr=1e-3), 10, torch.zeros(3))
    with torch.no_grad():
        refinement.twists.copy_(0.1 * torch.randn(len(cameras), 6))
    refined = refinement.cameras()
    index, y = torch.tensor([0, 3]), torch.tensor([2.5, 20.5])
    delta = refined.c2w @ torch.linalg.inv(cameras.c2w)
    torch.testing.assert_close(refined.row_poses(index, y), delta[index] @ cameras.row_poses(index, y))
    refined.row_poses(index, y).square().sum().backward()
    assert (refinement.twists.grad[[0, 3]] != 0).all()
    assert refinement.twists.grad[1].abs().max() == 0
    split = replace(still.train, paths=None)
    write_cameras(tmp_path / "cameras.json", split, refinement.refined())
    (first, *_) = json.loads((tmp_path / "cameras.json").read_text())["frames"]
    found = torch.tensor([first["camera_angular_velocity"], first["camera_linear_velocity"]])
    torch.testing.assert_close(found / 25, cameras.rolling[0, :6].view(2, 3))
    assert first["rolling_shutter_time"] == 1
    with pytest.raises(ValueError, match=r"camera\.focal must be false for images of a rolling shutter, got true"):
        CameraRefinement(cameras, RefinementSettings(focal=True), 10, torch.zeros(3))


def test_depths_are_refused(scene):
    train = replace(scene.train, extras={"depth": torch.ones(scene.train.images.shape[:3])})
    with pytest.raises(ValueError, match=r"trainer\.loss\.depth must be 0 for equirectangular images, .*, got 0\.1"):
        Session(replace(scene, splits={"train": train}), preset(*TINY, "trainer.loss.depth=0.1", device="cpu"))


def test_a_room_seen_by_spheres_gets_boxes_around_them(caplog):
    """All spheres are turned alike, as by a tripod: that says nothing about where the scene is."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.rand(20, 3, generator=generator) - 0.5
    c2w = torch.eye(4).repeat(20, 1, 1)
    c2w[:, :3, 3] = positions
    intrinsics = torch.tensor([[5.0, 5.0, 16.0, 8.0]]).repeat(20, 1)
    cameras = Cameras(c2w, intrinsics, 32, 16, Lens("equirectangular", torch.zeros(20, 0)))
    images = torch.randint(0, 255, (20, 16, 32, 3), dtype=torch.uint8, generator=generator)
    points = 6 * torch.rand(300, 3, generator=generator) - 3
    for known in (None, points):
        scene = voxelfield.scene_from_arrays(images, cameras, points=known)
        with caplog.at_level(logging.INFO):
            warp = voxelfield.warps.choice.choose_warp(scene, voxelfield.warps.choice.WarpConfig())
        assert not warp.is_forward_facing
        low, high = torch.tensor(warp.aabb)
        middle = (low + high) / 2
        assert (middle.abs() < 1).all()
        assert (high > positions.amax(dim=0)).all() or known is None
    assert scene.train.size_in_words == "32 x 16, equirectangular"


def test_panoramas_around_an_object_get_as_many_more_rays_as_miss_its_box(still, device):
    focal = torch.tensor([[25 / (2 * math.pi), 25 / (2 * math.pi), 12.5, 12.5]]).repeat(len(still.train), 1)
    panoramas = all_round(replace(still.train, cameras=replace(still.train.cameras, intrinsics=focal)))
    share = fraction_through_box(panoramas.cameras, still.aabb)
    assert share < 0.5 < fraction_through_box(still.train.cameras, still.aabb)
    for train, expected in ((still.train, 10), (panoramas, math.ceil(10 / max(share, 1 / 4)))):
        scene = replace(still, splits={"train": train})
        session = Session(scene, preset(*TINY, "trainer.max_rays=10", device=str(device)))
        assert len(session.train_step().rays) == expected
        assert session.config.trainer.max_rays == expected
        assert Session(scene, session.config).config.trainer.max_rays == expected, "not raised twice"
