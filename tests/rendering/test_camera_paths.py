"""Paths of cameras: where they lead, and which way they look."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from camera_poses import looking_at

from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.paths import at_size, axes_looking, interpolate, orbit, path_named, spiral, through
from voxelfield.rendering.render import View


def facing(count: int = 25, spread: float = 0.5) -> Cameras:
    """Cameras on a square before the origin, all looking along -z."""
    side = math.isqrt(count)
    c2w = torch.eye(4).repeat(count, 1, 1)
    steps = torch.linspace(-spread, spread, side)
    c2w[:, :2, 3] = torch.cartesian_prod(steps, steps)
    c2w[:, 2, 3] = 4.0
    return Cameras(c2w, torch.tensor([[20.0, 20, 8, 6]]).repeat(count, 1), 16, 12)


def around(count: int) -> Cameras:
    return orbit(facing(1), torch.zeros(3), count)


@pytest.mark.parametrize("name", ["orbit", "interpolate", "spiral"])
def test_usual_paths_show_the_cameras_times_in_order_and_the_nearest_of_other_values(name):
    given = facing() if name == "spiral" else around(9)
    codes = torch.arange(len(given))
    given = given.with_values(time=5 + (codes * 0.618) % 1, code=codes[:, None].float())

    def render(cameras: Cameras, index: int) -> View:
        return View(torch.ones(12, 16, 3), torch.ones(12, 16), torch.full((12, 16), 4.0))

    path = path_named(name, given, 4, torch.zeros(3), None, render)
    low, high = given.values["time"].aminmax()
    torch.testing.assert_close(path.values["time"], low + (high - low) * torch.tensor([0, 1 / 3, 2 / 3, 1]))
    nearest = torch.cdist(path.c2w[:, :3, 3], given.c2w[:, :3, 3]).argmin(dim=1)
    assert torch.equal(path.values["code"][:, 0], nearest.float())
    bare = Cameras(given.c2w, given.intrinsics, 16, 12)
    assert not path_named(name, bare, 4, torch.zeros(3), None, render).values


def assert_rigid(cameras: Cameras) -> None:
    axes = cameras.c2w[:, :3, :3].double()
    torch.testing.assert_close(axes @ axes.mT, torch.eye(3).double().expand_as(axes), atol=1e-5, rtol=0)
    assert (axes.det() > 0).all()


def test_interpolation_passes_cameras_and_goes_on_evenly():
    given = around(8)
    shuffled = given[[0, 5, 2, 7, 4, 1, 6, 3]]
    path = interpolate(shuffled, 71, keys=8)
    assert len(path) == 71
    assert_rigid(path)
    found = torch.cdist(path.c2w[:, :3, 3], given.c2w[:, :3, 3]).amin(dim=0)
    assert found.max() < 1e-5, "each camera lies on the path"
    steps = path.c2w[:, :3, 3].diff(dim=0).norm(dim=-1)
    assert steps.max() < 2 * steps.median(), "neighbours follow one another"
    # Between cameras on a circle the path stays near to it, and looks inwards.
    inward = -(path.c2w[:, :3, 3] / path.c2w[:, :3, 3].norm(dim=-1, keepdim=True))
    assert (-(path.c2w[:, :3, 2]) * inward).sum(dim=-1).min() > 0.99


def test_interpolation_of_many_cameras_passes_some_that_lie_far_apart():
    given = around(60)
    path = interpolate(given, 31, keys=4)
    passed = [int(index) for index in torch.cdist(path.c2w[::10, :3, 3], given.c2w[:, :3, 3]).argmin(dim=1)]
    assert passed in ([0, 15, 30, 45], [0, 45, 30, 15])
    torch.testing.assert_close(path.c2w[::10], given.c2w[passed], atol=1e-5, rtol=0)


def test_interpolation_through_a_dome_of_cameras_keeps_its_distance():
    heights = torch.linspace(0.05, 0.95, 100).double()
    turns = torch.arange(100).double() * 2.4  # the golden angle: a dome that is covered evenly
    radii = (1 - heights**2).sqrt()
    positions = 4 * torch.stack((radii * turns.cos(), radii * turns.sin(), heights), dim=-1)
    dome = replace(facing(1)[[0] * 100], c2w=looking_at((0.0, 0.0, 0.0), positions.float()))
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    path = interpolate(dome[order], 200)
    assert_rigid(path)
    assert path.c2w[:, :3, 3].norm(dim=-1).min() > 0.8 * 4, "the path never dives into what the cameras look at"


def test_interpolation_of_one_camera_stands_still():
    path = interpolate(facing(1), 3)
    torch.testing.assert_close(path.c2w, facing(1).c2w.expand(3, 4, 4))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_path_passes_cameras_in_their_order(count):
    given = around(5)[[3, 0, 4, 1, 2]][:count]
    path = through(given, 10 * (count - 1) + 1)
    torch.testing.assert_close(path.c2w[::10], given.c2w, atol=1e-5, rtol=0)
    torch.testing.assert_close(path.intrinsics[::10], given.intrinsics)
    assert_rigid(path)


def test_opposite_directions_are_no_special_case():
    middle = through(around(2), 3).c2w
    assert middle.isfinite().all()
    assert_rigid(through(around(2), 3))


def test_focal_lengths_are_interpolated_evenly():
    cameras = facing(4)[[0, 3]]
    cameras.intrinsics[1, :2] = 80.0
    path = interpolate(cameras, 3)
    assert path.intrinsics[:, 0].tolist() == pytest.approx([20, 40, 80], rel=1e-4)


def test_a_spiral_looks_at_its_target_and_stays_among_the_cameras():
    cameras = facing()
    path = spiral(cameras, torch.tensor([0.1, 0.0, 0.0]), 40)
    assert_rigid(path)
    position, forward = path.c2w[:, :3, 3], -path.c2w[:, :3, 2]
    focus = position + forward * (-position[:, 2:] / forward[:, 2:])
    torch.testing.assert_close(focus, torch.zeros(40, 3), atol=1e-4, rtol=0)
    assert position[:, :2].abs().max() <= 0.5 + 1e-5
    assert position[:, 0].min() < -0.4
    assert position[:, 0].max() > 0.4
    assert (path.c2w[:, 1, 1] > 0.9).all(), "upright"
    assert path.intrinsics.tolist() == cameras.intrinsics[:1].expand(40, 4).tolist()


def test_a_spiral_around_cameras_that_look_everywhere_is_refused():
    with pytest.raises(ValueError, match="look in all directions"):
        spiral(around(12), torch.zeros(3), 10)


def test_a_spiral_needs_cameras_of_one_side():
    cameras = facing(4)
    for pose, angle in zip(cameras.c2w, (-1.2, -0.9, 0.9, 1.2), strict=True):
        pose[:3, :3] = axes_looking(
            torch.tensor([math.sin(angle), 0.0, -math.cos(angle)]), torch.tensor([0.0, 1.0, 0.0])
        )
    with pytest.raises(ValueError, match="look in all directions"):
        spiral(cameras, torch.zeros(3), 10)


def test_a_spiral_around_what_is_behind_the_cameras_is_refused():
    with pytest.raises(ValueError, match=r"target must lie in front of the cameras, got .*, 1 behind them"):
        spiral(facing(), torch.tensor([0.0, 0, 5]), 10)


@pytest.mark.parametrize("make", [interpolate, lambda cameras, frames: spiral(cameras, torch.zeros(3), frames)])
def test_paths_of_nothing_are_refused(make):
    with pytest.raises(ValueError, match="cameras must be at least one"):
        make(facing()[:0], 3)
    with pytest.raises(ValueError, match="frames must be an int of at least 1, got 0"):
        make(facing(), 0)


def test_another_size_shows_as_much_from_top_to_bottom():
    given = facing(1)
    wide = at_size(given, 64, 24)
    assert (wide.width, wide.height) == (64, 24)
    box = torch.tensor([[-9.0] * 3, [9.0] * 3])
    one = torch.zeros(1, dtype=torch.int64)
    for x, y, wide_x, wide_y in ((8.0, 0.0, 32.0, 0.0), (8.0, 12.0, 32.0, 24.0), (0.0, 6.0, 16.0, 12.0)):
        before = given.rays(one, torch.tensor([[x, y]]), box).directions
        after = wide.rays(one, torch.tensor([[wide_x, wide_y]]), box).directions
        torch.testing.assert_close(before, after)
