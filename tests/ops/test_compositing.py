"""composite, ray_weights and their gradients."""

from __future__ import annotations

import math
from functools import partial

import pytest
import reference
import torch
from tolerances import assert_matches
from torch._subclasses.fake_tensor import FakeTensorMode

from voxelfield.ops import (
    alpha_transmittance,
    alpha_weights,
    composite,
    composite_alphas,
    ray_transmittance,
    ray_weights,
)

NAMES = ("density", "rgb", "t", "dt")
GRADIENTS = tuple(f"{name} gradient" for name in NAMES)
RESULTS = ("rgb", "opacity", "depth_sum", "weights", "distortion")
# None, one, and on either side of multiples of 32, the samples that a warp takes at once.
COUNTS = [0, 1, 33, 100, 0, 31, 32, 64, 65, 0]


def make(device, counts=COUNTS, dtype=torch.float64, thickness=0.06, channels=3):
    """Packed samples of rays; ``thickness`` is the mean optical thickness of a sample."""
    total = sum(counts)
    dt = 0.02 + 0.06 * torch.rand(total, dtype=torch.float64)
    density = 2 * thickness * torch.rand(total, dtype=torch.float64) / dt
    rgb = torch.rand(total, channels, dtype=torch.float64)
    t = torch.cat([torch.zeros(0), *(torch.rand(n).sort().values for n in counts)]).double() * 4 + 0.5
    ray_offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()] if counts else [0])
    inputs = {"density": density, "rgb": rgb, "t": t, "dt": dt}
    return {name: x.to(device, dtype) for name, x in inputs.items()} | {"ray_offsets": ray_offsets.to(device)}


def composite_all(**inputs):
    return composite(**inputs, distortion=True)


def composite_all_with(some, others):
    return composite_all(**{**some, **others})


def by_reference(min_transmittance=0.0, **inputs):
    results = reference.composite(**inputs, min_transmittance=min_transmittance)
    return *results, reference.distortion(results[3], inputs["t"], inputs["dt"], inputs["ray_offsets"])


def as_double(inputs):
    return {name: x.double().cpu() if x.is_floating_point() else x.cpu() for name, x in inputs.items()}


def value_and_gradients(function, inputs, grads, trained=NAMES):
    leaves = {name: inputs[name].detach().requires_grad_() for name in trained}
    values = function(**{**inputs, **leaves})
    gradients = torch.autograd.grad(values, list(leaves.values()), grads)
    return [x.detach() for x in (*values, *gradients)]


def random_grads(inputs):
    shapes = [x.shape for x in composite_all(**inputs)]
    dtype, device = inputs["density"].dtype, inputs["density"].device
    return [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]


def assert_all_match(actual, expected):
    for name, a, e in zip((*RESULTS, *GRADIENTS), actual, expected, strict=True):
        assert_matches(a.cpu(), e.double().cpu(), name)


# --- values and gradients


@pytest.mark.parametrize("min_transmittance", [0.0, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4, 11])
def test_value_and_gradients_match_reference(device, dtype, min_transmittance, channels):
    inputs = make(device, dtype=dtype, channels=channels)
    grads = random_grads(inputs)
    actual = value_and_gradients(lambda **x: composite_all(**x, min_transmittance=min_transmittance), inputs, grads)
    expected = value_and_gradients(
        lambda **x: by_reference(**x, min_transmittance=min_transmittance),
        as_double(inputs),
        [g.double().cpu() for g in grads],
    )
    assert all(x.dtype == dtype for x in actual)
    assert_all_match(actual, expected)
    if min_transmittance:
        assert (actual[3] == 0).any()


