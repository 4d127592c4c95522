"""Runs that are killed without warning, again and again, and are resumed with one unchanged command."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from process_groups import Group
from short_runs import finish, start, wait_for_checkpoint
from warm_python import Running, WarmPython, warm_python

from voxelfield.trained.checkpoint_file import load_checkpoint

pytestmark = pytest.mark.sweep

# A checkpoint every few steps, so that hardly a kill takes a run back to its beginning.
STEPS, EVERY, LOGGED, SHOWN = 120, 6, 4, 30
COMMAND = (
    "resume=auto",
    f"trainer.steps={STEPS}",
    f"trainer.checkpoint_every={EVERY}",
    f"trainer.log_every={LOGGED}",
    f"trainer.preview_every={SHOWN}",
    "trainer.evaluation.video_frames=2",
)
TRAINED = ("model", "optimizer", "average", "rng")
KILLS_OF_A_RUN = 8


def directory_of(directory: Path) -> str:
    return f"hydra.run.dir={directory}"


def kill_at_a_write(directory: Path, running: Running, within: float) -> None:
    """Kills a process as soon as a file is being written in its run directory, or after a time."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if any(".tmp" in name for name in os.listdir(directory)):  # noqa: PTH208 - the quickest way
                break
        time.sleep(0.0002)
    running.send_signal(signal.SIGKILL)


def kill_sometime(running: Running, within: float) -> None:
    time.sleep(within)
    running.send_signal(signal.SIGKILL)


def tensors(state: object, name: str = "") -> dict[str, torch.Tensor]:
    """Returns all tensors within a state, by where they are."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return {key: tensor for at, item in items for key, tensor in tensors(item, f"{name}/{at}").items()}


def trained(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint(directory)
    assert checkpoint["step"] == STEPS
    found = tensors({part: checkpoint[part] for part in TRAINED if part in checkpoint})
    assert any(name.startswith("/model/field.") for name in found)
    # Rates are set anew for every step; a run that was killed after the last one has those that it began with.
    return {name: tensor for name, tensor in found.items() if not name.endswith("/lr")}


def check_finished(directory: Path, reference: Path) -> None:
    """Compares a run with one that was never killed: weights, files, records."""
    expected, found = trained(reference), trained(directory)
    assert found.keys() == expected.keys()
    assert len(found) > 20
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    for name in ("model.safetensors", "test/" + next((reference / "test").iterdir()).name):
        assert (directory / name).read_bytes() == (reference / name).read_bytes(), name

    def files(folder: Path) -> set[str]:
        paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return {path for path in paths if not path.startswith("events.out.tfevents.")}

    assert files(directory) == files(reference), "litter, or something is lost"
    assert records(directory) == records(reference)


def records(directory: Path) -> dict[str, list[int]]:
    """Returns the steps at which each tag was recorded, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0}).Reload()
    tags = events.Tags()
    found = {tag: [event.step for event in events.Scalars(tag)] for tag in tags["scalars"]}
    return found | {tag: [event.step for event in events.Images(tag)] for tag in tags["images"]}


def survive(
    folder: Path, kills: int, seed: int, overrides: Sequence[str] = (), python: WarmPython = warm_python
) -> Counter[str]:
    """Kills runs a number of times in total; returns how often each outcome occurred."""
    command = (*COMMAND, *overrides)
    chance = random.Random(seed)
    reference = folder / "never_killed"
    began = time.monotonic()
    status, text, _ = finish(start(*command, directory_of(reference), merged=True, python=python))
    assert status == 0, text
    duration = time.monotonic() - began
    recorded = records(reference)
    assert recorded["PSNR/training_pixels"] == list(range(LOGGED, STEPS + 1, LOGGED))
    happened: Counter[str] = Counter()
    while happened["kills"] < kills:
        directory = folder / f"run_{happened['runs']}"
        left = KILLS_OF_A_RUN
        while True:
            running = start(*command, directory_of(directory), merged=True, python=python)
            if left > 0 and happened["kills"] < kills:
                left -= 1
                if chance.random() < 0.5:
                    kill_at_a_write(directory, running, chance.uniform(0.3, 1.0) * duration)
                else:
                    kill_sometime(running, chance.uniform(0.05, 1.0) * duration)
            status, text, _ = finish(running)
            if status == -signal.SIGKILL:
                happened["kills"] += 1
                happened["during a write"] += any(".tmp" in path.name for path in directory.rglob("*"))
                continue
            assert status == 0, text
            happened["went on"] += "resumed at step" in text
            break
        check_finished(directory, reference)
        happened["runs"] += 1
    return happened


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_if_it_never_was(tmp_path):
    assert survive(tmp_path, kills=2, seed=0)["kills"] == 2


