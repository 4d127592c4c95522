"""The visual hull keeps everything that can be matter and carves what an image shows to be empty."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.paths import orbit
from voxelfield.rendering.visual_hull import visual_hull

RADIUS = 0.4
CENTRE = torch.tensor([0.2, -0.1, 0.1])
AABB = torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])


LENSES = {
    "pinhole": None,
    "barrel": Lens("perspective", torch.tensor([[-0.4, 0.15, 0.0, 0.0, 0.01, -0.01]]).repeat(12, 1)),
    "pincushion": Lens("perspective", torch.tensor([[0.4, 0.1, 0.0, 0.0, 0.0, 0.0]]).repeat(12, 1)),
    "fisheye": Lens("fisheye", torch.tensor([[-0.1, 0.02, 0.0, 0.0, 0.0, 0.0]]).repeat(12, 1)),
    "equirectangular": Lens("equirectangular", torch.zeros(12, 0)),
}


def ring(views: int = 12, size: int = 96) -> Cameras:
    c2w = torch.eye(4)
    c2w[:3, 3] = torch.tensor([0.0, 3.0, 2.0])
    first = Cameras(c2w[None], torch.tensor([[1.2 * size, 1.2 * size, size / 2, size / 2]]), size, size)
    return orbit(first, torch.zeros(3), views)


def sphere_alpha(cameras: Cameras) -> torch.Tensor:
    """Opaque exactly where the ray through a pixel's centre meets the sphere."""
    images = []
    for index in range(len(cameras)):
        rays = cameras.image_rays(index, AABB * 4)
        offset = CENTRE - rays.origins
        along = (offset * rays.directions).sum(-1)
        distance = (offset.square().sum(-1) - along.square()).clamp(min=0).sqrt()
        images.append((distance < RADIUS).view(cameras.height, cameras.width))
    return torch.stack(images).to(torch.uint8) * 255


