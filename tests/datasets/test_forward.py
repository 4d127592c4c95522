"""Captures of which all photographs face the same way: how they are told from others, and their coordinates."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from composed_run import settings_of_run
from PIL import Image

import voxelfield
from voxelfield.datasets.forward import NotForwardError, ndc_box_of_cameras
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.rigid import exp_se3
from voxelfield.runs.configured import load_configured_scene
from voxelfield.training.config import parse, preset
from voxelfield.training.config.run import SceneConfig
from voxelfield.warps.ndc_box import NdcBox
from voxelfield.warps.nested_boxes import NestedBoxes

FIXTURE = Path(__file__).parent.parent / "fixtures" / "lego"
NEAR, FAR = 4.0, 40.0
WIDTH, HEIGHT, FOCAL = 8, 6, 7.0


def array_of_cameras(turn: float = 0.0, spread: float = 1.0) -> torch.Tensor:
    """Poses (12, 4, 4) beside one another in a plane, turned by up to some degrees about y; float64."""
    across, up = torch.meshgrid(torch.linspace(-spread, spread, 4), torch.linspace(-0.5, 0.5, 3), indexing="ij")
    twists = torch.zeros(12, 6, dtype=torch.float64)
    twists[:, 1] = torch.linspace(-turn, turn, 12).deg2rad()
    poses = exp_se3(twists)
    poses[:, 0, 3], poses[:, 1, 3] = across.flatten().double(), up.flatten().double()
    poses[:, 2, 3] = 0.1 * torch.cos(torch.arange(12.0)).double()
    return poses


def cameras_of(c2w: torch.Tensor) -> Cameras:
    intrinsics = torch.tensor([[FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2]]).repeat(len(c2w), 1)
    return Cameras(c2w.float(), intrinsics, WIDTH, HEIGHT)


def some_points(count: int = 500) -> torch.Tensor:
    """Points (M, 3) between depths of 4 and 40 before the array, float64."""
    depth = 1 / torch.linspace(1 / FAR, 1 / NEAR, count, dtype=torch.float64)
    return torch.cat(((torch.rand(count, 2) - 0.5).double() * depth[:, None], -depth[:, None]), dim=-1)


def half_upside_down() -> torch.Tensor:
    """The array, with every second camera rolled by 180 degrees."""
    c2w = array_of_cameras()
    c2w[::2, :3, :2] *= -1
    return c2w


@pytest.fixture
def capture(tmp_path):
    """Writes a capture in LLFF's layout."""

    def write(c2w: torch.Tensor) -> Path:
        folder = tmp_path / "capture"
        (folder / "images").mkdir(parents=True)
        rows = []
        for index, pose in enumerate(c2w.numpy()):
            Image.new("RGB", (WIDTH, HEIGHT), (90, 120, 30)).save(folder / "images" / f"{index:02d}.png")
            right, up, backwards, position = pose[:3].T
            matrix = np.stack((-up, right, backwards, position, [HEIGHT, WIDTH, FOCAL]), axis=-1)
            rows.append([*matrix.reshape(-1), NEAR, FAR])
        np.save(folder / "poses_bounds.npy", np.array(rows))
        return folder

    return write


def test_cameras_that_face_one_way_get_normalised_device_coordinates(capture, caplog):
    with caplog.at_level(logging.INFO, "voxelfield"):
        scene = voxelfield.load_scene(capture(array_of_cameras(turn=10)))
    assert isinstance(scene.warp, NdcBox)
    assert scene.warp.near == pytest.approx(0.75 * NEAR, rel=0.1)
    assert "all cameras face the same way" in caplog.text
    assert torch.equal(scene.aabb, torch.tensor(scene.warp.aabb))
    low, high = scene.aabb[:, 2].tolist()
    assert -1.1 * FAR < low < -0.6 * FAR
    assert -1.3 * NEAR < high < -0.5 * NEAR


def test_the_frame_holds_every_image_from_the_near_plane_to_infinity():
    c2w = array_of_cameras(turn=15)
    cameras = cameras_of(c2w)
    warp = ndc_box_of_cameras(c2w, cameras, some_points())
    for index in range(len(cameras)):
        rays = cameras.image_rays(index, torch.tensor(warp.outermost))
        origins, directions, _, length = warp.map_rays(rays.origins, rays.directions, rays.near, rays.far)
        assert (length > 0).all()
        low, high = torch.tensor(warp.warped_aabb)
        for ends in (origins, origins + length[:, None] * directions):
            assert (ends >= low - 1e-4).all()
            assert (ends <= high + 1e-4).all()
        assert origins[:, 2].min() > 0.99 * high[2]


