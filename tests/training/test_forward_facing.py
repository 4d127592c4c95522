"""Scenes in normalised device coordinates: a ball before a far wall, seen from one side, trained, resumed and saved."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from painted_ball import check_saved_alike, photograph
from PIL import Image
from quick_presets import preset
from small_pyramid import settings
from small_sessions import fitted, restored

import voxelfield
from voxelfield.cli.command import main
from voxelfield.datasets.scene import Scene, Split
from voxelfield.export import save_model
from voxelfield.export.lattice import box_lattice
from voxelfield.models.pyramid import PyramidConfig
from voxelfield.rendering.cameras import Cameras, views_of_points
from voxelfield.rendering.paths import path_named, reference_camera, seen_point, spiral
from voxelfield.rendering.rigid import compose, exp_se3
from voxelfield.rendering.view_pictures import depth_bounds, depth_colors
from voxelfield.rendering.viewpoints import viewpoint_of
from voxelfield.runs.train import load_configured_scene
from voxelfield.settings import CameraConfig, resolve
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.training.session import Session
from voxelfield.viewer.pictures import Painter, PictureRequest
from voxelfield.warps.choice import WarpConfig, choose_warp
from voxelfield.warps.ndc_box import NdcBox
from voxelfield.warps.nested_boxes import NestedBoxes

SIZE, FOCAL = 24, 22.0
BALL, DISTANCE = 0.8, 4.0
WALL = 20.0  # depth

# The grids' rate is low, so that training ends before either field shows all that it can; the networks' is high enough
# for the field to become opaque.
RATES = "trainer.rates={grid: 1, network: 3, final_factor: 0.1, cooldown: 0}"


def photographs(cameras: Cameras) -> torch.Tensor:
    """Exact images of the ball before the wall, (N, H, W, 4) uint8."""

    def wall(rays):
        return (-WALL - rays.origins[:, 2]) / rays.directions[:, 2]

    return photograph(cameras, BALL, torch.tensor([0.0, 0.0, -DISTANCE]), wall, scale=0.4)


def cameras_at(across: torch.Tensor, up: torch.Tensor) -> Cameras:
    c2w = torch.eye(4).repeat(len(across), 1, 1)
    c2w[:, 0, 3], c2w[:, 1, 3] = across, up
    intrinsics = torch.tensor([[FOCAL, FOCAL, SIZE / 2, SIZE / 2]]).repeat(len(across), 1)
    return Cameras(c2w, intrinsics, SIZE, SIZE)


@pytest.fixture(scope="module")
def scene() -> Scene:
    x, y = torch.meshgrid(torch.linspace(-0.9, 0.9, 4), torch.linspace(-0.9, 0.9, 4), indexing="ij")
    train = cameras_at(x.flatten(), y.flatten())
    test = cameras_at(torch.tensor([-0.5, 0.1, 0.6]), torch.tensor([0.2, -0.6, 0.5]))
    splits = {
        name: Split(photographs(cameras), cameras, tuple(f"{name}{i}" for i in range(len(cameras))))
        for name, cameras in (("train", train), ("test", test))
    }
    points = torch.tensor([[0.0, 0.0, -3.2], [8.0, 8.0, -20.0], [-8.0, -8.0, -20.0]]).double()
    box = torch.tensor([[-9.0, -9.0, -21.0], [9.0, 9.0, -3.0]])
    facts = {"points": points, "all_poses": train.c2w.double(), "all_cameras": train}
    return Scene("ball", box, splits, bounded=False, estimated=True, **facts)


@pytest.fixture(scope="module")
def warp(scene) -> NdcBox:
    chosen = choose_warp(scene, WarpConfig())
    assert isinstance(chosen, NdcBox)
    return chosen


@pytest.fixture(scope="module")
def trained(scene, tmp_path_factory) -> Session:
    return fitted(Session(scene, settings("trainer.steps=160", RATES), output=tmp_path_factory.mktemp("run")))


def test_ball_and_wall_are_seen_and_in_their_places(scene, trained):
    assert trained.evaluate(progress=False).psnr > 24
    view = trained.result().render(scene.test.cameras, 1)
    assert view.opacity.min() > 0.9
    middle, corner = view.depth[SIZE // 2 - 3, SIZE // 2 - 1], view.depth[-1, -1]
    assert DISTANCE - BALL - 0.5 < middle < DISTANCE + 0.5
    assert corner > 8


def test_sparse_levels_add_detail_in_these_coordinates(scene, tmp_path):
    fine = settings(
        *("trainer.steps=60", "trainer.sparse_resolutions=[56]"),
        "trainer.stages=[{step:0,resolution:16},{step:20,resolution:32},{step:40,resolution:56}]",
    )
    session = fitted(Session(scene, fine, output=tmp_path))
    (sparse,) = session.field.grid.sparse_grids
    assert 0 < sparse.count < sparse.exists.numel()
    assert sparse.features.detach().abs().max() > 0
    expected = session.result().render(scene.test.cameras, 0).rgb
    torch.testing.assert_close(voxelfield.load(tmp_path, "cpu").render(scene.test.cameras, 0).rgb, expected)


@pytest.mark.slow
@pytest.mark.parametrize("camera", ["camera=none", pytest.param("camera=refine", marks=pytest.mark.sweep)])
def test_the_preset_for_these_captures_learns_them(scene, camera):
    loss = preset("model=pyramid", "trainer=forward_facing", device="cpu", name="train").trainer.loss
    weights = [f"trainer.loss.{name}={value}" for name, value in vars(loss).items() if name != "tv_until"]
    steps = ("trainer.steps=160", "trainer.loss.tv_until=160", "camera.stages=[{start: 0.0, resolution: 16}]")
    session = fitted(Session(scene, settings(camera, *steps[: 3 if "refine" in camera else 2], *weights)))
    assert session.evaluate(progress=False).psnr > 24


def test_the_trainer_follows_from_the_scene(scene, monkeypatch, warp):
    monkeypatch.setattr(resolve, "config_name", lambda device: "train")
    views = scene.train.cameras[list(range(16)) * 7]
    many = Split(scene.train.images.repeat(7, 1, 1, 1), views, tuple(str(i) for i in range(len(views))))
    boxes = NestedBoxes(warp.aabb, 4, near=1.0)
    refine = CameraConfig(name="refine")
    for chosen, split, model, camera, trainer, expected in (
        (warp, scene.train, "pyramid", None, None, "forward_facing"),
        (boxes, scene.train, "pyramid", None, None, "few_photographs"),
        (boxes, scene.train, "pyramid", refine, None, "few_photographs"),
        (boxes, many, "pyramid", None, None, "many_photographs"),
        (warp, many, "pyramid", None, None, "many_photographs"),
        (boxes, many, "pyramid", refine, None, "many_photographs"),
        (boxes, many, PyramidConfig(), None, None, "many_photographs"),
        (boxes, many, "sh", None, None, "sh"),
        (boxes, many, "dense", None, None, "default"),
        (boxes, many, "pyramid", None, "fast", "fast"),
        (None, many, "pyramid", None, None, "default"),
    ):
        placed = replace(scene, splits={"train": split})
        config = resolve.completed({"model": model, "trainer": trainer, "camera": camera}, placed, chosen, "cpu")
        assert config.trainer == preset(f"trainer={expected}", device="cpu", name="train").trainer
        assert config.camera == (camera or CameraConfig())
    monkeypatch.setattr(resolve, "config_name", lambda device: "train_cpu")
    place = replace(scene, splits={"train": many})
    for trainer, expected in ((None, "cpu"), ("auto", "many_photographs")):
        config = resolve.completed({"model": "pyramid", "trainer": trainer}, place, boxes, "cpu")
        assert config.trainer == preset(f"trainer={expected}", device="cpu", name="train").trainer


@pytest.mark.sweep
def test_right_cameras_stay_where_they_are(scene):
    """Fog would contract them towards their mean, and turn them, which test views do not follow."""
    refine = ("camera=refine", "camera.stages=[{start: 0.0, resolution: 16}]")
    session = fitted(Session(scene, settings("trainer.steps=250", *refine)))
    assert session.cameras.similarity.scale == pytest.approx(1, abs=0.15)
    assert session.cameras.changes()["turned_degrees"] < 1
    assert session.evaluate(progress=False).psnr > 26


@pytest.mark.sweep
def test_nested_boxes_with_as_many_voxels_show_less(scene, trained):
    boxes = NestedBoxes(((-2.0, -2.0, -6.0), (2.0, 2.0, -2.0)), 4, near=1.0)
    nested = fitted(Session(scene, settings("trainer.steps=160", RATES), warp=boxes))
    vertices = [session.field.grid.levels[-1][..., 0].numel() for session in (trained, nested)]
    assert vertices[0] < 1.3 * vertices[1]
    assert trained.evaluate(progress=False).psnr > nested.evaluate(progress=False).psnr + 1


def test_a_run_and_its_model_file_show_the_same(scene, trained, tmp_path, warp):
    points = torch.tensor([[0.0, 0.0, -DISTANCE + BALL - 0.05], [0.0, 0.0, -1.0], [0.0, 0.0, 5.0]])
    run = check_saved_alike(trained, scene.test.cameras, points, tmp_path)
    assert run.field.warp == warp
    assert run.density(points)[0] > 0
    assert run.density(points)[1:].tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_a_small_model_file_shows_nearly_the_same(scene, trained, tmp_path):
    expected = trained.result().render(scene.test.cameras, 1)
    run = voxelfield.load(trained.output, "cpu")
    save_model(tmp_path / "small.safetensors", run, quality="standard", cameras=scene.train.cameras)
    smaller = voxelfield.load(tmp_path / "small.safetensors", "cpu")
    assert (smaller.render(scene.test.cameras, 1).rgb - expected.rgb).abs().mean() < 0.01


def test_a_training_in_other_coordinates_is_not_resumed(scene, trained, warp):
    session = Session(scene, settings("trainer.steps=160"), warp=replace(warp, near=1.0))
    with pytest.raises(ValueError, match=r"scene\.aabb and the settings of warp must be those of the checkpoint"):
        session.restore(load_checkpoint(trained.output))
    boxes = NestedBoxes(((-2.0, -2.0, -6.0), (2.0, 2.0, -2.0)), 4, near=1.0)
    with pytest.raises(ValueError, match=r"must be those of the checkpoint .*: set warp\.ndc=true$"):
        Session(scene, settings("trainer.steps=160"), warp=boxes).restore(load_checkpoint(trained.output))


def test_a_frame_that_differs_by_rounding_is_resumed(scene, trained, warp):
    other = replace(warp, near=warp.near * (1 + 1e-9))
    session = restored(Session(scene, settings("trainer.steps=160"), warp=other), trained.output)
    assert session.step == 160


def test_it_trains_on_every_device(scene, device):
    config = settings("trainer.steps=60", f"trainer.precision={'float16' if device.type == 'cuda' else 'float32'}")
    config.device = str(device)
    session = Session(scene, config)
    before = session.evaluate(progress=False).psnr
    assert session.fit()
    assert session.evaluate(progress=False).psnr > before + 3


def test_cells_that_one_image_shows_stay_empty(scene, warp):
    fine = settings("trainer.steps=1", "trainer.occupancy.resolution=32")
    session = fitted(Session(scene, fine))
    grid = session.occupancy
    # At the near plane, the outermost images lie beside one another.
    corner = torch.tensor(
        [[warp.warped_aabb[0][0] + 0.02, warp.warped_aabb[0][1] + 0.02, warp.warped_aabb[1][2] - 0.02]]
    )
    assert not grid.contains(corner).any()
    assert grid.contains(warp.from_world(torch.tensor([[0.0, 0.0, -5.0]]))[0]).all()


def test_what_is_exported_is_in_world_units(scene, trained, warp):
    lattice, voxel = box_lattice(trained.model)
    low, high = torch.tensor(warp.aabb, dtype=torch.float64)
    cells = torch.tensor(lattice.shape) - 1
    assert torch.equal(lattice.low, low)
    torch.testing.assert_close(lattice.low + cells * lattice.spacing, high)
    assert torch.equal(cells, ((high - low) / voxel).round().long()), "voxels are cubes"
    x, _, _ = trained.field.grid.voxel_size.tolist()
    (x0, _), (x1, _) = warp.window
    assert voxel == pytest.approx(-x * (x1 - x0) / 2 * float(torch.tensor(warp.aabb)[:, 2].mean()), rel=0.01)
    with pytest.raises(ValueError, match="box must be 1 to 1"):
        box_lattice(trained.model, 2)


def relative_rotation_error(cameras: Cameras, exact: Cameras) -> float:
    """Mean error of the rotations between pairs of cameras, degrees; unlike alignment, it ignores positions."""
    turned, wanted = (c.c2w[:, :3, :3].double() for c in (cameras, exact))
    between = turned[:, None].mT @ turned[None]
    expected = wanted[:, None].mT @ wanted[None]
    trace = (between * expected).sum(dim=(-2, -1))
    return float(((trace - 1) / 2).clamp(-1, 1).acos().rad2deg().mean())


@pytest.mark.sweep
def test_cameras_are_refined_in_these_coordinates_too(scene):
    generator = torch.Generator().manual_seed(5)
    split = scene.train
    motion = exp_se3(0.02 * torch.randn(len(split), 6, generator=generator))
    given = replace(split, cameras=replace(split.cameras, c2w=compose(motion, split.cameras.c2w)))
    moved = replace(scene, splits={"train": given})
    steps = "trainer.steps=250"
    refine = (
        *("camera=refine", "camera.stages=[{start: 0.0, resolution: 16}]"),
        *("camera.pose_lr=3e-3", "camera.warm_up=0.1", "camera.final_factor=0.2"),
    )
    refined, kept = (Session(moved, settings(steps, *some)) for some in (refine, ()))
    psnr = []
    for session in (refined, kept):
        assert session.fit()
        psnr.append(session.evaluate("train", progress=False).psnr)
    assert psnr[0] > psnr[1] + 4
    error, before = (relative_rotation_error(c, split.cameras) for c in (refined.cameras.refined, given.cameras))
    assert error < 0.75 * before


def test_the_usual_path_is_a_spiral_before_what_is_seen(scene, trained):
    run, cameras = voxelfield.load(trained.output, "cpu"), scene.train.cameras
    target = seen_point(cameras, run.render)
    assert -3 * WALL < target[2] < -DISTANCE + BALL  # smooth walls are found roughly
    path = path_named(None, cameras, 8, run.model.centre, run.model.warp, run.render)
    torch.testing.assert_close(path.c2w, spiral(cameras, target, 8).c2w)
    assert min(float(view.opacity.min()) for view in run.render_path(path)) > 0.5
    run.occupancy.occupied.zero_()
    assert seen_point(cameras, run.render) is None
    assert len(path_named(None, cameras, 8, run.model.centre, run.model.warp, run.render)) == 8


def test_an_overview_shows_all_of_the_window(scene, trained, warp):
    camera = reference_camera(warp, 30, 20)
    low, high = torch.tensor(warp.warped_aabb)
    corners = torch.cartesian_prod(*torch.stack((low, high), dim=-1)[:2], torch.tensor([0.1, 0.4]))
    inside = 0.98 * corners
    inside[:, 2] = corners[:, 2]
    assert views_of_points(camera, warp.to_world(inside)[0]).tolist() == [1] * 8
    assert trained.result().overview(24).opacity.mean() > 0.5


def test_a_capture_is_trained_and_rendered_along_its_usual_path(scene, tmp_path, caplog):
    folder, split = tmp_path / "ball", scene.train
    (folder / "images").mkdir(parents=True)
    rows = []
    for name, image, pose in zip(split.names, split.images.numpy(), split.cameras.c2w.double().numpy(), strict=True):
        Image.fromarray(image[..., :3]).save(folder / "images" / f"{name}.png")
        right, up, backwards, position = pose[:3].T
        rows.append([*np.stack((-up, right, backwards, position, [SIZE, SIZE, FOCAL]), axis=-1).reshape(-1), 3.0, 25.0])
    np.save(folder / "poses_bounds.npy", np.array(rows))
    config = settings("trainer.steps=40", "scene=folder", "scene.name=ball", f"data.root={tmp_path}")
    loaded = load_configured_scene(config, tmp_path)
    Session(loaded, config, output=tmp_path / "run").fit()
    command = [str(tmp_path / "run"), "--device", "cpu", "--frames", "3", "--supersampling", "1", "--depth"]
    assert main(["render", *command, "--out", str(tmp_path / "frames")]) == 0
    assert "show nothing but the background" not in caplog.text
    written = json.loads((tmp_path / "frames" / "frames.json").read_text())
    assert len(list((tmp_path / "frames").glob("*_depth.png"))) == 3
    assert "frames" in str(written)
    run = voxelfield.load(tmp_path / "run", "cpu")
    bounds = depth_bounds(run.field.aabb, run.model.warp)
    assert 200 < float((bounds[1] - bounds[0]).norm()) < 2000


def test_the_viewer_tells_depths_apart(trained):
    cameras = cameras_at(torch.tensor([0.0]), torch.tensor([0.0]))
    picture = Painter(trained.result()).picture(PictureRequest(viewpoint_of(cameras, 0), "depth", SIZE, SIZE))
    view = trained.result().render(cameras)
    expected = depth_colors(view.depth, view.opacity)
    assert (picture.float() / 255 - expected).abs().mean() < 0.02
    assert (expected[SIZE // 2, SIZE // 2] - expected[0, 0]).abs().max() > 0.3
