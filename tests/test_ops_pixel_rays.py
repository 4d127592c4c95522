"""pixel_rays: what Cameras.rays casts through pixel centres, and the pixels themselves."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from voxelfield.cameras import Cameras
from voxelfield.ops import pixel_rays

BOX = [[-1.0, -0.5, -2.0], [1.0, 1.5, 0.5]]


def make(device, count=5, height=7, width=11):
    images = torch.randint(256, (count, height, width, 4), dtype=torch.uint8)
    backward = F.normalize(torch.randn(count, 3), dim=-1)
    right = F.normalize(torch.linalg.cross(torch.randn(count, 3), backward), dim=-1)
    c2w = torch.eye(4).repeat(count, 1, 1)
    c2w[:, :3] = torch.stack((right, torch.linalg.cross(backward, right), backward, 3 * backward), dim=-1)
    intrinsics = torch.tensor([9.0, 8.0, 5.2, 3.4]).repeat(count, 1) + torch.rand(count, 4)
    return images.to(device), Cameras(c2w, intrinsics, width, height).to(device), torch.tensor(BOX, device=device)


def test_rays_are_the_cameras_and_colours_the_images(device):
    images, cameras, aabb = make(device)
    count, height, width, _ = images.shape
    index = torch.randperm(count * height * width, device=device)[:300]
    result = pixel_rays(images, index, cameras.c2w, cameras.intrinsics, aabb)
    camera, at = index // (height * width), index % (height * width)
    centres = torch.stack((at % width, at // width), dim=-1) + 0.5
    expected = cameras.rays(camera, centres, aabb)
    assert (expected.far > 0).any()
    assert (expected.far == 0).any()
    hit = expected.far > expected.near + 1e-3  # where it is no close call
    for name in ("origins", "directions"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), rtol=1e-5, atol=1e-6)
    for name in ("near", "far"):
        torch.testing.assert_close(getattr(result, name)[hit], getattr(expected, name)[hit], rtol=1e-4, atol=1e-5)
    assert torch.equal(result.far[expected.far == 0], torch.zeros_like(result.far[expected.far == 0]))
    torch.testing.assert_close(result.rgba, images.view(-1, 4)[index].float() / 255)


def test_no_rays(device):
    images, cameras, aabb = make(device)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    result = pixel_rays(images, nothing, cameras.c2w, cameras.intrinsics, aabb)
    assert [tuple(x.shape) for x in result] == [(0, 3), (0, 3), (0,), (0,), (0, 4)]


def test_bad_input_is_named():
    images, cameras, aabb = make("cpu")
    index = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(TypeError, match="images must be uint8, got float32"):
        pixel_rays(images.float(), index, cameras.c2w, cameras.intrinsics, aabb)
    with pytest.raises(ValueError, match="images must be contiguous"):
        pixel_rays(images.transpose(1, 2), index, cameras.c2w, cameras.intrinsics, aabb)
    with pytest.raises(TypeError, match="index must be int64"):
        pixel_rays(images, index.int(), cameras.c2w, cameras.intrinsics, aabb)
    with pytest.raises(ValueError, match=r"c2w must have shape \(5, 4, 4\)"):
        pixel_rays(images, index, cameras.c2w[:2], cameras.intrinsics, aabb)
