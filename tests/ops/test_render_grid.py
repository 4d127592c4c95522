"""render_grid and render_grid_image: against the separate steps in float64."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from image_ops import render_grid_image
from op_testing import deterministic
from pyramid_scene import CELLS, HEIGHT, OCCUPANCY_BOX, STEP, WIDTH, make_camera, make_rays, on
from pyramid_scene import PYRAMID_BOX as GRID_BOX
from torch.nn import functional as F

from voxelfield import ops
from voxelfield.fields.decoders import SHDecoder, spherical_harmonics
from voxelfield.fields.density import DensityActivation
from voxelfield.ops._internal.fields import pack_sh_grid
from voxelfield.ops._internal.rays import empty_distance

SCALE, SHIFT = 20.0, -1.5
DEGREES = [0, 1, 2, 3]
TENSORS = ("origins", "directions", "near", "far", "occupied", "aabb_occupancy", "grid", "aabb_grid")

# Coordinates rounded to float32 move what is sampled by some 1e-6 of its range, which density multiplies.
ATOL = 3e-5


def channels_of(degree):
    return 1 + 3 * (degree + 1) ** 2


def make_scene(count=100, degree=2, dtype=torch.float32, fraction=0.5, channels=None, resolution=(9, 8, 11)):
    """Rays through, from inside and past a box whose cells are occupied at random."""
    return {
        **make_rays(count),
        "occupied": torch.rand(6, 5, 7) < fraction,
        "aabb_occupancy": OCCUPANCY_BOX,
        "grid": torch.randn(*resolution, channels or channels_of(degree)).to(dtype),
        "aabb_grid": GRID_BOX,
    }


def settings(degree=2, **changes):
    return {"step": STEP, "degree": degree, "density_scale": SCALE, "density_shift": SHIFT, **changes}


def by_steps(scene, grid, degree, offset=None, min_transmittance=1e-4, min_weight=0.0):
    """Marches, samples, decodes and composites one after the other; float64 but for where the samples are."""
    walk = (scene[name] for name in TENSORS[:6])
    positions, t, _, ray_index, ray_offsets, _ = ops.march_rays(*walk, STEP, offset)
    low, high = scene["aabb_grid"].double()
    features = reference.sample_grid(grid, (positions.double() - low) / (high - low))
    density = SCALE * F.softplus(features[:, 0] + SHIFT)
    basis = spherical_harmonics(scene["directions"].double(), degree)[ray_index]
    coefficients = features[:, 1 : channels_of(degree)].unflatten(1, (3, -1))
    rgb = torch.sigmoid((coefficients * basis[:, None]).sum(-1))
    dt = torch.full_like(density, STEP)
    if min_weight > 0:
        weights, _ = reference.light(ray_offsets, density.detach(), dt, min_transmittance=min_transmittance)
        keep = weights > min_weight
        density, rgb, t, dt = density[keep], rgb[keep], t[keep], dt[keep]
        ray_offsets = torch.cat([ray_offsets.new_zeros(1), keep.cumsum(0)])[ray_offsets]
    return reference.composite(density, rgb, t.double(), dt, ray_offsets, min_transmittance)[:3]


def assert_rendered(actual, expected):
    for name, a, e in zip(("rgb", "opacity", "depth"), actual, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(
            a.cpu().double(), e, rtol=1e-5, atol=ATOL, msg=lambda text, name=name: f"{name}: {text}"
        )


def random_loss(rendered, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return sum(
        (x.cpu().double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in rendered
    )


# --- values


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matches_the_separate_steps(device, degree, dtype):
    scene = make_scene(degree=degree, dtype=dtype)
    offset = torch.rand(100)
    rendered = ops.render_grid(**on(device, scene), **settings(degree), offset=offset.to(device))
    expected = by_steps(scene, scene["grid"].double(), degree, offset)
    assert (expected[1] > 0.5).sum() > 30
    assert_rendered(rendered, expected)


@pytest.mark.parametrize("count", [1, 100, 10000, 20000, 40000])
def test_any_number_of_rays(device, count):
    # From few rays, each shared by several threads, to many: every one is rendered, and to the same result.
    scene = make_scene(100)
    expected = by_steps(scene, scene["grid"].double(), 2)
    chosen = torch.arange(count) % 100
    many = {name: value[chosen] if len(value) == 100 else value for name, value in scene.items()}
    rendered = ops.render_grid(**on(device, many), **settings())
    assert_rendered(rendered, [x[chosen] for x in expected])


@pytest.mark.parametrize(
    ("degree", "of_scene", "limits"),
    [
        (2, {}, {"min_transmittance": 0.0}),
        (2, {}, {"min_transmittance": 0.3}),
        (2, {"resolution": (1, 1, 1)}, {}),
        *((degree, {"channels": 56}, {}) for degree in DEGREES),
    ],
    ids=["rays go on", "rays stop", "one vertex", *(f"padding channels, degree {degree}" for degree in DEGREES)],
)
def test_other_scenes_and_limits_match_the_separate_steps(device, degree, of_scene, limits):
    scene = make_scene(degree=degree, **of_scene)
    rendered = ops.render_grid(**on(device, scene), **settings(degree, **limits))
    assert_rendered(rendered, by_steps(scene, scene["grid"].double(), degree, **limits))


def test_faint_samples_are_left_out(device):
    scene = make_scene()
    grid = scene["grid"].double()
    rendered = ops.render_grid(**on(device, scene), **settings(min_weight=0.05))
    expected = by_steps(scene, grid, 2, min_weight=0.05)
    assert (expected[1] - by_steps(scene, grid, 2)[1]).abs().max() > 0.05
    assert_rendered(rendered, expected)


def test_density_of_its_own(device):
    scene = make_scene()
    density = torch.randn(9, 8, 11)
    rendered = ops.render_grid(**on(device, scene), **settings(), density=density.to(device))
    grid = torch.cat([density[..., None], scene["grid"][..., 1:]], dim=-1)
    assert_rendered(rendered, by_steps(scene, grid.double(), 2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("degree", "channels"), [(0, 4), (2, 28), (2, 29)])
def test_with_a_density_of_its_own_the_first_channel_is_not_read(device, degree, channels, value):
    scene = on(device, make_scene(degree=degree, channels=channels))
    density = torch.randn(9, 8, 11, device=device)
    expected = ops.render_grid(**scene, **settings(degree), density=density)
    scene["grid"][..., 0] = value
    torch.testing.assert_close(ops.render_grid(**scene, **settings(degree), density=density), expected, rtol=0, atol=0)


@pytest.mark.parametrize("form", CELLS)
@pytest.mark.parametrize("fraction", [0.5, 0.02])
def test_how_cells_are_given_changes_nothing(device, form, fraction):
    # How far a stride takes a ray does not move its samples.
    scene = on(device, make_scene(300, fraction=fraction))
    scene["occupied"] = torch.rand(23, 14, 37, device=device) < 0.1 * fraction
    expected = ops.render_grid(**scene, **settings())
    assert expected.opacity.any()
    rendered = ops.render_grid(**{**scene, "occupied": CELLS[form](scene["occupied"])}, **settings())
    torch.testing.assert_close(rendered, expected, rtol=0, atol=0)


def test_cells_packed_or_not_give_the_same_gradient():
    scene = make_scene()
    gradients = []
    for cells in (scene["occupied"], *(form(scene["occupied"]) for form in CELLS.values())):
        grid = scene["grid"].clone().requires_grad_()
        random_loss(ops.render_grid(**{**scene, "grid": grid, "occupied": cells}, **settings())).backward()
        gradients.append(grid.grad)
    assert gradients[0].any()
    for other in gradients[1:]:
        assert torch.equal(other, gradients[0])


@pytest.mark.parametrize(("shape", "most"), [((9, 5, 12), 4), ((12, 5, 9), 1), ((2, 300, 3), 255)], ids=str)
def test_empty_distance_is_the_distance_to_occupied_cells(device, shape, most):
    occupied = torch.rand(shape[::-1]).permute(2, 1, 0) < 8 / math.prod(shape)  # not contiguous
    occupied[1, 2, 1] = True
    found = empty_distance(occupied.to(device), most).cpu()
    assert torch.equal(found, reference.empty_distance(occupied, most))
    nothing = torch.zeros(3, 3, 3, dtype=torch.bool, device=device)
    assert (empty_distance(nothing, 7) == 7).all()
    assert empty_distance(nothing[:0]).shape == (0, 3, 3)
    for raw in (0, 256):
        with pytest.raises(RuntimeError, match=f"max_distance must be 1 to 255, got {raw}"):
            torch.ops.voxelfield.empty_distance(nothing, raw)


def test_rays_that_miss_and_empty_space_give_nothing(device):
    scene = make_scene(fraction=-1.0)
    missing = {**make_scene(fraction=2.0), "far": torch.zeros(100)}
    for one in (scene, missing):
        for result in ops.render_grid(**on(device, one), **settings()):
            assert not result.any()


def test_no_rays(device):
    rgb, opacity, depth = ops.render_grid(**on(device, make_scene(count=0)), **settings())
    assert rgb.shape == (0, 3)
    assert opacity.shape == depth.shape == (0,)
    scene = on(device, make_scene(count=0))
    scene["grid"].requires_grad_()
    ops.render_grid(**scene, **settings()).rgb.sum().backward()
    assert not scene["grid"].grad.any()


def test_agrees_with_the_decoder(device):
    scene = on(device, make_scene())
    activation = DensityActivation(scale=3.0, initial=0.5)
    decoder = SHDecoder(2, activation)
    walk = (scene[name] for name in TENSORS[:6])
    positions, t, dt, ray_index, ray_offsets, _ = ops.march_rays(*walk, STEP)
    low, high = scene["aabb_grid"]
    features = ops.sample_trilinear(scene["grid"], (positions - low) / (high - low))
    rgb = decoder.rgb(features, decoder.encode_view(scene["directions"])[ray_index])
    expected = ops.composite(decoder.density(features), rgb, t, dt, ray_offsets)
    rendered = ops.render_grid(
        **scene, step=STEP, degree=2, density_scale=activation.scale, density_shift=activation.shift
    )
    assert_rendered(rendered, [x.cpu().double() for x in expected[:3]])


# --- gradient


@pytest.mark.covering("degree dtype")
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("min_weight", [0.0, 0.03])
def test_gradient_matches_the_separate_steps(device, degree, dtype, min_weight):
    scene = make_scene(degree=degree, dtype=dtype)
    exact = scene["grid"].double().requires_grad_()
    random_loss(by_steps(scene, exact, degree, min_weight=min_weight)).backward()
    scene = on(device, scene)
    grid = scene["grid"].requires_grad_()
    random_loss(ops.render_grid(**scene, **settings(degree, min_weight=min_weight))).backward()
    assert grid.grad.dtype == dtype
    largest = exact.grad.abs().max().item()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(grid.grad.cpu().double(), exact.grad, rtol=max(rounding, 1e-4), atol=2e-5 * largest)


@pytest.mark.parametrize("channels", [28, 29, 32])
@pytest.mark.parametrize("count", [100, 40000])
def test_gradient_of_any_number_of_rays_and_channels(device, channels, count):
    scene = make_scene(100, channels=channels)
    exact = scene["grid"].double().requires_grad_()
    random_loss(by_steps(scene, exact, 2)).backward()
    copies = count // 100
    many = on(device, {n: v.repeat(copies, *(1,) * (v.dim() - 1)) if len(v) == 100 else v for n, v in scene.items()})
    grid = many["grid"].requires_grad_()
    rendered = ops.render_grid(**many, **settings())
    random_loss([x.unflatten(0, (copies, 100)).sum(0) for x in rendered]).backward()
    torch.testing.assert_close(
        grid.grad.cpu().double() / copies, exact.grad, rtol=1e-3, atol=1e-4 * exact.grad.abs().max().item()
    )
    assert not grid.grad[..., 28:].any()


# --- images


@pytest.mark.covering("degree dtype")
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["bits", "empty distances to 255"])
def test_an_image_is_its_rays_over_the_background(device, degree, dtype, form):
    scene = on(device, make_scene(degree=degree))
    camera = make_camera(device)
    background = torch.tensor([1.0, 0.5, 0.25], device=device)
    grid, density = pack_sh_grid(scene["grid"], degree, dtype)
    changes = settings(min_weight=1e-3) | {"degree": degree}
    rgb, opacity, depth = render_grid_image(
        camera.c2w[0],
        camera.intrinsics[0],
        WIDTH,
        HEIGHT,
        CELLS[form](scene["occupied"]),
        scene["aabb_occupancy"],
        background=background,
        grid=grid,
        density=density,
        aabb_grid=scene["aabb_grid"],
        **changes,
    )
    rays = camera.image_rays(0, scene["aabb_grid"])
    assert 100 < (rays.far > rays.near).sum() < WIDTH * HEIGHT - 100
    listed = {"origins": rays.origins, "directions": rays.directions, "near": rays.near, "far": rays.far}
    expected = ops.render_grid(
        **{**scene, **listed, "grid": scene["grid"].to(dtype)}, **settings(degree, min_weight=1e-3)
    )
    assert rgb.shape == (HEIGHT, WIDTH, 3)
    # Rays are made by other roundings here: where one enters a cell a little later it has a sample less.
    for one, two in (
        (rgb.flatten(0, 1), expected.rgb + (1 - expected.opacity[:, None]) * background),
        (opacity.flatten(), expected.opacity),
        (depth.flatten(), expected.depth_sum / expected.opacity.clamp(min=1e-6)),
    ):
        off = (one - two).abs() > 1e-3
        assert off.float().mean() < 0.01
        assert (one - two).abs().mean() < 1e-3


def test_a_display_grid_keeps_the_field(device):
    grid = torch.randn(4, 5, 6, 30, device=device)
    features, density = pack_sh_grid(grid, 2)
    assert features.shape == (4, 5, 6, 32)
    assert features.dtype == density.dtype == torch.float16
    assert torch.equal(features[..., :28], grid[..., :28].half())
    assert not features[..., 28:].any()
    assert torch.equal(density, grid[..., 0].half())


# --- errors and registration


def test_a_density_of_its_own_is_refused_in_training():
    scene = make_scene(count=2)
    scene["grid"].requires_grad_()
    with pytest.raises(ValueError, match="density must be None"):
        ops.render_grid(**scene, **settings(), density=torch.zeros(9, 8, 11))


@pytest.mark.cuda
def test_a_gradient_without_a_fixed_order_is_refused_where_that_is_asked_for():
    device = torch.device("cuda")
    scene = on(device, make_scene(count=10))
    scene["grid"].requires_grad_()
    total = ops.render_grid(*(scene[name] for name in TENSORS), **settings()).rgb.sum()
    message = "render_grid does not have a deterministic implementation on CUDA"
    with deterministic(), pytest.raises(RuntimeError, match=message):
        total.backward(retain_graph=True)
    with deterministic(warn_only=True), pytest.warns(UserWarning, match=message):
        total.backward()
    assert scene["grid"].grad.any()
