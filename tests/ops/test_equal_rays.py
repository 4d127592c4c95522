"""Compositing of rays with equally many samples, (R, S), which are packed rays without offsets."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from voxelfield import ops

RAYS, SAMPLES = 5, 40


def make(device, rays=RAYS, samples=SAMPLES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    shape = rays, samples
    values = {
        "density": 3 * torch.rand(shape, generator=generator, dtype=dtype),
        "rgb": torch.rand((*shape, 3), generator=generator, dtype=dtype),
        "t": torch.rand(shape, generator=generator, dtype=dtype).sort(dim=1).values,
        "dt": 0.02 + 0.1 * torch.rand(shape, generator=generator, dtype=dtype),
    }
    return {name: x.to(device) for name, x in values.items()}


def alpha_of(density, dt):
    return 1 - torch.exp(-density * dt)


CASES = {
    "composite": lambda density, rgb, t, dt, *offsets: ops.composite(density, rgb, t, dt, *offsets, distortion=True),
    "composite, one length": lambda density, rgb, t, dt, *offsets: ops.composite(density, rgb, t, 0.05, *offsets)[:4],
    "composite_alphas": lambda density, rgb, t, dt, *offsets: ops.composite_alphas(
        alpha_of(density, dt), rgb, t, *offsets
    )[:4],
    "ray_weights": lambda density, rgb, t, dt, *offsets: (ops.ray_weights(density, dt, *offsets),),
    "ray_transmittance": lambda density, rgb, t, dt, *offsets: (
        ops.ray_transmittance(density, dt, *offsets, min_transmittance=0.3),
    ),
    "alpha_weights": lambda density, rgb, t, dt, *offsets: (ops.alpha_weights(alpha_of(density, dt), *offsets),),
    "alpha_transmittance": lambda density, rgb, t, dt, *offsets: (
        ops.alpha_transmittance(alpha_of(density, dt), *offsets),
    ),
}


@pytest.mark.parametrize("size", [(RAYS, SAMPLES), (3, 1), (4, 0), (0, 7), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_packed_rays(device, case, dtype, size):
    rays, samples = size
    dense = {name: x.requires_grad_() for name, x in make(device, rays, samples, dtype).items()}
    packed = {name: x.detach().flatten(0, 1).requires_grad_() for name, x in dense.items()}
    offsets = samples * torch.arange(rays + 1, device=device)
    results, expected = CASES[case](**dense), CASES[case](*packed.values(), offsets)
    weights = expected[3] if len(expected) > 1 else expected[0]
    for actual, wanted in zip(results, expected, strict=True):
        assert actual.shape == ((rays, samples) if wanted is weights else wanted.shape)
        assert torch.equal(actual.reshape(wanted.shape), wanted)
    for results_of, inputs in ((results, dense), (expected, packed)):
        sum(x.square().sum() for x in results_of).backward()
        assert all(x.grad is None or x.grad.shape == x.shape for x in inputs.values())
    for name, x in dense.items():
        assert (x.grad is None) == (packed[name].grad is None)
        if x.grad is not None:
            assert torch.equal(x.grad.flatten(0, 1), packed[name].grad)


@pytest.mark.parametrize("case", CASES)
def test_derivatives_of_every_order_and_mode(device, case):
    inputs = [x.requires_grad_() for x in make(device, 2, 6).values()]
    names = tuple(make(device, 1, 1))
    used = {"composite, one length": names[:3], "composite_alphas": names}.get(
        case, names if case == "composite" else ("density", "dt")
    )
    leaves = [x for name, x in zip(names, inputs, strict=True) if name in used]

    def function(*given):
        return CASES[case](**(dict(zip(names, inputs, strict=True)) | dict(zip(used, given, strict=True))))

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, fast_mode=True)


def test_vmap(device):
    inputs = make(device)
    several = {name: torch.stack((x, x.flip(0))) for name, x in inputs.items()}
    mapped = torch.vmap(partial(ops.composite, distortion=True))(*several.values())
    for call in range(2):
        one = ops.composite(*(x[call] for x in several.values()), distortion=True)
        for actual, expected in zip(mapped, one, strict=True):
            torch.testing.assert_close(actual[call], expected)


def test_sixteen_bits_and_any_layout(device):
    inputs = make(device, dtype=torch.float32)
    turned = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in inputs.items()}
    for a, e in zip(ops.composite(**turned)[:4], ops.composite(**inputs)[:4], strict=True):
        assert torch.equal(a, e)
    assert ops.composite(**{name: x.half() for name, x in inputs.items()}).weights.dtype == torch.float32


@pytest.mark.parametrize("name", ["density", "rgb", "t", "dt"])
def test_wrong_shapes_are_named(name):
    inputs = make("cpu")
    inputs[name] = inputs[name][:, :-1] if name != "density" else inputs[name].flatten()
    why = r"\(R, S\) without ray_offsets, got \(200,\)" if name == "density" else r"\(5, 40(, C)?\), got \(5, 39"
    with pytest.raises(ValueError, match=rf"^{name} must have shape {why}"):
        ops.composite(**inputs)
    if name in ("density", "dt"):
        with pytest.raises(ValueError, match=rf"^{name} must have shape {why}"):
            ops.ray_weights(inputs["density"], inputs["dt"])
        with pytest.raises(ValueError, match=r"^alpha must have shape \(R, S\) without ray_offsets"):
            ops.alpha_weights(inputs["density"].flatten())
    with pytest.raises(TypeError, match=r"^dt must be a torch\.Tensor, got NoneType$"):
        ops.ray_weights(make("cpu")["density"], None)
