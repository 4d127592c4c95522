"""select_samples: which samples are kept, how they are packed, and what does not fit."""

from __future__ import annotations

import itertools
import math

import pytest
import reference
import torch
from op_testing import never_synchronising
from test_marching import assert_truncated

from voxelfield.ops import PackedSamples, ray_weights, select_samples

LIMITS = {"min_transmittance": 0.05, "min_weight": 0.01}
# None, one, and on either side of multiples of 8 and 32, the samples that a group of threads takes at once.
COUNTS = [0, 1, 33, 100, 0, 31, 32, 64, 65, 7, 8, 9, 0]


def make(device, counts=COUNTS, spare=0, thickness=0.1):
    """Packed samples of rays, and ``spare`` rows of no ray that would be seen."""
    total = sum(counts)
    dt = 0.02 + 0.06 * torch.rand(total)
    inputs = {
        "density": 2 * thickness * torch.rand(total) / dt,
        "positions": torch.randn(total, 3),
        "t": torch.rand(total),
        "dt": dt,
    }
    inputs = {name: torch.cat([x, x.new_full((spare, *x.shape[1:]), 1.0)]).to(device) for name, x in inputs.items()}
    return inputs | {"ray_offsets": torch.tensor([0, *itertools.accumulate(counts)], device=device)}


def by_reference(inputs, min_transmittance, min_weight):
    """The kept samples in float64: positions, t, dt, ray_index, ray_offsets. Fails where it is a close call."""
    inputs = {name: x.cpu() for name, x in inputs.items()}
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    light = {name: exact[name] for name in ("density", "dt", "ray_offsets")}
    weights, _ = reference.light(**light, min_transmittance=min_transmittance)
    assert ((weights - min_weight).abs() > 1e-7).all()
    *samples, ray_index, ray_offsets, _ = reference.select(
        **exact, min_transmittance=min_transmittance, min_weight=min_weight
    )
    return *(x.float() for x in samples), ray_index, ray_offsets


def assert_selected(actual, expected, capacity):
    """Fails unless ``actual`` are those of the expected samples whose rays fit; returns the number of these rays."""
    actual = PackedSamples(*(x.cpu() for x in actual))
    return assert_truncated(actual, PackedSamples(*expected, rays_kept=torch.tensor([0])), capacity)


@pytest.mark.parametrize("counts", [COUNTS, [5, 0, 20, 8, 3] * 60, [], [0, 0], [1], [300]], ids=lambda c: f"{len(c)}")
@pytest.mark.parametrize("spare", [0, 50])
def test_kept_samples_match_reference(device, counts, spare):
    inputs = make(device, counts, spare)
    expected = by_reference(inputs, **LIMITS)
    actual = select_samples(**inputs, **LIMITS)
    total = len(expected[0])
    assert sum(counts) < 20 or 0 < total < sum(counts)
    assert_selected(actual, expected, total)
    for capacity in {0, total // 3, total - 1, total + 1, 5 * total + 7} - {-1}:
        assert_selected(select_samples(**inputs, **LIMITS, capacity=capacity), expected, capacity)


def test_no_limits_keep_all_that_is_not_empty(device):
    inputs = make(device)
    inputs["density"][::3] = 0
    actual = select_samples(**inputs, min_transmittance=0.0, min_weight=0.0)
    assert torch.equal(actual.t, inputs["t"][inputs["density"] > 0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_densities_that_are_not_finite_are_kept(device, value):
    inputs = make(device)
    inputs["density"][:] = value
    samples = select_samples(**inputs)
    for name in ("positions", "t", "dt"):
        assert torch.equal(getattr(samples, name), inputs[name])


def test_a_density_that_is_not_finite_hides_nothing_and_is_hidden_by_a_wall(device):
    # On CUDA 32 threads judge samples together: those behind a wall must not disturb the others.
    for place, kept in ((0, [0, 5]), (3, [3, 5]), (20, [5])):
        density = torch.zeros(64, device=device)
        density[5], density[place] = 1e4, math.nan
        ones = torch.ones_like(density)
        t, offsets = ones.cumsum(0) - 1, torch.tensor([0, 64], device=device)
        packed = select_samples(density, ones[:, None].expand(64, 3), t, ones, offsets)
        assert packed.t.tolist() == kept


def test_many_rays(device):
    # More rays than there can be parts of the smallest size.
    counts = torch.randint(3, (300_000,)).tolist()
    inputs = make(device, counts)
    weights = ray_weights(inputs["density"], inputs["dt"], inputs["ray_offsets"], min_transmittance=0.05)
    kept = (weights > 0.05).cpu()
    ray_index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[kept]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(ray_index, minlength=len(counts)).cumsum(0)])
    expected = *(inputs[name].cpu()[kept] for name in ("positions", "t", "dt")), ray_index, offsets
    limits = {"min_transmittance": 0.05, "min_weight": 0.05}
    for capacity in (len(ray_index), len(ray_index) // 2, len(ray_index) + 9):
        assert_selected(select_samples(**inputs, **limits, capacity=capacity), expected, capacity)


def test_the_density_needs_no_gradient(device):
    inputs = make(device)
    inputs["density"].requires_grad_()
    assert not any(x.requires_grad for x in select_samples(**inputs))


@pytest.mark.cuda
def test_a_captured_selection_follows_its_inputs():
    inputs = make("cuda", counts=[20] * 400, spare=100)
    select_samples(**inputs, capacity=2000)  # loads the extension
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = select_samples(**inputs, **LIMITS, capacity=2000)
    takes = []
    for thickness in (0.01, 0.1, 3.0):
        counts = torch.randint(21, (400,)).tolist()
        other = make("cuda", counts, 8100 - sum(counts), thickness)
        for name, value in inputs.items():
            value.copy_(other[name])
        graph.replay()
        whole = select_samples(**inputs, **LIMITS)
        takes.append(assert_selected(captured, [x.cpu() for x in whole[:-1]], 2000))
    assert min(takes) < 400
    assert max(takes) == 400


@pytest.mark.cuda
def test_a_selection_into_a_capacity_never_synchronises():
    inputs = make("cuda")
    select_samples(**inputs, capacity=100)  # loads the extension
    with never_synchronising():
        select_samples(**inputs, capacity=100)
