"""float16 to float32 and back inside the ops: the bits of torch's own conversions, in every form of the CPU code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from voxelfield.ops import sample_trilinear, trilinear_interpolate
from voxelfield.ops._internal.optim import grid_adam_

# Wide rows, whole and broken vectors of eight and four numbers, and single numbers.
CHANNELS = [1, 2, 3, 4, 7, 8, 12, 28, 64]


def all_halves() -> torch.Tensor:
    """Every float16: zeros, subnormals, normal numbers, infinities and NaN, of either sign."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype == torch.float16
    numbers = ~expected.isnan()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[numbers].view(torch.int16), expected[numbers].view(torch.int16))


def floats_around_halves() -> torch.Tensor:
    """Every float16 in float32, the ties between neighbours, both neighbours of each tie, and arbitrary bits."""
    exact = all_halves().float()
    exact = exact[exact.isfinite()].unique()
    ties = torch.cat([(exact[1:] + exact[:-1]) / 2, torch.tensor([65520.0, -65520.0])])
    beside = [torch.nextafter(ties, torch.tensor(limit)) for limit in (-torch.inf, torch.inf)]
    bits = torch.randint(-(2**31), 2**31, (50_000,)).to(torch.int32).view(torch.float32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45, -1e-45, 3e38])
    return torch.cat([exact, ties, *beside, bits, special])


def test_rounding_agrees_with_torch(device):
    values = floats_around_halves().to(device)
    for channels in (1, 3, 8, 29):
        param = values[: len(values) // channels * channels].view(1, 1, -1, channels).clone()
        moments, grad = [torch.zeros_like(param) for _ in range(2)], torch.zeros_like(param)
        working = torch.empty_like(param, dtype=torch.float16)
        grid_adam_([param], [moments[0]], [moments[1]], [grad], [0.0], [1], working=[working])
        assert_same_bits(working, param.half())


@pytest.mark.parametrize("channels", CHANNELS)
def test_every_number_survives_sampling(device, channels):
    values = all_halves().to(device)
    values = values[: len(values) // channels * channels].view(-1, channels)
    # In the middle of a cell of equal corners all sums are exact, but they start from +0, which swallows -0.
    sampled = trilinear_interpolate(values[:, None].expand(-1, 8, -1), torch.zeros(len(values), 3, device=device))
    assert_same_bits(sampled, values + 0.0)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("padding", ["border", "zeros"])
def test_subnormal_grids_follow_float64(device, channels, padding):
    grid = (torch.randn(3, 4, 5, channels) * 3e-6).half().to(device).requires_grad_()
    points = (torch.rand(200, 3) * 1.4 - 0.2).to(device).requires_grad_()
    exact_grid, exact_points = (x.detach().double().requires_grad_() for x in (grid, points))
    upstream = torch.randn(200, channels).half().to(device)

    value = sample_trilinear(grid, points, padding=padding)
    exact = sample_trilinear(exact_grid, exact_points, padding=padding)
    gradients = torch.autograd.grad(value, (grid, points), upstream)
    exact_gradients = torch.autograd.grad(exact, (exact_grid, exact_points), upstream.double())

    step = 2.0**-24  # of float16 subnormals
    assert (value.double() - exact).abs().max() <= 0.51 * step
    torch.testing.assert_close(gradients[0].double(), exact_gradients[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(gradients[1].double(), exact_gradients[1], rtol=1e-3, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_other_forms_of_the_code_agree(capability):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not other_forms", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
