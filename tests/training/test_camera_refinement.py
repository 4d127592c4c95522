"""Cameras that are learned: their module, and whole trainings on a scene of 25x25 pixels."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quick_presets import preset
from small_sessions import fitted, interrupt_at, restored

import voxelfield
from voxelfield.components import lost_cameras
from voxelfield.components.exposure import AffineExposure
from voxelfield.components.lost_cameras import LostCameras, shrunk
from voxelfield.components.refinement import (
    CameraRefinement,
    RefinedCameras,
    RefinementSettings,
    refine_views,
    write_cameras,
)
from voxelfield.components.registry import Training
from voxelfield.datasets.scene import Scene, Split
from voxelfield.datasets.transforms import read_transforms
from voxelfield.models.pixel_sampler import PixelSampler
from voxelfield.rendering.alignment import Similarity, align_cameras, pose_errors
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.rigid import compose as product
from voxelfield.rendering.rigid import exp_se3
from voxelfield.run_directory import CAMERAS_FILE
from voxelfield.runs.train import train_as_configured
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.training.session import Session
from voxelfield.warps.ndc_box import NdcBox

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]

SH = ("model=sh", "model.resolutions=[16,32]", "trainer.finest_resolution=32")
"""Learns poses in the fewest steps, whatever the seed; those of a pyramid are learned in test_unbounded.py."""

TINY = (
    "model=pyramid",
    "model.resolutions=[16,24]",
    "model.width=16",
    "model.geometry=8",
    "model.hidden=1",
    "trainer=smoke",
    "trainer.finest_resolution=24",
    "trainer.log_every=5",
    "trainer.preview_every=0",
    "trainer.checkpoint_every=0",
    "camera=refine",
    "camera.pose_lr=5e-3",
    "camera.final_factor=0.05",
    "camera.stages=[{start: 0.0, resolution: 16}]",
    "camera.finest_from=0.7",
)


def some_cameras(count: int = 4) -> Cameras:
    c2w = exp_se3(torch.randn(count, 6))
    return Cameras(c2w, torch.tensor([[30.0, 31.0, 16.0, 12.0]]).repeat(count, 1), 32, 24)


def perturbed(scene: Scene, size: float) -> Scene:
    generator = torch.Generator().manual_seed(7)
    split = scene.train
    motion = exp_se3(size * torch.randn(len(split), 6, generator=generator))
    cameras = replace(split.cameras, c2w=product(motion, split.cameras.c2w))
    return Scene(scene.name, scene.aabb, {**scene.splits, "train": replace(split, cameras=cameras)})


def session_of(scene: Scene, output: Path | None, *overrides: str, seed: int = 0, **hooks) -> Session:
    given = {text.partition("=")[0] for text in overrides}
    # Hydra refuses a group that is chosen twice, and settings of a model that is another one.
    base = [text for text in TINY if text.partition("=")[0] not in given]
    if "model" in given:
        base = [text for text in base if not text.startswith("model.")]
    settings = preset(*base, *overrides, f"seed={seed}", device="cpu")
    return Session(scene, settings, output=output, **hooks)


# ------------------------------------------------------------------------------------------------------- the module


def refinement_of(cameras: Cameras, unit: float = 1.0, pose_from: int = 0, **options) -> CameraRefinement:
    given = {"pose_lr": 0.01, "final_factor": 1.0, "warm_up": 0.0, "focal_from": 0.0, **options}
    settings = RefinementSettings(focal="focal_lr" in options, **given)
    centre = torch.tensor([0.5, -1.0, 2.0]).to(cameras.c2w.device)
    return CameraRefinement(cameras, settings, 100, centre, unit, pose_from)


def test_cameras_are_the_given_ones_at_first(device):
    cameras = some_cameras().to(device)
    refinement = refinement_of(cameras, focal_lr=0.1)
    torch.testing.assert_close(refinement.refined().c2w, cameras.c2w, rtol=0, atol=1e-6)
    assert torch.equal(refinement.refined().intrinsics, cameras.intrinsics)
    assert torch.equal(refinement.given.c2w, cameras.c2w)


def test_motions_turn_about_the_centre_and_focal_lengths_change_together():
    cameras = some_cameras()
    refinement = refinement_of(cameras, focal_lr=0.1)
    twists = torch.randn(4, 6)
    with torch.no_grad():
        refinement.twists.copy_(twists)
        refinement.log_focal.fill_(math.log(1.25))
    refined = refinement.refined()
    to_centre, from_centre = torch.eye(4), torch.eye(4)
    from_centre[:3, 3] = torch.tensor([0.5, -1.0, 2.0])
    to_centre[:3, 3] = -from_centre[:3, 3]
    wanted = exp_se3(twists) @ to_centre @ cameras.c2w
    # Positions go away as focal lengths grow, so that what is at the centre keeps its size.
    wanted[:, :3, 3] *= 1.25
    torch.testing.assert_close(refined.c2w, from_centre @ wanted, rtol=0, atol=1e-5)
    wanted = cameras.intrinsics * torch.tensor([1.25, 1.25, 1.0, 1.0])
    torch.testing.assert_close(refined.intrinsics, wanted)


def test_rates_rise_then_decay_and_steps_go_downhill(device):
    refinement = refinement_of(
        some_cameras().to(device), focal_lr=0.02, final_factor=0.01, warm_up=0.1, focal_from=0.09
    )
    seen, factors = [], []
    for number in (0, 4, 9, 50, 100):
        before = refinement.twists.detach().clone()
        refinement.cameras().c2w.square().sum().backward()
        (-refinement.cameras().intrinsics[:, 0].sum()).backward()
        slope = refinement.twists.grad.clone()
        refinement.after_step(torch.tensor(number, device=device))
        assert refinement.twists.grad is None
        moved = refinement.twists.detach() - before
        seen.append(refinement.scalars()["lr/pose"])
        factors.append(refinement.scalars()["camera/focal_factor"])
        if number == 0:
            assert bool((moved[slope != 0] * slope[slope != 0] < 0).all())
            torch.testing.assert_close(moved.abs().max(), torch.tensor(seen[0], device=device))
    expected = [0.01 * min(1, (n + 1) / 10) * 0.01 ** (n / 100) for n in (0, 4, 9, 50, 100)]
    assert seen == pytest.approx(expected, rel=1e-5)
    assert factors[:2] == [1, 1]
    assert factors[1] < factors[2] < factors[3]


def test_cameras_are_kept_before_the_rates_rise(device):
    refinement = refinement_of(some_cameras().to(device), final_factor=0.01, warm_up=0.1, pose_from=40)
    numbers, seen = (0, 39, 40, 44, 70, 100), []
    for number in numbers:
        before = refinement.twists.detach().clone()
        refinement.cameras().c2w.square().sum().backward()
        refinement.after_step(torch.tensor(number, device=device))
        assert torch.equal(refinement.twists.detach(), before) == (number < 40)
        seen.append(refinement.scalars()["lr/pose"])
    expected = [0.01 * min(1, (n - 39) / 10) * 0.01 ** ((n - 40) / 60) if n >= 40 else 0 for n in numbers]
    assert seen == pytest.approx(expected, rel=1e-5)


def test_cameras_that_face_one_way_are_kept_while_there_is_fog():
    assert RefinementSettings().kept_steps(1000, forward=True) == 300
    assert RefinementSettings().kept_steps(1000, forward=False) == 0
    assert RefinementSettings(pose_from=0.0).kept_steps(1000, forward=True) == 0
    assert RefinementSettings(pose_from=0.25).kept_steps(1000, forward=False) == 250


def test_the_focal_length_of_a_lens_is_refused():
    cameras = replace(some_cameras(), lens=Lens("perspective", torch.full((4, 6), 0.01)))
    with pytest.raises(ValueError, match=r"camera\.focal must be false for images of a lens that distorts, got true"):
        refinement_of(cameras, focal_lr=0.1)
    assert refinement_of(cameras).refined().lens is cameras.lens


def test_a_state_of_other_cameras_is_refused():
    state = refinement_of(some_cameras()).state_dict()
    with pytest.raises(ValueError, match="resume must name a checkpoint of the same cameras"):
        refinement_of(some_cameras()).check_state(state)


@pytest.mark.parametrize("side", [1, 3])
def test_rays_cast_for_cameras_are_those_of_the_kernel(scene, device, side):
    """Of the same pixels, with the same colours."""
    pixels, box = PixelSampler(scene.train, device, side), scene.aabb.to(device)
    torch.manual_seed(1)
    wanted = pixels.batch(200, box, "white")
    torch.manual_seed(1)
    found = pixels.batch(200, box, "white", pixels.cameras)
    assert torch.equal(found.pixels, wanted.pixels)
    torch.testing.assert_close(found.rgba, wanted.rgba, rtol=1e-6, atol=0)
    for name in ("origins", "directions", "near", "far"):
        torch.testing.assert_close(getattr(found.rays, name), getattr(wanted.rays, name), rtol=0, atol=2e-5)


# ---------------------------------------------------------------------------------------------------- what comes back


@pytest.fixture(scope="module")
def refined(scene, tmp_path_factory) -> Session:
    """A training whose cameras were moved by some degrees, with previews."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("refined")
    return fitted(session_of(perturbed(scene, 0.05), folder, *SH, "trainer.steps=220", "trainer.preview_every=150"))


