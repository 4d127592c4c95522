"""Runs that repeat themselves bit for bit."""

from __future__ import annotations

import os

import pytest
import torch
from quick_presets import preset
from short_runs import ROOT, TINY

import voxelfield
from voxelfield.runs.train import train_as_configured
from voxelfield.training.execution import reproducible


def test_the_wish_holds_within_its_block_only():
    assert not torch.are_deterministic_algorithms_enabled()
    with reproducible(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_block_without_the_wish_keeps_that_of_the_program():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with reproducible(False):
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        with reproducible(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "model",
    [("model=pyramid", "model.resolutions=[4,8,12]"), ("model=sh", "model.degree=1", "model.resolutions=[6,12]"), ()],
)
def test_a_run_repeats_itself(tmp_path, device, model):
    """On a GPU, sums of gradients would otherwise depend on which thread comes first."""

    def weights(name: str) -> dict[str, torch.Tensor]:
        config = preset(*TINY, *model, "deterministic=true", device=device.type, name="train")
        train_as_configured(config, tmp_path / name, ROOT)
        return dict(voxelfield.load(tmp_path / name, device="cpu").field.named_parameters())

    first, second = weights("first"), weights("second")
    assert len(first) >= 1
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
