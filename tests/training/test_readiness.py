"""What is done before training is of use to it."""

import sys

import torch

from voxelfield.training import readiness
from voxelfield.training.config import LoggerConfig


def test_the_view_that_loads_kernels_is_one_that_can_be_judged(device, monkeypatch):
    judged = []
    evaluate = readiness.evaluate_split
    monkeypatch.setattr(readiness, "evaluate_split", lambda *a, **k: judged.append(evaluate(*a, **k)))
    readiness._load_kernels_that_judge(device)
    assert judged[0].ssim_per_view == (1.0,)


def test_tensorboard_is_imported_where_it_logs(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    readiness.make_ready(torch.device("cpu"), LoggerConfig(name="none"))
    assert "torch.utils.tensorboard" not in sys.modules
    readiness.make_ready(torch.device("cpu"), LoggerConfig(name="tensorboard"))
    assert "torch.utils.tensorboard" in sys.modules
