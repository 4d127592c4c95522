"""A ray that is not finite: it has no samples, or results that are not finite, and no other ray changes by a bit."""

from __future__ import annotations

import math

import pytest
import torch
from op_contracts import BOXES, CONTRACTS, tensors
from op_contracts import RAYS as RAYS_OF_SAMPLES
from pyramid_scene import OCCUPANCY_BOX, STEP, make_rays, on
from test_march_visible import make_scene as make_pyramid_scene
from test_march_visible import settings as pyramid_settings
from test_render_grid import make_scene as make_grid_scene
from test_render_grid import settings as grid_settings

import voxelfield.compat.nerfacc as nerfacc
from voxelfield import ops
from voxelfield.ops._internal.fields import march_visible
from voxelfield.ops._internal.rays import march_pieces

RAYS, BROKEN = 60, 8
NOT_FINITE = [math.nan, math.inf, -math.inf]
every_value = pytest.mark.parametrize("value", NOT_FINITE)

# --- packed samples

COUNTS = torch.tensor([3, 0, 5, 70, 4, 1, 0, 9, 12, 8, 30, 0, 2] + [6] * (RAYS - 13))
OFFSETS = torch.cat((torch.zeros(1, dtype=torch.int64), COUNTS.cumsum(0)))
M = int(OFFSETS[-1])
ROWS = torch.arange(RAYS).repeat_interleave(COUNTS)


def selected(offsets, **samples):
    packed = ops.select_samples(**samples, ray_offsets=offsets)
    whole = torch.stack((packed.t, packed.dt, *packed.positions.unbind(1)), dim=1)
    kept = torch.full((M, 5), -1.0, device=offsets.device)
    starts = (offsets[:-1] - packed.ray_offsets[:-1])[packed.ray_index]
    return (kept.index_copy(0, torch.arange(len(whole), device=offsets.device) + starts, whole),)


def drawn_in_rows(offsets, ends, weights):
    """Draws from the last 40 rays, which have six samples each, as nerfacc does."""
    edges, weights = ends[-6 * 40 :].view(40, 6), weights[-6 * 40 :].view(40, 6)
    cdfs = torch.cat((torch.zeros_like(weights[:, :1]), weights[:, 1:].cumsum(1)), dim=1)
    intervals, samples = nerfacc.importance_sampling(nerfacc.RayIntervals(edges), cdfs, 8)
    left, right = nerfacc.searchsorted(nerfacc.RayIntervals(edges), samples)
    results = intervals.vals, samples.vals, left, right
    return tuple(torch.cat((x.new_zeros(RAYS - 40, x.shape[1]), x)) for x in results)


def info(offsets):
    return torch.stack((offsets[:-1], offsets.diff()), dim=1)


def row_of(name):
    """The inputs of a row of the table of contracts that have a value for each sample, and a function of these."""
    row = CONTRACTS[name]
    rest = row.arguments()
    each = [key for key, x in rest.items() if isinstance(x, torch.Tensor) and x.shape[:1] == (8,)]
    settings = {key: x for key, x in rest.items() if not isinstance(x, torch.Tensor)}
    return each, lambda offsets, **x: tensors(row.call(**settings, **x, ray_offsets=offsets))


# The names of inputs (M,), (M, 3) for rgb and positions, and a function of offsets and these.
PACKED = {
    **{name: row_of(name) for name, row in RAYS_OF_SAMPLES.items() if "ray_offsets" in row.arguments()},
    "select_samples": (("density", "positions", "t", "dt"), selected),
    "nerfacc, from densities": (
        ("t", "ends", "density"),
        lambda offsets, t, ends, density: nerfacc.render_weight_from_density(t, ends, density, info(offsets)),
    ),
    "nerfacc, from alphas": (("alpha",), lambda offsets, alpha: nerfacc.render_weight_from_alpha(alpha, info(offsets))),
    "nerfacc, drawn": (("ends", "weights"), drawn_in_rows),
}
PACKED = {name: row for name, row in PACKED.items() if row[0] and "one length" not in name}
PACKED_INPUTS = [(op, name) for op, (names, _) in PACKED.items() for name in names]