def test_a_ray_of_constant_density_in_closed_form(device):
    count, sigma, dt = 50, 3.0, 0.02
    t = (torch.arange(count, dtype=torch.float64, device=device) + 0.5) * dt
    color = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64, device=device)
    result = composite(
        torch.full_like(t, sigma),
        color.expand(count, 3),
        t,
        torch.full_like(t, dt),
        torch.tensor([0, count], device=device),
        min_transmittance=0.0,
    )
    opacity = 1 - math.exp(-sigma * count * dt)
    assert result.opacity.item() == pytest.approx(opacity)
    torch.testing.assert_close(result.rgb[0], opacity * color)
    torch.testing.assert_close(
        result.weights, (1 - math.exp(-sigma * dt)) * torch.exp(-sigma * dt * torch.arange(count).to(t))
    )
    assert result.depth_sum.item() == pytest.approx((result.weights * t).sum().item())


@pytest.mark.parametrize("output", RESULTS)
def test_gradient_of_each_result_alone(device, output):
    inputs = make(device, counts=[3, 0, 40])
    which = RESULTS.index(output)

    def gradients(function, x):
        density, rgb = x["density"].detach().requires_grad_(), x["rgb"].detach().requires_grad_()
        value = function(**{**x, "density": density, "rgb": rgb})[which]
        d_density, d_rgb = torch.autograd.grad(value.square().sum(), (density, rgb), allow_unused=True)
        return d_density, torch.zeros_like(rgb) if d_rgb is None else d_rgb

    actual = gradients(lambda **x: composite_all(**x, min_transmittance=0.0), inputs)
    for a, e in zip(actual, gradients(by_reference, as_double(inputs)), strict=True):
        assert_matches(a.cpu(), e)


@pytest.mark.parametrize("channels", [3, 5])
def test_gradients_are_the_same_whichever_are_wanted(device, channels):
    inputs = make(device, dtype=torch.float32, channels=channels)
    grads = random_grads(inputs)
    everything = value_and_gradients(composite_all, inputs, grads)
    for trained in (("density", "rgb"), ("density", "t"), ("dt",)):
        some = value_and_gradients(composite_all, inputs, grads, trained)
        for name, actual in zip(trained, some[5:], strict=True):
            torch.testing.assert_close(actual, everything[5 + NAMES.index(name)], msg=name)


def test_gradients_of_lengths_of_zero(device):
    inputs = make(device, counts=[40])
    inputs["dt"][10:20] = 0
    grads = random_grads(inputs)
    actual = value_and_gradients(composite_all, inputs, grads)
    expected = value_and_gradients(by_reference, as_double(inputs), [g.cpu() for g in grads])
    assert_all_match(actual, expected)


SECOND = {"composite": 0.0, "composite, cut": 0.5, "composite_alphas": 0.0, "composite_alphas, cut": 0.5}


