"""march_visible: against marching, the density network and selection in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from op_contracts import BOXES
from pyramid_scene import (
    CELLS,
    OCCUPANCY_BOX,
    PYRAMID_BOX,
    STEP,
    WEIGHT_TOLERANCE,
    exact_geometry,
    exact_network,
    make_levels,
    make_rays,
    make_weights,
    of_dense_levels,
    on,
    pyramid_dtypes,
)
from test_marching import assert_packed, assert_truncated

from voxelfield import ops
from voxelfield.ops._internal.fields import march_visible
from voxelfield.ops._internal.rays import march_pieces
from voxelfield.ops._internal.stencil import atlas_coordinates

INITIAL = 8.0
LIMITS = {"min_transmittance": 1e-4, "min_weight": 1e-3}

either_boxes = pytest.mark.parametrize("boxes", [[], BOXES], ids=["one box", "nested boxes"])


def make_scene(count=200, levels=3, width=64, dtype=torch.float16, fraction=0.6):
    return {
        **make_rays(count),
        "occupied": torch.rand(6, 5, 7) < fraction,
        "aabb_occupancy": OCCUPANCY_BOX,
        "levels": make_levels(levels, dtype),
        "aabb": PYRAMID_BOX,
        "density_weights": make_weights(4 * levels, width, 16),
    }


def settings(**changes):
    return {"step": STEP, "density_initial": INITIAL, **LIMITS, **changes}


def march(scene, offset=None):
    cells = {name: scene[name] for name in ("origins", "directions", "near", "far", "occupied")}
    return ops.march_rays(*cells.values(), scene["aabb_occupancy"], STEP, offset)


def exact_light(scene, candidates):
    """Light that reaches each candidate sample and its weight, float64."""
    raw = exact_geometry(scene, candidates.positions)[:, 0]
    thickness = INITIAL * raw.clamp(max=12).exp() * STEP
    before = thickness.cumsum(0) - thickness
    start = candidates.ray_offsets[:-1].clamp(max=max(len(before) - 1, 0))
    transmittance = torch.exp(-(before - before[start][candidates.ray_index]))
    return transmittance, transmittance * -torch.expm1(-thickness)


def rows_of(samples):
    """Each sample as its ray and the bits of its distance."""
    return list(zip(samples.ray_index.tolist(), samples.t.tolist(), strict=True))


@pyramid_dtypes
@pytest.mark.parametrize(("levels", "width"), [(1, 16), (3, 64), (6, 128), (8, 40)])
def test_keeps_what_shows(device, dtype, levels, width):
    scene = make_scene(levels=levels, width=width, dtype=dtype)
    offset = torch.rand(200)
    candidates = march(scene, offset)
    _, weight = exact_light(scene, candidates)
    seen = march_visible(**on(device, scene), **settings(), offset=offset.to(device))
    tolerance = WEIGHT_TOLERANCE[dtype]
    found = set(rows_of(seen))
    assert len(found) == len(seen.t)
    surely = weight > LIMITS["min_weight"] * (1 + tolerance)
    possibly = weight > LIMITS["min_weight"] * (1 - tolerance)
    assert 100 < surely.sum() < 0.9 * len(weight)
    rows = rows_of(candidates)
    assert {row for row, sure in zip(rows, surely.tolist(), strict=True) if sure} <= found
    assert found <= {row for row, possible in zip(rows, possibly.tolist(), strict=True) if possible}


def by_steps(scene, boxes, blocks):
    """Marches, samples, evaluates the network and selects, one after the other."""
    walk = [scene[name] for name in ("origins", "directions", "near", "far")]
    cells = ops.pack_occupancy(scene["occupied"]), scene["aabb_occupancy"], STEP
    candidates = march_pieces(*walk, *cells, boxes) if boxes else ops.march_rays(*walk, *cells)
    low, high = scene["aabb"]
    in_cube = (candidates.positions - low) / (high - low)
    features = [
        ops.sample_trilinear(
            level.float(), in_cube if table is None else atlas_coordinates(in_cube, table, level.shape[:3])
        )
        for level, table in zip(scene["levels"], blocks, strict=True)
    ]
    raw = exact_network(torch.cat(features, dim=-1).double(), scene["density_weights"])[:, 0]
    density = INITIAL * raw.clamp(max=12).exp()
    return ops.select_samples(density.float(), *candidates[:3], candidates.ray_offsets, **LIMITS)


@pyramid_dtypes
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@either_boxes
def test_matches_the_separate_steps(device, dtype, boxes, sparse):
    scene = make_scene(600, dtype=dtype)
    blocks = [None, None, None]
    if sparse:
        scene["levels"][1] = torch.randn(16, 16, 8, 4).to(dtype)  # an atlas of 2 x 2 x 1 blocks
        stored = [a << 20 | b << 10 for a in range(2) for b in range(2)]
        blocks[1] = torch.tensor([*stored, -1, -1, stored[2], stored[0]], dtype=torch.int32).view(2, 2, 2)
    expected = set(rows_of(by_steps(scene, boxes, blocks)))
    placed = [None if table is None else table.to(device) for table in blocks]
    seen = march_visible(**on(device, scene), **settings(), boxes=boxes, blocks=placed)
    found = set(rows_of(seen))
    assert len(expected) > 500
    assert len(found ^ expected) < (0.002 if dtype == torch.float32 else 0.02) * len(expected)


def test_stops_where_it_is_dark(device):
    scene = make_scene()
    candidates = march(scene)
    transmittance, _ = exact_light(scene, candidates)
    seen = march_visible(**on(device, scene), **settings(min_transmittance=0.3, min_weight=0.0))
    found, rows = set(rows_of(seen)), rows_of(candidates)
    assert {row for row, light in zip(rows, transmittance.tolist(), strict=True) if light > 0.31} <= found
    assert found <= {row for row, light in zip(rows, transmittance.tolist(), strict=True) if light > 0.29}
    assert 0.01 < (transmittance > 0.31).float().mean() < 0.9


def test_samples_are_packed_by_ray(device):
    scene = make_scene()
    seen = march_visible(**on(device, scene), **settings())
    assert len(seen.t) > 0
    assert_packed(seen, scene, step=STEP)


@either_boxes
@pytest.mark.parametrize("max_samples", [1, 3])
def test_a_ray_keeps_its_first_samples(device, max_samples, boxes):
    scene = on(device, make_scene())
    every = march_visible(**scene, **settings(), boxes=boxes)
    first = march_visible(**scene, **settings(), max_samples_per_ray=max_samples, boxes=boxes)
    place = torch.arange(len(every.t), device=device) - every.ray_offsets[every.ray_index]
    assert (place >= max_samples).any()
    for one, two in zip(first[:4], every[:4], strict=True):
        assert torch.equal(one, two[place < max_samples])
    assert torch.equal(first.ray_offsets.diff(), every.ray_offsets.diff().clamp(max=max_samples))


@either_boxes
def test_rays_that_are_not_needed_change_nothing(device, boxes):
    # On CUDA, with more rays than are marched at once.
    scene = on(device, make_scene(count=400_000 if device.type == "cuda" else 2_000))
    every = march_visible(**scene, **settings(), boxes=boxes)
    for share in (50, 5):
        capacity = len(every.t) // share
        part = march_visible(**scene, **settings(), capacity=capacity, boxes=boxes)
        assert assert_truncated(part, every, capacity) < len(scene["near"])


@either_boxes
@pytest.mark.cuda
def test_what_is_not_needed_is_not_marched(boxes):
    scene = on("cuda", make_scene(count=400_000))
    bits = ops.pack_occupancy(scene.pop("occupied"))
    rays = [scene.pop(name) for name in ("origins", "directions", "near", "far")]
    offset = torch.full_like(rays[2], 0.5)
    numbers = (STEP, INITIAL, *LIMITS.values(), 8, list(boxes))
    marched = (*rays, offset, *bits, *of_dense_levels(scene), *numbers)
    _, counts, *_ = torch.ops.voxelfield.march_to_slots(*marched, 1 << 40, 0.0)
    most = int(counts.sum()) // 20
    _, few, sums, _ = torch.ops.voxelfield.march_to_slots(*marched, most, 0.0)
    assert most < few.sum() == sums.sum() < 5 * most
    assert torch.equal(few[few > 0], counts[few > 0])


def test_nothing_to_see(device):
    missing = make_scene()
    missing["far"] = missing["near"].clone()
    for scene in (missing, make_scene(fraction=-1.0), make_scene(count=0)):
        seen = march_visible(**on(device, scene), **settings(), capacity=5)
        assert not seen.ray_offsets.any()
        assert seen.positions.isnan().all()


@pytest.mark.parametrize("form", CELLS)
def test_how_cells_are_given_changes_nothing(device, form):
    scene = on(device, make_scene(fraction=0.1))
    expected = march_visible(**scene, **settings())
    assert len(expected.t) > 50
    seen = march_visible(**{**scene, "occupied": CELLS[form](scene["occupied"])}, **settings())
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 128])
def test_a_ray_does_not_depend_on_the_others(width):
    # Many more rays than threads: they are handed out as others end.
    count = 200_000
    scene = on("cuda", make_scene(count, levels=6, width=width))
    seen = march_visible(**scene, **settings())
    again = march_visible(**scene, **settings())
    torch.testing.assert_close(seen, again, rtol=0, atol=0)
    rays = ("origins", "directions", "near", "far")
    some = torch.randperm(count, device="cuda")[:500].sort().values
    alone = march_visible(**{n: v[some] if n in rays else v for n, v in scene.items()}, **settings())
    assert torch.equal(alone.ray_offsets.diff(), seen.ray_offsets.diff()[some])
    chosen = torch.isin(seen.ray_index, some)
    assert torch.equal(alone.t, seen.t[chosen])
    assert torch.equal(alone.positions, seen.positions[chosen])


@pytest.mark.cuda
def test_can_be_captured_in_a_graph():
    scene = on("cuda", make_scene(5000))
    packed = {**scene, "occupied": ops.pack_occupancy(scene["occupied"])}
    expected = march_visible(**packed, **settings(), capacity=40_000)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        seen = march_visible(**packed, **settings(), capacity=40_000)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        for one, two in zip(seen, expected, strict=True):
            assert torch.equal(one.nan_to_num(), two.nan_to_num())


def chance_of(rays, t):
    """The number in [0, 1) by which the roulette decides about samples."""
    bits = t.cpu().numpy().view(np.uint32) * np.uint32(0x9E3779B9) ^ rays.cpu().numpy().astype(np.uint32)
    bits = (bits ^ bits >> 16) * np.uint32(0x85EBCA6B)
    bits = (bits ^ bits >> 13) * np.uint32(0xC2B2AE35)
    return torch.from_numpy(((bits ^ bits >> 16) >> 8).astype(np.float64) / 2**24)


@pytest.mark.parametrize("roulette", [0.02, 0.3, 1.0])
def test_roulette_keeps_faint_samples_by_their_weight(device, roulette):
    scene = make_scene(400, dtype=torch.float32 if device.type == "cpu" else torch.float16)
    limits = {"min_transmittance": 0.0, "min_weight": 0.0}
    offset = torch.rand(400)
    candidates = march(scene, offset)
    transmittance, weight = exact_light(scene, candidates)
    opacity = (weight / transmittance).nan_to_num()
    probability = (opacity * (transmittance / roulette).clamp(min=4)).clamp(max=1)
    surely = weight >= roulette
    probability = torch.where(surely, 1.0, probability)
    chance = chance_of(candidates.ray_index, candidates.t)
    tolerance = WEIGHT_TOLERANCE[scene["levels"][0].dtype]
    decided = (chance - probability).abs() > 4 * tolerance * probability
    decided &= (weight - roulette).abs() > 4 * tolerance * roulette
    seen = march_visible(
        **on(device, scene), **settings(**limits), offset=offset.to(device), max_samples_per_ray=256, roulette=roulette
    )
    found = dict(zip(rows_of(seen), seen.dt.tolist(), strict=True))
    longer = 0
    for row, kept, sure, known, a, p in zip(
        *(rows_of(candidates), (chance < probability).tolist(), surely.tolist()),
        *(decided.tolist(), opacity.tolist(), probability.tolist()),
        strict=True,
    ):
        if not known:
            continue
        assert (row in found) == kept
        if kept:
            stretch = 1.0 if sure or p == 1 else math.log1p(-a / p) / math.log1p(-a)
            assert found[row] == pytest.approx(STEP * stretch, rel=20 * tolerance)
            longer += stretch > 1
    assert longer > 20
    assert 0 < int((decided & (chance >= probability)).sum()) < int(decided.sum())


@either_boxes
def test_roulette_keeps_the_mean_of_what_is_seen(device, boxes):
    """One ray many times: which of its samples are kept depends on its number."""
    count = 20_000
    scene = make_scene(40, fraction=1.0, dtype=torch.float32 if device.type == "cpu" else torch.float16)
    initial = 0.4  # so that most samples are faint
    limits = {"min_transmittance": 1e-4, "min_weight": 0.0, "max_samples_per_ray": 256, "boxes": boxes}
    limits["density_initial"] = initial
    lit = march_visible(**on(device, scene), **settings(**limits))
    ray = int(lit.ray_offsets.diff().argmax())
    rays = {name: scene[name][ray : ray + 1] for name in ("origins", "directions", "near", "far")}
    whole = march_visible(**on(device, scene | rays), **settings(**limits))
    many = {name: value.expand(count, *value.shape[1:]).contiguous() for name, value in rays.items()}
    seen = march_visible(**on(device, scene | many), **settings(**limits), roulette=0.1)

    def sums(samples):
        x = torch.stack((samples.t, samples.t.square()), dim=-1)
        raw = exact_geometry(scene, samples.positions.cpu())[:, 0]
        density = (initial * raw.clamp(max=12).exp()).float().to(device)
        composite = ops.composite(density, x, samples.t, samples.dt, samples.ray_offsets, min_transmittance=0.0)
        return torch.cat((composite.opacity[:, None], composite.rgb), dim=1).double()

    expected, drawn = sums(whole)[0], sums(seen)
    assert len(seen.t) < 0.7 * count * len(whole.t)
    assert (drawn.std(dim=0) > 0.01 * expected).all()
    error = (drawn.mean(dim=0) - expected).abs()
    assert (error < 5 * drawn.std(dim=0) / count**0.5 + 1e-3 * expected).all()


def test_roulette_of_no_number_is_refused():
    with pytest.raises(ValueError, match=r"roulette must lie in 0\.\.1, got 1\.5"):
        march_visible(**make_scene(3), **settings(), roulette=1.5)
