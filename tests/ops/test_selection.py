"""select_samples: which samples are kept, how they are packed, and what does not fit."""

from __future__ import annotations

import itertools
import math

import pytest
import reference
import torch
from op_testing import LAYOUTS, never_synchronising, threads

from voxelfield import _library
from voxelfield.ops import ray_weights, select_samples

SAMPLES = ("density", "positions", "t", "dt")
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
    used = int(inputs["ray_offsets"][-1])
    density, t, dt = (inputs[name][:used].double() for name in ("density", "t", "dt"))
    *_, weights = reference.composite(density, torch.zeros(used, 3), t, dt, inputs["ray_offsets"], min_transmittance)
    assert ((weights - min_weight).abs() > 1e-7).all()
    kept = weights > min_weight
    rays = len(inputs["ray_offsets"]) - 1
    ray_index = torch.repeat_interleave(torch.arange(rays), inputs["ray_offsets"].diff())[kept]
    counts = torch.bincount(ray_index, minlength=rays) if rays else torch.zeros(0, dtype=torch.int64)
    ray_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return *(inputs[name][:used][kept] for name in ("positions", "t", "dt")), ray_index, ray_offsets


def assert_truncated(actual, expected, capacity):
    """Fails unless ``actual`` are those of the expected samples whose rays fit, and the rows after them are empty."""
    *expected, ray_offsets = expected
    rays = len(ray_offsets) - 1
    rays_kept = int((ray_offsets[1:] <= capacity).sum())
    used = int(ray_offsets[rays_kept])
    *samples, actual_offsets, rays_kept = (x.cpu() for x in actual)
    assert rays_kept.tolist() == [rays_kept]
    assert torch.equal(actual_offsets, ray_offsets.clamp(max=used))
    for name, a, e in zip(("positions", "t", "dt", "ray_index"), samples, expected, strict=True):
        assert len(a) == capacity
        assert torch.equal(a[:used], e[:used]), name
    positions, t, dt, ray_index = samples
    assert positions[used:].isnan().all()
    assert not t[used:].any()
    assert not dt[used:].any()
    assert (ray_index[used:] == max(rays - 1, 0)).all()
    return rays_kept


@pytest.mark.parametrize("counts", [COUNTS, [5, 0, 20, 8, 3] * 60, [], [0, 0], [1], [300]], ids=lambda c: f"{len(c)}")
@pytest.mark.parametrize("spare", [0, 50])
def test_kept_samples_match_reference(device, counts, spare):
    inputs = make(device, counts, spare)
    expected = by_reference(inputs, **LIMITS)
    actual = select_samples(**inputs, **LIMITS)
    total = len(expected[0])
    assert sum(counts) < 20 or 0 < total < sum(counts)
    assert_truncated(actual, expected, total)
    for capacity in {0, total // 3, total - 1, total + 1, 5 * total + 7} - {-1}:
        assert_truncated(select_samples(**inputs, **LIMITS, capacity=capacity), expected, capacity)


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
        assert_truncated(select_samples(**inputs, **limits, capacity=capacity), expected, capacity)


def test_the_density_needs_no_gradient(device):
    inputs = make(device)
    inputs["density"].requires_grad_()
    assert not any(x.requires_grad for x in select_samples(**inputs))


@pytest.mark.parametrize(("name", "layout"), [*itertools.product(SAMPLES, LAYOUTS), ("ray_offsets", "every other row")])
def test_any_memory_layout(device, name, layout):
    inputs = make(device)
    expected = select_samples(**inputs, **LIMITS)
    for a, e in zip(select_samples(**{**inputs, name: LAYOUTS[layout](inputs[name])}, **LIMITS), expected, strict=True):
        assert torch.equal(a, e)


def test_any_number_of_threads_gives_the_same_bits():
    inputs = make("cpu", counts=[7] * 1000)
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(select_samples(**inputs, **LIMITS))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


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
        takes.append(assert_truncated(captured, [x.cpu() for x in whole[:-1]], 2000))
    assert min(takes) < 400
    assert max(takes) == 400


@pytest.mark.cuda
def test_a_selection_into_a_capacity_never_synchronises():
    inputs = make("cuda")
    select_samples(**inputs, capacity=100)  # loads the extension
    with never_synchronising():
        select_samples(**inputs, capacity=100)


# --- errors and registration


WRONG = {
    "dimensions": (lambda x: x[..., None], ValueError, r"{} must have shape \("),
    "size": (lambda x: torch.cat([x, x]), ValueError, r"{} must have shape \("),
    "double": (lambda x: x.double(), TypeError, "{} must be .*got float64"),
    "list": (lambda x: x.tolist(), TypeError, r"{} must be a torch\.Tensor, got list"),
    "device": (lambda x: x.to("meta"), ValueError, "{} must be on the device of density"),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, k) for n in (*SAMPLES, "ray_offsets") for k in WRONG if (n, k) != ("ray_offsets", "size")],
)
def test_wrong_arguments_are_named(name, kind):
    change, error, message = WRONG[kind]
    inputs = make("cpu", counts=[2, 3])
    inputs[name] = change(inputs[name])
    # density sets the number of samples and the device.
    blamed = "positions" if name == "density" and kind in ("size", "device") else name
    with pytest.raises(error, match=message.format(blamed)):
        select_samples(**inputs)


@pytest.mark.parametrize("name", ["min_weight", "min_transmittance"])
@pytest.mark.parametrize("value", [-1e-9, 1.001, math.nan])
def test_limits_must_be_fractions(name, value):
    with pytest.raises(ValueError, match=rf"{name} must lie in \[0, 1\], got"):
        select_samples(**make("cpu", counts=[2]), **{name: value})


def test_offsets_have_at_least_one_entry():
    inputs = make("cpu", counts=[])
    with pytest.raises(ValueError, match="ray_offsets must have R \\+ 1 entries"):
        select_samples(**{**inputs, "ray_offsets": torch.zeros(0, dtype=torch.int64)})


@pytest.mark.parametrize(("capacity", "error"), [(-1, ValueError), (2.0, TypeError)])
def test_capacity_must_be_a_number_of_rows(capacity, error):
    with pytest.raises(error, match="capacity must be"):
        select_samples(**make("cpu", counts=[2]), capacity=capacity)


@pytest.mark.parametrize("counts", [[0, 1, 33], []], ids=str)
def test_opcheck(device, counts):
    _library.ensure_loaded(device.type)
    density, positions, t, dt, ray_offsets = make(device, counts).values()
    ops = torch.ops.voxelfield
    judge = (density, dt, ray_offsets, 1e-3, 1e-3)
    # The test left out compares values, of which the unused ones are anything.
    torch.library.opcheck(
        ops.count_visible_samples.default,
        judge,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    counted = ops.count_visible_samples(*judge)
    pack = (positions, t, dt, ray_offsets, *counted, int(counted[2].sum()))
    torch.library.opcheck(ops.pack_visible_samples.default, pack)
