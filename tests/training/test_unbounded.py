"""Scenes that reach beyond a box: a ball in front of a far background, trained, resumed, saved and loaded."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from camera_poses import looking_at
from painted_ball import along_and_beside, check_saved_alike, photograph
from small_pyramid import settings
from small_sessions import fitted, restored
from warp_fields import field_over

import voxelfield
from voxelfield.datasets.scene import Scene, Split
from voxelfield.export import save_model
from voxelfield.rendering.alignment import pose_errors
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings, count_visible_samples, visible_cells, visible_samples
from voxelfield.rendering.rigid import compose, exp_se3
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.training.session import Session
from voxelfield.warps.nested_boxes import NestedBoxes

SIZE = 24
BOXES = NestedBoxes(((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0)), 5, near=0.2)
BALL = 0.7
FAR = 12.0  # radius of the painted sphere behind it


def photographs(cameras: Cameras) -> torch.Tensor:
    """Exact images of the ball in front of the sphere, (N, H, W, 4) uint8."""

    def sphere(rays):
        along, beside = along_and_beside(rays, torch.zeros(3))
        return -along + (FAR**2 - beside).sqrt()

    return photograph(cameras, BALL, torch.zeros(3), sphere, scale=0.25)


def ring(count: int, radius: float, phase: float) -> Cameras:
    angle = torch.arange(count) * (2 * torch.pi / count) + phase
    position = radius * torch.stack((angle.cos(), angle.sin(), 0.3 * torch.sin(3 * angle)), dim=-1)
    intrinsics = torch.tensor([[20.0, 20.0, SIZE / 2, SIZE / 2]]).repeat(count, 1)
    return Cameras(looking_at((0.0, 0.0, 0.0), position), intrinsics, SIZE, SIZE)


@pytest.fixture(scope="module")
def scene() -> Scene:
    splits = {}
    for name, cameras in (("train", ring(16, 3.0, 0.0)), ("test", ring(3, 3.0, 0.2))):
        splits[name] = Split(photographs(cameras), cameras, tuple(f"{name}{i}" for i in range(len(cameras))))
    return Scene("ball", torch.tensor(BOXES.aabb), splits, bounded=False)


@pytest.fixture(scope="module")
def trained(scene, tmp_path_factory) -> Session:
    return fitted(Session(scene, settings("trainer.steps=160"), warp=BOXES, output=tmp_path_factory.mktemp("run")))


def test_the_background_is_seen_and_in_its_place(scene, trained):
    evaluation = trained.evaluate(progress=False)
    assert evaluation.psnr > 23
    view = trained.result().render(scene.test.cameras, 0)
    ball, corner = view.depth[SIZE // 2, SIZE // 2], view.depth[0, 0]
    assert 1.9 < ball < 2.9  # 3 - 0.7, from the camera
    assert corner > 5
    assert view.opacity.min() > 0.9


def test_one_box_cannot_show_it(scene):
    session = fitted(Session(replace(scene, bounded=True), settings("trainer.steps=160")))
    assert session.evaluate(progress=False).psnr < 18


def test_its_faint_samples_are_kept(scene, caplog):
    given = settings("trainer.steps=1", "trainer.render.min_weight=1e-3")
    with caplog.at_level("INFO", logger="voxelfield"):
        assert Session(scene, given, warp=BOXES).config.trainer.render.min_weight == 1e-4
    assert "trainer.render.min_weight is 0.0001: the scene goes on beyond a box" in caplog.text
    assert Session(replace(scene, bounded=True), given).config.trainer.render.min_weight == 1e-3


def test_its_settings_say_where_it_lies(trained):
    assert trained.config.recorded_warp == BOXES
    assert trained.field.aabb.tolist() == [list(corner) for corner in BOXES.outermost]
    x, y, z = trained.occupancy.occupied.shape
    assert (y, z) == (16, 16)
    assert x > 5 * 16


def test_a_run_and_its_model_file_show_the_same(scene, trained, tmp_path):
    points = torch.tensor([[0.65, 0.0, 0.0], [0.0, 0.0, 5.0], [100.0, 0.0, 0.0]])
    run = check_saved_alike(trained, scene.test.cameras, points, tmp_path)
    assert run.density(points)[0] > 0
    assert run.density(points)[2] == 0


def test_a_smaller_model_file_shows_nearly_the_same(scene, trained, tmp_path):
    expected = trained.result().render(scene.test.cameras, 1)
    save_model(tmp_path / "model.safetensors", trained.result(), quality="standard")
    small = voxelfield.load(tmp_path / "model.safetensors", "cpu")
    assert (small.render(scene.test.cameras, 1).rgb - expected.rgb).abs().mean() < 0.01


def test_what_cameras_see_is_found_in_every_box(scene, trained):
    run = trained.result()
    cameras = scene.train.cameras
    seen = visible_cells(run.field, run.occupancy, trained.model.settings, cameras)
    rays = cameras.image_rays(3, run.field.aabb)
    samples, _ = visible_samples(run.field, rays, run.occupancy, trained.model.settings)
    low, high = run.occupancy.aabb
    cells = ((samples.positions - low) / (high - low) * torch.tensor(seen.shape)).long()
    assert seen[cells.unbind(-1)].all()
    assert 0 < seen.float().mean() <= run.occupancy.fraction() + 1e-6


def saved_in_passing(scene: Scene, config, output: Path, stop: int) -> tuple[Session, Path]:
    """Trains to the end; returns the session, and a copy of the checkpoint that an interruption would have left."""
    copy = output / "stopped" / "checkpoint.pt"

    def save(session: Session) -> None:
        if session.step == stop:
            session.save()
            session.wait()
            copy.parent.mkdir()
            shutil.copy(session.checkpoint, copy)

    session = fitted(Session(scene, config, warp=BOXES, output=output, on_step=save))
    return session, copy


def assert_continued_alike(scene: Scene, whole: Session, config, checkpoint: Path, stop: int) -> None:
    """Goes on from a checkpoint, and compares what comes of it with a training that was never interrupted."""
    session = restored(Session(scene, config, warp=BOXES), checkpoint)
    assert session.step == stop
    session.fit()
    torch.testing.assert_close([*whole.field.parameters()], [*session.field.parameters()], rtol=0, atol=0)


def test_a_resumed_training_ends_the_same(scene, tmp_path):
    config = settings("trainer.steps=60")
    whole, checkpoint = saved_in_passing(scene, config, tmp_path, stop=30)
    assert_continued_alike(scene, whole, config, checkpoint, stop=30)


def test_a_training_in_other_boxes_is_not_resumed(scene, trained):
    session = Session(scene, settings("trainer.steps=160"), warp=replace(BOXES, count=4))
    with pytest.raises(ValueError, match=r"the settings of warp must be those of the checkpoint"):
        session.restore(load_checkpoint(trained.output))


def test_nothing_is_put_beside_cameras_nor_where_one_image_looks(scene):
    """Cells about a training camera are empty from the start, and so are those that a single camera sees."""
    boxes = replace(BOXES, near=0.4)
    cameras = scene.train.cameras
    # One more camera, which alone looks away from all others.
    away = cameras.c2w[:1].clone()
    away[0, :3, 3] = torch.tensor([0.0, 0.0, 6.0])
    away[0, :3, :3] = torch.tensor([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, -1.0]])
    c2w, intrinsics = torch.cat((cameras.c2w, away)), torch.cat((cameras.intrinsics, cameras.intrinsics[:1]))
    names = (*scene.train.names, "away")
    images = torch.cat((scene.train.images, scene.train.images[:1]))
    train = Split(images, Cameras(c2w, intrinsics, SIZE, SIZE), names)
    fine = settings("trainer.steps=1", "trainer.occupancy.resolution=64")
    session = fitted(Session(replace(scene, splits={"train": train}), fine, warp=boxes))
    grid = session.occupancy
    places, _ = boxes.from_world(cameras.c2w[:, :3, 3])
    assert not grid.contains(places).any()
    between = cameras.c2w[:, :3, 3] * 0.5
    assert grid.contains(boxes.from_world(between)[0]).all()
    alone = torch.tensor([[0.0, 0.0, 7.5], [0.2, 0.1, 7.8]])
    assert not grid.contains(boxes.from_world(alone)[0]).any()


def test_sparse_levels_train_resume_and_are_saved(scene, tmp_path):
    fine = settings(
        *("trainer.steps=66", "trainer.sparse_resolutions=[64]"),
        "trainer.stages=[{step:0,resolution:16},{step:20,resolution:32},{step:40,resolution:64},{step:58,resolution:64}]",
    )
    whole, checkpoint = saved_in_passing(scene, fine, tmp_path, stop=50)
    sparse = whole.field.grid.sparse_grids[0]
    assert whole.field.grid.active == 4
    assert 0 < sparse.count < sparse.exists.numel()
    assert sparse.features.detach().abs().max() > 0
    assert_continued_alike(scene, whole, fine, checkpoint, stop=50)
    loaded = voxelfield.load(tmp_path, "cpu")
    expected = whole.result().render(scene.test.cameras, 1).rgb
    torch.testing.assert_close(loaded.render(scene.test.cameras, 1).rgb, expected, atol=0.02, rtol=0)


def test_cells_are_told_how_many_visible_samples_they_hold(device):
    torch.manual_seed(0)
    field, occupancy = field_over(BOXES, (24, 5, 4), device)
    cameras, shape = ring(2, 3.0, 0.1).to(device), (40, 3, 5)
    render = RenderSettings(step=0.05, min_weight=0.01)
    rows = torch.arange(1, SIZE, 3, device=device)
    y, x = torch.meshgrid(rows + 0.5, rows + 0.5, indexing="ij")
    pixels = torch.stack((x, y), dim=-1).view(-1, 2).repeat(2, 1)
    index = torch.arange(2, device=device).repeat_interleave(len(rows) ** 2)
    positions = visible_samples(field, cameras.rays(index, pixels, field.aabb), occupancy, render)[0].positions
    low, high = occupancy.aabb
    cells = ((positions - low) / (high - low) * torch.tensor(shape, device=device)).long()
    expected = torch.zeros(shape, dtype=torch.int32, device=device)
    for x, y, z in cells.tolist():
        expected[x, y, z] += 1
    shown = count_visible_samples(field, occupancy, render, cameras, shape, every=3)
    assert torch.equal(shown, expected)
    assert int(shown.max()) > 3
    assert int((shown == 0).sum()) > 10


@pytest.mark.slow
def test_cameras_are_refined_in_nested_boxes_too(scene):
    generator = torch.Generator().manual_seed(5)
    split = scene.train
    motion = exp_se3(0.03 * torch.randn(len(split), 6, generator=generator))
    given = replace(split, cameras=replace(split.cameras, c2w=compose(motion, split.cameras.c2w)))
    slowly = ("camera.pose_lr=1e-3", "camera.warm_up=0.3", "camera.final_factor=0.2", "trainer.steps=200")
    refine = ("camera=refine", "camera.stages=[{start: 0.0, resolution: 16}]", *slowly)
    session = fitted(Session(replace(scene, splits={"train": given}), settings(*refine), warp=BOXES))
    before, _ = pose_errors(given.cameras, split.cameras)
    after, _ = pose_errors(session.cameras.refined, split.cameras)
    assert float(after.mean()) < 0.75 * float(before.mean())