@pytest.mark.sweep
def test_perturbed_cameras_come_back(refined, scene):
    truth = scene.train.cameras
    before, _ = pose_errors(refined.scene.train.cameras, truth)
    after, _ = pose_errors(refined.cameras.refined, truth)
    assert float(before.mean()) > 4
    assert float(after.mean()) < 0.55 * float(before.mean())


def test_views_are_judged_in_the_frame_of_the_refined_cameras(refined, scene):
    run = refined.result()
    aligned = run.evaluate(scene.test, progress=False).psnr
    by_hand = align_cameras(refined.scene.train.cameras, refined.cameras.refined).cameras(scene.test.cameras)
    run = replace(run, cameras=None)
    found = run.evaluate(replace(scene.test, cameras=by_hand), progress=False).psnr
    assert found == pytest.approx(aligned, abs=1e-3)
    assert found != run.evaluate(scene.test, progress=False).psnr
    assert refined.evaluate(progress=False).psnr == pytest.approx(aligned, abs=1e-3)
    # Training views have poses of their own.
    followed = refined.cameras.follow(refined.scene.train.cameras)
    assert torch.equal(followed.c2w, refined.cameras.refined.c2w)


def test_cameras_that_were_not_refined_follow_the_others():
    given, others = some_cameras(8), some_cameras(3)
    matrix = exp_se3(torch.randn(1, 6, dtype=torch.float64))[0]
    moved = Similarity(1.3, matrix[:3, :3], matrix[:3, 3])
    refined = moved.cameras(given)
    refined = replace(refined, intrinsics=given.intrinsics * torch.tensor([0.9, 0.9, 1.0, 1.0]))
    both = Cameras(torch.cat((others.c2w, given.c2w[5:])), torch.cat((others.intrinsics, given.intrinsics[5:])), 32, 24)
    found = RefinedCameras(given, refined).follow(both)
    torch.testing.assert_close(found.c2w[:3], moved.cameras(others).c2w, rtol=0, atol=1e-4)
    assert torch.equal(found.c2w[3:], refined.c2w[5:])
    torch.testing.assert_close(found.intrinsics[:, 0], torch.full((6,), 27.0))
    torch.testing.assert_close(found.intrinsics[:, 2:], both.intrinsics[:, 2:])


