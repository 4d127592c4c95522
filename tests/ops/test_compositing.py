"""composite, ray_weights and their gradients."""

from __future__ import annotations

import math
from functools import partial

import pytest
import reference
import torch
from tolerances import assert_matches

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


by_reference = partial(reference.composite, distortion=True)


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


@pytest.mark.parametrize("min_transmittance", [0.0, 0.5])
@pytest.mark.parametrize("function", [composite, composite_alphas])
def test_second_derivatives_beside_rows_of_no_ray(device, function, min_transmittance):
    inputs = make(device, counts=[0, 1, 9, 40], channels=2)
    offsets = inputs.pop("ray_offsets")
    if function is composite_alphas:
        inputs = {"alpha": alphas(inputs), "rgb": inputs["rgb"], "t": inputs["t"]}

    def used(*rows):
        rows = [torch.cat([x, x.new_full((2, *x.shape[1:]), math.nan)]) for x in rows]
        options = {"distortion": True} if function is composite else {}
        return [x for x in function(*rows, offsets, min_transmittance=min_transmittance, **options) if x is not None]

    leaves = [x.requires_grad_() for x in inputs.values()]
    assert (used(*leaves)[3] == 0).sum() > 2 or not min_transmittance
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


def test_vmap_over_offsets_too(device):
    inputs = make(device, counts=[0, 3, 40, 0])
    inputs = {name: torch.stack([x, x.flip(0)]) for name, x in inputs.items()}
    inputs["ray_offsets"] = torch.tensor([[0, 3, 40, 41, 43], [1, 3, 31, 31, 40]], device=device)
    actual = torch.vmap(lambda x: composite_all(**x))(inputs)
    for call in range(2):
        for a, e in zip(actual, composite_all(**{name: x[call] for name, x in inputs.items()}), strict=True):
            torch.testing.assert_close(a[call], e)
    with pytest.raises(NotImplementedError, match="derivatives of compositing, cannot be mapped over ray_offsets"):
        torch.vmap(torch.func.grad(lambda x, rows: ray_weights(x, 0.1, rows).sum()))(
            inputs["density"], inputs["ray_offsets"]
        )


@pytest.mark.parametrize("dt", [0.05, torch.tensor(0.05, dtype=torch.float64)], ids=["number", "tensor"])
def test_one_length_for_all_samples(device, dt):
    inputs = make(device)
    dt = dt.to(device).requires_grad_() if isinstance(dt, torch.Tensor) else dt
    expected = composite_all(**{**inputs, "dt": torch.full_like(inputs["t"], 0.05)})
    actual = composite_all(**{**inputs, "dt": dt})
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for function in (ray_weights, ray_transmittance):
        assert torch.equal(
            function(inputs["density"], dt, inputs["ray_offsets"]),
            function(inputs["density"], torch.full_like(inputs["t"], 0.05), inputs["ray_offsets"]),
        )
    if isinstance(dt, torch.Tensor):
        assert torch.autograd.gradcheck(lambda dt: composite_all(**{**inputs, "dt": dt})[:3], dt)


@pytest.mark.parametrize("size", [(3, 8), (4, 0), (0, 7)], ids=str)
def test_rays_of_equally_many_samples_may_share_a_length(device, size):
    density, t, rgb = (torch.rand(*size, *more, device=device) for more in ((), (), (3,)))
    packed = (x.flatten(0, 1) for x in (density, rgb, t))
    expected = composite(*packed, 0.05, size[1] * torch.arange(size[0] + 1, device=device))
    for a, e in zip(composite(density, rgb, t, 0.05)[:4], expected, strict=False):
        assert torch.equal(a, e.view_as(a))


def test_narrow_offsets_are_converted(device):
    inputs = make(device)
    narrow = {**inputs, "ray_offsets": inputs["ray_offsets"].int()}
    torch.testing.assert_close(composite_all(**narrow), composite_all(**inputs), rtol=0, atol=0)


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
    for found, what in ((result.rgb, "rgb"), (result.depth_sum, "t")):
        torch.testing.assert_close(found.cpu(), (expected @ inputs[what].cpu())[None])


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


# --- nothing, and rows of no ray


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nothing_to_composite(device, counts, dtype):
    inputs = make(device, counts=counts, dtype=dtype)
    inputs["rgb"].requires_grad_()
    result = composite_all(**inputs)
    rays = len(counts)
    assert [tuple(x.shape) for x in result] == [(rays, 3), (rays,), (rays,), (0,), (rays,)]
    assert not any(x.any() for x in result)
    sum(x.sum() for x in result).backward()
    assert inputs["rgb"].grad.shape == (0, 3)


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
        torch.testing.assert_close((*values, *gradients), expected, rtol=0, atol=0)


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
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


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
