"""What steps add up until it is read."""

from __future__ import annotations

import torch

from voxelfield.training.step import StepTotals


def test_totals_add_up_until_they_are_read(device):
    totals = StepTotals(device)
    errors, counts = torch.rand(3, 2, device=device), torch.tensor([[5, 2**53 - 9], [3, 4], [0, 4]], device=device)
    for step in range(3):
        totals.add({"first": errors[step, 0], "second": errors[step, 1]})
        totals.add({"few": counts[step, 0], "many": counts[step, 1]})
    expected = errors.cpu().double().sum(0).tolist()
    assert totals.read() == {"first": expected[0], "second": expected[1], "few": 8.0, "many": 2.0**53 - 1}
    assert set(totals.read().values()) == {0.0}


def test_a_total_may_be_added_to_beside_different_ones(device):
    totals = StepTotals(device)
    one = torch.ones((), device=device)
    totals.add({"a": one, "b": 2 * one})
    totals.add({"a": 4 * one})
    assert totals.read() == {"a": 5.0, "b": 2.0}