def test_poses_of_judged_views_are_refined_if_wished(refined, scene):
    field = {name: value.clone() for name, value in refined.field.named_parameters()}
    gradients = [level.grad.clone() for level in refined.field.grid.levels if level.grad is not None]
    assert gradients
    state = torch.get_rng_state()
    trainer = refined.config.trainer
    aligned = align_cameras(scene.train.cameras, refined.cameras.refined).cameras(scene.test.cameras)
    split = replace(scene.test, cameras=aligned)
    optimised = refine_views(refined.model, trainer, split, steps=40, rate=2e-3)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in refined.field.named_parameters():
        assert torch.equal(value, field[name])
        assert value.requires_grad
    kept = [level.grad for level in refined.field.grid.levels if level.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(kept, gradients, strict=True))
    run = replace(refined.result(), cameras=None)
    better = run.evaluate(optimised, progress=False).psnr
    assert better > run.evaluate(split, progress=False).psnr + 0.2
    # As the setting asks for it.
    run = refined.result()
    run.config.camera.test_steps = 5
    assert run.evaluate(refined.scene.test, progress=False).psnr != refined.evaluate(progress=False).psnr


def test_a_loaded_run_judges_as_the_session_did(refined):
    loaded = voxelfield.load(refined.output, "cpu")
    assert torch.equal(loaded.cameras.refined.c2w, refined.cameras.refined.c2w)
    found = loaded.evaluate(refined.scene.test, progress=False)
    assert found.psnr == pytest.approx(refined.evaluate(progress=False).psnr, abs=1e-3)


