"""The choice of a warp: which scenes have none, nested boxes or normalised device coordinates, and where these lie."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from camera_poses import looking_at
from composed_run import settings_of_run
from PIL import Image
from quick_presets import preset

import voxelfield
from voxelfield.datasets.llff import points_of_frusta
from voxelfield.datasets.poses import turned_about
from voxelfield.grids.boxes import parse_box
from voxelfield.models.dense import DenseConfig
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.rigid import exp_se3
from voxelfield.settings import RunConfig, SceneConfig, parse
from voxelfield.warps.choice import (
    NotForwardError,
    WarpConfig,
    box_of_cameras,
    choose_warp,
    ndc_box_of_cameras,
    nested_boxes_of_cameras,
    stray_cameras,
    turn_on_the_spot,
)
from voxelfield.warps.ndc_box import NdcBox
from voxelfield.warps.nested_boxes import NestedBoxes
from voxelfield.warps.warp import Warp

FIXTURE = Path(__file__).parent.parent / "fixtures" / "lego"
NEAR, FAR = 4.0, 40.0
WIDTH, HEIGHT, FOCAL = 8, 6, 7.0
BOX = [[-1.0, -2.0, -9.0], [1.0, 2.0, -3.0]]


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


def ndc_box(c2w: torch.Tensor, points: torch.Tensor | None = None, near: float | None = None, **options) -> NdcBox:
    """Coordinates of pinhole cameras, with points before the array unless a near plane is given."""
    return ndc_box_of_cameras(c2w, cameras_of(c2w).border_rays(), points, near, **options)


def chosen(folder: Path, *, load: dict | None = None, **settings) -> Warp | None:
    """The warp of the scene in a folder."""
    return choose_warp(voxelfield.load_scene(folder, **(load or {})), WarpConfig(**settings))


def circle(count: int, radius: float, height: float = 0.0) -> torch.Tensor:
    """Cameras around the z axis that look at the origin."""
    angle = torch.arange(count) * (2 * torch.pi / count)
    position = torch.stack((radius * angle.cos(), radius * angle.sin(), torch.full((count,), height)), dim=-1)
    return looking_at((0.0, 0.0, 0.0), position)


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
        warp = chosen(capture(array_of_cameras(turn=10)))
    assert isinstance(warp, NdcBox)
    assert warp.near == pytest.approx(0.75 * NEAR, rel=0.1)
    assert "all cameras face the same way" in caplog.text
    (_, _, low), (_, _, high) = warp.aabb
    assert -1.1 * FAR < low < -0.6 * FAR
    assert -1.3 * NEAR < high < -0.5 * NEAR


def test_the_grid_covers_every_image_from_the_near_plane_to_infinity():
    c2w = array_of_cameras(turn=15)
    cameras = cameras_of(c2w)
    warp = ndc_box(c2w, some_points())
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
    warp = ndc_box(c2w, some_points())
    outermost = torch.linalg.vector_norm(c2w[:, :2, 3], dim=-1).argmax()
    near, far = torch.tensor([[0.0, 0.0, -5.0], [0.0, 0.0, -9.0]])
    seen = [(point - c2w[outermost, :3, 3].float()) for point in (near, far)]
    slopes = torch.stack([point[:2] / -point[2] for point in seen])
    parallax = float((slopes[0] - slopes[1]).norm())
    warped, _ = warp.from_world(torch.stack((near, far)))
    (x0, _), (x1, _) = warp.window
    assert float((warped[0] - warped[1])[2]) * (x1 - x0) / 2 == pytest.approx(parallax, rel=0.1)


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
        (array_of_cameras(), -some_points(), None, r"near must be above .*, got -[\d.]+ from the nearest points"),
        (half_upside_down(), some_points(), None, r"agree on the up direction, got directions that cancel"),
        (array_of_cameras(), 1e36 * some_points(), None, r"aabb must be finite"),
    ],
    ids=["directions", "depths", "behind", "up", "overflow"],
)
def test_other_cameras_are_told_from_them(c2w, points, near, message):
    with pytest.raises(NotForwardError, match=message):
        ndc_box(c2w, points, near)


def test_cameras_far_apart_are_told_from_them_only_where_that_is_asked_for(capture):
    c2w = array_of_cameras(spread=4)
    assert isinstance(ndc_box(c2w, some_points()), NdcBox)
    with pytest.raises(NotForwardError, match=r"images must together be at most 2 times as wide as one .*, got 3"):
        ndc_box(c2w, some_points(), widest=2.0)
    folder = capture(c2w)
    assert isinstance(chosen(folder), NestedBoxes)
    assert isinstance(chosen(folder, ndc=True), NdcBox)


def test_other_cameras_get_nested_boxes_unless_coordinates_are_asked_for(capture):
    folder = capture(array_of_cameras(turn=50))
    assert isinstance(chosen(folder), NestedBoxes)
    for refused in (folder, FIXTURE):
        with pytest.raises(ValueError, match=r"^warp\.ndc must be false or null for this capture: cameras must "):
            chosen(refused, ndc=True)


def test_settings_take_precedence_over_the_choice(capture):
    folder = capture(array_of_cameras())
    assert isinstance(chosen(folder, ndc=False), NestedBoxes)
    nested = chosen(folder, boxes=3, near=0.25, ratio=3.0)
    assert (nested.count, nested.near, nested.ratio) == (3, 0.25, 3.0)
    assert isinstance(chosen(folder, ratio=2.0), NestedBoxes)
    assert chosen(folder, boxes=1) is chosen(folder, load={"aabb": BOX}) is None
    inside = chosen(folder, load={"aabb": BOX}, boxes=4)
    assert (inside.count, [[*corner] for corner in inside.aabb]) == (4, BOX)
    given = chosen(folder, load={"aabb": BOX}, near=2.5, ndc=True)
    assert isinstance(given, NdcBox)
    assert (given.near, [[*corner] for corner in given.aabb]) == (2.5, BOX)
    with pytest.raises(ValueError, match="aabb must have its centre beyond the near plane"):
        chosen(folder, load={"aabb": [[-1, -1, 5], [1, 1, 9]]}, ndc=True)


def test_the_choice_does_not_depend_on_what_is_loaded(capture):
    folder = capture(array_of_cameras(turn=8))
    whole = chosen(folder)
    for load in ({"splits": ("train",)}, {"splits": ("test",)}, {"splits": ()}, {"downscale": 2}, {"image_size": 3}):
        assert chosen(folder, load=load) == whole, load
    assert chosen(folder, load={"splits": ("test",), "holdout": 0}) == whole


def test_the_log_says_why_boxes_are_nested(capture, caplog):
    with caplog.at_level(logging.INFO, "voxelfield"):
        assert isinstance(chosen(capture(array_of_cameras()), near=0.05), NestedBoxes)
    assert "the grid lies in nested boxes, not in normalised device coordinates: near must be above" in caplog.text


def test_without_points_the_near_plane_must_be_given():
    c2w = array_of_cameras()
    with pytest.raises(ValueError, match="near must be given with ndc where no points of the scene are known"):
        ndc_box(c2w)
    (_, _, low), (_, _, high) = ndc_box(c2w, near=2.0).aabb
    assert low < -19 < -2.2 < high


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ndc": True, "boxes": 3}, "^warp.ndc must be false or null with 3 nested boxes, got true$"),
        ({"boxes": 0}, r"^warp.boxes must lie in \[1, 12\], or null, got 0$"),
        ({"near": -1.0}, "^warp.near must be at least 0, or null, got -1.0$"),
        ({"ratio": 1.0}, "^warp.ratio must be above 1, or null, got 1.0$"),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        parse(WarpConfig, settings, "warp")


@pytest.mark.parametrize("warp", [ndc_box(array_of_cameras(), some_points()), NestedBoxes(BOX, 4, 3.0, 0.5), None])
def test_a_run_records_its_warp(warp):
    box = BOX if warp is None else warp.aabb
    recorded = RunConfig(scene=SceneConfig("mine", box), warp=WarpConfig.of(warp))
    assert parse(RunConfig, asdict(recorded)).recorded_warp == warp


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": None}, r"^warp\.camera must come with warp\.ndc=true and with all of warp\.camera, "),
        ({"ndc": False}, r"^warp\.camera must come with warp\.ndc=true"),
        ({"near": None}, r"^warp\.camera must come with .*warp\.near"),
        ({"window": ((1.0, 1.0), (0.0, 0.0))}, r"^warp: window must be finite, with lower limits below upper ones"),
    ],
)
def test_an_incomplete_record_is_refused(changes, message):
    warp = ndc_box(array_of_cameras(), some_points())
    recorded = asdict(RunConfig(scene=SceneConfig("mine", warp.aabb), warp=WarpConfig.of(warp)))
    recorded["warp"] |= changes
    with pytest.raises(ValueError, match=message):
        parse(RunConfig, recorded)


def test_a_model_may_choose_another_warp(capture):
    class InTwoBoxes(DenseConfig):
        def choose_warp(self, scene, settings):
            return NestedBoxes(parse_box(scene.aabb), settings.boxes or 2)

    scene = voxelfield.load_scene(capture(array_of_cameras()))
    model = InTwoBoxes(features=3, width=16)
    session = voxelfield.Session(scene, model, trainer="smoke", device="cpu", warp=WarpConfig(boxes=3))
    assert (session.model.warp.count, session.config.warp.boxes) == (3, 3)
    assert voxelfield.Session(scene, model, trainer="smoke", device="cpu").model.warp.count == 2
    given = NestedBoxes(BOX, 5)
    assert voxelfield.Session(scene, model, trainer="smoke", device="cpu", warp=given).model.warp == given


def test_photographs_in_these_coordinates_get_their_trainer(capture, monkeypatch, tmp_path):
    folder = capture(array_of_cameras())
    box = "scene.aabb=[[-1,-1,-9],[1,1,-3]]"

    def trainer(*overrides: str) -> object:
        return settings_of_run(monkeypatch, tmp_path / "run", f"scene={folder}", *overrides).trainer

    forward, nested, default = (
        preset(f"trainer={name}", name="train").trainer for name in ("forward_facing", "few_photographs", "default")
    )
    assert trainer(box) == trainer("warp.boxes=1") == default
    assert trainer(box, "warp.ndc=true") == trainer() == forward
    assert trainer("warp.ndc=false") == trainer("warp.ratio=3") == trainer("warp.boxes=4") == nested


def test_photographs_from_all_sides_get_the_trainer_for_their_number(capture, monkeypatch, tmp_path):
    folder = capture(array_of_cameras(turn=50))
    settings = settings_of_run(monkeypatch, tmp_path / "run", f"scene={folder}")
    assert settings.trainer == preset("trainer=few_photographs", name="train").trainer


@pytest.mark.parametrize("unit", [1000.0, 1.0, 0.001])
def test_the_boxes_of_a_room_have_its_unit(unit):
    """Cameras that look outwards see no common point; cameras in one place tell no length."""
    room = turned_about(circle(8, 1.0))
    room[:, :3, 3] *= unit
    torch.testing.assert_close(box_of_cameras(room), unit * box_of_cameras(turned_about(circle(8, 1.0))))
    assert nested_boxes_of_cameras(room).near == pytest.approx(
        unit * nested_boxes_of_cameras(turned_about(circle(8, 1.0))).near
    )
    room[:, :3, 3] = 7.1
    torch.testing.assert_close(box_of_cameras(room).diff(dim=0), torch.full((1, 3), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("unit", [1000.0, 1.0, 0.001])
def test_cameras_that_turn_on_the_spot_are_known_whatever_their_unit(unit):
    one_place = turned_about(circle(12, 0.05))
    walk = one_place.clone()
    one_place[:, :3, 3] = 3.0
    walk[:, :3, 3] = torch.rand(12, 3, generator=torch.Generator().manual_seed(0))
    around = circle(12, 4.0)
    several = (one_place, one_place[:1].clone(), walk, around, array_of_cameras())
    for poses in several:
        poses[:, :3, 3] *= unit
    assert [turn_on_the_spot(poses) for poses in several] == [True, *4 * [False]]


def test_without_points_rays_begin_where_the_nearest_cameras_may_see_the_subject():
    around = circle(40, 4.0)
    assert nested_boxes_of_cameras(around).near == pytest.approx(0.8)
    assert nested_boxes_of_cameras(torch.cat((around, circle(20, 1.0)))).near == pytest.approx(0.2)
    room = turned_about(circle(8, 1.0))
    room[0, :3, 3] = 0
    assert nested_boxes_of_cameras(room).near > 0.1, "cameras that look outwards may stand in the middle"


def test_points_say_where_the_subject_is():
    torch.manual_seed(0)
    near = torch.tensor([5.0, 0.0, 1.0]) + torch.tensor([1.0, 2.0, 0.5]) * (2 * torch.rand(900, 3) - 1)
    far = torch.tensor([5.0, 0.0, 1.0]) + 15 * (2 * torch.rand(80, 3) - 1)
    lost = torch.full((5, 3), 1e4)
    cameras = circle(8, 4.0)
    cameras[:, :3, 3] += torch.tensor([5.0, 0.0, 1.0])
    boxes = nested_boxes_of_cameras(cameras, torch.cat((near, far, lost)))
    low, high = torch.tensor(boxes.aabb)
    assert ((low < torch.tensor([5.0, 0.0, 1.0])) & (torch.tensor([5.0, 0.0, 1.0]) < high)).all()
    assert ((high - low) < torch.tensor([3.0, 5.0, 2.5])).all()
    for axis in range(3):
        inside = (near[:, axis] > low[axis]) & (near[:, axis] < high[axis])
        assert 0.7 < inside.float().mean() < 1
    low, high = torch.tensor(boxes.outermost)
    assert ((far > low) & (far < high)).all(dim=-1).float().mean() > 0.9
    assert high[0] < 1000


def background(count: int, low: list[float], high: list[float]) -> torch.Tensor:
    """Points spread over a box."""
    share = torch.rand(count, 3, generator=torch.Generator().manual_seed(0))
    return torch.lerp(torch.tensor(low), torch.tensor(high), share)


def test_points_of_the_background_do_not_widen_the_smallest_box():
    bench = background(400, [-1.0, -0.5, -0.5], [1.0, 0.5, 0.5])
    everywhere = background(3000, [-14.0, -5.0, -12.0], [14.0, 5.0, 12.0])
    behind = background(3000, [8.0, -6.0, -2.0], [20.0, 6.0, 9.0])
    for trees in (everywhere, behind):
        boxes = nested_boxes_of_cameras(circle(40, 4.0), torch.cat((bench, trees)))
        low, high = torch.tensor(boxes.aabb)
        assert (low >= -2.01).all()
        assert (high <= 2.01).all()
        assert ((low < 0) & (high > 0)).all()
        assert torch.tensor(boxes.outermost)[1, 0] > 12, "the largest box still holds the background"


def test_the_largest_box_reaches_beyond_the_cameras():
    boxes = nested_boxes_of_cameras(circle(40, 4.0, height=1.0), background(2000, [-0.4] * 3, [0.4] * 3))
    low, high = torch.tensor(boxes.outermost)
    assert (low < -16).all(), "photographs show more than what structure from motion found points on"
    assert (high > 16).all()
    assert torch.tensor(boxes.aabb)[1, 0] < 0.5


def test_only_around_a_subject_is_there_one_box_more():
    around, within = circle(40, 4.0), turned_about(circle(8, 1.0))
    assert [nested_boxes_of_cameras(c2w).count for c2w in (around, within)] == [7, 6]
    seen = background(2000, [-2.0] * 3, [2.0] * 3)
    assert [nested_boxes_of_cameras(c2w, seen).count for c2w in (around, within)] == [5, 2]


def test_cameras_that_face_the_same_way_do_not_limit_the_box_of_points():
    c2w = torch.eye(4).repeat(30, 1, 1)
    c2w[:, 0, 3] = torch.linspace(-1, 1, 30)
    low, high = torch.tensor(nested_boxes_of_cameras(c2w, background(2000, [-8.0, -6.0, -30], [8.0, 6.0, -10])).aabb)
    assert (high - low > 0.7 * torch.tensor([16.0, 12.0, 20.0])).all()


def test_cameras_amid_a_place_do_not_limit_the_box_of_points():
    around = circle(40, 1.0)
    around[::2] = turned_about(around[::2])
    low, high = torch.tensor(nested_boxes_of_cameras(around, background(2000, [-5.0] * 3, [5.0] * 3)).aabb)
    assert (high - low > 7).all()


@pytest.mark.parametrize("outward", [False, True])
def test_stray_poses_do_not_widen_the_boxes(outward):
    cameras = circle(40, 1.0, height=0.1)
    cameras = turned_about(cameras) if outward else cameras
    stray = cameras.clone()
    stray[[3, 17, 30], :3, 3] = torch.tensor([[28.0, 3.0, 1.0], [-9.0, 20.0, 7.0], [0.0, -12.0, 30.0]])
    assert stray_cameras(stray).nonzero()[:, 0].tolist() == [3, 17, 30]
    others = [index for index in range(40) if index not in (3, 17, 30)]
    assert nested_boxes_of_cameras(stray) == nested_boxes_of_cameras(cameras[others])
    points = background(500, [-0.5] * 3, [0.5] * 3)
    assert nested_boxes_of_cameras(stray, points) == nested_boxes_of_cameras(cameras[others], points)


def test_many_distant_cameras_are_not_astray():
    far = torch.cat((circle(30, 1.0), circle(6, 20.0)))
    assert not stray_cameras(far).any()
    assert not stray_cameras(circle(40, 4.0, height=1.0)).any()
    assert not stray_cameras(torch.eye(4).repeat(5, 1, 1)).any()


def boxes_of_a_row(count: int) -> torch.Tensor:
    """The smallest box for cameras side by side that see from 2 to 10 units."""
    c2w = torch.eye(4).repeat(count, 1, 1)
    c2w[:, 0, 3] = torch.linspace(-1, 1, count)
    slopes = torch.tensor([[0.5, 0.25]]).repeat(count, 1)
    seen = points_of_frusta(c2w, slopes, torch.full((count,), 2.0), torch.full((count,), 10.0))
    return torch.tensor(nested_boxes_of_cameras(c2w, seen).aabb)


@pytest.mark.parametrize("count", [34, 62, 66, 128])
def test_boxes_do_not_depend_on_the_number_of_photographs(count):
    low, high = boxes_of_a_row(count)
    torch.testing.assert_close(low[:2], -high[:2], atol=0.15, rtol=0.1)
    torch.testing.assert_close(torch.stack((low, high)), boxes_of_a_row(100), atol=0.15, rtol=0.1)


def test_points_that_coincide_say_nothing():
    alone = nested_boxes_of_cameras(circle(8, 4.0), torch.ones(50, 3))
    assert alone == nested_boxes_of_cameras(circle(8, 4.0))


def test_points_on_a_wall_have_a_box():
    points = torch.cat((torch.rand(100, 2), torch.zeros(100, 1)), dim=-1)
    low, high = torch.tensor(nested_boxes_of_cameras(circle(4, 3.0, 1.0), points).aabb)
    assert (high - low).min() > 0.05


def test_points_of_frusta_are_what_is_seen():
    c2w = circle(3, 4.0, 1.0)
    near, far = torch.tensor([1.0, 2.0, 1.0]), torch.tensor([4.0, 9.0, 4.0])
    slopes = torch.tensor([[0.5, 0.25]]).repeat(3, 1)
    points = points_of_frusta(c2w, slopes, near, far).view(3, -1, 3)
    for camera in range(3):
        local = (points[camera] - c2w[camera, :3, 3].double()) @ c2w[camera, :3, :3].double()
        depth = -local[:, 2]
        assert near[camera] < depth.min() < 1.3 * near[camera]
        assert 0.5 * far[camera] < depth.max() < far[camera]
        assert (local[:, :2].abs() <= depth[:, None] * slopes[camera] + 1e-9).all()
        # Half of them lie before the depth that is halfway in 1 / depth.
        middle = 2 / (1 / near[camera] + 1 / far[camera])
        assert (depth < middle).float().mean() == 0.5
