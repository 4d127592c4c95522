"""Features in few bytes: what rounding costs, and that compression costs nothing."""

from __future__ import annotations

import pytest
import torch

from voxelfield.export.quantized import dequantize, pack_codes, quantize, unpack_codes


def test_values_are_off_by_half_a_step_at_most(device):
    values = torch.randn(5000, 3, device=device) * torch.tensor([1e-6, 1.0, 1e6], device=device)
    codes, size = quantize(values, 50)
    assert codes.dtype == torch.int8
    assert codes.abs().amax(dim=0).tolist() == [50, 50, 50]
    torch.testing.assert_close(size, values.abs().amax(dim=0) / 50)
    assert ((dequantize(codes, size) - values).abs() <= 0.5001 * size).all()


def test_zeros_and_no_rows_at_all_are_fine(device):
    codes, size = quantize(torch.zeros(4, 2, device=device), 127)
    assert not codes.any()
    assert not dequantize(codes, size).any()
    codes, size = quantize(torch.zeros(0, 2, device=device), 127)
    assert (codes.shape, size.tolist()) == ((0, 2), [0, 0])
    assert unpack_codes(pack_codes(codes), 0, 2).shape == (0, 2)


def test_steps_too_small_for_float32_are_zeros():
    codes, size = quantize(torch.full((3, 1), 1e-45), 127)
    assert dequantize(codes, size).isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="values must be finite"):
        quantize(torch.tensor([[0.0, value]]), 127)


@pytest.mark.parametrize("steps", [0, 128])
def test_steps_have_a_range(steps):
    with pytest.raises(ValueError, match=rf"steps must lie in 1\.\.127, got {steps}"):
        quantize(torch.ones(1, 1), steps)


def test_codes_come_back_and_take_about_their_entropy(device):
    codes = torch.distributions.Laplace(0.0, 4.0).sample((200_000, 4)).round().clamp(-127, 127).to(device, torch.int8)
    packed = pack_codes(codes)
    assert torch.equal(unpack_codes(packed, 200_000, 4), codes.cpu())
    _, counts = codes.unique(return_counts=True)
    share = counts.double() / counts.sum()
    entropy = float(-(share * share.log2()).sum()) / 8 * codes.numel()
    assert packed.numel() < 1.05 * entropy


def test_damaged_or_other_codes_are_refused():
    packed = pack_codes(torch.ones(10, 2, dtype=torch.int8))
    with pytest.raises(ValueError, match="must be 11 x 2 codes, got 20"):
        unpack_codes(packed, 11, 2)
    with pytest.raises(ValueError, match="compressed features are damaged"):
        unpack_codes(packed[:-3], 10, 2)