def test_refined_cameras_are_written_as_transforms(refined, tmp_path):
    split, cameras = refined.scene.train, refined.cameras.refined
    write_cameras(tmp_path / CAMERAS_FILE, replace(split, paths=None), cameras)
    content = json.loads((tmp_path / CAMERAS_FILE).read_text())
    assert {(frame["w"], frame["h"]) for frame in content["frames"]} == {(cameras.width, cameras.height)}
    photos, _ = read_transforms(tmp_path / CAMERAS_FILE)
    assert len(photos) == len(split)
    for index, photo in enumerate(photos):
        torch.testing.assert_close(photo.c2w.float(), cameras.c2w[index])
        wanted = cameras.intrinsics[index].tolist()
        assert photo.intrinsics(cameras.width, cameras.height) == pytest.approx(wanted, rel=1e-6)


# ------------------------------------------------------------------------------------------------ cameras that are lost


@pytest.fixture
def astray(refined):
    """A trained session, a camera of which is turned by 90 degrees for one test."""
    twists = refined.component(CameraRefinement).twists
    saved = twists.detach().clone()
    with torch.no_grad():
        twists[5, :3] += torch.tensor([0.0, 0.0, math.pi / 2])
    yield refined
    with torch.no_grad():
        twists.copy_(saved)


def search(session: Session, split, starts: int = 48, exposure=None):
    twists = session.component(CameraRefinement).twists.detach().clone()
    components = [session.component(CameraRefinement), *([] if exposure is None else [exposure])]
    searched = replace(session.scene, splits={"train": split})
    found = LostCameras(starts, Training(session.config, searched, session.model, None, components)).find()
    assert torch.equal(session.component(CameraRefinement).twists, twists)
    return found


@pytest.mark.parametrize("side", [pytest.param(64, marks=pytest.mark.slow), 13])
def test_a_lost_camera_is_found_again(astray, scene, monkeypatch, side):
    monkeypatch.setattr(lost_cameras, "_SIDE", side)
    before = astray.component(CameraRefinement).refined().c2w
    state = torch.get_rng_state()
    (found,) = search(astray, scene.train)
    astray.component(CameraRefinement).set_pose(found.index, found.twist)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.name == scene.train.names[5]
    assert found.after < 0.25 * found.before
    assert math.degrees(found.turned) == pytest.approx(90, abs=10)
    after = astray.component(CameraRefinement).refined().c2w
    others = [index for index in range(len(after)) if index != 5]
    assert torch.equal(after[others], before[others])
    angles, _ = pose_errors(astray.cameras.refined, scene.train.cameras)
    assert float(angles[5]) < 8
    moments = [
        m
        for m in astray.component(CameraRefinement)._optimizer.state[astray.component(CameraRefinement).twists].values()
        if m.dim() == 2
    ]
    assert len(moments) == 2
    assert all(not m[5].any() and m[others].any() for m in moments)
    assert search(astray, scene.train) == []


