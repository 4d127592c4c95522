"""Compositing of rays with equally many samples, (R, S), which are packed rays without offsets."""

from __future__ import annotations

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
