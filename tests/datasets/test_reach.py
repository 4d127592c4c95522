"""How far scenes reach: which of them get nested boxes, and which boxes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import voxelfield
from voxelfield.datasets.bounds import nested_boxes_of_cameras, points_of_frusta, stray_cameras
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.poses import turned_about
from voxelfield.runs.configured import load_configured_scene
from voxelfield.training.config import preset


def circle(count: int, radius: float, height: float = 0.0) -> torch.Tensor:
    """Cameras around the z axis that look at the origin."""
    angle = torch.arange(count) * (2 * torch.pi / count)
    position = torch.stack((radius * angle.cos(), radius * angle.sin(), torch.full((count,), height)), dim=-1)
    back = torch.nn.functional.normalize(position, dim=-1)
    right = torch.nn.functional.normalize(torch.stack((-angle.sin(), angle.cos(), torch.zeros(count)), dim=-1), dim=-1)
    c2w = torch.eye(4).repeat(count, 1, 1)
    c2w[:, :3] = torch.stack((right, torch.linalg.cross(back, right), back, position), dim=-1)
    return c2w


@pytest.fixture
def capture(tmp_path):
    """Writes a capture of eight cameras around the origin."""

    def write() -> Path:
        folder = tmp_path / "capture"
        (folder / "images").mkdir(parents=True)
        frames = []
        for index, pose in enumerate(circle(8, 4.0).tolist()):
            pixels = np.full((6, 8, 4), 255, np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
            frames.append({"file_path": f"images/{index}.png", "transform_matrix": pose})
        meta = {"fl_x": 8, "fl_y": 8, "cx": 4, "cy": 3, "w": 8, "h": 6, "frames": frames}
        (folder / "transforms.json").write_text(json.dumps(meta))
        return folder

    return write


def test_photographs_show_what_is_around(capture):
    scene = voxelfield.load_scene(capture())
    assert scene.warp is not None
    torch.testing.assert_close(scene.aabb, torch.tensor([[-1.0] * 3, [1.0] * 3]), atol=1e-3, rtol=0)
    torch.testing.assert_close(torch.tensor(scene.warp.aabb), scene.aabb)
    assert scene.warp.outermost[1][0] > 20
    assert 0.1 < scene.warp.near < 1


def test_a_box_that_is_given_holds_all(capture):
    box = [[-1.0, -2.0, -3.0], [1.0, 2.0, 3.0]]
    scene = voxelfield.load_scene(capture(), aabb=box)
    assert scene.warp is None
    assert scene.aabb.tolist() == box


def test_the_number_of_boxes_can_be_given(capture):
    folder, box = capture(), [[-1.0, -2.0, -3.0], [1.0, 2.0, 3.0]]
    assert voxelfield.load_scene(folder, boxes=1).warp is None
    several = voxelfield.load_scene(folder, boxes=3, near=0.25)
    assert (several.warp.count, several.warp.near) == (3, 0.25)
    around = voxelfield.load_scene(folder, aabb=box, boxes=4)
    assert around.warp.count == 4
    assert around.aabb.tolist() == box


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boxes": 0}, "boxes must be a whole number of at least 1, got 0"),
        ({"boxes": 40}, "count must be 1 to 12 boxes, got 40"),
        ({"near": -1.0}, "near must be finite and not negative, got -1.0"),
    ],
)
def test_refuses(capture, changes, message):
    with pytest.raises(ValueError, match=message):
        voxelfield.load_scene(capture(), **changes)


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
    assert (low < -8).all(), "photographs show more than what structure from motion found points on"
    assert (high > 8).all()
    assert torch.tensor(boxes.aabb)[1, 0] < 0.5


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


def test_options_are_checked():
    with pytest.raises(ValueError, match="boxes must be a whole number of at least 1, got -2"):
        LoadOptions(boxes=-2)


def test_a_configuration_says_how_far_a_scene_reaches(capture):
    folder = capture()
    names = (f"scene.name={folder.name}", f"data.root={folder.parent}")
    settings = preset(
        "scene=folder", *names, "scene.boxes=4", "scene.box_ratio=3", "scene.near=0.5", "data.holdout=4", device="cpu"
    )
    boxes = load_configured_scene(settings, folder).warp
    assert (boxes.count, boxes.ratio, boxes.near) == (4, 3.0, 0.5)