def test_an_image_of_something_else_is_found_nowhere(refined, scene):
    images = scene.train.images.clone()
    images[3] = torch.randint(256, images[3].shape, dtype=torch.uint8)
    images[3, ..., 3] = 255
    (lost,) = search(refined, replace(scene.train, images=images))
    assert (lost.index, lost.name, lost.after, lost.twist) == (3, scene.train.names[3], None, None)
    # Pixels that a mask rules out say nothing.
    masks = torch.ones(images.shape[:3], dtype=torch.bool)
    masks[3, :, 2:] = False
    images[3, :, :2] = scene.train.images[3, :, :2]
    assert search(refined, replace(scene.train, images=images, masks=masks)) == []


def test_a_dark_photograph_is_not_lost_if_its_exposure_is_known(refined, scene):
    exposure = AffineExposure(scene.train.cameras.c2w)
    with torch.no_grad():
        exposure.log_gain[3] = math.log(0.4)
    colors = scene.train.images[..., :3] * exposure.corrections()[0].detach()[:, None, None]
    images = torch.cat((colors.round().clamp(0, 255).to(torch.uint8), scene.train.images[..., 3:]), dim=-1)
    dark = replace(scene.train, images=images)
    assert [camera.index for camera in search(refined, dark, 2)] == [3]
    assert search(refined, dark, 2, exposure) == []


def test_a_view_is_not_searched_for_if_its_valid_pixels_are_cut_off(refined, scene, monkeypatch):
    monkeypatch.setattr(lost_cameras, "_SIDE", 13)
    images = scene.train.images.clone()
    assert images.shape[1:3] == (25, 25)  # in larger pixels, 12 x 12 and a remainder
    images[3] = torch.randint(256, images[3].shape, dtype=torch.uint8)
    images[3, ..., 3] = 255
    assert [camera.index for camera in search(refined, replace(scene.train, images=images), 2)] == [3]
    masks = torch.ones(images.shape[:3], dtype=torch.bool)
    masks[3] = False
    masks[3, -1, -1] = True
    assert search(refined, replace(scene.train, images=images, masks=masks), 2) == []


def test_a_training_with_sparse_levels_refines_its_cameras(scene):
    overrides = ("trainer.sparse_resolutions=[28]", "trainer.finest_resolution=28", "model.resolutions=[12,16]")
    session = fitted(session_of(scene, None, *overrides, "trainer.steps=60", "camera.finest_from=0.5"))
    (level,) = session.model.grid.sparse_grids
    assert level.count > 0
    assert session.model.grid.active == 3
    assert (session.cameras.refined.c2w - session.cameras.given.c2w).abs().max() > 1e-4


@pytest.mark.sweep
def test_training_looks_for_lost_cameras_as_a_stage_begins(scene, caplog):
    caplog.set_level(logging.INFO)
    motion = torch.zeros(len(scene.train), 6)
    motion[5, 2] = 2.0
    cameras = replace(scene.train.cameras, c2w=product(exp_se3(motion), scene.train.cameras.c2w))
    given = Scene(scene.name, scene.aabb, {"train": replace(scene.train, cameras=cameras)})
    overrides = (*SH, "trainer.steps=120", "trainer.finest_resolution=32", "camera.finest_from=0.6")
    session = fitted(session_of(given, None, *overrides))
    found = [record.message for record in caplog.records if "far worse than others" in record.message]
    assert len(found) == 1
    assert found[0].startswith(f"step 72: the camera of {scene.train.names[5]} reproduces")
    assert pose_errors(session.cameras.refined, scene.train.cameras)[0].max() < 12
    without = fitted(session_of(given, None, *overrides, "camera.search_poses=0"))
    assert pose_errors(without.cameras.refined, scene.train.cameras)[0].max() > 60


