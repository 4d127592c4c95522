"""The context of a GPU that is created early."""

from __future__ import annotations

import pytest
import torch

from voxelfield.cli.early_context import begin_context


@pytest.mark.parametrize("arguments", [("device=cpu",), ("device=cuda", "device=cpu"), ("device=banana",)])
def test_nothing_is_done_for_a_run_on_something_else(arguments):
    assert begin_context(arguments) is None


@pytest.mark.parametrize("arguments", [(), ("scene=lego", "+device=auto"), ("device=cuda:99",)])
def test_a_gpu_that_is_not_there_is_left_for_torch_to_report(arguments, capfd):
    thread = begin_context(arguments)
    assert thread is not None
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert capfd.readouterr().err == ""


@pytest.mark.cuda
def test_torch_uses_the_context():
    thread = begin_context(("device=cuda:0",))
    assert thread is not None
    thread.join(timeout=60)
    assert int(torch.ones(2, device="cuda").sum()) == 2