def test_a_voxel_in_depth_shifts_the_outermost_view_by_a_voxel():
    c2w = array_of_cameras()
    warp = ndc_box_of_cameras(c2w, cameras_of(c2w), some_points())
    outermost = torch.linalg.vector_norm(c2w[:, :2, 3], dim=-1).argmax()
    near, far = torch.tensor([[0.0, 0.0, -5.0], [0.0, 0.0, -9.0]])
    seen = [(point - c2w[outermost, :3, 3].float()) for point in (near, far)]
    slopes = torch.stack([point[:2] / -point[2] for point in seen])
    parallax = float((slopes[0] - slopes[1]).norm())
    places, _ = warp.from_world(torch.stack((near, far)))
    (x0, _), (x1, _) = warp.window
    assert float((places[0] - places[1])[2]) * (x1 - x0) / 2 == pytest.approx(parallax, rel=0.1)


@pytest.mark.parametrize(
    ("c2w", "points", "near", "message"),
    [
        (array_of_cameras(turn=50), some_points(), None, r"within 30 degrees of their mean direction, got 50 degrees"),
        (
            array_of_cameras(),
            some_points(),
            0.11,
            r"near must be above 0\.127\d, because of the foremost camera, got 0\.11",
        ),
        (array_of_cameras(), -some_points(), None, r"the nearest points put it at -"),
        (half_upside_down(), some_points(), None, r"up directions that cancel"),
        (array_of_cameras(), 1e36 * some_points(), None, r"aabb must be finite"),
    ],
    ids=["directions", "depths", "behind", "up", "overflow"],
)
def test_other_cameras_are_told_from_them(c2w, points, near, message):
    with pytest.raises(NotForwardError, match=message):
        ndc_box_of_cameras(c2w, cameras_of(c2w), points, near)


def test_cameras_far_apart_are_told_from_them_only_where_that_is_asked_for(capture):
    c2w = array_of_cameras(spread=4)
    cameras, points = cameras_of(c2w), some_points()
    assert isinstance(ndc_box_of_cameras(c2w, cameras, points), NdcBox)
    with pytest.raises(NotForwardError, match=r"images must together be at most 2 times as wide as one .*, got 3"):
        ndc_box_of_cameras(c2w, cameras, points, widest=2.0)
    folder = capture(c2w)
    assert isinstance(voxelfield.load_scene(folder).warp, NestedBoxes)
    assert isinstance(voxelfield.load_scene(folder, ndc=True).warp, NdcBox)


def test_other_cameras_get_nested_boxes_unless_coordinates_are_asked_for(capture):
    folder = capture(array_of_cameras(turn=50))
    assert isinstance(voxelfield.load_scene(folder).warp, NestedBoxes)
    with pytest.raises(
        ValueError, match=r"^ndc must be False or None for this capture: cameras must look within .*, got 50 degrees$"
    ):
        voxelfield.load_scene(folder, ndc=True)


def test_what_is_given_of_the_frame_is_taken(capture):
    folder, box = capture(array_of_cameras()), [[-1.0, -2.0, -9.0], [1.0, 2.0, -3.0]]
    assert isinstance(voxelfield.load_scene(folder, ndc=False).warp, NestedBoxes)
    assert isinstance(voxelfield.load_scene(folder, boxes=3).warp, NestedBoxes)
    assert voxelfield.load_scene(folder, aabb=box).warp is None
    given = voxelfield.load_scene(folder, aabb=box, near=2.5, ndc=True)
    assert isinstance(given.warp, NdcBox)
    assert (given.warp.near, given.aabb.tolist()) == (2.5, box)


def test_the_frame_does_not_depend_on_what_is_loaded(capture):
    folder = capture(array_of_cameras(turn=8))
    whole = voxelfield.load_scene(folder)
    for options in ({"splits": ("train",)}, {"splits": ("test",)}, {"splits": ()}, {"downscale": 2}, {"image_size": 3}):
        assert voxelfield.load_scene(folder, **options).warp == whole.warp, options
    assert voxelfield.load_scene(folder, splits=("test",), holdout=0).warp == whole.warp


def test_the_log_says_why_boxes_are_nested(capture, caplog):
    with caplog.at_level(logging.INFO, "voxelfield"):
        scene = voxelfield.load_scene(capture(array_of_cameras()), near=0.05)
    assert isinstance(scene.warp, NestedBoxes)
    assert "the grid lies in nested boxes, not in normalised device coordinates: near must be above" in caplog.text