def test_copies_of_a_camera_keep_the_focal_length(device):
    refinement = refinement_of(some_cameras().to(device), focal_lr=0.1)
    with torch.no_grad():
        refinement.log_focal.fill_(math.log(1.25))
        refinement.twists.copy_(torch.randn(4, 6))
    copies = refinement.copies(2, refinement.twists[[2, 2]], 2, pose_lr=0.1, steps=3)
    for copy in range(2):
        assert torch.equal(copies.refined().c2w[copy], refinement.refined().c2w[2])
        assert torch.equal(copies.refined().intrinsics[copy], refinement.refined().intrinsics[2] / 2)
    intrinsics = copies.refined().intrinsics
    for number in range(3):
        copies.cameras().c2w.square().sum().backward()
        copies.cameras().intrinsics.sum().backward()
        copies.after_step(torch.tensor(number, device=device))
    assert torch.equal(copies.refined().intrinsics, intrinsics)
    assert not torch.equal(copies.twists, refinement.twists[[2, 2]])


@pytest.mark.parametrize("unit", [1.0, 40.0])
def test_a_camera_can_be_brought_where_others_are(device, unit):
    refinement = refinement_of(some_cameras().to(device), focal_lr=0.1, unit=unit)
    with torch.no_grad():
        refinement.log_focal.fill_(math.log(1.25))
        refinement.twists.copy_(torch.randn(4, 6))
    places = refinement.refined().c2w
    for twist, place in zip(refinement.twists_towards(2, places), places, strict=True):
        refinement.set_pose(2, twist)
        torch.testing.assert_close(refinement.refined().c2w[2], place, rtol=0, atol=1e-5 * unit)
        copies = refinement.copies(2, twist[None], 1, pose_lr=0.1, steps=3)
        assert torch.equal(copies.refined().c2w[0], refinement.refined().c2w[2])


def test_the_unit_of_motions_is_the_depth_of_a_scene_that_all_cameras_face():
    rows = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 2.0))
    warp = NdcBox(((-1.0, -1.0, -50.0), (1.0, 1.0, -30.0)), rows, 1.0, ((-1.0, -1.0), (1.0, 1.0)), 1.0)
    assert warp.motion_unit == pytest.approx(42.0)


def test_small_images_are_means_of_what_shows():
    images = torch.zeros(1, 7, 10, 4, dtype=torch.uint8)
    images[0, :3, :3] = torch.tensor([200, 100, 0, 255], dtype=torch.uint8)
    images[0, :3, 3] = torch.tensor([80, 80, 80, 255], dtype=torch.uint8)
    images[0, :3, 4:6] = torch.tensor([255, 255, 255, 0], dtype=torch.uint8)
    masks = torch.ones(1, 7, 10, dtype=torch.bool)
    masks[0, 0, 0] = False
    cameras = Cameras(torch.eye(4)[None], torch.tensor([[30.0, 33.0, 5.0, 3.0]]), 10, 7)
    small = shrunk(Split(images, cameras, ("one",), masks), 3)
    assert small.images.shape == (1, 2, 3, 4)
    assert small.images[0, 0, 0].tolist() == [200, 100, 0, 255]
    assert small.images[0, 0, 1].tolist() == [80, 80, 80, 85]
    assert small.masks[0].tolist() == [[False, True, True], [True, True, True]]
    torch.testing.assert_close(small.cameras.intrinsics, torch.tensor([[10.0, 11.0, 5 / 3, 1.0]]))
    masks[0] = torch.rand(7, 10) < 0.5
    masks[0, 0, :2] = True
    assert shrunk(Split(images, cameras, ("one",), masks), 3).masks.any()


@pytest.mark.slow
def test_a_network_moves_cameras_towards_the_truth(scene):
    given = perturbed(scene, 0.05)
    session = fitted(session_of(given, None, "model=dense", "model.width=16", "model.hidden=1", "trainer.steps=150"))
    before, _ = pose_errors(given.train.cameras, scene.train.cameras)
    after, _ = pose_errors(session.cameras.refined, scene.train.cameras)
    assert float(after.mean()) < 0.8 * float(before.mean())


