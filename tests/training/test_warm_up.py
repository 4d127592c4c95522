"""Preparations while photographs are decoded."""

import gc
import sys

import pytest
import torch

from voxelfield.components.tensorboard import TensorBoardSettings
from voxelfield.runs import train as run_training
from voxelfield.settings.presets import preset


def _assert_loads_kernels(settings, device, monkeypatch):
    evaluated = []
    evaluate = run_training.evaluate_split
    monkeypatch.setattr(run_training, "evaluate_split", lambda *a, **k: evaluated.append(evaluate(*a, **k)))
    run_training._load_kernels(settings, device)
    ((ssim,),) = (each.scores["ssim"] for each in evaluated)
    assert 0 < ssim <= 1


@pytest.mark.parametrize("model", ["pyramid", "sh", "dense"])
def test_the_view_that_loads_kernels_can_be_trained_on_and_evaluated(model, monkeypatch):
    settings = preset("trainer=smoke", f"model={model}", name="train_cpu")
    _assert_loads_kernels(settings, torch.device("cpu"), monkeypatch)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "chosen",
    [(f"trainer={name}",) for name in ("default", "fast", "few_photographs", "forward_facing", "many_photographs")]
    + [("trainer=sh", "model=sh")],
)
def test_the_kernels_of_each_preset_can_be_loaded_on_a_gpu(chosen, monkeypatch):
    gc.collect()
    before = torch.cuda.memory_allocated()
    _assert_loads_kernels(preset(*chosen, name="train"), torch.device("cuda"), monkeypatch)
    gc.collect()
    # Nothing of the field is kept, whose levels take 300 MB and more; cuBLAS keeps 32 MB for each stream.
    assert torch.cuda.memory_allocated() - before < 2**28


def test_tensorboard_is_imported_where_it_logs(monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    run_training._warm_up(preset(name="train_cpu"), torch.device("cpu"), [])
    assert "torch.utils.tensorboard" not in sys.modules
    run_training._warm_up(preset(name="train_cpu"), torch.device("cpu"), [TensorBoardSettings()])
    assert "torch.utils.tensorboard" in sys.modules


@pytest.mark.cuda
def test_kernels_are_loaded_on_a_gpu_and_what_loaded_them_is_freed(monkeypatch):
    loaded = []

    def load(settings, device):
        cycle = [torch.zeros(2**20, device=device)]
        cycle.append(cycle)
        loaded.append(settings)

    monkeypatch.setattr(run_training, "_load_kernels", load)
    settings, before = preset(name="train"), torch.cuda.memory_allocated()
    run_training._warm_up(settings, torch.device("cuda"), [])
    assert loaded == [settings]
    assert torch.cuda.memory_allocated() == before
