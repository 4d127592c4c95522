"""GraphedCall: as many calls as were requested, launched one by one or replayed."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

from voxelfield.installed import without_garbage_collection
from voxelfield.training.execution import GraphedCall


def test_every_call_counts(device):
    total, amount = torch.zeros((), device=device), torch.ones((), device=device)
    launched = []

    def add():
        launched.append(None)
        total.add_(amount)

    call = GraphedCall(add, device)
    for number in range(1, 11):
        call()
        assert total.item() == number
    amount.fill_(100.0)  # replays read the tensors anew
    call()
    assert total.item() == 110
    assert len(launched) == (11 if device.type == "cpu" else 4)


def test_random_numbers_are_drawn_anew(device):
    drawn, value = [], torch.zeros(5, device=device)
    call = GraphedCall(lambda: value.copy_(torch.rand(5, device=device)), device)
    for _ in range(8):
        call()
        drawn.append(tuple(value.tolist()))
    assert len(set(drawn)) == 8


@pytest.mark.cuda
def test_a_graph_draws_what_calls_one_by_one_would():
    values = []
    for graphed in (True, False):
        value = torch.zeros(6, device="cuda")

        def draw(value=value):
            value.copy_(torch.rand(6, device="cuda")).mul_(torch.randint(9, (6,), device="cuda"))

        call = GraphedCall(draw, torch.device("cuda")) if graphed else draw
        torch.manual_seed(5)
        for _ in range(9):
            call()
        values.append(value.clone())
    assert torch.equal(*values)


def test_garbage_is_collected_as_before_after_a_time_without():
    for collects in (True, False):
        (gc.enable if collects else gc.disable)()
        try:
            with contextlib.suppress(KeyError), without_garbage_collection():
                assert not gc.isenabled()
                raise KeyError
            assert gc.isenabled() == collects
        finally:
            gc.enable()


@pytest.mark.cuda
def test_no_garbage_is_collected_while_a_graph_is_captured():
    value, collects = torch.zeros((), device="cuda"), []

    def add():
        collects.append(gc.isenabled())
        value.add_(1)

    call = GraphedCall(add, torch.device("cuda"))
    for _ in range(6):
        call()
    assert collects == [True, True, True, False]
    assert gc.isenabled()