def packed_inputs(names, device):
    generator = torch.Generator().manual_seed(5)
    t = 1 + torch.rand(M, generator=generator).cumsum(0)
    made = {"density": 4 * torch.rand(M, generator=generator), "alpha": torch.rand(M, generator=generator)}
    made |= {"rgb": torch.rand(M, 3, generator=generator), "positions": torch.rand(M, 3, generator=generator)}
    made |= {"values": made["rgb"][:, :2], "t_starts": t, "t_ends": t + 0.1}
    made |= {"t": t, "ends": t + 0.1, "dt": 0.1 + torch.rand(M, generator=generator)}
    made["weights"] = torch.rand(M, generator=generator) * (torch.rand(M, generator=generator) < 0.7)
    made["weights"][OFFSETS[BROKEN] : OFFSETS[BROKEN + 1]] = 0.0  # where lengths are used in their place
    return {name: made[name].to(device) for name in names}


def of_other_rays(x, broken):
    """The rows of all rays but one, of rays or of samples."""
    assert x.shape[0] in (RAYS, M)
    return x[(torch.arange(RAYS) if x.shape[0] == RAYS else ROWS) != broken]


@every_value
@pytest.mark.parametrize("broken", [BROKEN, RAYS - 2, RAYS - 1])
@pytest.mark.parametrize(("op", "name"), PACKED_INPUTS, ids=[f"{op}-{name}" for op, name in PACKED_INPUTS])
def test_samples_change_no_other_ray(device, op, name, broken, value):
    names, function = PACKED[op]
    results = []
    for is_broken in (False, True):
        inputs = packed_inputs(names, device)
        if is_broken:
            inputs[name][OFFSETS[broken] : OFFSETS[broken + 1]] = value
        inputs = {key: x.requires_grad_() for key, x in inputs.items()}
        outputs = list(function(OFFSETS.to(device), **inputs))
        floating = [x for x in outputs if x.requires_grad]
        if floating:
            grads = [torch.linspace(-1, 1, x.numel(), device=device).view(x.shape) for x in floating]
            outputs += torch.autograd.grad(floating, list(inputs.values()), grads)
        results.append([of_other_rays(x.detach(), broken) for x in outputs])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert expected.isfinite().all()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("value", [*NOT_FINITE, 1.7e308])
def test_intervals_change_no_other_ray_in_float64(device, value):
    edges = torch.rand(RAYS, 13, dtype=torch.float64, device=device).cumsum(1)
    weights = torch.rand(RAYS, 12, dtype=torch.float64, device=device)
    weights[::2] = 0.0
    expected = ops.importance_sample(edges[:, :-1], edges[:, 1:], weights, 9)
    for broken in range(RAYS - 5, RAYS):
        for changed in (0, 1):
            given = edges.clone(), weights.clone()
            given[changed][broken] = value
            actual = ops.importance_sample(given[0][:, :-1], given[0][:, 1:], given[1], 9)
            assert torch.equal(of_other_rays(actual, broken), of_other_rays(expected, broken))


# --- marching

# What makes a ray not finite, or its positions in cells. An infinite `far` is allowed.
BREAKS = [(name, value) for name in ("origins", "directions", "near", "far", "offset") for value in NOT_FINITE]
BREAKS.remove(("far", math.inf))
BREAKS += [("origins", 3e38), ("origins", -3e38)]
every_break = pytest.mark.parametrize(("name", "value"), BREAKS, ids=[f"{name}-{value}" for name, value in BREAKS])


def march_scene(device):
    scene = {**make_rays(RAYS), "occupied": torch.rand(6, 5, 7) < 0.6, "aabb": OCCUPANCY_BOX}
    return on(device, scene | {"offset": torch.rand(RAYS)})


def level_scene(device):
    scene = march_scene(device)
    box = scene.pop("aabb").view(1, 6)
    del scene["offset"]
    return scene | {"occupied": torch.rand(2, 6, 5, 7, device=device) < 0.6, "aabbs": torch.cat((box, 2 * box))}


def visible_scene(device):
    return on(device, make_pyramid_scene(RAYS)) | {"offset": torch.rand(RAYS, device=device)}


