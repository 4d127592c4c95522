"""voxelfield.compat.nerfacc against loops over the steps and samples of each ray."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from march_testing import slanted_rays
from torch.nn import functional as F

import voxelfield.compat.nerfacc as nerfacc
from voxelfield.compat.nerfacc.estimators.prop_net import get_proposal_requires_grad_fn
from voxelfield.compat.nerfacc.volrend import accumulate_along_rays_
from voxelfield.ops.march_levels import level_intervals

BOX = torch.tensor([-1.0, -0.5, -2.0, 1.0, 1.5, 1.0])
FACE_TOLERANCE = 1e-4  # in cells: so close to a face, rounding decides on which side of it a position lies


def levels_of(count):
    centre, half = (BOX[:3] + BOX[3:]) / 2, (BOX[3:] - BOX[:3]) / 2
    return torch.stack([torch.cat((centre - half * 2**level, centre + half * 2**level)) for level in range(count)])


def make_rays(count=40):
    return slanted_rays(BOX.view(2, 3), count, 6.0)


class AtAFaceError(Exception):
    """A position is within rounding of a face."""


def cell_of(point, occupied, aabbs):
    """The first box that contains a position, and its cell; None outside of all."""
    found = None
    for level, aabb in enumerate(aabbs):
        sizes = occupied.shape[1:]
        cell = [(x - low) / (high - low) * n for x, low, high, n in zip(point, aabb[:3], aabb[3:], sizes, strict=True)]
        if any(x < -FACE_TOLERANCE or x > n + FACE_TOLERANCE for x, n in zip(cell, sizes, strict=True)):
            continue
        if any(abs(x - round(x)) < FACE_TOLERANCE for x in cell):
            raise AtAFaceError
        if found is None:
            found = (level, *map(int, cell))
    return found


def march_by_loop(origin, direction, near, far, occupied, aabbs, step, cone_angle):
    """The intervals of one ray."""
    step, cone_angle, t, kept = np.float32(step), np.float32(cone_angle), np.float32(near), []
    end, ray, boxes = min(float(far), 100.0), (origin.tolist(), direction.tolist()), aabbs.tolist()

    def middle():
        return float(t) + 0.5 * float(dt)

    def cell():
        return cell_of([x + middle() * d for x, d in zip(*ray, strict=True)], occupied, boxes)

    while True:
        dt = max(step, np.float32(t * cone_angle))
        if not middle() < end:
            return kept
        here = cell()
        if here is not None and occupied[here]:
            kept.append((float(t), float(t + dt)))
            t += dt
        else:  # all steps in a cell that is not occupied, or outside of the boxes, have the length of the first one
            while middle() < end and cell() == here:
                t += dt


@pytest.mark.parametrize("cone_angle", [0.0, 0.08])
@pytest.mark.parametrize("levels", [1, 3])
def test_traversal_takes_the_steps_of_a_loop(device, levels, cone_angle):
    occupied, aabbs = torch.rand(levels, 6, 4, 8) < 0.4, levels_of(levels)
    origins, directions = make_rays()
    near, far = 0.5 * torch.rand(40), 2 + 8 * torch.rand(40)
    far[::3] = math.inf
    inputs = (x.to(device) for x in (origins, directions, occupied, aabbs, near, far))
    intervals, samples, stops = nerfacc.traverse_grids(*inputs, step_size=0.11, cone_angle=cone_angle)
    t_starts, t_ends = intervals.vals[intervals.is_left].cpu(), intervals.vals[intervals.is_right].cpu()
    torch.testing.assert_close(samples.vals.cpu(), (t_starts + t_ends) / 2)
    compared = 0
    for ray in range(40):
        arguments = origins[ray], directions[ray], near[ray], far[ray], occupied, aabbs, 0.11, cone_angle
        try:
            expected = march_by_loop(*arguments)
        except AtAFaceError:
            continue
        rows = samples.ray_indices.cpu() == ray
        found = torch.stack((t_starts[rows], t_ends[rows]), dim=1)
        torch.testing.assert_close(found, torch.tensor(expected).reshape(-1, 2), rtol=1e-6, atol=0.0)
        first, count = samples.packed_info[ray].tolist()
        assert rows.nonzero()[:, 0].tolist() == list(range(first, first + count))
        assert len(expected) == 0 or stops[ray] >= expected[-1][1]
        compared += 1
    assert compared > 30
    assert len(t_starts) > 100


def test_edges_are_shared_by_adjacent_intervals(device):
    occupied = torch.tensor([True, True, False, True], device=device).view(1, 4, 1, 1)
    box = torch.tensor([[0.0, 0, 0, 4, 1, 1]], device=device)
    origins = torch.tensor([[-1.0, 0.5, 0.5], [-1.0, 2.5, 0.5], [5.0, 0.5, 0.5]], device=device)
    directions = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [-1.0, 0, 0]], device=device)
    intervals, samples, stops = nerfacc.traverse_grids(origins, directions, occupied, box, step_size=0.5)
    forth, back = [1, 1.5, 2, 2.5, 3, 4, 4.5, 5], [1, 1.5, 2, 3, 3.5, 4, 4.5, 5]
    assert intervals.vals.tolist() == [*forth, *back]
    assert intervals.is_left.int().tolist() == [1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0]
    assert intervals.is_right.int().tolist() == [0, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1]
    assert intervals.packed_info.tolist() == [[0, 8], [8, 0], [8, 8]]
    assert intervals.ray_indices.tolist() == [0] * 8 + [2] * 8
    assert samples.packed_info.tolist() == [[0, 6], [6, 0], [6, 6]]
    assert stops.tolist() == [5.0, 0.0, 5.0]
    # One interval for each occupied cell.
    intervals, _, _ = nerfacc.traverse_grids(origins, directions, occupied, box, step_size=0.0)
    assert intervals.vals.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("cone_angle", [0.0, 0.05])
def test_limited_traversal_continues_where_it_stopped(device, cone_angle):
    occupied, aabbs = (torch.rand(2, 5, 5, 5) < 0.5).to(device), levels_of(2).to(device)
    origins, directions = (x.to(device) for x in make_rays())
    near, far = torch.full((40,), 0.1, device=device), torch.full((40,), 1e10, device=device)
    mask = torch.arange(40, device=device) % 6 != 5
    whole = level_intervals(origins, directions, near, far.where(mask, near), occupied, aabbs, 0.1, cone_angle)
    counts, parts = torch.zeros(40, dtype=torch.int64, device=device), []
    kept = mask
    while kept.any():
        options = {"step_size": 0.1, "cone_angle": cone_angle, "over_allocate": True, "rays_mask": kept}
        intervals, samples, near = nerfacc.traverse_grids(
            origins, directions, occupied, aabbs, near, far, traverse_steps_limit=7, **options
        )
        assert samples.packed_info[:, 1].max() <= 7
        assert samples.is_valid.all()
        parts.append((samples.ray_indices, intervals.vals[intervals.is_left]))
        counts += samples.packed_info[:, 1]
        kept = kept & (samples.packed_info[:, 1] == 7)
    assert torch.equal(counts, whole.ray_offsets.diff())
    rays, begins = (torch.cat(x) for x in zip(*parts, strict=True))
    assert torch.equal(begins[rays.argsort(stable=True)], whole.begins)


def test_rays_that_cannot_advance_or_are_not_finite_end(device):
    occupied, box = torch.ones(1, 2, 2, 2, dtype=torch.bool, device=device), levels_of(1).to(device)
    origins = torch.tensor([[-1e6, 0.5, 0.5], [math.nan, 0.0, 0.0], [0.0, 0.5, 0.5]], device=device)
    directions = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [math.inf, 0, 0]], device=device)
    near, far = torch.full((3,), 999_900.0, device=device), torch.full((3,), math.inf, device=device)
    assert level_intervals(origins, directions, near, far, occupied, box, 1e-3).ray_offsets.tolist() == [0, 0, 0, 0]
    assert level_intervals(origins, directions, near * math.nan, far, occupied, box, 1e-3).begins.shape == (0,)


def test_raw_ops_are_registered_as_torch_expects(device):
    origins, directions = (x.to(device) for x in make_rays(5))
    ends = torch.zeros(5, device=device), torch.full((5,), 9.0, device=device)
    occupied, box = torch.ones(1, 2, 2, 2, dtype=torch.bool, device=device), levels_of(1).to(device)
    walk = origins, directions, *ends, occupied, box, 0.5, 0.0, 100
    offsets = level_intervals(*walk).ray_offsets
    kernels = torch.ops.voxelfield
    torch.library.opcheck(kernels.count_level_intervals.default, walk)
    torch.library.opcheck(kernels.place_level_intervals.default, (*walk, offsets, int(offsets[-1])))


def test_rows_that_the_caller_adds_are_empty_intervals(device):
    origins, directions = (x.to(device) for x in make_rays(5))
    ends = torch.zeros(5, device=device), torch.full((5,), 9.0, device=device)
    occupied, box = torch.ones(1, 2, 2, 2, dtype=torch.bool, device=device), levels_of(1).to(device)
    walk = origins, directions, *ends, occupied, box, 0.5, 0.0, 100
    marched = level_intervals(*walk)
    offsets = marched.ray_offsets + 4 * torch.arange(6, device=device)
    torch.full((3, len(marched.begins) + 20), 7, device=device)  # what may be left in memory
    begins, ends, rays = torch.ops.voxelfield.place_level_intervals(*walk, offsets, len(marched.begins) + 20)
    assert (ends > begins).sum() == len(marched.begins)
    assert (ends == begins).sum() == 20
    assert torch.equal(rays, torch.arange(5, device=device).repeat_interleave(offsets.diff()))


def test_boxes_are_intersected(device):
    boxes = torch.tensor([[0.0, 0, 0, 1, 1, 1], [2.0, 0, 0, 3, 1, 2]], device=device)
    origins = torch.tensor([[-1.0, 0.5, 0.5], [0.5, 0.5, 0.5], [0.0, -1, 1.5], [4.0, 0, 0]], device=device)
    directions = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0.0, 1, 0], [1.0, 0, 0]], device=device)
    t_mins, t_maxs, hits = nerfacc.ray_aabb_intersect(origins, directions, boxes, near_plane=0.0, miss_value=-7.0)
    assert hits.tolist() == [[True, True], [True, True], [False, False], [False, False]]
    assert t_mins.tolist() == [[1, 3], [0, 1.5], [-7, -7], [-7, -7]]
    assert t_maxs.tolist() == [[2, 4], [0.5, 2.5], [-7, -7], [-7, -7]]
    unlimited = nerfacc.ray_aabb_intersect(origins, directions, boxes, far_plane=2.0)
    assert unlimited[0][1].tolist() == [-0.5, 1.5]
    assert unlimited[1][:2].tolist() == [[2, 2], [0.5, 2]]


# --- volume rendering


COUNTS = [3, 0, 5, 1, 0, 4]


def make_samples(device, batched, dtype=torch.float64):
    shape = (4, 5) if batched else (sum(COUNTS),)
    t_starts = torch.rand(shape, dtype=torch.float64).cumsum(-1)
    values = {
        "t_starts": t_starts,
        "t_ends": t_starts + 0.1 + torch.rand(shape, dtype=torch.float64),
        "sigmas": 2 * torch.rand(shape, dtype=torch.float64),
        "rgbs": torch.rand(*shape, 3, dtype=torch.float64),
    }
    rays = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    where = {} if batched else {"ray_indices": rays.to(device), "n_rays": len(COUNTS)}
    return {name: x.to(device, dtype).requires_grad_() for name, x in values.items()}, where


def light_by_loop(alphas, packed):
    """Transmittance in front of each sample, and the rows of each ray."""
    rows = list(torch.arange(alphas.numel()).split(COUNTS if packed else alphas.shape[-1]))
    flat = alphas.flatten()
    ahead = [torch.cat((flat.new_ones(1), (1 - flat[ray]).cumprod(0)[:-1]))[: len(ray)] for ray in rows]
    return torch.cat(ahead), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("given", ["density", "alpha"])
@pytest.mark.parametrize("batched", [False, True])
def test_rendering_and_its_gradients_match_a_loop(device, batched, given, dtype):
    samples, where = make_samples(device, batched, dtype)
    truth, _ = make_samples("cpu", batched)
    for name, x in samples.items():
        truth[name] = x.detach().cpu().double().requires_grad_()
    background = torch.tensor([0.2, 0.5, 0.9])

    def evaluate(t_starts, t_ends, ray_indices):
        assert (ray_indices is None) == batched
        return samples["rgbs"], samples["sigmas"] if given == "density" else 0.4 * samples["sigmas"]

    function = {"rgb_sigma_fn" if given == "density" else "rgb_alpha_fn": evaluate}
    colors, opacities, depths, extras = nerfacc.rendering(
        samples["t_starts"], samples["t_ends"], **where, **function, render_bkgd=background.to(device, dtype)
    )

    dt = truth["t_ends"] - truth["t_starts"]
    alphas = (1 - torch.exp(-truth["sigmas"] * dt) if given == "density" else 0.4 * truth["sigmas"]).flatten()
    trans, rows = light_by_loop(alphas.view_as(dt), not batched)
    weights, middle = trans * alphas, (truth["t_starts"] + truth["t_ends"]).flatten() / 2
    opacity = torch.stack([weights[ray].sum() for ray in rows])[:, None]
    color = torch.stack([weights[ray] @ truth["rgbs"].flatten(0, -2)[ray] for ray in rows])
    depth = torch.stack([weights[ray] @ middle[ray] for ray in rows])[:, None] / opacity.clamp_min(1e-10)
    expected = {
        "colors": (colors, color + background * (1 - opacity)),
        "opacities": (opacities, opacity),
        "depths": (depths, depth),
        "weights": (extras["weights"].flatten(), weights),
        "trans": (extras["trans"].flatten(), trans),
        "alphas": (extras["alphas"].flatten(), alphas),
    }
    assert extras["weights"].shape == dt.shape
    assert ("sigmas" in extras) == (given == "density")
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-10}
    loss = expected_loss = 0.0
    for name, (actual, right) in expected.items():
        factors = torch.rand(right.shape, dtype=torch.float64)
        torch.testing.assert_close(actual.cpu().double(), right, **close, msg=lambda text, name=name: f"{name}: {text}")
        loss = loss + (actual * factors.to(device, dtype)).sum()
        expected_loss = expected_loss + (right * factors).sum()
    loss.backward()
    expected_loss.backward()
    for name, x in samples.items():
        grad, right = x.grad, truth[name].grad
        if right is None:
            assert grad is None, name
            continue
        torch.testing.assert_close(grad.cpu().double(), right, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("batched", [False, True])
def test_functions_of_samples_match_a_loop(device, batched):
    samples, where = make_samples(device, batched, torch.float32)
    t_starts, t_ends, sigmas = (samples[name].detach() for name in ("t_starts", "t_ends", "sigmas"))
    prefix = torch.rand(sigmas.shape, device=device)
    places = [where]
    if not batched:
        packed_info = nerfacc.pack_info(**where)
        assert packed_info.tolist() == [[sum(COUNTS[:ray]), count] for ray, count in enumerate(COUNTS)]
        places += [{"packed_info": packed_info}, {"ray_indices": where["ray_indices"]}]
    alphas = (1 - torch.exp(-sigmas.double() * (t_ends - t_starts).double())).cpu()
    trans = light_by_loop(alphas, not batched)[0].view_as(alphas)
    with_prefix = trans * prefix.cpu()

    def check(actual, right):
        torch.testing.assert_close(actual.cpu().double(), right, rtol=1e-4, atol=1e-5)

    for place in places:
        check(nerfacc.render_transmittance_from_density(t_starts, t_ends, sigmas, **place)[0], trans)
        found = nerfacc.render_weight_from_density(t_starts, t_ends, sigmas, **place, prefix_trans=prefix)
        for actual, right in zip(found, (with_prefix * alphas, with_prefix, alphas), strict=True):
            check(actual, right)
        opacity = alphas.float().to(device)
        check(nerfacc.render_transmittance_from_alpha(opacity, **place), trans)
        found = nerfacc.render_weight_from_alpha(opacity, **place, prefix_trans=prefix)
        for actual, right in zip(found, (with_prefix * alphas, with_prefix), strict=True):
            check(actual, right)
        limits = {"early_stop_eps": 0.3, "alpha_thre": 0.35}
        visible = (trans >= 0.3) & (alphas >= 0.35)
        assert 0 < visible.sum() < visible.numel()
        seen = nerfacc.render_visibility_from_density(t_starts, t_ends, sigmas, **place, **limits)
        assert torch.equal(seen.cpu(), visible)
        assert torch.equal(nerfacc.render_visibility_from_alpha(opacity, **place, **limits).cpu(), visible)
        limits = {"early_stop_eps": 0.3, "prefix_trans": prefix}
        assert torch.equal(nerfacc.render_visibility_from_alpha(opacity, **place, **limits).cpu(), with_prefix >= 0.3)


def test_values_are_accumulated_in_any_order(device):
    weights = torch.rand(9, device=device, requires_grad=True)
    values, rays = torch.rand(9, 4, device=device), torch.tensor([2, 0, 2, 4, 0, 1, 2, 4, 4], device=device)
    sums = nerfacc.accumulate_along_rays(weights, values, rays, n_rays=6)
    expected = torch.stack([(weights[rays == ray, None] * values[rays == ray]).sum(dim=0) for ray in range(6)])
    torch.testing.assert_close(sums, expected)
    outputs = torch.ones(6, 1, device=device)
    accumulate_along_rays_(weights.detach(), None, rays, outputs)
    torch.testing.assert_close(outputs - 1, nerfacc.accumulate_along_rays(weights, None, rays, 6))
    torch.testing.assert_close(nerfacc.accumulate_along_rays(weights.view(3, 3)), weights.view(3, 3).sum(-1)[:, None])
    sums.sum().backward()
    torch.testing.assert_close(weights.grad, values.sum(dim=1))


def test_scans_leave_out_what_lies_between_rays(device):
    inputs = torch.arange(1.0, 10.0, device=device)
    packed_info = torch.tensor([[1, 2], [3, 0], [5, 3]], device=device)
    rows = [1, 2, 5, 6, 7]
    expected = {
        nerfacc.inclusive_sum: [2, 5, 6, 13, 21],
        nerfacc.exclusive_sum: [0, 2, 0, 6, 13],
        nerfacc.inclusive_prod: [2, 6, 6, 42, 336],
        nerfacc.exclusive_prod: [1, 2, 1, 6, 42],
    }
    for scan, values in expected.items():
        assert scan(inputs, packed_info)[rows].tolist() == values
        whole = scan(inputs.view(3, 3))
        for ray in range(3):
            assert torch.equal(whole[ray], scan(inputs[3 * ray : 3 * ray + 3], torch.tensor([[0, 3]], device=device)))
        with pytest.raises(ValueError, match="inputs must have shape"):
            scan(inputs.view(3, 3), packed_info)


def test_nothing_is_valid_everywhere(device):
    none, rays = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    fail = {"rgb_sigma_fn": pytest.fail}
    colors, opacities, depths, extras = nerfacc.rendering(
        none, none, rays, n_rays=3, render_bkgd=torch.ones(3, device=device), **fail
    )
    assert colors.tolist() == [[1.0] * 3] * 3
    assert opacities.tolist() == depths.tolist() == [[0.0]] * 3
    assert extras["weights"].shape == (0,)
    assert nerfacc.rendering(none, none, rays, n_rays=0, **fail)[0].shape == (0, 3)
    assert nerfacc.rendering(none.view(0, 8), none.view(0, 8), **fail)[0].shape == (0, 3)
    for given in ("rgb_sigma_fn", "rgb_alpha_fn"):
        function = {given: lambda t_starts, t_ends, _: (none.view(3, 0, 3), t_starts)}
        assert nerfacc.rendering(none.view(3, 0), none.view(3, 0), **function)[0].tolist() == [[0.0] * 3] * 3
    assert nerfacc.pack_info(rays).shape == (0, 2)
    assert nerfacc.exclusive_sum(none, rays.view(0, 2)).shape == (0,)
    estimator = nerfacc.OccGridEstimator([0, 0, 0, 1, 1, 1], 4).to(device)
    found = estimator.sampling(none.view(0, 3), none.view(0, 3), sigma_fn=pytest.fail, render_step_size=0.1)
    assert [x.shape for x in found] == [(0,)] * 3


# --- the estimator


def make_estimator(device, levels=2):
    estimator = nerfacc.OccGridEstimator(BOX.tolist(), [6, 4, 8], levels).to(device)
    estimator.binaries.copy_(torch.rand(estimator.binaries.shape) < 0.5)
    return estimator


def test_checkpoints_have_the_names_of_nerfacc():
    estimator = nerfacc.OccGridEstimator(BOX, 5, levels=3)
    shapes = {name: (tuple(x.shape), x.dtype) for name, x in estimator.state_dict().items()}
    assert shapes == {
        "resolution": ((3,), torch.int32),
        "aabbs": ((3, 6), torch.float32),
        "occs": ((375,), torch.float32),
        "binaries": ((3, 5, 5, 5), torch.bool),
    }
    torch.testing.assert_close(estimator.aabbs, levels_of(3))
    assert not estimator.binaries.any()
    assert estimator.device == torch.device("cpu")


@pytest.mark.parametrize("given", ["sigma_fn", "alpha_fn"])
def test_sampling_drops_what_is_not_visible(device, given):
    estimator = make_estimator(device)
    estimator.occs.fill_(0.05)
    rays_o, rays_d = (x.to(device) for x in make_rays())
    options = {"near_plane": 0.1, "far_plane": 9.0, "render_step_size": 0.1}
    rays, t_starts, t_ends = estimator.sampling(rays_o, rays_d, **options)
    near, far = torch.full((40,), 0.1, device=device), torch.full((40,), 9.0, device=device)
    whole = level_intervals(rays_o, rays_d, near, far, estimator.binaries, estimator.aabbs, 0.1)
    torch.testing.assert_close((rays, t_starts, t_ends), (whole.ray_index, whole.begins, whole.ends), rtol=0, atol=0)

    values = torch.rand(len(rays), device=device)
    kept = estimator.sampling(
        rays_o, rays_d, **options, **{given: lambda *_: values}, early_stop_eps=0.2, alpha_thre=0.5
    )
    samples = {"t_starts": t_starts, "t_ends": t_ends, "sigmas": values}
    render = nerfacc.render_weight_from_alpha
    if given == "sigma_fn":
        _, trans, alphas = nerfacc.render_weight_from_density(**samples, ray_indices=rays, n_rays=40)
    else:
        (_, trans), alphas = render(values, ray_indices=rays, n_rays=40), values
    visible = (trans >= 0.2) & (alphas >= estimator.occs.mean())  # the mean, 0.05, is less than alpha_thre
    assert 0 < visible.sum() < len(rays)
    for actual, all_of_them in zip(kept, (rays, t_starts, t_ends), strict=True):
        assert torch.equal(actual, all_of_them[visible])
    with pytest.raises(ValueError, match="must have shape"):
        estimator.sampling(rays_o, rays_d, **options, **{given: lambda *_: values[:, None]})


def test_rays_begin_and_end_where_they_are_told(device):
    estimator = nerfacc.OccGridEstimator([0, 0, 0, 4, 1, 1], [4, 1, 1]).to(device)
    estimator.binaries.fill_(True)
    rays_o, rays_d = torch.tensor([[0.0, 0.5, 0.5]] * 3, device=device), torch.eye(3, device=device)[:1].repeat(3, 1)
    t_min, t_max = torch.tensor([0.0, 1.0, 2.0], device=device), torch.tensor([9.0, 2.5, 9.0], device=device)
    options = {"near_plane": 0.5, "far_plane": 3.5, "render_step_size": 0.25, "t_min": t_min, "t_max": t_max}
    rays, t_starts, t_ends = estimator.sampling(rays_o, rays_d, **options)
    assert [t_starts[rays == ray].min().item() for ray in range(3)] == [0.5, 1.0, 2.0]
    assert [t_ends[rays == ray].max().item() for ray in range(3)] == [3.5, 2.5, 3.5]
    rays, t_starts, _ = estimator.sampling(rays_o, rays_d, **options, stratified=True)
    first = torch.stack([t_starts[rays == ray].min() for ray in range(3)]).cpu() - torch.tensor([0.5, 1.0, 2.0])
    assert ((first >= 0) & (first < 0.25)).all()
    assert len(set(first.tolist())) == 3


def test_updates_find_the_occupied_cells(device):
    estimator = nerfacc.OccGridEstimator([-1, -1, -1, 1, 1, 1], 16, levels=2).to(device)
    calls = []

    def evaluate(points):
        calls.append(len(points))
        return 0.05 * (points.norm(dim=-1, keepdim=True) < 0.7).float()

    for step in range(33):
        estimator.update_every_n_steps(step, evaluate, warmup_steps=32)
    cells = 16**3
    assert calls[:4] == [cells] * 4  # two boxes at step 0, and at step 16
    assert max(calls[4:]) < cells  # at step 32, some of them
    centres = (torch.stack(torch.meshgrid([torch.arange(16.0)] * 3, indexing="ij"), -1) + 0.5) / 8 - 1
    binaries = estimator.binaries.cpu()
    for level in range(2):
        distance, width = 2**level * centres.norm(dim=-1), 2**level / 8
        assert binaries[level][distance < 0.7 - width].all()
        assert not binaries[level][distance > 0.7 + width].any()
    assert estimator.occs.max() <= 0.05
    estimator.eval()
    with pytest.raises(RuntimeError, match="training mode"):
        estimator.update_every_n_steps(0, evaluate)


def test_values_decay_where_cells_are_evaluated(device):
    estimator = nerfacc.OccGridEstimator([-1, -1, -1, 1, 1, 1], 4).to(device)
    estimator.occs.copy_(torch.linspace(-0.2, 1.0, 64))
    before = estimator.occs.clone()
    estimator._update(0, lambda points: torch.full((len(points), 1), 0.3, device=device), ema_decay=0.5)
    seen = before >= 0
    assert torch.equal(estimator.occs[~seen], before[~seen])
    torch.testing.assert_close(estimator.occs[seen], (0.5 * before[seen]).clamp(min=0.3))
    assert torch.equal(estimator.binaries.flatten(), estimator.occs > 1e-2)


def test_cells_that_no_camera_sees_are_excluded(device):
    estimator = nerfacc.OccGridEstimator([-1, -1, -1, 1, 1, 1], 9, levels=2).to(device)
    # At the origin, looking along z, with a field of view of 90 degrees.
    intrinsics = torch.tensor([[[50.0, 0, 50], [0, 50, 50], [0, 0, 1]]], device=device)
    estimator.mark_invisible_cells(intrinsics, torch.eye(4, device=device)[None], 100, 100, near_plane=0.4, chunk=100)
    points = torch.stack(torch.meshgrid([torch.linspace(-1, 1, 9)] * 3, indexing="ij"), -1).view(-1, 3)
    for level, occs in enumerate(estimator.occs.cpu().view(2, -1)):
        x, y, z = (2**level * points).unbind(-1)
        inside = (z >= 0.4) & (x >= -z) & (x < z) & (y >= -z) & (y < z)
        assert torch.equal(occs >= 0, inside)
        assert set(occs.tolist()) == {0.0, -1.0}
    counts = []
    estimator._update(0, lambda points: counts.append(len(points)) or torch.ones(len(points), 1, device=device))
    assert sum(counts) == (estimator.occs >= 0).sum()
    with pytest.raises(ValueError, match="c2w must have shape"):
        estimator.mark_invisible_cells(intrinsics, torch.eye(4, device=device), 100, 100)


# --- proposal networks


def test_samples_are_drawn_from_the_distribution(device):
    edges = torch.tensor([[0.0, 1, 2, 4], [0.0, 1, 2, 4]], device=device)
    cdfs = torch.tensor([[0.0, 0.5, 0.5, 1], [0.2, 0.2, 0.2, 0.4]], device=device)
    intervals, samples = nerfacc.importance_sampling(nerfacc.RayIntervals(edges), cdfs, 4)
    torch.testing.assert_close(samples.vals.cpu(), torch.tensor([[0.25, 0.75, 2.5, 3.5], [2.25, 2.75, 3.25, 3.75]]))
    expected = torch.tensor([[0.0, 0.5, 1.625, 3, 4], [2.0, 2.5, 3, 3.5, 4]])
    torch.testing.assert_close(intervals.vals.cpu(), expected)
    assert nerfacc.importance_sampling(nerfacc.RayIntervals(edges), cdfs, 1)[0].vals.tolist() == [[0, 4], [0, 4]]
    _, samples = nerfacc.importance_sampling(nerfacc.RayIntervals(edges), cdfs, 2000, stratified=True)
    assert ((samples.vals >= edges[:, :1]) & (samples.vals <= edges[:, -1:])).all()
    assert (samples.vals[0] < 1).sum() == 1000
    left, right = nerfacc.searchsorted(nerfacc.RayIntervals(edges), nerfacc.RaySamples(edges.clamp(0.5, 5) - 1))
    assert left.tolist() == [[0, 0, 1, 2]] * 2
    assert right.tolist() == [[0, 1, 2, 3]] * 2
    with pytest.raises(NotImplementedError, match="packed edges are not offered"):
        nerfacc.searchsorted(nerfacc.RayIntervals(edges[0]), nerfacc.RaySamples(edges[0]))
    with pytest.raises(NotImplementedError, match="n_intervals_per_ray must be an int"):
        nerfacc.importance_sampling(nerfacc.RayIntervals(edges), cdfs, torch.tensor([2, 3], device=device))


@pytest.mark.parametrize("sampling_type", ["uniform", "lindisp"])
def test_a_proposal_learns_where_matter_is(device, sampling_type):
    """A proposal of one density for each of 16 ranges of distances, and matter between 3 and 3.5."""
    proposal = torch.full((16,), -2.0, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([proposal], lr=0.3)
    estimator = nerfacc.PropNetEstimator(optimizer).to(device)

    def proposed(t_starts, t_ends):
        return F.softplus(proposal[((t_starts + t_ends) * 1.5).long().clamp(0, 15)])

    def matter(t_starts, t_ends):
        middle = (t_starts + t_ends) / 2
        return 8.0 * ((middle > 3) & (middle < 3.5)).float()

    def sample(requires_grad):
        planes = {"near_plane": 0.5, "far_plane": 5.0, "sampling_type": sampling_type, "stratified": requires_grad}
        ends = estimator.sampling([proposed], [32], 24, n_rays=8, **planes, requires_grad=requires_grad)
        assert all(t.shape == (8, 24) and (t >= 0.5).all() and (t <= 5.0001).all() for t in ends)
        return *ends, (matter(*ends) > 0).float().mean()

    before = sample(False)[-1]
    losses = []
    for _ in range(30):
        t_starts, t_ends, _ = sample(True)
        trans, _ = nerfacc.render_transmittance_from_density(t_starts, t_ends, matter(t_starts, t_ends))
        losses.append(estimator.update_every_n_steps(trans, requires_grad=True))
    assert sample(False)[-1] > 2 * before
    assert sum(losses[-10:]) < sum(losses[:10])
    with pytest.raises(RuntimeError, match="must follow sampling"):
        estimator.update_every_n_steps(trans, requires_grad=True)
    assert estimator.update_every_n_steps(trans) == 0.0


def test_proposals_are_trained_more_rarely_as_time_goes_by():
    requires_grad = get_proposal_requires_grad_fn(target=3.0, num_steps=10)
    trained = [step for step in range(40) if requires_grad(step)]
    assert trained[:3] == [1, 2, 3]
    assert {b - a for a, b in itertools.pairwise(trained[-6:])} == {4}


# --- refusals


def test_all_names_of_nerfacc_are_offered():
    names = [
        *(f"render_{what}_from_alpha" for what in ("transmittance", "weight", "visibility")),
        *(f"render_{what}_from_density" for what in ("transmittance", "weight", "visibility")),
        *(f"{end}clusive_{kind}" for end in ("in", "ex") for kind in ("sum", "prod")),
        *("pack_info", "accumulate_along_rays", "rendering", "importance_sampling", "searchsorted", "RayIntervals"),
        *("RaySamples", "ray_aabb_intersect", "traverse_grids", "OccGridEstimator", "PropNetEstimator", "__version__"),
    ]
    assert all(hasattr(nerfacc, name) for name in names)
    assert set(nerfacc.__all__) == set(names)


def test_bad_arguments_are_named(device):
    t, rays = torch.rand(4, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    sigma = {"rgb_sigma_fn": lambda *_: (torch.rand(4, 3, device=device), t[:, None])}
    with pytest.raises(ValueError, match="sigmas must have the shape of t_starts"):
        nerfacc.rendering(t, t + 1, rays, n_rays=1, **sigma)
    with pytest.raises(ValueError, match="n_rays must be given"):
        nerfacc.rendering(t, t + 1, rays, **sigma)
    with pytest.raises(ValueError, match="must be given, got neither"):
        nerfacc.rendering(t, t + 1, rays, n_rays=1)
    with pytest.raises(ValueError, match="packed_info must have shape"):
        nerfacc.exclusive_sum(t, rays)
    for packed_info in ([[2, 2], [0, 2]], [[0, 3], [2, 2]], [[0, 5]]):
        with pytest.raises(ValueError, match="packed_info must list rays in the order of their samples"):
            nerfacc.exclusive_sum(t.cpu(), torch.tensor(packed_info))
    with pytest.raises(ValueError, match="outputs must have shape"):
        accumulate_along_rays_(t, None, rays, torch.zeros(2, 3, device=device))
    with pytest.raises(ValueError, match="traverse_steps_limit must be positive"):
        nerfacc.traverse_grids(t[:3, None], t[:3, None], t, t, over_allocate=True)
    with pytest.raises(ValueError, match="resolution must be"):
        nerfacc.OccGridEstimator(BOX, [4, 0, 4])
    with pytest.raises(ValueError, match="roi_aabb must be six numbers"):
        nerfacc.OccGridEstimator(BOX[:5])
    with pytest.raises(TypeError, match="contraction_type"):
        nerfacc.OccGridEstimator(BOX, contraction_type=None)
    estimator = make_estimator(device)
    for shape in ((), (3,), (2000,), (192, 2)):
        with pytest.raises(ValueError, match=r"occ_eval_fn must return shape \(192, 1\) or \(192,\), got"):
            estimator.update_every_n_steps(0, lambda _, shape=shape: torch.zeros(shape, device=device))
    with pytest.raises(ValueError, match="cone_angle must be finite and not negative"):
        estimator.sampling(t[:, None].expand(4, 3), t[:, None].expand(4, 3), cone_angle=-1.0)
