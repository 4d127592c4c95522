"""render_pyramid_image: against the separate steps in float64, and against the modules it renders."""

from __future__ import annotations

import pytest
import reference
import torch
from image_ops import render_pyramid_image
from pyramid_scene import (
    CELLS,
    HEIGHT,
    OCCUPANCY_BOX,
    PYRAMID_BOX,
    STEP,
    WIDTH,
    exact_geometry,
    exact_network,
    make_camera,
    make_levels,
    make_weights,
    on,
    pyramid_dtypes,
)

from voxelfield import ops
from voxelfield.fields.decoders import spherical_harmonics
from voxelfield.rendering.cameras import Cameras

INITIAL = 8.0
BACKGROUND = torch.tensor([1.0, 0.5, 0.25])
SETTINGS = {"step": STEP, "density_initial": INITIAL, "min_weight": 1e-3}

# What a pixel may be off by, in the mean and all but one in a hundred: rays made by other roundings enter a cell a
# sample earlier or later, and samples near min_weight come and go.
MEAN_ERROR = {torch.float32: 5e-5, torch.float16: 5e-4}
MAX_ERROR = {torch.float32: 1e-3, torch.float16: 5e-3}


def make_scene(levels=3, width=64, hidden=2, degree=3, dtype=torch.float16, fraction=0.6):
    basis = (degree + 1) ** 2
    return {
        "background": BACKGROUND,
        "occupied": torch.rand(6, 5, 7) < fraction,
        "aabb_occupancy": OCCUPANCY_BOX,
        "levels": make_levels(levels, dtype),
        "aabb": PYRAMID_BOX,
        "density_weights": make_weights(4 * levels, width, 16),
        "color_weights": make_weights(16 + basis, *([width] * hidden), 3),
    }


def render(scene, camera, degree=3, **changes):
    size = (camera.width, camera.height)
    return render_pyramid_image(
        camera.c2w[0], camera.intrinsics[0], *size, **scene, **{**SETTINGS, "degree": degree, **changes}
    )


def by_steps(scene, camera, degree=3, min_weight=1e-3):
    """Marches, samples, runs the networks and composites one after the other; float64 but for where the samples are."""
    rays = camera.image_rays(0, scene["aabb"])
    walk = (rays.origins, rays.directions, rays.near, rays.far, scene["occupied"], scene["aabb_occupancy"])
    positions, t, _, ray_index, ray_offsets, _ = ops.march_rays(*walk, STEP)
    geometry = exact_geometry(scene, positions)
    density = INITIAL * geometry[:, 0].clamp(max=12).exp()
    basis = spherical_harmonics(rays.directions.double(), degree)[ray_index]
    rgb = torch.sigmoid(exact_network(torch.cat((geometry, basis), dim=1), scene["color_weights"]))
    dt = torch.full_like(density, STEP)
    weights, _ = reference.light(ray_offsets, density, dt)
    keep = weights > min_weight
    ray_offsets = torch.cat([ray_offsets.new_zeros(1), keep.cumsum(0)])[ray_offsets]
    kept = [x[keep] for x in (density, rgb, t.double(), dt)]
    rgb, opacity, depth, _ = reference.composite(*kept, ray_offsets, 1e-4)
    rgb = rgb + (1 - opacity)[:, None] * scene["background"].double()
    return (
        rgb.view(HEIGHT, WIDTH, 3),
        opacity.view(HEIGHT, WIDTH),
        (depth / opacity.clamp(min=1e-6)).view(HEIGHT, WIDTH),
    )


def assert_images_agree(actual, expected, dtype):
    for name, one, two in zip(("rgb", "opacity", "depth"), actual, expected, strict=True):
        assert one.shape == two.shape
        assert one.dtype == torch.float32
        error = (one.cpu().double() - two.cpu().double()).abs()
        scale = 3.0 if name == "depth" else 1.0
        assert error.mean() < scale * MEAN_ERROR[dtype], name
        assert (error > scale * MAX_ERROR[dtype]).double().mean() < 0.01, name


@pyramid_dtypes
@pytest.mark.parametrize(
    ("levels", "width", "hidden", "degree"),
    [
        (3, 64, 2, 3),
        (6, 128, 2, 3),
        (1, 16, 1, 0),
        (6, 64, 1, 2),
        (8, 100, 2, 1),
        (2, 128, 1, 3),
        (6, 128, 3, 3),
        (3, 64, 3, 2),
    ],
)
def test_matches_the_separate_steps(device, dtype, levels, width, hidden, degree):
    scene = make_scene(levels, width, hidden, degree, dtype)
    expected = by_steps(scene, make_camera(), degree)
    assert 100 < (expected[1] > 0.5).sum() < WIDTH * HEIGHT - 100
    assert_images_agree(render(on(device, scene), make_camera(device), degree), expected, dtype)


@pytest.mark.parametrize("form", CELLS)
def test_how_cells_are_given_changes_nothing(device, form):
    scene, camera = on(device, make_scene(fraction=0.1)), make_camera(device)
    expected = render(scene, camera)
    _, opacity, _ = expected
    assert opacity.any()
    image = render({**scene, "occupied": CELLS[form](scene["occupied"])}, camera)
    torch.testing.assert_close(image, expected, rtol=0, atol=0)


def test_empty_space_shows_the_background(device):
    rgb, opacity, depth = render(on(device, make_scene(fraction=-1.0)), make_camera(device))
    assert torch.equal(rgb.cpu(), BACKGROUND.expand(HEIGHT, WIDTH, 3))
    assert not opacity.any()
    assert not depth.any()


def test_weights_in_float16_are_the_same(device):
    scene, camera = on(device, make_scene()), make_camera(device)
    expected = render(scene, camera)
    halves = {name: [x.half() for x in scene[name]] for name in ("density_weights", "color_weights")}
    torch.testing.assert_close(render({**scene, **halves}, camera), expected, rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 128])
def test_an_image_is_the_same_in_every_run(width):
    scene = on("cuda", make_scene(levels=6, width=width))
    small = make_camera("cuda")
    camera = Cameras(small.c2w, 16 * small.intrinsics, 16 * WIDTH, 16 * HEIGHT)
    expected = render(scene, camera)
    for _ in range(3):
        torch.testing.assert_close(render(scene, camera), expected, rtol=0, atol=0)


@pytest.mark.cuda
def test_a_large_image_matches_the_cpu():
    # Many more pixels than threads: rays are handed out as others end, and many samples wait for the colour network.
    scene = make_scene(levels=6, width=128)
    small = make_camera()
    camera = Cameras(small.c2w, 8 * small.intrinsics, 8 * WIDTH, 8 * HEIGHT)
    expected = render(scene, camera)
    assert_images_agree(render(on("cuda", scene), camera.to("cuda")), expected, torch.float16)
