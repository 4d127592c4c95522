"""How far scenes reach: which of them get nested boxes, and which boxes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import voxelfield
from voxelfield.datasets.bounds import nested_boxes_of_cameras, points_of_frusta
from voxelfield.datasets.options import LoadOptions
from voxelfield.training.config import preset
from voxelfield.training.configured import load_configured_scene

FIXTURE = Path(__file__).parent.parent / "fixtures" / "lego"


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

    def write(alpha: int = 255) -> Path:
        folder = tmp_path / "capture"
        (folder / "images").mkdir(parents=True)
        frames = []
        for index, pose in enumerate(circle(8, 4.0).tolist()):
            pixels = np.full((6, 8, 4), 255, np.uint8)
            pixels[0, 0, 3] = alpha
            Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
            frames.append({"file_path": f"images/{index}.png", "transform_matrix": pose})
        meta = {"fl_x": 8, "fl_y": 8, "cx": 4, "cy": 3, "w": 8, "h": 6, "frames": frames}
        (folder / "transforms.json").write_text(json.dumps(meta))
        return folder

    return write


def test_photographs_show_what_is_around(capture):
    scene = voxelfield.load_scene(capture())
    assert scene.frame is not None
    torch.testing.assert_close(scene.aabb, torch.tensor([[-1.0] * 3, [1.0] * 3]), atol=1e-3, rtol=0)
    torch.testing.assert_close(torch.tensor(scene.frame.aabb), scene.aabb)
    assert scene.frame.outermost[1][0] > 20
    assert 0.1 < scene.frame.near < 1


def test_transparent_pixels_say_that_nothing_is(capture):
    scene = voxelfield.load_scene(capture(alpha=0))
    assert scene.frame is None
    torch.testing.assert_close(scene.aabb, torch.tensor([[-4.0] * 3, [4.0] * 3]), atol=1e-3, rtol=0)


def test_a_box_that_is_given_holds_all(capture):
    box = [[-1.0, -2.0, -3.0], [1.0, 2.0, 3.0]]
    scene = voxelfield.load_scene(capture(), aabb=box)
    assert scene.frame is None
    assert scene.aabb.tolist() == box


def test_the_number_of_boxes_can_be_given(capture):
    folder, box = capture(), [[-1.0, -2.0, -3.0], [1.0, 2.0, 3.0]]
    assert voxelfield.load_scene(folder, boxes=1).frame is None
    several = voxelfield.load_scene(folder, boxes=3, near=0.25)
    assert (several.frame.count, several.frame.near) == (3, 0.25)
    around = voxelfield.load_scene(folder, aabb=box, boxes=4)
    assert around.frame.count == 4
    assert around.aabb.tolist() == box


def test_a_scene_of_another_format_reaches_as_far_as_it_is_told():
    scene = voxelfield.load_scene(FIXTURE, splits=("train",), boxes=3, near=0.5)
    assert (scene.frame.count, scene.frame.near) == (3, 0.5)
    assert scene.aabb.tolist() == [[-1.5] * 3, [1.5] * 3]
    assert voxelfield.load_scene(FIXTURE, splits=("train",)).frame is None


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
    boxes = nested_boxes_of_cameras(circle(8, 4.0), torch.cat((near, far, lost)))
    low, high = torch.tensor(boxes.aabb)
    assert ((low < torch.tensor([5.0, 0.0, 1.0])) & (torch.tensor([5.0, 0.0, 1.0]) < high)).all()
    assert ((high - low) < torch.tensor([3.0, 5.0, 2.5])).all()
    for axis in range(3):
        inside = (near[:, axis] > low[axis]) & (near[:, axis] < high[axis])
        assert 0.7 < inside.float().mean() < 1
    low, high = torch.tensor(boxes.outermost)
    assert ((far > low) & (far < high)).all(dim=-1).float().mean() > 0.9
    assert high[0] < 1000


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
    boxes = load_configured_scene(settings, folder).frame
    assert (boxes.count, boxes.ratio, boxes.near) == (4, 3.0, 0.5)
