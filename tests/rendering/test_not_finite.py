"""A field that is not finite: every renderer shows the same, so that a diverged model never looks like background."""

from __future__ import annotations

import math

import pytest
import torch
from image_ops import render_grid_image, render_pyramid_image
from torch.nn import functional as F

from voxelfield import ops
from voxelfield.ops._internal.fields import march_visible, pack_sh_grid
from voxelfield.rendering.cameras import Cameras

BOX = [[-1.0] * 3, [1.0] * 3]
STEP = 0.1
SIZE = 8
values = pytest.mark.parametrize("value", [math.nan, math.inf])


def make_camera(device):
    """Looks along -z at the middle of the box."""
    c2w = torch.eye(4)
    c2w[2, 3] = 4.0
    intrinsics = torch.tensor([12.0, 12.0, SIZE / 2, SIZE / 2])
    return Cameras(c2w[None], intrinsics[None], SIZE, SIZE).to(device)


def make_grid(device, value, channel):
    """A thin fog with one vertex whose value is not finite, on the side of -x, -y."""
    grid = torch.zeros(5, 5, 5, 4)
    grid[..., 0] = -1.0
    grid[1, 1, 2, channel] = value
    return grid.to(device)


SH = {"density_scale": 1.0, "density_shift": 0.0}


def scene(device):
    box = torch.tensor(BOX, device=device)
    return {"occupied": torch.ones(4, 4, 4, dtype=torch.bool, device=device), "aabb_occupancy": box}


def by_steps(grid, rays, device, select):
    box = torch.tensor(BOX, device=device)
    walk = (rays.origins, rays.directions, rays.near, rays.far)
    samples = ops.march_rays(*walk, scene(device)["occupied"], box, STEP)

    def features_at(positions):
        return ops.sample_trilinear(grid, (positions - box[0]) / (box[1] - box[0]))

    if select:
        with torch.no_grad():
            density = F.softplus(features_at(samples.positions)[:, 0])
            samples = ops.select_samples(density, *samples[:3], samples.ray_offsets)
    features = features_at(samples.positions)
    rgb = torch.sigmoid(features[:, 1:] * 0.28209479177387814)
    return ops.composite(F.softplus(features[:, 0]), rgb, samples.t, samples.dt, samples.ray_offsets)


def by_render_grid(grid, rays, device, min_weight):
    walk = (rays.origins, rays.directions, rays.near, rays.far)
    box = torch.tensor(BOX, device=device)
    settings = {"step": STEP, "degree": 0, "min_weight": min_weight, **SH}
    return ops.render_grid(*walk, *scene(device).values(), grid, box, **settings)


RENDERERS = {
    "march, sample, composite": lambda *args: by_steps(*args, select=False),
    "march, select, sample, composite": lambda *args: by_steps(*args, select=True),
    "render_grid": lambda *args: by_render_grid(*args, min_weight=0.0),
    "render_grid, faint samples dropped": lambda *args: by_render_grid(*args, min_weight=1e-4),
}


@values
@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_density_that_is_not_finite_makes_pixels_and_gradients_so(device, value, renderer):
    rays = make_camera(device).image_rays(0, torch.tensor(BOX, device=device))
    sound = make_grid(device, 0.0, 0)
    broken = make_grid(device, value, 0).requires_grad_()
    expected, actual = (RENDERERS[renderer](grid, rays, device) for grid in (sound, broken))
    touched = actual.rgb.isnan().all(dim=1)
    assert 0 < touched.sum() < SIZE * SIZE
    for x in (actual.opacity, actual.depth_sum):
        assert torch.equal(x.isnan(), touched)
    torch.testing.assert_close(actual.rgb[~touched], expected.rgb[~touched])
    # All renderers agree on the pixels.
    assert torch.equal(touched, RENDERERS["march, sample, composite"](broken, rays, device).rgb.isnan().all(dim=1))
    actual.rgb.sum().backward()
    assert not broken.grad.isfinite().all()


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_color_that_is_not_a_number_shows(device, renderer):
    rays = make_camera(device).image_rays(0, torch.tensor(BOX, device=device))
    grid = make_grid(device, math.nan, 2).requires_grad_()
    actual = RENDERERS[renderer](grid, rays, device)
    touched = actual.rgb[:, 1].isnan()
    assert 0 < touched.sum() < SIZE * SIZE
    assert actual.rgb[:, ::2].isfinite().all()
    assert actual.opacity.isfinite().all()
    assert torch.equal(touched, RENDERERS["march, sample, composite"](grid, rays, device).rgb[:, 1].isnan())
    actual.rgb.sum().backward()
    assert not grid.grad.isfinite().all()


@values
def test_an_image_shows_what_its_rays_show(device, value):
    cameras, grid = make_camera(device), make_grid(device, value, 0)
    box = torch.tensor(BOX, device=device)
    features, density = pack_sh_grid(grid, 0, torch.float32)
    field = {"grid": features, "density": density, "aabb_grid": box, "degree": 0}
    background = torch.ones(3, device=device)
    camera = cameras.c2w[0], cameras.intrinsics[0], SIZE, SIZE
    rgb, _, depth = render_grid_image(*camera, **scene(device), **field, background=background, step=STEP, **SH)
    rays = cameras.image_rays(0, box)
    expected = by_render_grid(grid, rays, device, 1e-4)
    assert expected.opacity.isnan().any()
    assert torch.equal(rgb.isnan().flatten(0, 1), expected.rgb.isnan())
    assert torch.equal(depth.isnan().flatten(), expected.depth_sum.isnan())


def make_pyramid(device, value):
    """Density is an exponential of the first feature, colour depends on nothing."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    level = torch.zeros(5, 5, 5, 4)
    level[1, 1, 2, 0] = value
    hidden, last = torch.zeros(16, 4), torch.zeros(16, 16)
    hidden[0, 0] = last[0, 0] = 1.0
    box = torch.tensor(BOX, device=device)
    weights = [hidden.to(device), last.to(device)]
    return {"levels": [level.to(device, dtype)], "aabb": box, "density_weights": weights}


def test_a_pyramid_shows_what_is_not_a_number(device):
    cameras, settings = make_camera(device), {"step": STEP, "density_initial": 0.5}
    rays = cameras.image_rays(0, torch.tensor(BOX, device=device))
    walk = (rays.origins, rays.directions, rays.near, rays.far)
    field = make_pyramid(device, math.nan)
    sound = march_visible(*walk, **scene(device), **make_pyramid(device, 0.0), **settings)
    seen = march_visible(*walk, **scene(device), **field, **settings)
    assert torch.equal(seen.ray_offsets, sound.ray_offsets)  # none of them is dropped
    color = [torch.zeros(8, 17, device=device), torch.zeros(3, 8, device=device)]
    camera = cameras.c2w[0], cameras.intrinsics[0], SIZE, SIZE
    shown = {"background": torch.ones(3, device=device), "color_weights": color, "degree": 0}
    rgb, opacity, depth = render_pyramid_image(*camera, **scene(device), **field, **shown, **settings)
    touched = rgb.isnan().all(dim=2)
    assert 0 < touched.sum() < SIZE * SIZE
    assert torch.equal(opacity.isnan(), touched)
    assert torch.equal(depth.isnan(), touched)