@pytest.mark.slow
def test_a_wrong_focal_length_is_found(scene):
    split = scene.train
    intrinsics = split.cameras.intrinsics * torch.tensor([1.1, 1.1, 1.0, 1.0])
    given = Scene(
        scene.name, scene.aabb, {"train": replace(split, cameras=replace(split.cameras, intrinsics=intrinsics))}
    )
    session = fitted(session_of(given, None, "trainer.steps=120", "camera.focal=true", "camera.focal_lr=5e-3"))
    assert 0.94 < 1.1 * session.cameras.focal_factor < 1.06
    assert session.cameras.follow(given.train.cameras).intrinsics[0, 0] == session.cameras.refined.intrinsics[0, 0]


def test_small_adjustments_begin_once_the_field_has_formed(scene, caplog):
    stages = "trainer.stages=[{step: 0, resolution: 16}, {step: 4, resolution: 24}]"
    settings = ("camera=adjust", "camera.stages=[]", stages, "trainer.steps=20", "trainer.occupancy.start=1000")
    kept: dict[int, bool] = {}
    grown: list[int] = []

    def look(session: Session) -> None:
        kept[session.step] = not session.component(CameraRefinement).twists.any()

    with caplog.at_level("INFO", logger="voxelfield"):
        session_of(scene, None, *settings, on_step=look, on_stage=lambda session: grown.append(session.step)).fit()
    assert kept == {step: step <= 6 for step in range(1, 21)}
    assert grown[-1] == 4
    assert "the stages are those of trainer.stages" in caplog.text


def test_resuming_changes_nothing(scene, tmp_path):
    given, overrides = perturbed(scene, 0.05), ("trainer.steps=20", "camera.focal=true", "trainer.average_steps=4")
    whole = fitted(session_of(given, tmp_path / "whole", *overrides))

    first = session_of(given, tmp_path / "parts", *overrides, on_step=interrupt_at(11))
    assert not first.fit()
    halfway = load_checkpoint(first.output)["cameras"]
    torch.rand(1000)
    second = restored(session_of(given, tmp_path / "parts", *overrides, seed=9), first.output)
    assert second.step == 11
    assert second.fit()
    expected, actual = load_checkpoint(whole.output)["cameras"], load_checkpoint(second.output)["cameras"]
    for name in ("c2w", "intrinsics"):
        assert torch.equal(actual[name], expected[name])
        assert not torch.equal(actual[name], halfway[name])
    for number, state in expected["optimizer"].items():
        assert all(torch.equal(state[key], actual["optimizer"][number][key]) for key in state)
    torch.testing.assert_close([*whole.field.parameters()], [*second.field.parameters()], rtol=0, atol=0)


def test_checkpoints_with_and_without_refinement_are_told_apart(scene, tmp_path):
    overrides = ("trainer.steps=1",)
    session = session_of(scene, tmp_path / "refined", *overrides)
    plain = session_of(scene, tmp_path / "plain", *overrides, "camera=none")
    assert plain.component(CameraRefinement) is None
    assert plain.cameras is None
    for one in (session, plain):
        one.fit()
    with pytest.raises(ValueError, match=r"camera\.name must be none, as in the checkpoint, got refine"):
        session.restore(load_checkpoint(plain.output))
    with pytest.raises(ValueError, match=r"camera\.name must be refine, as in the checkpoint, got none"):
        plain.restore(load_checkpoint(session.output))
    assert "cameras" not in load_checkpoint(plain.output)


def test_images_seen_from_wrong_poses_carve_nothing(scene, caplog):
    coarse = ("trainer.steps=1", "trainer.occupancy.start=10", "trainer.stages=[{step: 0, resolution: 24}]")
    with caplog.at_level(logging.INFO):
        session = session_of(scene, None, *coarse)
    assert "no visual hull is used" in caplog.text
    session.fit()
    assert session.occupancy.fraction() == 1
    carved = fitted(session_of(scene, None, *coarse, "camera=none"))
    assert carved.occupancy.fraction() < 0.9


def config_of_a_short_run():
    return preset(
        "scene=lego",
        "data.root=tests/fixtures",
        *(text for text in TINY if not text.startswith("trainer.log")),
        "logger=none",
        "trainer.image_size=25",
        "trainer.steps=10",
        "trainer.evaluation.video_frames=0",
        "camera.test_steps=2",
        device="cpu",
    )