def cell_of(points: torch.Tensor, resolution: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    cells = torch.tensor(resolution)
    return tuple(((points - AABB[0]) / (AABB[1] - AABB[0]) * cells).long().unbind(-1))


def assert_kept(hull: torch.Tensor) -> None:
    """Asserts that no cell with a point of the sphere has been carved away."""
    directions = torch.nn.functional.normalize(torch.randn(5000, 3), dim=-1)
    assert hull[cell_of(CENTRE + directions * RADIUS * torch.rand(5000, 1), hull.shape)].all()


@pytest.mark.parametrize("lens", LENSES)
@pytest.mark.parametrize("resolution", [(32, 32, 32), (17, 40, 25)])
def test_the_object_is_kept_and_the_rest_carved(device, resolution, lens):
    cameras = dataclasses.replace(ring(), lens=LENSES[lens])
    hull = visual_hull(sphere_alpha(cameras), cameras.to(device), AABB.to(device), resolution).cpu()
    assert_kept(hull)
    away = torch.rand(5000, 3) * 2 - 1
    away = away[(away - CENTRE).norm(dim=-1) > 2.2 * RADIUS]
    assert hull[cell_of(away, resolution)].float().mean() < 0.1


@pytest.mark.parametrize("lens", ["pinhole", "fisheye"])
def test_rows_with_poses_of_their_own_keep_the_object(device, lens):
    axes = torch.nn.functional.normalize(torch.randn(12, 2, 3), dim=-1) * torch.tensor([[0.04], [0.04]])
    rolling = torch.cat((axes.flatten(1) / 96, torch.full((12, 1), 48.0)), dim=1)
    cameras = dataclasses.replace(ring(), lens=LENSES[lens], rolling=rolling)
    hull = visual_hull(sphere_alpha(cameras), cameras.to(device), AABB.to(device), (32, 32, 32)).cpu()
    assert_kept(hull)
    assert hull.float().mean() < 0.4


def test_whole_spheres_carve_across_their_seam_but_not_at_their_poles(device):
    """Cameras that are turned at random, one right above the object and one within the box."""
    generator = torch.Generator().manual_seed(0)
    cameras = ring(size=32)
    heading = 2 * math.pi * torch.rand(12, generator=generator)
    turn = torch.eye(4).repeat(12, 1, 1)
    turn[:, 0, 0], turn[:, 2, 2] = heading.cos(), heading.cos()
    turn[:, 0, 2], turn[:, 2, 0] = heading.sin(), -heading.sin()
    c2w = cameras.c2w @ turn
    c2w[0, :3, 3], c2w[1, :3, 3] = torch.tensor([0.2, -0.1, 2.0]), torch.tensor([-0.9, 0.9, 0.9])
    focal = 512 / (2 * math.pi)
    intrinsics = torch.tensor([[focal, focal, 256.0, 128.0]]).repeat(12, 1)
    spheres = Cameras(c2w, intrinsics, 512, 256, LENSES["equirectangular"])
    hull = visual_hull(sphere_alpha(spheres), spheres.to(device), AABB.to(device), (32, 32, 32)).cpu()
    assert_kept(hull)
    assert hull.float().mean() < 0.2


def test_opaque_images_carve_nothing():
    alpha = torch.full((3, 96, 96), 255, dtype=torch.uint8)
    assert visual_hull(alpha, ring(3), AABB, (8, 8, 8)).all()


def test_an_empty_image_carves_only_what_it_surely_covers():
    hull = visual_hull(torch.zeros(1, 96, 96, dtype=torch.uint8), ring(1), AABB * 2, (32, 32, 32))
    assert not hull[16, 16, 16]
    assert hull[0, 0, 0], "this corner lies outside the image"


def test_a_camera_inside_the_box_carves_nothing():
    assert visual_hull(torch.zeros(1, 96, 96, dtype=torch.uint8), ring(1), AABB * 8, (8, 8, 8)).all()


def test_one_faint_pixel_keeps_its_ray():
    cameras = ring(1)
    alpha = torch.zeros(1, 96, 96, dtype=torch.uint8)
    alpha[0, 48, 48] = 1
    hull = visual_hull(alpha, cameras, AABB, (32, 32, 32))
    ray = cameras.image_rays(0, AABB)[torch.tensor([48 * 96 + 48])]
    t = torch.linspace(float(ray.near) + 1e-3, float(ray.far) - 1e-3, 50)
    assert hull[cell_of(ray.origins + t[:, None] * ray.directions, (32, 32, 32))].all()
    assert math.isclose(hull.float().mean().item(), 0.0, abs_tol=0.05)


def test_what_a_lens_would_fold_back_into_the_image_is_kept():
    # Beyond 1 / sqrt(0.9), the formula leads back to the centre, which it reaches at 1 / sqrt(0.3).
    lens = Lens("perspective", torch.tensor([[-0.3, 0.0, 0.0, 0.0, 0.0, 0.0]]))
    camera = Cameras(torch.eye(4)[None], torch.tensor([[110.0, 110.0, 48.0, 48.0]]), 96, 96, lens)
    box, cells = torch.tensor([[-6.0, -1.0, -3.0], [6.0, 1.0, -2.0]]), torch.tensor([96, 16, 8])
    hull = visual_hull(torch.zeros(1, 96, 96, dtype=torch.uint8), camera, box, tuple(cells.tolist()))

    def kept(tangent):
        point = torch.tensor([2.5 * tangent, 0.0, -2.5])
        x, y, z = ((point - box[0]) / (box[1] - box[0]) * cells).long().tolist()
        return bool(hull[x, y, z])

    assert not kept(0.0)
    assert kept(1 / math.sqrt(0.3))


def test_alpha_must_fit_the_cameras():
    with pytest.raises(ValueError, match=r"alpha must have shape \(2, 96, 96\)"):
        visual_hull(torch.zeros(3, 96, 96, dtype=torch.uint8), ring(2), AABB, (4, 4, 4))