# A scene, and a function of it and of a capacity that returns packed samples.
MARCHES = {
    "march_rays": (march_scene, lambda capacity, **x: ops.march_rays(**x, step=STEP, capacity=capacity)),
    "march_levels": (level_scene, lambda capacity, **x: ops.march_levels(**x, step=STEP, capacity=capacity)),
    "march_levels, cells": (level_scene, lambda capacity, **x: ops.march_levels(**x, step=0.0, capacity=capacity)),
    "march_pieces": (
        march_scene,
        lambda capacity, occupied, **x: march_pieces(
            **x, occupied=ops.pack_occupancy(occupied), step=STEP, boxes=BOXES, capacity=capacity
        ),
    ),
    "march_visible": (visible_scene, lambda capacity, **x: march_visible(**x, **pyramid_settings(), capacity=capacity)),
    "march_visible, pieces": (
        visible_scene,
        lambda capacity, **x: march_visible(**x, **pyramid_settings(), capacity=capacity, boxes=BOXES),
    ),
}


def break_ray(scene, ray, name, value, axis=slice(None)):
    """Returns the scene with a ray of which a number, or the component of a vector along an axis, is not finite."""
    broken = scene[name].clone()
    broken[(ray, axis) if broken.dim() == 2 else ray] = value
    return scene | {name: broken}


@every_break
@pytest.mark.parametrize("march", MARCHES)
def test_a_ray_that_is_not_finite_has_no_samples(device, march, name, value):
    make_scene, function = MARCHES[march]
    scene = make_scene(device)
    if name not in scene:
        pytest.skip("the op has no offset")
    expected = function(None, **scene)
    before = expected.ray_offsets.diff()
    ray = int(before.argmax())
    others = expected.ray_index != ray
    assert before[ray] > 1
    assert others.sum() > 50
    before[ray] = 0
    for axis in (slice(None), 0, 2) if scene[name].dim() == 2 else (slice(None),):
        for capacity in (None, int(others.sum())):
            samples = function(capacity, **break_ray(scene, ray, name, value, axis))
            assert torch.equal(samples.ray_offsets.diff(), before)
            assert samples.rays_kept == RAYS
            for actual, whole in zip(samples[:4], expected[:4], strict=True):
                assert torch.equal(actual, whole[others])


@pytest.mark.parametrize("march", MARCHES)
def test_an_infinite_far_leaves_rays_finite(device, march):
    make_scene, function = MARCHES[march]
    scene = make_scene(device)
    ray = int(function(None, **scene).ray_offsets.diff().argmax())
    samples = function(None, **break_ray(scene, ray, "far", math.inf))
    assert samples.ray_offsets.diff()[ray] > 1
    assert samples.positions.isfinite().all()


@pytest.mark.parametrize("march", MARCHES)
@pytest.mark.parametrize("capacity", [0, 5])
def test_rows_without_rays_have_the_first_index(device, march, capacity):
    make_scene, function = MARCHES[march]
    scene = {name: x[:0] if len(x) == RAYS else x for name, x in make_scene(device).items()}
    samples = function(capacity, **scene)
    assert samples.ray_index.tolist() == [0] * capacity
    assert samples.positions.isnan().all()
    assert samples.ray_offsets.tolist() == [0]
    assert samples.rays_kept.tolist() == [0]


@every_break
def test_render_grid_renders_all_other_rays_alike(device, name, value):
    scene = on(device, make_grid_scene(RAYS)) | {"offset": torch.rand(RAYS, device=device)}
    results = []
    for rays in (break_ray(scene, BROKEN, "far", 0.0), break_ray(scene, BROKEN, name, value)):
        grid = scene["grid"].clone().requires_grad_()
        rendered = ops.render_grid(**rays | {"grid": grid}, **grid_settings())
        (rendered.rgb.sum() + rendered.depth_sum.sum()).backward()
        results.append((*rendered, grid.grad))
    *expected, of_grid = results[0]
    *actual, of_broken = results[1]
    for one, two in zip(actual, expected, strict=True):
        assert not one[BROKEN].any()
        assert torch.equal(one, two)
    torch.testing.assert_close(of_broken, of_grid, rtol=1e-4, atol=1e-4 * of_grid.abs().max().item())


@every_value
@pytest.mark.parametrize("place", [(0, 3), (2, 3), (0, 0), (1, 2)], ids=str)
@pytest.mark.parametrize("op", ["render_grid_image", "render_pyramid_image", "render_baked_image"])
def test_a_camera_that_is_not_finite_sees_nothing(op, place, value):
    inputs, render = CONTRACTS[op].arguments(), CONTRACTS[op].call
    assert render(**inputs)[1].any()
    inputs["c2w"][place] = value
    image, opacity, depth, *_ = render(**inputs)
    assert (image == inputs.get("background", torch.zeros(3))[0]).all()
    assert not opacity.any()
    assert not depth.any()
