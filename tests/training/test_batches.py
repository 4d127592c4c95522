from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from camera_poses import random_rotations
from torch import Tensor

from voxelfield.datasets.scene import Split
from voxelfield.models import pixel_sampler
from voxelfield.models.batch import background_for
from voxelfield.models.pixel_sampler import PixelSampler
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.rigid import pose_matrices

COUNT, HEIGHT, WIDTH = 3, 5, 7
BOX = torch.tensor([[-2.0, -2.0, -2.0], [2.0, 2.0, 2.0]])


@pytest.fixture
def split() -> Split:
    """Cameras of unlike poses and intrinsics; each pixel's colour spells its camera, row and column."""
    c2w = pose_matrices(random_rotations(COUNT), torch.randn(COUNT, 3))
    intrinsics = torch.tensor([[9.0, 8.0, 3.1, 2.7], [6.0, 7.0, 3.5, 2.5], [12.0, 12.0, 2.0, 3.0]])
    images = torch.zeros(COUNT, HEIGHT, WIDTH, 4, dtype=torch.uint8)
    images[..., 0] = torch.arange(COUNT)[:, None, None]
    images[..., 1] = torch.arange(HEIGHT)[:, None]
    images[..., 2] = torch.arange(WIDTH)
    images[..., 3] = 200 + images[..., 0]
    return Split(images, Cameras(c2w, intrinsics, WIDTH, HEIGHT), ("a", "b", "c"))


def draw(sampler: PixelSampler, count: int, box: Tensor, cameras: Cameras | None = None) -> tuple[Rays, Tensor, Tensor]:
    batch = sampler.batch(count, box, "white", cameras)
    return batch.rays, batch.rgba, batch.pixels


def decoded(rgba: Tensor) -> Tensor:
    return (rgba * 255).round().long().cpu()


def counted(rgba: Tensor) -> Tensor:
    """How often each pixel was drawn, (N, H, W) int64."""
    counts = torch.zeros(COUNT, HEIGHT, WIDTH, dtype=torch.int64)
    *where, _ = decoded(rgba).unbind(-1)
    return counts.index_put_(tuple(where), torch.ones(len(rgba), dtype=torch.int64), accumulate=True)


def check_drawn_evenly(rgba: Tensor, allowed: Tensor) -> None:
    """200 draws are expected of each pixel that may be drawn, with a standard deviation of 14."""
    counts = counted(rgba)
    assert not counts[~allowed].any()
    assert counts[allowed].min() > 120
    assert counts[allowed].max() < 280


def random_masks() -> Tensor:
    masks = torch.rand(COUNT, HEIGHT, WIDTH) < 0.4
    masks[:, 2, 3] = True
    return masks


def test_the_ray_of_a_pixel_goes_through_its_centre(split, device):
    rays, rgba, _ = draw(PixelSampler(split, device), 500, BOX.to(device))
    assert len(rays) == 500
    camera, row, column, alpha = decoded(rgba).unbind(-1)
    assert torch.equal(alpha, 200 + camera), "colour and opacity must be of one pixel"
    pose = split.cameras.c2w[camera]
    torch.testing.assert_close(rays.origins.cpu(), pose[:, :3, 3])
    # back into the camera's frame (x right, y up, looking along -z) and onto its image
    x, y, z = (pose[:, :3, :3].transpose(1, 2) @ rays.directions.cpu()[..., None])[..., 0].unbind(-1)
    assert (z < 0).all()
    fx, fy, cx, cy = split.cameras.intrinsics[camera].unbind(-1)
    torch.testing.assert_close(cx + fx * x / -z, column + 0.5, atol=1e-4, rtol=0)
    torch.testing.assert_close(cy - fy * y / -z, row + 0.5, atol=1e-4, rtol=0)


