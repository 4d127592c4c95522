"""Runs that are stopped, requeued, or find their disk full: real processes and signals."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from short_runs import finish, start, wait_for_checkpoint

from voxelfield.trained.checkpoint_file import checkpoint_path, load_checkpoint

# Runs train.py after a change of what it calls; the signal stands for one that arrives just then.
PATCHED = """
import os, signal, sys, time
from voxelfield.cli.train import main
from voxelfield.runs import train as run_training
from voxelfield.trained.trained_model import TrainedModel

def stall(*_, **__):
    os.kill(os.getpid(), signal.{signal})
    time.sleep(60)

{owner}.{name} = stall
sys.exit(main(sys.argv[1:]))
"""

# What is patched, and the message with which that ends.
LOADING = ("run_training", "load_configured_scene", "stopped before training began")
EVALUATING = (
    "TrainedModel",
    "evaluate",
    "stopped while evaluating; continue with: voxelfield train resume={checkpoint}",
)

# Runs train.py where no file may be larger.
LIMITED = """
import resource, sys
from voxelfield.cli.train import main

resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.exit(main(sys.argv[1:]))
"""


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.sweep
def test_one_command_is_requeued_until_its_run_is_finished(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    directory = tmp_path / "run"
    unchanged = ("resume=auto", f"hydra.run.dir={directory}")
    first = start(*unchanged, "trainer.steps=1000000")
    wait_for_checkpoint(first, directory, within=60)

    # Meanwhile no other process may use the directory, or resume from it.
    settings = (directory / ".hydra" / "config.yaml").read_text()
    same, another = start(*unchanged), start(f"resume={directory}", f"hydra.run.dir={tmp_path / 'other'}")
    code, _, complaints = finish(same)
    assert code == 2
    assert complaints.startswith("hydra.run.dir must be a folder that no other run is using")
    assert complaints.count("\n") == 1
    assert (directory / ".hydra" / "config.yaml").read_text() == settings, "refused before Hydra wrote"
    code, _, complaints = finish(another)
    assert code == 2
    assert f"resume must name a run that has ended, but process {first.pid}" in complaints

    # Batch systems repeat themselves.
    for _ in range(12):
        first.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    code, output, _ = finish(first)
    assert code == 130
    stopped = re.search(r"stopped after step (\d+); continue with: voxelfield train resume=(\S+)\n", output)
    assert stopped, output
    step = int(stopped[1])
    assert Path(stopped[2]) == checkpoint_path(directory, step)
    assert {path.name for path in directory.glob("*.pt")} == {checkpoint_path(directory, step).name}
    assert ".lock" not in names(directory)

    # The newest file may have suffered; the one before it is taken, with a warning. Its number is beyond the last step,
    # so that no checkpoint of the continued run takes its name.
    damaged = checkpoint_path(directory, step + 13)
    damaged.write_bytes(bytes(1000))
    steps = f"trainer.steps={step + 12}"
    code, output, _ = finish(start(*unchanged, steps))
    assert code == 0
    assert output.count(" warning: ") == 1
    assert f"{damaged} is truncated or damaged (1000 bytes)" in output
    assert f"resumed at step {step} from {checkpoint_path(directory, step)}" in output
    left = {path.name for path in directory.glob("*.pt")}
    assert left == {checkpoint_path(directory, step + 12).name, damaged.name}

    code, output, _ = finish(start(*unchanged, steps))
    assert code == 0
    assert f"the run in {directory} is finished: PSNR" in output
    assert "train views" not in output, "the scene was loaded"

    events = accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    recorded = [event.step for event in events.Scalars("PSNR/training_pixels")]
    assert recorded == [*range(5, step + 13, 5), *([step + 12] if (step + 12) % 5 else [])]


@pytest.mark.parametrize(
    ("number", "owner", "name", "message"),
    [
        pytest.param("SIGHUP", *LOADING, marks=pytest.mark.slow),
        ("SIGINT", *LOADING),
        ("SIGTERM", *EVALUATING),
    ],
)
def test_a_signal_ends_loading_and_evaluating_at_once_with_a_message(tmp_path, number, owner, name, message):
    program = PATCHED.format(signal=number, owner=owner, name=name)
    began = time.monotonic()
    code, output, _ = finish(start(f"hydra.run.dir={tmp_path}", program=("-c", program)))
    assert code == 130
    assert time.monotonic() - began < 50, "the signal did not end it"
    checkpoint = checkpoint_path(tmp_path, 20)
    assert output.splitlines()[-1].endswith(message.format(checkpoint=checkpoint))
    assert (owner != "TrainedModel") or load_checkpoint(checkpoint)["step"] == 20


def test_a_rerun_in_an_occupied_directory_warns(tmp_path):
    checkpoint_path(tmp_path, 7).write_bytes(b"of an earlier run")
    code, output, _ = finish(start(f"hydra.run.dir={tmp_path}", "trainer.steps=2"))
    assert code == 0
    assert f"{tmp_path} holds an earlier run (checkpoint_0000007.pt)" in output
    assert checkpoint_path(tmp_path, 7).read_bytes() == b"of an earlier run"


def test_a_disk_that_is_full_for_large_files_loses_these_and_nothing_else(tmp_path):
    program = LIMITED.format(limit=30_000)
    code, output, complaints = finish(start(f"hydra.run.dir={tmp_path}", program=("-c", program)))
    assert code == 1
    assert "checkpoint_0000010.pt could not be written: File too large; training continues" in output
    lost = "checkpoint_0000020.pt could not be written: File too large; there is no checkpoint to continue from"
    assert complaints.splitlines()[-1].endswith(lost)
    assert json.loads((tmp_path / "metrics.json").read_text())["steps"] == 20
    assert [name for name in names(tmp_path) if "tmp" in name.split(".") or name.endswith(".pt")] == []


def test_a_run_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    code, _, complaints = finish(start(f"hydra.run.dir={tmp_path / 'file' / 'run'}"))
    assert code == 2
    assert complaints.count("\n") == 1
    assert str(tmp_path / "file") in complaints


def test_training_that_has_diverged_is_a_failure(tmp_path):
    options = ("trainer.rates.grid=1e6", f"hydra.run.dir={tmp_path}", "resume=auto")
    for _ in range(2):  # the second time it is finished already
        code, _, complaints = finish(start(*options))
        assert code == 1
        assert re.search(r"training diverged \(\d+\.\d\d dB\): lower trainer\.rates\.grid and ", complaints)
    assert json.loads((tmp_path / "metrics.json").read_text())["diverged"] is True