@pytest.mark.parametrize("case", SECOND)
def test_second_derivatives(device, case):
    inputs = make(device, counts=[0, 1, 9, 40], thickness=0.06, channels=2)
    fixed = {"min_transmittance": SECOND[case]}
    inputs["rgb"] = torch.cat([inputs["rgb"], inputs["rgb"].new_full((2, 2), math.nan)])
    for name in ("density", "t", "dt"):
        inputs[name] = torch.cat([inputs[name], inputs[name].new_full((2,), math.nan)])  # rows of no ray
    if "alphas" in case:
        inputs["density"] = alphas(inputs)
        del inputs["dt"]
    offsets = inputs.pop("ray_offsets")

    def function(*inputs):
        if "alphas" in case:
            return composite_alphas(*inputs, offsets, **fixed)[:4]
        return composite_all(**dict(zip(NAMES, inputs, strict=True)), ray_offsets=offsets, **fixed)

    def used(*rows):
        return function(*(torch.cat([x, full[-2:]]) for x, full in zip(rows, inputs.values(), strict=True)))

    leaves = [x[:-2].clone().requires_grad_() for x in inputs.values()]
    assert (used(*leaves)[3] == 0).sum() > 2 or SECOND[case] == 0
    assert torch.autograd.gradcheck(used, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(used, leaves, check_fwd_over_rev=True, fast_mode=True)


def test_first_derivatives_do_not_depend_on_create_graph(device):
    inputs = make(device, dtype=torch.float32, thickness=0.3)
    grads = random_grads(inputs)
    expected = value_and_gradients(composite_all, inputs, grads)[5:]
    leaves = [inputs[name].requires_grad_() for name in NAMES]
    actual = torch.autograd.grad(composite_all(**inputs), leaves, grads, create_graph=True)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        torch.testing.assert_close(a.detach(), e, rtol=1e-4, atol=1e-4, msg=name)


def test_vmap_over_everything(device):
    inputs = make(device, counts=[0, 3, 40, 0])
    spare = {name: torch.cat([inputs[name][:2], inputs[name], inputs[name][:4]]) for name in NAMES}
    several = {name: torch.stack([x, x.flip(0)], dim=x.dim()) for name, x in spare.items()}
    offsets = torch.stack([inputs["ray_offsets"] + 2, inputs["ray_offsets"].clamp(max=30) + 1])
    for mapped in (("density",), ("rgb", "t"), ("dt", "ray_offsets"), (*NAMES, "ray_offsets")):
        arguments = {**spare, "ray_offsets": offsets[0]}
        chosen = {name: offsets if name == "ray_offsets" else several[name] for name in mapped}
        dims = {name: 0 if name == "ray_offsets" else -1 for name in mapped}
        actual = torch.vmap(partial(composite_all_with, arguments), in_dims=(dims,))(chosen)
        for call in range(2):
            one = {name: x.select(dims[name], call) for name, x in chosen.items()}
            for a, e in zip(actual, composite_all(**{**arguments, **one}), strict=True):
                torch.testing.assert_close(a[call], e)
    gradient = torch.vmap(
        torch.func.grad(lambda x: composite(**{**spare, "density": x}, ray_offsets=offsets[0]).rgb.sum())
    )
    assert gradient(several["density"].mT.contiguous()).shape == (2, len(spare["density"]))
    no_calls = torch.vmap(lambda x: composite_all(**{**spare, "density": x}, ray_offsets=offsets[0]))(
        several["density"].mT[:0]
    )
    assert [x.shape for x in no_calls] == [(0, 4, 3), (0, 4), (0, 4), (0, len(spare["density"])), (0, 4)]
    with pytest.raises(NotImplementedError, match="derivatives of compositing, cannot be mapped over ray_offsets"):
        torch.vmap(torch.func.grad(lambda x, rows: ray_weights(x, 0.1, rows).sum()), (None, 0))(
            spare["density"], offsets
        )


@pytest.mark.parametrize("dt", [0.05, torch.tensor(0.05, dtype=torch.float64)], ids=["number", "tensor"])
def test_one_length_for_all_samples(device, dt):
    inputs = make(device)
    dt = dt.to(device).requires_grad_() if isinstance(dt, torch.Tensor) else dt
    expected = composite_all(**{**inputs, "dt": torch.full_like(inputs["t"], 0.05)})
    actual = composite_all(**{**inputs, "dt": dt})
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    for function in (ray_weights, ray_transmittance):
        assert torch.equal(
            function(inputs["density"], dt, inputs["ray_offsets"]),
            function(inputs["density"], torch.full_like(inputs["t"], 0.05), inputs["ray_offsets"]),
        )
    if isinstance(dt, torch.Tensor):
        assert torch.autograd.gradcheck(lambda dt: composite_all(**{**inputs, "dt": dt})[:3], dt)


def test_narrow_offsets_are_converted(device):
    inputs = make(device)
    narrow = {**inputs, "ray_offsets": inputs["ray_offsets"].int()}
    for a, e in zip(composite_all(**narrow), composite_all(**inputs), strict=True):
        assert torch.equal(a, e)


def test_weights_alone_are_the_same_weights(device):
    for dtype, limit in ((torch.float32, {}), (torch.float32, {"min_transmittance": 0.3}), (torch.float64, {})):
        inputs = make(device, dtype=dtype, thickness=0.3)
        inputs["density"].requires_grad_()
        weights = ray_weights(inputs["density"], inputs["dt"], inputs["ray_offsets"], **limit)
        assert (weights == 0).any()
        assert_matches(weights.detach(), composite(**inputs, **limit).weights.detach().double())


# --- where a ray stops


def tenths(device, count=40):
    """One ray; each sample lets a tenth of the light through."""
    dt = torch.full((count,), 0.1, dtype=torch.float64, device=device)
    density = torch.full_like(dt, 10 * math.log(10))
    ray_offsets = torch.tensor([0, count], device=device)
    return {"density": density, "rgb": torch.rand(count, 3).to(dt), "t": dt.cumsum(0), "dt": dt} | {
        "ray_offsets": ray_offsets
    }


@pytest.mark.parametrize(("min_transmittance", "seen"), [(1.0, 1), (0.5, 1), (5e-3, 3), (5e-36, 36), (0.0, 40)])
def test_samples_behind_the_limit_count_for_nothing(device, min_transmittance, seen):
    inputs = tenths(device)
    result = composite(**inputs, min_transmittance=min_transmittance)
    expected = 0.9 * 0.1 ** torch.arange(40, dtype=torch.float64)
    expected[seen:] = 0
    torch.testing.assert_close(result.weights.cpu(), expected, rtol=1e-9, atol=0)
    assert not result.weights[seen:].any()
    torch.testing.assert_close(result.opacity.cpu(), expected.sum()[None])
    torch.testing.assert_close(result.rgb.cpu(), (expected @ inputs["rgb"].cpu())[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("wall", [1e4, 1e9, 1e30])
def test_a_wall_hides_what_is_behind_and_nothing_before(device, dtype, wall):
    # Haze, then matter so dense that sums of optical depth with and without it share no digit.
    for place in (0, 5, 31, 32, 40):
        thickness = torch.full((50,), 0.05, dtype=torch.float64)
        thickness[place] = wall
        expected = torch.zeros(50, dtype=torch.float64)
        expected[:place] = (1 - math.exp(-0.05)) * torch.exp(-0.05 * torch.arange(place).double())
        expected[place] = math.exp(-0.05 * place)
        density = thickness.to(device, dtype).requires_grad_()
        ones = torch.ones_like(density)
        result = composite(density, ones[:, None].expand(50, 3), ones, ones, torch.tensor([0, 50], device=device))
        assert_matches(result.weights.detach().cpu(), expected)
        assert_matches(result.opacity.detach().cpu(), torch.ones(1).double())
        (result.weights * torch.linspace(0, 1, 50).to(density)).sum().backward()
        assert density.grad.isfinite().all()
        assert not density.grad[place + 1 :].any()


# --- empty, strided, threaded


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nothing_to_composite(device, counts, dtype):
    inputs = make(device, counts=counts, dtype=dtype)
    inputs["density"].requires_grad_()
    inputs["rgb"].requires_grad_()
    result = composite_all(**inputs)
    rays = len(counts)
    assert [tuple(x.shape) for x in result] == [(rays, 3), (rays,), (rays,), (0,), (rays,)]
    assert not any(x.any() for x in result)
    sum(x.sum() for x in result).backward()
    assert inputs["density"].grad.shape == (0,)
    assert inputs["rgb"].grad.shape == (0, 3)
    assert ray_weights(inputs["density"], inputs["dt"], inputs["ray_offsets"]).shape == (0,)


def test_rays_without_samples_are_zero(device):
    # Uninitialised memory would show sooner or later: fill what the allocator is likely to hand out.
    for _ in range(5):
        torch.full((1000, 3), math.nan, dtype=torch.float64, device=device)
        result = composite(**make(device, counts=[0] * 500 + [2] + [0] * 499))
        assert not result.rgb[:500].any()
        assert not result.opacity[501:].any()
        assert not result.depth_sum[501:].any()


def test_distortion_is_only_there_when_wanted(device):
    inputs = make(device)
    plain, full = composite(**inputs), composite_all(**inputs)
    assert plain.distortion is None
    for name in RESULTS[:-1]:
        assert torch.equal(getattr(plain, name), getattr(full, name))


@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_distortion_in_closed_form(device, shift):
    # Two samples of opacity one half, a distance of 2 apart: weights 1/2 and 1/4. Far away it is the same.
    dt = torch.tensor([0.25, 0.5], device=device)
    t = torch.tensor([1.0, 3.0], device=device) + shift
    ray_offsets = torch.tensor([0, 2], device=device)
    result = composite(math.log(2) / dt, torch.zeros(2, 3, device=device), t, dt, ray_offsets, distortion=True)
    expected = 2 * 2 * 0.5 * 0.25 + (0.25 * 0.25 + 0.0625 * 0.5) / 3
    torch.testing.assert_close(result.distortion.cpu(), torch.tensor([expected]))


def spoil(size, device):
    """Leaves NaN in memory that the allocator is likely to hand out next."""
    for _ in range(10):
        torch.full((size, 3), math.nan, dtype=torch.float64, device=device)
        torch.full((size,), math.nan, dtype=torch.float64, device=device)


@pytest.mark.parametrize("counts", [[], [0], [3, 0, 40], [20] * 300], ids=lambda c: f"{len(c)}")
@pytest.mark.parametrize("spare", [1, 50, 20_000])
def test_rows_of_no_ray_count_for_nothing(device, counts, spare):
    used = sum(counts)
    inputs = make(device, counts)
    # What no op should read.
    more = {
        name: torch.cat([inputs[name], inputs[name].new_full((spare, *inputs[name].shape[1:]), math.nan)])
        for name in NAMES
    } | {"ray_offsets": inputs["ray_offsets"]}
    grads = random_grads(inputs)
    expected = value_and_gradients(composite_all, inputs, grads)
    grads[3] = torch.cat([grads[3], grads[3].new_full((spare,), math.nan)])
    spoil(used + spare, device)
    actual = value_and_gradients(composite_all, more, grads)
    for name, a, e in zip((*RESULTS, *GRADIENTS), actual, expected, strict=True):
        if name in ("weights", *GRADIENTS):
            assert len(a) == used + spare
            assert not a[used:].any(), name
            a = a[:used]
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12, msg=name)
    spoil(used + spare, device)
    weights = ray_weights(more["density"], more["dt"], more["ray_offsets"])
    assert not weights[used:].any()


@pytest.mark.cuda
def test_captured_compositing_follows_its_inputs():
    capacity = 3000
    inputs = make("cuda", [20] * 100, dtype=torch.float32)
    inputs = {
        name: torch.cat([x, x.new_ones(1000, *x.shape[1:])]) if name in NAMES else x for name, x in inputs.items()
    }
    grads = random_grads(inputs)
    value_and_gradients(composite_all, inputs, grads)  # loads the extension
    for name in NAMES:
        inputs[name].requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = composite_all(**inputs)
        gradients = torch.autograd.grad(values, [inputs[name] for name in NAMES], grads)
    for _ in range(3):
        counts = torch.randint(30, (100,)).tolist()
        other = make("cuda", counts, dtype=torch.float32)
        with torch.no_grad():
            for name in NAMES:
                inputs[name][: sum(counts)] = other[name]
            inputs["ray_offsets"].copy_(other["ray_offsets"])
        assert sum(counts) < capacity
        graph.replay()
        expected = value_and_gradients(composite_all, {n: x.detach() for n, x in inputs.items()}, grads)
        for a, e in zip((*values, *gradients), expected, strict=True):
            assert torch.equal(a, e)


def test_expanded_gradients(device):
    inputs = make(device, counts=[3, 0, 40])
    ones = [torch.ones((), dtype=torch.float64, device=device).expand(x.shape) for x in composite_all(**inputs)]
    actual = value_and_gradients(composite_all, inputs, ones)
    expected = value_and_gradients(composite_all, inputs, [x.contiguous() for x in ones])
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.cuda
def test_cpu_and_cuda_agree():
    inputs = make("cpu", counts=[*range(150)], dtype=torch.float32)
    grads = random_grads(inputs)
    ours = value_and_gradients(lambda **x: composite_all(**x, min_transmittance=0.0), inputs, grads)
    theirs = value_and_gradients(
        lambda **x: composite_all(**x, min_transmittance=0.0),
        {name: x.cuda() for name, x in inputs.items()},
        [g.cuda() for g in grads],
    )
    assert_all_match(theirs, ours)


# --- values that are not finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 3, 31, 32, 60])
def test_a_density_that_is_not_finite_shows_where_it_is_reached(device, value, place):
    # Two rays: the second one is sound. Samples behind it and around it are finite.
    inputs = make(device, counts=[64, 40], thickness=0.01)
    inputs["density"][place] = value
    density, rgb = inputs["density"].requires_grad_(), inputs["rgb"].requires_grad_()
    result = composite_all(**inputs)
    for name in ("rgb", "opacity", "depth_sum", "distortion"):
        assert not getattr(result, name)[0].isfinite().any(), name
        assert getattr(result, name)[1].isfinite().all(), name
    weights = result.weights.detach()
    assert weights[place].isnan()
    assert weights.isfinite().sum() == len(weights) - 1
    (grad,) = torch.autograd.grad(result.weights.sum(), density, create_graph=True)
    assert grad[: place + 1].isnan().all()  # the light of those ahead would change its weight
    assert grad[64:].isfinite().all()
    (result.rgb.sum() + result.opacity.sum()).backward()
    assert not density.grad[:64].isfinite().any()
    assert density.grad[64:].isfinite().all()
    assert rgb.grad[64:].isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["density", "rgb"])
def test_behind_the_end_of_a_ray_anything_may_lie(device, value, what):
    inputs = make(device, counts=[64])
    inputs["density"][5] = 1e9
    expected = value_and_gradients(composite_all, inputs, random_grads(inputs))
    for place in (6, 31, 40):
        broken = {**inputs, what: inputs[what].clone()}
        broken[what][place] = value
        torch.manual_seed(0)
        grads = random_grads(inputs)
        torch.manual_seed(0)
        actual = value_and_gradients(composite_all, broken, grads)
        expected = value_and_gradients(composite_all, inputs, grads)
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_color_that_is_not_finite_shows(device, value):
    inputs = make(device, counts=[64, 40], thickness=0.01)
    inputs["rgb"][7, 1] = value
    result = composite_all(**inputs)
    assert not result.rgb[0, 1].isfinite()
    assert result.rgb[0, ::2].isfinite().all()
    assert result.rgb[1].isfinite().all()


# --- alphas, transmittance


def alphas(inputs):
    return -torch.expm1(-inputs["density"] * inputs["dt"])


@pytest.mark.parametrize("min_transmittance", [0.0, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_alphas_give_what_their_densities_give(device, dtype, min_transmittance):
    inputs = make(device, thickness=0.3)
    grads = random_grads(inputs)[:4]
    limit = {"min_transmittance": min_transmittance}

    def by_density(alpha, rgb):
        density = -torch.log1p(-alpha) / inputs["dt"]
        return composite(**{**inputs, "density": density, "rgb": rgb}, **limit)[:4]

    def by_alpha(alpha, rgb):
        t = inputs["t"].to(alpha.dtype)
        return composite_alphas(alpha, rgb, t, inputs["ray_offsets"], **limit)[:4]

    results = []
    for function, kind in ((by_alpha, dtype), (by_density, torch.float64)):
        alpha = alphas(inputs).to(kind).requires_grad_()
        rgb = inputs["rgb"].to(kind).requires_grad_()
        values = function(alpha, rgb)
        results.append([*values, *torch.autograd.grad(values, (alpha, rgb), [g.to(kind) for g in grads])])
    for name, actual, expected in zip(("rgb", "opacity", "depth", "weights", "alpha", "color"), *results, strict=True):
        assert_matches(actual.detach(), expected.detach(), name)


def test_an_opaque_alpha_ends_its_ray(device):
    alpha = torch.tensor([0.5, 1.0, 0.5, 0.25], device=device, requires_grad=True)
    rgb = torch.rand(4, 3, device=device)
    offsets = torch.tensor([0, 3, 4], device=device)
    for limit in (0.0, 1e-4):
        result = composite_alphas(alpha, rgb, torch.ones_like(alpha), offsets, min_transmittance=limit)
        assert result.weights.tolist() == [0.5, 0.5, 0.0, 0.25]
        light = alpha_transmittance(alpha, offsets, min_transmittance=limit)
        assert light.tolist() == [1.0, 0.5, 0.0, 1.0]
        (grad,) = torch.autograd.grad(result.rgb.sum(), alpha)
        expected = [rgb[0].sum() - rgb[1].sum(), 0.5 * rgb[1].sum(), 0.0, rgb[3].sum()]
        torch.testing.assert_close(grad, torch.tensor(expected, device=device))


@pytest.mark.parametrize("value", [math.nan, 1.1, math.inf, -math.inf])
def test_an_alpha_out_of_range_shows(device, value):
    alpha = torch.full((10,), 0.1, device=device)
    alpha[4] = value
    result = composite_alphas(alpha, torch.rand(10, 3, device=device), alpha, torch.tensor([0, 10], device=device))
    assert result.rgb.isnan().all()
    assert result.weights[4].isnan()
    assert result.weights.isfinite().sum() == 9


@pytest.mark.parametrize("min_transmittance", [0.0, 1e-2])
def test_transmittance_is_what_the_weights_leave(device, min_transmittance):
    inputs = make(device, thickness=0.3)
    limit = {"min_transmittance": min_transmittance}
    args = inputs["density"], inputs["dt"], inputs["ray_offsets"]
    light, weights = ray_transmittance(*args, **limit), ray_weights(*args, **limit)
    alpha = alphas(inputs)
    assert_matches(light * alpha, weights)
    assert_matches(alpha_transmittance(alpha, args[2], **limit), light)
    assert_matches(alpha_weights(alpha, args[2], **limit), weights)
    first = inputs["ray_offsets"][:-1][inputs["ray_offsets"].diff() > 0]
    assert (light[first] == 1).all()
    assert (light == 0).any() == (min_transmittance > 0)


# --- errors and registration


def test_tensors_that_torch_func_leaves_behind_get_gradients():
    inputs, kept = make("cpu", counts=[2, 3]), []
    density = inputs["density"].requires_grad_()
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(density)
    (expected,) = torch.autograd.grad(composite(**inputs).rgb.sum(), density)
    composite(**{**inputs, "density": kept[0]}).rgb.sum().backward()
    assert torch.equal(density.grad, expected)


@pytest.mark.parametrize("rays", [3, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_number_of_offsets_is_looked_at(rays, dtype):
    inputs = make("cpu", counts=[2] * rays, dtype=dtype)
    assert composite(**inputs).rgb.shape == (rays, 3)
    for at, value, message in ((1, 5, "not decrease"), (0, -1, "lie in"), (-1, 2 * rays + 1, "lie in")):
        offsets = inputs["ray_offsets"].clone()
        offsets[at] = value
        with pytest.raises(ValueError, match=f"ray_offsets must {message}"):
            composite(**{**inputs, "ray_offsets": offsets})


@pytest.mark.parametrize("make_fake", [lambda x: x.to("meta"), FakeTensorMode().from_tensor], ids=["meta", "fake"])
def test_tensors_without_values_are_checked_too(make_fake):
    inputs = {name: make_fake(x) for name, x in make("cpu", counts=[2, 3], dtype=torch.float32).items()}
    shapes = [None if x is None else x.shape for x in composite_all(**inputs)]
    assert shapes == [(2, 3), (2,), (2,), (5,), (2,)]
    wide = composite(**{**inputs, "density": inputs["density"].half(), "rgb": inputs["rgb"].bfloat16()})
    assert {x.dtype for x in wide if x is not None} == {torch.float32}
    for name in NAMES:
        with pytest.raises(ValueError, match="must have shape"):
            composite(**{**inputs, name: inputs[name][:2]})
    with pytest.raises(ValueError, match="min_transmittance must lie in"):
        composite(**inputs, min_transmittance=2.0)