AT_THE_REPORT = """
import os, signal, sys
from voxelfield.cli.train import main
from voxelfield.runs import results

results.write_report = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


def test_a_run_that_is_killed_before_its_report_gets_one(tmp_path):
    directory = tmp_path / "run"
    command = ("resume=auto", "trainer.evaluation.video_frames=2", "trainer.evaluation.report=true")
    running = start(*command, directory_of(directory), program=("-c", AT_THE_REPORT), merged=True)
    status, text, _ = finish(running)
    assert status == -signal.SIGKILL, text
    before = {path.name for path in directory.iterdir()}
    assert {"metrics.json", "model.safetensors", "orbit.mp4", "test", "checkpoint_0000020.pt"} <= before
    assert "report.html" not in before
    for expected in ("resumed at step 20", "is finished: PSNR"):
        status, text, _ = finish(start(*command, directory_of(directory), merged=True))
        assert status == 0, text
        assert expected in text
        assert (directory / "report.html").is_file()


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_run_whose_directory_goes_away_creates_it_again(tmp_path, how):
    directory = tmp_path / "run"
    command = ("trainer.steps=1000000", "trainer.checkpoint_every=10", directory_of(directory))
    running = start(*command, merged=True)
    wait_for_checkpoint(running, directory)
    if how == "moved":
        directory.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(directory)
    wait_for_checkpoint(running, directory)
    running.send_signal(signal.SIGTERM)
    status, text, _ = finish(running)
    assert status == 130, text
    assert f"{directory} was deleted, with everything that this run had written there, or moved away" in text
    (kept,) = directory.glob("checkpoint_*.pt")
    assert text.splitlines()[-1].endswith(f"continue with: voxelfield train resume={kept}")
    load_checkpoint(kept)


@pytest.mark.long
def test_runs_survive_a_hundred_kills(tmp_path, capsys):
    happened = survive(tmp_path, kills=100, seed=1)
    with capsys.disabled():
        print(f"\n{dict(happened)}")
    assert happened["kills"] == 100
    assert happened["during a write"] >= 10


@pytest.mark.cuda
@pytest.mark.long
def test_runs_on_a_gpu_survive_twenty_kills(tmp_path, capsys):
    on_gpu = ("device=cuda", "deterministic=true", "model=pyramid", "model.resolutions=[4,8,12]")
    happened = survive(tmp_path, 20, seed=2, overrides=on_gpu, python=WarmPython(gpu=True))
    with capsys.disabled():
        print(f"\n{dict(happened)}")
    assert happened["kills"] == 20
    assert happened["during a write"] >= 2


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_runs_of_two_processes_survive_twenty_kills_of_one(tmp_path):
    chance = random.Random(3)
    command = (*COMMAND, "devices=2", "trainer.evaluation.report=false")
    reference = tmp_path / "never_killed"
    began = time.monotonic()
    with Group(reference, *command) as group:
        status, _, err = group.finish()
    assert (status, err) == (0, ""), err
    duration = time.monotonic() - began
    kills = runs = 0
    while kills < 20:
        directory = tmp_path / f"run_{runs}"
        status = 1
        while status != 0:
            with Group(directory, *command) as group:
                if kills < 20:
                    group.wait_until(lambda group=group: len(group.workers()) == 2)
                    time.sleep(chance.uniform(0.05, 1.0) * duration)
                    ended = group.launcher.poll() is not None
                    with contextlib.suppress(ProcessLookupError, IndexError):
                        os.kill(group.workers()[chance.randrange(2)], signal.SIGKILL)
                    began = time.monotonic()
                status, _, err = group.finish()
                if status != 0:
                    assert not ended
                    assert time.monotonic() - began < 60
                    assert re.fullmatch(r"process [01] of 2 .* was ended by SIGKILL.*\n", err), err
                    kills += 1
        check_finished(directory, reference)
        runs += 1