def test_a_box_behind_the_near_plane_is_refused(capture):
    with pytest.raises(ValueError, match="aabb must have its centre beyond the near plane"):
        voxelfield.load_scene(capture(array_of_cameras()), aabb=[[-1, -1, 5], [1, 1, 9]], ndc=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ndc": True, "boxes": 3}, "^ndc must be False or None with 3 nested boxes, got True$"),
        ({"ndc": "yes"}, "^ndc must be True, False or None, got 'yes'$"),
    ],
)
def test_contradictions_are_named(capture, options, message):
    with pytest.raises(ValueError, match=message):
        voxelfield.load_scene(capture(array_of_cameras()), **options)


def test_cameras_around_an_object_have_none():
    with pytest.raises(ValueError, match=r"^ndc must be False or None for this capture: cameras must "):
        voxelfield.load_scene(FIXTURE, ndc=True)


def test_without_points_the_near_plane_must_be_given():
    c2w = array_of_cameras()
    with pytest.raises(ValueError, match="near must be given with ndc where no points of the scene are known"):
        ndc_box_of_cameras(c2w, cameras_of(c2w), None)
    warp = ndc_box_of_cameras(c2w, cameras_of(c2w), None, near=2.0)
    low, high = torch.tensor(warp.aabb)[:, 2].tolist()
    assert low < -19 < -2.2 < high


def test_the_configuration_gives_the_same_frame():
    c2w = array_of_cameras(turn=5)
    warp = ndc_box_of_cameras(c2w, cameras_of(c2w), some_points())
    config = SceneConfig("mine", warp.aabb)
    assert config.warp is None
    config.record(warp)
    assert parse(SceneConfig, vars(config)).warp == warp


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ndc_depth": None}, r"scene\.ndc_camera must come with scene\.ndc=true and with all of scene\.ndc_camera, "),
        ({"ndc": False}, r"scene\.ndc_camera must come with scene\.ndc=true"),
        ({"near": None}, r"scene\.ndc_camera must come with .*scene\.near"),
        ({"ndc_window": ((1.0, 1.0), (0.0, 0.0))}, r"scene\.window must be finite, with lower limits below upper ones"),
    ],
)
def test_an_incomplete_record_of_a_frame_is_refused(changes, message):
    c2w = array_of_cameras()
    config = SceneConfig("mine", ndc_box_of_cameras(c2w, cameras_of(c2w), some_points()).aabb)
    config.record(ndc_box_of_cameras(c2w, cameras_of(c2w), some_points()))
    with pytest.raises(ValueError, match=message):
        parse(SceneConfig, vars(config) | changes, "scene")


def test_settings_of_the_command_line_reach_the_frame(capture):
    folder = capture(array_of_cameras())
    names = ("scene=folder", f"scene.name={folder.name}", f"data.root={folder.parent}")

    def warp(*overrides: str) -> object:
        return load_configured_scene(preset(*names, *overrides, device="cpu"), folder).warp

    assert isinstance(warp(), NdcBox)
    assert warp("scene.near=2.5").near == 2.5
    assert isinstance(warp("scene.ndc=false"), NestedBoxes)
    assert warp("scene.box_ratio=3").ratio == 3
    with pytest.raises(ValueError, match=r"scene\.ndc_depth must come with"):
        warp("scene.ndc_depth=0.5")
    with pytest.raises(TypeError, match="warp must be NestedBoxes, an NdcBox or None, got str"):
        SceneConfig().record("ndc")


def test_photographs_in_these_coordinates_get_their_trainer(capture, monkeypatch, tmp_path):
    folder = capture(array_of_cameras())
    box = "scene.aabb=[[-1,-1,-9],[1,1,-3]]"

    def trainer(*overrides: str) -> object:
        return settings_of_run(monkeypatch, tmp_path / "run", f"scene={folder}", *overrides).trainer

    forward, nested, default = (
        preset(f"trainer={name}", name="train").trainer for name in ("forward_facing", "few_photographs", "default")
    )
    assert trainer(box) == trainer("scene.boxes=1") == default
    assert trainer(box, "scene.ndc=true") == trainer() == forward
    assert trainer("scene.ndc=false") == trainer("scene.box_ratio=3") == trainer("scene.boxes=4") == nested


def test_photographs_from_all_sides_get_the_trainer_for_their_number(capture, monkeypatch, tmp_path):
    folder = capture(array_of_cameras(turn=50))
    settings = settings_of_run(monkeypatch, tmp_path / "run", f"scene={folder}")
    assert settings.trainer == preset("trainer=few_photographs", name="train").trainer
