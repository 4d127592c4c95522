"""Features in few bytes: what rounding costs, and that compression costs nothing."""

from __future__ import annotations

import pytest
import torch

from voxelfield.trained.model_file import pack, quantize, steps_by_importance, steps_by_spread, unpack


def test_values_are_off_by_half_a_step_at_most(device):
    scale = torch.tensor([1e-6, 1.0, 1e6], device=device)
    values = torch.randn(5000, 3, device=device) * scale
    codes, step = quantize(values, 0.2 * scale)
    assert codes.dtype == torch.int8
    torch.testing.assert_close(step, 0.2 * scale)
    assert ((codes * step - values).abs() <= 0.5001 * step).all()


def test_a_step_is_enlarged_where_a_byte_would_not_hold_the_largest_code(device):
    values = torch.randn(5000, 1, device=device)
    codes, step = quantize(values, torch.full((1,), 1e-4, device=device))
    assert codes.abs().max() == 127
    torch.testing.assert_close(step, values.abs().amax(dim=0) / 127)


def test_zeros_and_no_rows_at_all_are_fine(device):
    codes, step = quantize(torch.zeros(4, 2, device=device), torch.ones(2, device=device))
    assert not codes.any()
    assert not (codes * step).any()
    codes, step = quantize(torch.zeros(0, 2, device=device), torch.ones(2, device=device))
    assert (codes.shape, step.tolist()) == ((0, 2), [0, 0])
    assert unpack(pack(codes), 0).shape == (0,)


@pytest.mark.parametrize(("value", "step"), [(1.0, torch.inf), (1e-45, 0.0)])
def test_steps_beyond_the_range_of_numbers_give_finite_features(value, step):
    codes, step = quantize(torch.full((3, 1), value), torch.tensor([step]))
    assert (codes * step).isfinite().all()


def test_steps_by_spread_are_finer_in_levels_of_few_vertices():
    coarse, fine = torch.randn(1000, 2), 3 * torch.randn(4000, 2)
    steps = steps_by_spread([coarse, fine, torch.zeros(0, 2)], 0.5)
    torch.testing.assert_close(steps[0], 0.25 * coarse.std(dim=0, correction=0))
    torch.testing.assert_close(steps[1], 0.5 * fine.std(dim=0, correction=0))
    assert steps[2].tolist() == [0, 0]


def test_steps_by_importance_cause_the_error_asked_for():
    levels = [torch.randn(20_000, 2) * torch.tensor([1.0, 30.0]), 0.1 * torch.randn(50_000, 1)]
    importance = [torch.rand(20_000, 2) * torch.tensor([1e-5, 1e-8]), 1e-3 * torch.rand(50_000, 1)]
    found, channels = 0.0, []
    _, steps = steps_by_importance(levels, importance, 0.01)
    for values, weight, step in zip(levels, importance, steps, strict=True):
        codes, step = quantize(values, step)
        error = (weight * (codes * step - values).square()).sum(dim=0)
        channels += (error / len(values)).tolist()
        found += float(error.sum())
    assert found**0.5 == pytest.approx(0.01, rel=0.05)
    assert channels == pytest.approx([channels[0]] * 3, rel=0.2), "a feature of each channel contributes alike"


def test_features_that_matter_less_than_their_share_of_the_error_are_dropped():
    levels, importance = [torch.tensor([[2.0], [2.0], [0.1]])], [torch.tensor([[1e-6], [1e-2], [1e-2]])]
    assert steps_by_importance(levels, importance, 0.02)[0][0].tolist() == [[0.0], [2.0], [0.0]]


def test_codes_come_back_and_take_about_their_entropy(device):
    codes = torch.distributions.Laplace(0.0, 4.0).sample((200_000, 4)).round().clamp(-127, 127).to(device, torch.int8)
    packed = pack(codes.t())
    assert torch.equal(unpack(packed, 800_000).view(torch.int8).view(4, 200_000).t(), codes.cpu())
    _, counts = codes.unique(return_counts=True)
    share = counts.double() / counts.sum()
    entropy = float(-(share * share.log2()).sum()) / 8 * codes.numel()
    assert packed.numel() < 1.05 * entropy


def test_damaged_or_other_codes_are_refused():
    packed = pack(torch.ones(10, 2, dtype=torch.int8))
    for content, size, message in (
        (packed, 22, "must be 22 bytes, got 20"),
        (packed, 18, "must be 18 bytes, got more than 18"),
        (packed[:-3], 20, "compressed data"),
        (packed ^ 255, 20, "compressed data is damaged"),
        (packed, 1 << 60, "cannot contain that many"),
    ):
        with pytest.raises(RuntimeError, match=message):
            unpack(content, size)