def test_cameras_that_cannot_be_written_keep_no_other_result_from_it(tmp_path):
    (tmp_path / CAMERAS_FILE).mkdir()
    with pytest.raises(OSError, match=rf"^{re.escape(CAMERAS_FILE)} could not be written in "):
        train_as_configured(config_of_a_short_run(), tmp_path, ROOT)
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "report.html").is_file()


def test_a_run_from_the_command_line_leaves_its_cameras_behind(tmp_path):
    config = config_of_a_short_run()
    metrics = train_as_configured(config, tmp_path, ROOT)
    changes = json.loads((tmp_path / "metrics.json").read_text())["cameras"]
    assert changes == metrics["cameras"]
    assert changes["turned_degrees"] > 0
    assert changes["moved"] > 0
    assert changes["focal_factor"] == 1
    frames = json.loads((tmp_path / CAMERAS_FILE).read_text())["frames"]
    cameras = voxelfield.load(tmp_path, "cpu").cameras
    assert torch.tensor([frame["transform_matrix"] for frame in frames]).equal(cameras.refined.c2w)
    assert all(Path(frame["file_path"]).is_file() for frame in frames)


# ------------------------------------------------------------------------------------------------------ the schedule


def test_stages_are_shares_of_the_steps():
    settings = preset("camera=refine", "trainer.steps=1000", device="cpu", name="train")
    scheduled = RefinementSettings.of(settings).adapt(settings.trainer)
    assert [stage.step for stage in scheduled.stages] == [0, 100, 200, 300, 400, 500]
    assert scheduled.resolutions == [16, 32, 64, 128, 256, 400]
    assert [stage.crop for stage in scheduled.stages] == [False, False, False, True, False, False]
    assert scheduled.occupancy.start == 100
    assert RefinementSettings.of(settings).adapt(scheduled) == scheduled
    assert settings.trainer.resolutions == [64, 128, 256, 400]


def test_small_adjustments_keep_the_stages_of_the_trainer():
    settings = preset("camera=adjust", "camera.occupancy_from=0.5", "trainer.steps=1000", device="cpu", name="train")
    scheduled = RefinementSettings.of(settings).adapt(settings.trainer)
    assert settings.camera.refines
    assert scheduled.stages == settings.trainer.stages
    assert scheduled.occupancy.start == 500
    assert RefinementSettings.of(settings).kept_steps(1000, forward=False) == 300


def test_stages_as_fine_as_the_last_are_left_out():
    settings = preset("camera=refine", "trainer=smoke", "trainer.steps=10", device="cpu", name="train")
    assert RefinementSettings.of(settings).adapt(settings.trainer).resolutions == [16, 32, 48]
    settings = preset("camera=refine", "trainer.finest_resolution=12", "trainer=smoke", device="cpu")
    settings.trainer.stages = settings.trainer.stages[:1]
    settings.trainer.stages[0].resolution = 12
    stages = RefinementSettings.of(settings).adapt(settings.trainer).stages
    assert [(stage.step, stage.resolution) for stage in stages] == [(0, 12)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("camera.name=guess", "camera.name must be one of none, refine, got 'guess'"),
        ("camera.final_factor=2", "camera.final_factor must lie in (0, 1], got 2.0"),
        ("camera.finest_from=0.2", "camera.stages must start at 0 and rise to camera.finest_from, got"),
        (
            "camera.stages=[{start: 0.1, resolution: 32}]",
            "camera.stages must start at 0 and rise to camera.finest_from, got [0.1, 0.5]",
        ),
        (
            "camera.stages=[{start: 0.0, resolution: 32}, {start: 0.1, resolution: 16}]",
            "camera.stages must not become coarser, got resolutions [32, 16]",
        ),
        ("camera.stages=[{start: 1.5, resolution: 32}]", "camera.stages[0].start must lie in [0, 1), got 1.5"),
    ],
)
def test_settings_that_make_no_sense(override, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        preset("camera=refine", override, device="cpu")
