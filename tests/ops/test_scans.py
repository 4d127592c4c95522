"""Running sums and products along packed rays, and conversions between ray offsets and ray indices."""

from __future__ import annotations

import pytest
import reference
import torch
from tolerances import arithmetic, assert_matches

from voxelfield import ops
from voxelfield.ops.ray_sums import scan

SCANS = {name: getattr(ops, name) for name in ("inclusive_sum", "exclusive_sum", "inclusive_prod", "exclusive_prod")}
every_scan = pytest.mark.parametrize("name", SCANS)
# Rays on either side of the 8 and 32 samples that a team takes at once, and rows of no ray at both ends.
COUNTS = [0, 1, 7, 8, 9, 33, 70, 0]


def make(device, columns=(2,), counts=COUNTS, spare=3, dtype=torch.float64):
    values = torch.rand(sum(counts) + 2 * spare, *columns, dtype=torch.float64) + 0.5
    offsets = spare + torch.tensor([0, *counts]).cumsum(0)
    return values.to(device, dtype), offsets.to(device)


def by_reference(name, values, offsets):
    return reference.scan(values, offsets, inclusive=name.startswith("in"), product=name.endswith("prod"))


@every_scan
@pytest.mark.parametrize("columns", [(), (1,), (11,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_values_match_reference(device, name, columns, dtype):
    values, offsets = make(device, columns, dtype=dtype)
    actual = SCANS[name](values, offsets)
    assert actual.dtype == arithmetic(dtype)
    assert_matches(actual.cpu(), by_reference(name, values.double().cpu(), offsets))
    narrow = SCANS[name](values, offsets.int())
    assert torch.equal(narrow, actual)


@every_scan
@pytest.mark.parametrize("counts", [[], [0], [0, 0]], ids=str)
def test_nothing_to_scan(device, name, counts):
    values, offsets = make(device, counts=counts, spare=0)
    assert SCANS[name](values, offsets).shape == (0, 2)
    assert SCANS[name](values.new_zeros(0, 0), offsets).shape == (0, 0)


@every_scan
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_gradients_with_factors_of_zero(device, name, zeros):
    values, offsets = make(device)
    for k in range(zeros):
        values[30 + 5 * k] = 0
    grad = torch.randn_like(values)
    x, y = values.clone().requires_grad_(), values.cpu().requires_grad_()
    (actual,) = torch.autograd.grad(SCANS[name](x, offsets), x, grad)
    (expected,) = torch.autograd.grad(by_reference(name, y, offsets), y, grad.cpu())
    assert_matches(actual.cpu(), expected)


@pytest.mark.parametrize("form", [0, 1, 2])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("given", ["values", "factors", "both"])
def test_derivatives_of_every_order_and_mode(device, form, reverse, given):
    values, offsets = make(device, counts=[0, 3, 34], spare=1)
    factors = values.flip(0)
    factors[5] = 0
    inputs = {"values": (values,), "factors": (factors,), "both": (values, factors)}[given]

    def function(*inputs):
        values, factors = {"values": (*inputs, None), "factors": (None, *inputs), "both": inputs}[given]
        return scan(values, factors, offsets, form, reverse)

    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


# --- offsets and indices


@pytest.mark.parametrize("counts", [[], [0], [0, 2, 0, 3, 1, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_offsets_and_indices(device, counts, dtype):
    expected = torch.tensor([0, *counts], device=device).cumsum(0)
    numbers = torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device).long())
    index = numbers.to(dtype)
    offsets = ops.offsets_from_ray_index(index, len(counts))
    assert offsets.dtype == torch.int64
    assert torch.equal(offsets, expected)
    info = ops.pack_info(index, len(counts))
    assert info.dtype == torch.int64
    assert torch.equal(info, torch.stack((expected[:-1], expected.diff()), dim=1))
    assert torch.equal(ops.ray_index_from_offsets(offsets.to(dtype), sum(counts)), numbers)


def test_rows_of_no_ray_belong_to_the_last_one(device):
    offsets = torch.tensor([0, 2, 3], device=device)
    assert ops.ray_index_from_offsets(offsets, 6).tolist() == [0, 0, 1, 1, 1, 1]
    assert ops.ray_index_from_offsets(offsets[:1], 2).tolist() == [0, 0]
