"""pixel_rays: what Cameras.rays casts through a pixel, and the pixels themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from camera_poses import random_rotations

from voxelfield.ops._internal.cameras import pixel_rays
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.rigid import pose_matrices

BOX = [[-1.0, -0.5, -2.0], [1.0, 1.5, 0.5]]


def make(device, count=5, height=7, width=11):
    images = torch.randint(256, (count, height, width, 4), dtype=torch.uint8)
    axes = random_rotations(count)
    c2w = pose_matrices(axes, 3 * axes[..., 2])
    intrinsics = torch.tensor([9.0, 8.0, 5.2, 3.4]).repeat(count, 1) + torch.rand(count, 4)
    return images.to(device), Cameras(c2w, intrinsics, width, height).to(device), torch.tensor(BOX, device=device)


@pytest.mark.parametrize(
    "model", [None, "perspective", "fisheye", ("pinhole", "perspective", "fisheye", "rational", "division")]
)
@pytest.mark.parametrize("side", [1, 2, 3, 5])
def test_rays_are_the_cameras_and_colours_the_images(device, side, model):
    images, cameras, aabb = make(device)
    if model is not None:
        terms = torch.randn(len(cameras), 1 if isinstance(model, tuple) else 10, device=device) * 0.03
        terms[0] = 0
        cameras = dataclasses.replace(cameras, lens=Lens(model, terms))
    count, height, width, _ = images.shape
    index = torch.randperm(count * height * width, device=device)[:300]
    result = pixel_rays(
        images,
        index,
        cameras.c2w,
        cameras.intrinsics,
        aabb,
        lens=None if cameras.lens is None else cameras.lens.rows,
        supersampling=side,
    )
    camera, at = index // (height * width), index % (height * width)
    down, right = torch.meshgrid(*[torch.arange(side, device=device)] * 2, indexing="ij")
    # Of the side * side parts of a pixel's width and height, each has one ray.
    right, down = (right * side + down + 0.5) / side**2, (down * side + side - 1 - right + 0.5) / side**2
    points = torch.stack(
        ((at % width)[:, None] + right.flatten(), (at // width)[:, None] + down.flatten()), dim=-1
    ).flatten(0, 1)
    expected = cameras.rays(camera.repeat_interleave(side**2), points, aabb)
    assert (expected.far > 0).any()
    assert (expected.far == 0).any()
    hit = expected.far > expected.near + 1e-3  # where the ray clearly hits
    for name in ("origins", "directions"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), rtol=1e-5, atol=1e-6)
    for name in ("near", "far"):
        torch.testing.assert_close(getattr(result, name)[hit], getattr(expected, name)[hit], rtol=1e-4, atol=1e-5)
    assert torch.equal(result.far[expected.far == 0], torch.zeros_like(result.far[expected.far == 0]))
    torch.testing.assert_close(result.rgba, images.view(-1, 4)[index].float() / 255)


def test_rays_that_no_memory_holds_are_refused():
    images, cameras, aabb = make("cpu")
    one = torch.zeros(1, dtype=torch.int64)
    # Their number fits 64 bits, but that of their bytes does not.
    with pytest.raises(RuntimeError, match=r"supersampling must be at least 1 .* got 2147483647"):
        pixel_rays(images, one, cameras.c2w, cameras.intrinsics, aabb, supersampling=2**31 - 1)


@pytest.mark.parametrize("side", [0, -1, 2**32])
def test_the_raw_op_bounds_the_number_of_rays(device, side):
    images, cameras, aabb = make(device)
    camera = images, torch.zeros(3, dtype=torch.int64, device=device), cameras.c2w, cameras.intrinsics
    pixel_rays(*camera, aabb)  # loads the extension
    with pytest.raises(RuntimeError, match=rf"supersampling must be at least 1 .* got {side}"):
        torch.ops.voxelfield.pixel_rays(*camera, None, aabb, side)