@pytest.mark.parametrize("side", [2, 3])
def test_the_rays_of_a_pixel_are_spread_evenly_over_it(split, device, side):
    rays, rgba, _ = draw(PixelSampler(split, device, side), 50, BOX.to(device))
    assert len(rays) == 50 * side**2
    assert rgba.shape == (50, 4)
    camera, row, column, _ = decoded(rgba).unbind(-1)
    down, right = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    right, down = (right + (down + 0.5) / side) / side, (down + (side - 0.5 - right) / side) / side
    points = torch.stack((column[:, None] + right.flatten(), row[:, None] + down.flatten()), dim=-1)
    expected = split.cameras.rays(camera.repeat_interleave(side**2), points.flatten(0, 1), BOX)
    torch.testing.assert_close(rays.origins.cpu(), expected.origins)
    torch.testing.assert_close(rays.directions.cpu(), expected.directions, atol=1e-5, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_the_image_of_each_pixel_is_known(split, device, masked):
    sampler = PixelSampler(replace(split, masks=random_masks()) if masked else split, device, supersampling=2)
    _, rgba, numbers = draw(sampler, 300, BOX.to(device))
    images = sampler.images_of(numbers)
    assert images.dtype == torch.int64
    assert torch.equal(images.cpu(), decoded(rgba)[:, 0])
    assert len(images.unique()) == COUNT


def test_values_are_the_bytes_over_255(split, device):
    _, rgba, _ = draw(PixelSampler(split, device), 100, BOX.to(device))
    assert rgba.dtype == torch.float32
    assert rgba.device.type == device.type
    torch.testing.assert_close(rgba, decoded(rgba).to(device) / 255, atol=0, rtol=1e-6)


def test_every_pixel_is_equally_likely(split, device):
    _, rgba, _ = draw(PixelSampler(split, device), 200 * COUNT * HEIGHT * WIDTH, BOX.to(device))
    check_drawn_evenly(rgba, torch.ones(COUNT, HEIGHT, WIDTH, dtype=torch.bool))


@pytest.mark.parametrize("masked", [False, True])
def test_pixels_of_panoramas_are_drawn_by_their_solid_angle(split, device, masked):
    lens = Lens(["equirectangular", "pinhole", "equirectangular"], torch.zeros(COUNT, 0))
    focal = HEIGHT / math.pi
    intrinsics = torch.tensor([[focal, focal, WIDTH / 2, HEIGHT / 2]]).repeat(COUNT, 1)
    split = replace(split, cameras=replace(split.cameras, lens=lens, intrinsics=intrinsics))
    # The latitude of a row's middle; the last panorama begins at the equator.
    latitudes = (torch.arange(HEIGHT) + 0.5 - HEIGHT / 2) / focal
    intrinsics[2, 3] = 0
    intrinsics[2, 1] *= 2
    cosines = torch.stack((latitudes.cos(), torch.ones(HEIGHT), ((torch.arange(HEIGHT) + 0.5) / focal / 2).cos()))
    expected = cosines[..., None].expand(-1, -1, WIDTH).clone()
    if masked:
        split = replace(split, masks=torch.rand(COUNT, HEIGHT, WIDTH) < 0.6)
        expected *= split.masks
    _, rgba, _ = draw(PixelSampler(split, device), 300_000, BOX.to(device))
    counts = counted(rgba)
    assert not counts[expected == 0].any()
    # About 600 or more of each pixel, so a standard deviation of at most 4 %.
    torch.testing.assert_close(counts / 300_000, expected / expected.sum(), rtol=0.2, atol=0)


def test_masked_pixels_are_never_drawn_and_the_others_equally_often(split, device):
    masks = random_masks()
    sampler = PixelSampler(replace(split, masks=masks), device)
    _, rgba, _ = draw(sampler, 200 * int(masks.sum()), BOX.to(device))
    check_drawn_evenly(rgba, masks)


SIZES = torch.tensor([[WIDTH, 2], [3, HEIGHT], [4, 3]])
INSIDE = (torch.arange(HEIGHT)[:, None] < SIZES[:, 1, None, None]) & (torch.arange(WIDTH) < SIZES[:, 0, None, None])


@pytest.fixture
def mixed(split) -> Split:
    """The same images, cut to different sizes; the room beside them holds values that no pixel has."""
    split.images[~INSIDE] = 255
    return replace(split, cameras=replace(split.cameras, sizes=SIZES))


@pytest.mark.parametrize("masked", [False, True])
def test_only_pixels_of_images_of_different_sizes_are_drawn_and_equally_often(mixed, device, masked):
    mixed = replace(mixed, masks=torch.rand(COUNT, HEIGHT, WIDTH) < 0.6 if masked else None)
    expected = INSIDE & mixed.masks if masked else INSIDE
    sampler = PixelSampler(mixed, device)
    rays, rgba, numbers = draw(sampler, 200 * int(expected.sum()), BOX.to(device))
    check_drawn_evenly(rgba, expected)
    camera, row, column, _ = decoded(rgba).unbind(-1)
    assert torch.equal(sampler.images_of(numbers).cpu(), camera)
    points = torch.stack((column, row), dim=-1) + 0.5
    expected_rays = mixed.cameras.rays(camera, points, BOX)
    torch.testing.assert_close(rays.directions.cpu(), expected_rays.directions, atol=1e-5, rtol=0)


def test_patches_lie_inside_images_of_different_sizes(mixed, device):
    sampler = PixelSampler(mixed, device, patches=50, patch_size=3)
    _, rgba, _ = draw(sampler, 50 * 9, BOX.to(device))
    camera, row, column, _ = decoded(rgba).unbind(-1)
    widths, heights = SIZES[camera].unbind(-1)
    assert (column < widths).all()
    assert (row < heights).all()
    assert set(camera.tolist()) == {1, 2}, "the first image is lower than a patch"


def test_masked_pixels_carve_nothing_away(split, device):
    split.images[..., 3] = 0
    masks = torch.ones(COUNT, HEIGHT, WIDTH, dtype=torch.bool)
    masks[0, 1, 2] = False
    alpha = PixelSampler(replace(split, masks=masks), device).images[..., 3].cpu()
    assert torch.equal(alpha == 255, ~masks)
    assert not split.images[..., 3].any(), "the scene's own images must stay"


def test_batches_begin_with_patches_square_by_square_and_row_by_row(split, device):
    rays, rgba, _ = draw(PixelSampler(split, device, supersampling=2, patches=40, patch_size=3), 500, BOX.to(device))
    assert (len(rays), len(rgba)) == (4 * 500, 500)
    camera, row, column, _ = decoded(rgba[: 40 * 9]).view(40, 3, 3, 4).unbind(-1)
    assert (camera == camera[:, :1, :1]).all()
    assert torch.equal(row, row[:, :1, :1] + torch.arange(3)[:, None].expand(3, 3))
    assert torch.equal(column, column[:, :1, :1] + torch.arange(3).expand(3, 3))
    assert len(decoded(rgba[40 * 9 :]).unique(dim=0)) > 50, "the others are drawn one by one"


def test_patches_reach_every_pixel_about_as_often(split, device):
    split = replace(split, images=split.images[:, :, :5].contiguous(), cameras=replace(split.cameras, width=5))
    _, rgba, _ = draw(PixelSampler(split, device, patches=3000, patch_size=3), 27000, BOX.to(device))
    _, row, column, _ = decoded(rgba).unbind(-1)
    counts = torch.bincount(row * 5 + column, minlength=25)
    # Corners are in 2/5 of the squares along each axis, the centre is in all.
    assert counts.min() > 27000 / 9 * 0.13
    assert counts.argmax() == 12


def test_patches_avoid_masked_pixels(split, device):
    masks = torch.zeros(COUNT, HEIGHT, WIDTH, dtype=torch.bool)
    masks[0, 1:4, 2:5] = True
    masks[1, ::2] = True
    masks[2, 0:4, 0:3] = True
    _, rgba, _ = draw(PixelSampler(replace(split, masks=masks), device, patches=50, patch_size=3), 450, BOX.to(device))
    corners = decoded(rgba).view(50, 9, 4)[:, 0, :3]
    assert {tuple(corner) for corner in corners.tolist()} == {(0, 1, 2), (2, 0, 0), (2, 1, 0)}


def test_patches_must_fit(split, device):
    with pytest.raises(ValueError, match="patch_size must be at most the images' shorter side, 5, got 6"):
        PixelSampler(split, device, patches=1, patch_size=6)
    masks = torch.zeros(COUNT, HEIGHT, WIDTH, dtype=torch.bool)
    masks[:, :, ::2] = True
    with pytest.raises(
        ValueError, match="patch_size must fit into an image, or into the part that its mask leaves, got 2"
    ):
        PixelSampler(replace(split, masks=masks), device, patches=1, patch_size=2)


def test_rays_are_bounded_by_the_box(split, device):
    box = torch.tensor([[-0.3, -0.2, -0.1], [0.1, 0.2, 0.3]], device=device)
    sampler = PixelSampler(split, device)
    torch.manual_seed(1)
    small, *_ = draw(sampler, 300, box)
    torch.manual_seed(1)
    large, *_ = draw(sampler, 300, 10 * box)
    torch.testing.assert_close(small.directions, large.directions, atol=0, rtol=0)
    assert ((small.far - small.near) <= (large.far - large.near) + 1e-5).all()
    assert (small.far - small.near).sum() < 0.5 * (large.far - large.near).sum()


def test_the_seed_decides_what_is_drawn(split, device):
    sampler = PixelSampler(split, device)
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(draw(sampler, 64, BOX.to(device))[1])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_fixed_backgrounds(device):
    assert torch.equal(background_for("white", 4, device), torch.ones(4, 3, device=device))
    assert torch.equal(background_for("black", 4, device), torch.zeros(4, 3, device=device))


def test_random_backgrounds_differ_by_ray_and_channel(device):
    background = background_for("random", 1000, device)
    assert background.shape == (1000, 3)
    assert background.device.type == device.type
    assert background.min() >= 0
    assert background.max() <= 1
    assert background.unique().numel() > 2900
    torch.testing.assert_close(background.mean(0).cpu(), torch.full((3,), 0.5), atol=0.06, rtol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("masked", [False, True])
def test_images_on_the_host_give_the_same_batches(split, masked):
    device = torch.device("cuda")
    if masked:
        masks = torch.rand(COUNT, HEIGHT, WIDTH) < 0.5
        masks[:, 2, 3] = True
        split = replace(split, masks=masks)
    split = replace(split, extras={"depth": torch.rand(COUNT, HEIGHT, WIDTH)})
    on_device, on_host = (PixelSampler(split, device, 2, 0, 1, images=images) for images in ("device", "host"))
    assert torch.equal(on_host.images, on_device.images)
    drawn = []
    for sampler in (on_device, on_host):
        torch.manual_seed(0)
        rays, rgba, numbers = draw(sampler, 300, BOX.to(device))
        # Where cameras are learned, rays are cast by torch's operations.
        again = draw(sampler, 300, BOX.to(device), sampler.cameras)
        depth = sampler.look_up("depth", numbers)
        drawn.append((rays.origins, rays.directions, rgba, numbers, depth, again[1], again[2]))
    torch.testing.assert_close(*drawn, rtol=0, atol=0)


def test_data_of_pixels_is_read_from_the_host_once(split, monkeypatch):
    stored = []

    def read(tensor, device):
        assert all(tensor is not earlier for earlier in stored)
        stored.append(tensor.clone())
        return stored[-1]

    monkeypatch.setattr(pixel_sampler, "read_from_host", read)
    split = replace(split, extras={"depth": torch.rand(COUNT, HEIGHT, WIDTH)})
    sampler = PixelSampler(split, torch.device("cpu"), images="host")
    assert len(stored) == 2
    numbers = torch.arange(7)
    assert torch.equal(sampler.look_up("depth", numbers), split.extras["depth"].flatten()[:7])


@pytest.mark.parametrize("shape", [(COUNT + 1,), (COUNT + 1, 2), (COUNT, 3, 4), (1, HEIGHT, WIDTH), (HEIGHT, WIDTH, 1)])
def test_data_of_another_shape_are_refused(device, split, shape):
    sampler = PixelSampler(split, device)
    with pytest.raises(ValueError, match=r"data 'more' must have shape \(3(, 5, 7)?, ...\), got"):
        sampler.carry("more", torch.zeros(shape))
