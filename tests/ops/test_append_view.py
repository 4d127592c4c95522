"""append_view: geometry and viewing directions side by side, as plain torch lays them."""

from __future__ import annotations

import pytest
import torch
from op_testing import DTYPES
from tolerances import arithmetic, assert_matches
from torch.nn import functional as F

from voxelfield.fields.decoders import spherical_harmonics
from voxelfield.ops._internal.color import append_view


def make(device, dtype=torch.float64, rows=77, size=16, rays=9):
    geometry = torch.randn(rows, size, device=device).to(dtype)
    directions = F.normalize(torch.randn(rays, 3, device=device, dtype=arithmetic(dtype)), dim=-1)
    return geometry, directions, torch.randint(rays, (rows,), device=device)


@pytest.mark.covering("dtype degree")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 15, 16])
def test_values(device, dtype, degree, size):
    geometry, directions, index = make(device, dtype, size=size)
    inputs, raw = append_view(geometry, directions, index, degree)
    assert inputs.dtype == dtype
    assert raw.dtype == arithmetic(dtype)
    assert torch.equal(inputs[:, :size], geometry)
    assert torch.equal(raw, geometry[:, 0].to(raw.dtype))
    assert_matches(inputs[:, size:], spherical_harmonics(directions.double(), degree)[index], "view")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "degree"), [(16, 3), (16, 2), (5, 3), (1, 0)])
def test_gradient(device, dtype, size, degree):
    geometry, directions, index = make(device, dtype, size=size)
    geometry.requires_grad_()
    inputs, raw = append_view(geometry, directions, index, degree)
    grad_inputs, grad_raw = torch.randn_like(inputs), torch.randn_like(raw)
    (grad,) = torch.autograd.grad((inputs, raw), geometry, (grad_inputs, grad_raw))
    expected = grad_inputs[:, :size].double()
    expected[:, 0] += grad_raw.double()
    assert_matches(grad, expected, "gradient")
