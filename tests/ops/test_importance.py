"""Samples drawn from the weights of earlier ones, and samples in steps that grow with the distance."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from op_testing import never_synchronising
from test_marching import assert_truncated
from torch.nn import functional as F

from voxelfield import ops
from voxelfield.ops.march_levels import level_intervals

COUNTS = [0, 1, 5, 40, 0, 3, 0]


def make(device, counts=COUNTS, spare=2, dtype=torch.float32):
    """Intervals of rays with gaps between them, and rows of no ray that hold NaN at both ends."""
    generator = torch.Generator().manual_seed(1)
    lengths = [0.1 + torch.rand(2 * n, generator=generator, dtype=torch.float64) for n in counts]
    edges = [1 + length.cumsum(0).view(-1, 2) for length in lengths]
    nothing = torch.full((spare, 2), math.nan, dtype=torch.float64)
    starts, ends = torch.cat([nothing, *edges, nothing]).unbind(1)
    weights = torch.rand(len(starts), generator=generator, dtype=torch.float64).where(starts.isfinite(), math.nan)
    weights[spare + 3 : spare + 4] = 0
    offsets = spare + torch.tensor([0, *counts]).cumsum(0)
    return *(x.to(device, dtype) for x in (starts, ends, weights)), offsets.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shift", ["middle", "ray", "each"])
def test_distances_match_reference(device, dtype, shift):
    starts, ends, weights, offsets = make(device, dtype=dtype)
    count, rays = 17, len(offsets) - 1
    given = {"middle": None, "ray": torch.rand(rays, device=device), "each": torch.rand(rays, count, device=device)}
    offset = given[shift]
    actual = ops.importance_sample(starts, ends, weights, count, offsets, offset=offset)
    assert actual.dtype == dtype
    assert (actual.diff(dim=1) >= 0).all()
    inputs = [x.double().cpu() for x in (starts, ends, weights)]
    expected = reference.draw(*inputs, count, offsets.cpu(), None if offset is None else offset.cpu().double())
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_rays_of_equally_many_intervals_share_their_edges(device):
    edges = torch.tensor([[0.0, 1, 2, 4], [1.0, 2, 3, 5]], device=device)
    weights = torch.tensor([[0.5, 0, 0.5], [0, 0, 2.0]], device=device)
    drawn = ops.importance_sample(edges[:, :-1], edges[:, 1:], weights, 4)
    torch.testing.assert_close(drawn.cpu(), torch.tensor([[0.25, 0.75, 2.5, 3.5], [3.25, 3.75, 4.25, 4.75]]))
    packed = edges[:, :-1].flatten(), edges[:, 1:].flatten(), weights.flatten(), 4
    assert torch.equal(drawn, ops.importance_sample(*packed, torch.tensor([0, 3, 6], device=device)))


@pytest.mark.parametrize("nothing", [0.0, -1.0, math.nan, math.inf])
def test_without_a_positive_weight_all_of_a_ray_is_alike(device, nothing):
    starts, ends = torch.tensor([[0.0, 2.0]], device=device), torch.tensor([[1.0, 5.0]], device=device)
    weights = torch.full((1, 2), nothing, device=device)
    drawn = ops.importance_sample(starts, ends, weights, 4)
    torch.testing.assert_close(drawn.cpu(), torch.tensor([[0.5, 2.5, 3.5, 4.5]]))
    points = ops.importance_sample(starts, starts, weights, 4)
    assert set(points.flatten().tolist()) == {0.0, 2.0}


def test_samples_lie_where_weights_are(device):
    edges = torch.linspace(1, 5, 65, device=device).expand(3000, 65)
    weights = torch.zeros(3000, 64, device=device)
    weights[torch.arange(3000), torch.arange(3000) % 64] = 1e-6
    offset = torch.rand(3000, 32, device=device)
    drawn = ops.importance_sample(edges[:, :-1], edges[:, 1:], weights, 32, offset=offset)
    place = ((drawn - 1) * 16 - 0.5).round().long().clamp(0, 63)
    assert torch.equal(place, (torch.arange(3000, device=device) % 64)[:, None].expand(3000, 32))
    offset = torch.full((3000,), 1 - 2**-24, device=device)
    last = ops.importance_sample(edges[:, :-1], edges[:, 1:], weights, 1, offset=offset)
    assert (((last - 1) * 16).ceil().long() == place[:, :1] + 1).all()


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("counts", [[], [0, 0], [2, 0]], ids=str)
def test_nothing_to_draw_or_to_draw_from(device, count, counts):
    starts, ends, weights, offsets = make(device, counts, spare=0)
    drawn = ops.importance_sample(starts, ends, weights, count, offsets)
    assert drawn.shape == (len(counts), count)
    assert not drawn[1:].any()


@pytest.mark.cuda
def test_drawing_never_synchronises():
    starts, ends, weights, offsets = make("cuda")
    offset = torch.rand(len(offsets) - 1, 9, device="cuda")
    ops.importance_sample(starts, ends, weights, 9, offsets, offset=offset)
    with never_synchronising():
        ops.importance_sample(starts, ends, weights, 9, offsets, offset=offset)
        ops.importance_sample(starts[2:42].view(4, 10), ends[2:42].view(4, 10), weights[2:42].view(4, 10), 9)


# --- steps that grow


def levels(device):
    occupied = torch.rand(2, 4, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.6
    boxes = torch.tensor([[-1.0, -1, -1, 1, 1, 1], [-2.0, -2, -2, 2, 2, 2]])
    origins = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)) * 0.5 - 2
    directions = F.normalize(-origins + 0.3, dim=1)
    near, far = torch.full((40,), 0.1), torch.full((40,), 9.0)
    return [x.to(device) for x in (origins, directions, near, far, occupied, boxes)]


def test_samples_are_the_middles_of_growing_steps(device):
    walk = *levels(device), 0.05, 0.06
    samples, intervals = ops.march_levels(*walk), level_intervals(*walk)
    assert torch.equal(samples.ray_offsets, intervals.ray_offsets)
    assert torch.equal(samples.ray_index, intervals.ray_index)
    torch.testing.assert_close(samples.t, (intervals.begins + intervals.ends) / 2)
    torch.testing.assert_close(samples.dt, intervals.ends - intervals.begins)
    origins, directions = walk[:2]
    expected = origins[samples.ray_index] + samples.t[:, None] * directions[samples.ray_index]
    torch.testing.assert_close(samples.positions, expected)
    assert samples.dt.max() > 2 * samples.dt.min()
    assert samples.rays_kept.tolist() == [40]


@pytest.mark.parametrize("capacity", [0, 1, 300, 10_000])
def test_rays_are_kept_as_long_as_all_of_their_samples_fit(device, capacity):
    walk = *levels(device), 0.05, 0.06
    whole, packed = ops.march_levels(*walk), ops.march_levels(*walk, capacity=capacity)
    assert_truncated(packed, whole, capacity)


@pytest.mark.cuda
def test_growing_steps_into_a_capacity_never_synchronise():
    walk = *levels("cuda"), 0.05, 0.06
    with never_synchronising():
        ops.march_levels(*walk, capacity=300)


def test_intervals_of_no_ray_are_drawn_for_no_ray(device):
    one = torch.ones(1, device=device)
    assert ops.importance_sample(one, 2 * one, one, 3, torch.zeros(1, dtype=torch.int64, device=device)).shape == (0, 3)
