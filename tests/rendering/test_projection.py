"""Where points show in images: the inverse of casting rays."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from camera_poses import random_rotations
from torch.nn import functional as F

from voxelfield.rendering.cameras import (
    Cameras,
    distance_to_nearest,
    fraction_through_box,
    pixels_of_rays,
    views_of_points,
)
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.rigid import pose_matrices

COUNT, WIDTH, HEIGHT = 5, 40, 30
BOX = torch.tensor([[-50.0] * 3, [50.0] * 3])
LENSES = {
    "pinhole": None,
    "perspective": Lens("perspective", torch.tensor([[0.05, -0.01, 0.001, 0.002, 0.0, 0.0]]).repeat(COUNT, 1)),
    "fisheye": Lens("fisheye", torch.tensor([[0.03, -0.02, 0.0, 0.0, 0.0, 0.0]]).repeat(COUNT, 1)),
    "one of each": Lens(
        ["fisheye", "pinhole", "perspective", "field_of_view", "extended_unified"],
        torch.tensor([[0.03, -0.02], [0.0, 0.0], [0.05, -0.01], [0.5, 0.0], [0.5, 1.0]]),
    ),
    "equirectangular, and others": Lens(
        ["equirectangular", "fisheye", "equirectangular", "pinhole", "equirectangular"], torch.zeros(COUNT, 0)
    ),
}


@pytest.fixture(params=LENSES)
def cameras(request, device) -> Cameras:
    c2w = pose_matrices(random_rotations(COUNT), torch.randn(COUNT, 3))
    intrinsics = torch.tensor([[25.0, 27.0, 19.0, 16.0]]).repeat(COUNT, 1)
    return Cameras(c2w, intrinsics, WIDTH, HEIGHT, lens=LENSES[request.param]).to(device)


def test_a_ray_goes_back_through_its_pixel(cameras, device):
    for camera in range(COUNT):
        rays = cameras.image_rays(camera, BOX.to(device))
        flip = torch.tensor([1.0, -1.0, -1.0], device=device)
        in_camera = (rays.directions * 3.7) @ cameras.c2w[camera, :3, :3] * flip
        row, column = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
        expected = torch.stack((column, row), dim=-1).view(-1, 2)
        assert torch.equal(pixels_of_rays(cameras, camera, in_camera).cpu(), expected)


def test_views_are_counted_where_rays_say_so(cameras, device):
    points = torch.randn(4000, 3, device=device) * 3
    expected = torch.zeros(len(points), dtype=torch.int64)
    for camera in range(COUNT):
        rays = cameras.image_rays(camera, BOX.to(device))
        to_point = points - cameras.c2w[camera, :3, 3]
        # Within the image if some pixel's ray is as near as neighbouring rays are to one another.
        alike = (F.normalize(to_point, dim=-1) @ rays.directions.T).amax(dim=-1)
        expected += ((alike > 0.9998) & (to_point.norm(dim=-1) > 0.5)).cpu()
    found = views_of_points(cameras, points, near=0.5).cpu()
    assert (found == expected).float().mean() > 0.9
    assert (found - expected).abs().max() <= 1 + (COUNT > 1)
    assert 0.05 < (found > 0).float().mean() < 0.9


def test_points_behind_or_too_near_do_not_count(device):
    cameras = Cameras(torch.eye(4)[None], torch.tensor([[20.0, 20.0, 20.0, 15.0]]), WIDTH, HEIGHT).to(device)
    points = torch.tensor([[0.0, 0.0, -2.0], [0.0, 0.0, 2.0], [0.0, 0.0, -0.4], [9.0, 0.0, -2.0]], device=device)
    assert views_of_points(cameras, points, near=0.5).tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(distance_to_nearest(cameras, points)[:3].cpu(), torch.tensor([2.0, 2.0, 0.4]))


@pytest.mark.parametrize("middle", [20.0, -7.0, 65.0, -180.0])
def test_panoramas_go_on_across_the_seam(device, middle):
    """A whole sphere of 80 x 40 pixels and a crop of one, of 40 x 30; behind the camera, the circle begins again."""
    lens = Lens("equirectangular", torch.zeros(2, 0))
    focal = 80 / (2 * math.pi)
    intrinsics = torch.tensor([[focal, focal, middle, 20.0], [focal, focal, middle, 9.5]])
    sizes = torch.tensor([[80, 40], [40, 30]])
    cameras = Cameras.of_sizes(torch.eye(4).repeat(2, 1, 1), intrinsics, sizes, lens).to(device)
    for camera, (width, height) in enumerate(sizes.tolist()):
        in_camera = cameras.image_rays(camera, BOX.to(device)).directions * torch.tensor([1, -1, -1], device=device)
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        shown = row + 0.5 - intrinsics[camera, 3] < 20  # one row of the crop lies below the nadir
        pixels = pixels_of_rays(cameras, camera, in_camera).cpu().view(height, width, 2)
        assert torch.equal(pixels[shown], torch.stack((column, row), dim=-1)[shown])
    around = torch.randn(2000, 3, device=device)
    assert (views_of_points(cameras[:1], around) == 1).all(), "a whole sphere shows everything"
    assert 0.2 < views_of_points(cameras[1:], around).float().mean() < 0.6


@pytest.mark.parametrize("sizes", [None, [[40, 30], [20, 30], [40, 10], [40, 30], [13, 17]]])
def test_the_share_of_rays_through_a_box_is_that_of_all_pixels(cameras, device, sizes):
    cameras = replace(cameras, sizes=None if sizes is None else torch.tensor(sizes))
    aabb = torch.tensor([[-0.4, -0.5, -0.3], [0.5, 0.6, 0.7]], device=device)
    through = total = 0.0
    for index, (fy, cy) in enumerate(cameras.intrinsics[:, 1::2].tolist()):
        rays, (width, height) = cameras.image_rays(index, aabb), cameras.size(index)
        angles = (torch.arange(height, device=device) + 0.5 - cy) / fy
        weights = angles.cos() if cameras.is_sphere[index] else torch.ones_like(angles)
        through += float(((rays.far > rays.near).view(height, width) * weights[:, None]).sum())
        total += float(weights.sum()) * width
    assert 0 < through < total
    assert fraction_through_box(cameras, aabb) == pytest.approx(through / total, abs=0.04)
    assert fraction_through_box(cameras, aabb + 1000) == 0
