"""Preparations while photographs are decoded."""

import sys

import pytest
import torch

from voxelfield.components.tensorboard import TensorBoardSettings
from voxelfield.runs import train as run_training


def test_the_view_that_loads_kernels_can_be_evaluated(device, monkeypatch):
    evaluated = []
    evaluate = run_training.evaluate_split
    monkeypatch.setattr(run_training, "evaluate_split", lambda *a, **k: evaluated.append(evaluate(*a, **k)))
    run_training._load_evaluation_kernels(device)
    assert evaluated[0].scores["ssim"] == (1.0,)


def test_tensorboard_is_imported_where_it_logs(monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    run_training._warm_up(torch.device("cpu"), [])
    assert "torch.utils.tensorboard" not in sys.modules
    run_training._warm_up(torch.device("cpu"), [TensorBoardSettings()])
    assert "torch.utils.tensorboard" in sys.modules


@pytest.mark.cuda
def test_the_kernels_of_the_evaluation_are_loaded_on_a_gpu(monkeypatch):
    devices = []
    monkeypatch.setattr(run_training, "_load_evaluation_kernels", devices.append)
    run_training._warm_up(torch.device("cuda"), [])
    assert devices == [torch.device("cuda")]
