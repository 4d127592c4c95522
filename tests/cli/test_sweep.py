"""The GPUs of a sweep's jobs: each job has one of its own."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from voxelfield.cli import launching
from voxelfield.cli.launching import reserve_device


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    monkeypatch.setattr(launching, "_FREE_GPU_SECONDS", 0.01)


def test_each_job_has_a_gpu_of_its_own_and_waits_for_one(two_gpus, tmp_path):
    with reserve_device("cuda", tmp_path) as first:
        assert first == "cuda:0"
        waiting, found = threading.Event(), []

        def third() -> None:
            waiting.set()
            with reserve_device("auto", tmp_path) as device:
                found.append(device)

        with reserve_device("auto", tmp_path) as device:
            assert device == "cuda:1"
            job = threading.Thread(target=third)
            job.start()
            waiting.wait()
            job.join(0.1)
            assert not found
        job.join(10)
    assert found == ["cuda:1"]
    with reserve_device("auto", tmp_path / "another sweep") as device:
        assert device == "cuda:0"


@pytest.mark.parametrize("requested", ["cpu", "cuda:1"])
def test_a_device_that_is_named_is_kept(two_gpus, tmp_path, requested):
    with reserve_device(requested, tmp_path) as device, reserve_device(requested, tmp_path) as another:
        assert device == another == requested
    assert not list(tmp_path.iterdir())
