"""Running sums and products along packed rays, and conversions between ray offsets and ray indices."""

from __future__ import annotations

import itertools

import pytest
import torch
from op_testing import LAYOUTS
from tolerances import arithmetic, assert_matches

from voxelfield import _library, ops
from voxelfield.ops.ray_sums import scan

SCANS = {
    "inclusive_sum": ops.inclusive_sum,
    "exclusive_sum": ops.exclusive_sum,
    "inclusive_prod": ops.inclusive_prod,
    "exclusive_prod": ops.exclusive_prod,
}
every_scan = pytest.mark.parametrize("name", SCANS)
# Rays on either side of the 8 and 32 samples that a team takes at once, and rows of no ray at both ends.
COUNTS = [0, 1, 7, 8, 9, 33, 70, 0]


def make(device, columns=(2,), counts=COUNTS, spare=3, dtype=torch.float64):
    values = torch.rand(sum(counts) + 2 * spare, *columns, dtype=torch.float64) + 0.5
    offsets = spare + torch.tensor([0, *counts]).cumsum(0)
    return values.to(device, dtype), offsets.to(device)


def by_reference(name, values, offsets):
    rows = {}
    for first, last in itertools.pairwise(offsets.tolist()):
        for i in range(first, last):
            ahead = values[first : i + (name[:2] == "in")]
            rows[i] = ahead.sum(dim=0) if name.endswith("sum") else ahead.prod(dim=0)
    return torch.stack([rows.get(i, torch.zeros_like(values[0])) for i in range(len(values))])


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
def test_any_memory_layout(device, name):
    values, offsets = make(device)
    expected = SCANS[name](values, offsets)
    for layout in LAYOUTS.values():
        assert torch.equal(SCANS[name](layout(values), offsets), expected)


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


@every_scan
def test_vmap(device, name):
    values, offsets = make(device)
    several = torch.stack([values, 0.5 * values], dim=1)
    actual = torch.vmap(lambda x: SCANS[name](x, offsets), in_dims=1)(several)
    torch.testing.assert_close(actual[1], SCANS[name](0.5 * values, offsets))
    assert torch.vmap(lambda x: SCANS[name](x, offsets))(values[None][:0]).shape == (0, *values.shape)
    with pytest.raises(NotImplementedError, match="mapped over ray_offsets"):
        torch.vmap(scan, in_dims=(None, None, 0, None))(values, None, offsets.expand(2, -1), 0)


def test_opcheck(device):
    _library.ensure_loaded(device.type)
    values, offsets = make(device, counts=[0, 3, 34])
    for inputs in ((values, None), (None, values), (values.requires_grad_(), values.detach())):
        torch.library.opcheck(torch.ops.voxelfield.scan_along_rays.default, (*inputs, offsets, 1, False))


def test_compiled():
    values, offsets = make("cpu", dtype=torch.float32)
    values.requires_grad_()

    def loss(values):
        return (ops.exclusive_prod(values, offsets) * ops.inclusive_sum(values, offsets)).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (actual,) = torch.autograd.grad(compiled(values), values)
    (expected,) = torch.autograd.grad(loss(values), values)
    torch.testing.assert_close(actual, expected)


def test_wrong_arguments_are_named():
    values, offsets = make("cpu")
    for wrong, error, message in (
        ((values[..., None], offsets), ValueError, "values must have shape"),
        ((values.int(), offsets), TypeError, "values must be float32"),
        ((values, offsets.float()), TypeError, "ray_offsets must be int64 or int32, got float32"),
        ((values, offsets + 9), ValueError, r"ray_offsets must lie in 0\.\.134"),
        ((values.tolist(), offsets), TypeError, r"values must be a torch\.Tensor, got list"),
    ):
        with pytest.raises(error, match=message):
            ops.inclusive_sum(*wrong)


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


@pytest.mark.parametrize(
    ("index", "rays", "message"),
    [
        ([0, 1, 2], 2, r"ray_index must lie in 0\.\.1, as there are 2 rays, got 0\.\.2"),
        ([0, 2, 1], 3, "ray_index must not decrease"),
        ([0], -1, "rays must be a number of rays, at least 0, got -1"),
        ([[0]], 1, r"ray_index must have shape \(M\)"),
        ([0.5], 1, "ray_index must be int64 or int32, got float32"),
        ([0], True, "rays must be an int, got bool"),
    ],
)
def test_wrong_indices_are_named(index, rays, message):
    for function in (ops.pack_info, ops.offsets_from_ray_index):
        with pytest.raises((TypeError, ValueError), match=message):
            function(torch.tensor(index), rays)


def test_wrong_offsets_are_named():
    with pytest.raises(ValueError, match=r"ray_offsets must lie in 0\.\.4, as samples has rows, got 0\.\.5"):
        ops.ray_index_from_offsets(torch.tensor([0, 5]), 4)
    with pytest.raises(TypeError, match="samples must be an int, got float"):
        ops.ray_index_from_offsets(torch.tensor([0, 5]), 5.0)
