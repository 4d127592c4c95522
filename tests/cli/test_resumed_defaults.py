"""Every default of ``train.py`` is stopped by Ctrl-C, and goes on with what the message tells: real processes."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from place_capture import write_capture
from process_groups import TRAIN, Group
from short_runs import ROOT, finish, wait_for_checkpoint
from sky_scene import write_photographs
from warm_python import WarmPython, warm_python

from voxelfield.config import parse
from voxelfield.settings import RunConfig
from voxelfield.trained.checkpoint_file import checkpoint_path, load_checkpoint

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")

FEW_RESULTS = (
    "trainer.checkpoint_every=4",
    "trainer.preview_every=0",
    "trainer.evaluation.views=1",
    "trainer.evaluation.video_frames=0",
    "trainer.evaluation.report=false",
)
# Sizes with which a step takes a fraction of a second on a CPU; what a run chooses for itself is left to it.
SMALL = (
    "trainer.image_size=24",
    "trainer.visible_samples=4096",
    "trainer.candidate_samples=65536",
    "trainer.max_rays=1024",
    "trainer.stages=[{step: 0, resolution: 12}, {step: 6, resolution: 16}]",
    "trainer.occupancy.resolution=12",
)
# The default where there is a GPU, likewise.
SMALL_PYRAMID = (
    *("model=pyramid", "trainer=auto", "trainer.finest_resolution=16", "trainer.sparse_resolutions=[]"),
    *("model.resolutions=[8,16]", "model.width=32", "trainer.precision=float32"),
)
LEGO = ("scene=lego", f"data.root={ROOT / 'tests' / 'fixtures'}")
on_gpu = WarmPython(gpu=True)


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captures")
    write_capture(folder / "room")
    write_photographs(folder / "sky", image_size=24, views=33)
    return {"room": folder / "room", "sky": folder / "sky"}


def stopped_at(output: str) -> tuple[int, str]:
    """Returns the step at which a run has stopped, and what its message says to continue with."""
    found = re.search(r"stopped after step (\d+); continue with: voxelfield train (resume=\S+)\n", output)
    assert found, output
    return int(found[1]), found[2]


def check_goes_on(directory: Path, stopped: Path, resumed: str, step: int, end: int) -> None:
    """Checks that a run has gone on from where the first one stopped, to its end."""
    assert f"resumed at step {step} from {stopped}" in resumed
    assert json.loads((directory / "metrics.json").read_text())["steps"] == end


def check_ctrl_c(folder: Path, python: WarmPython, *overrides: str, steps: int | None = None) -> RunConfig:
    """Stops a run, continues it in another directory and in its own; returns the settings in its checkpoint.

    Without a number of steps, it is stopped long before its end, and continued for two steps.
    """
    command, first = ("train.py", *FEW_RESULTS, *overrides), folder / "first"
    running = python.start(*command, f"trainer.steps={steps or 1000000}", f"hydra.run.dir={first}", merged=True)
    wait_for_checkpoint(running, first)
    running.send_signal(signal.SIGINT)
    code, output, _ = finish(running)
    assert code == 130, output
    step, advice = stopped_at(output)
    stopped = checkpoint_path(first, step)
    assert advice == f"resume={stopped}"
    saved, end = parse(RunConfig, load_checkpoint(first)["config"]), steps or step + 2
    for directory, resume in ((folder / "second", advice), (first, "resume=auto")):
        again = python.run(*command, f"trainer.steps={end}", resume, f"hydra.run.dir={directory}", merged=True)
        assert again.returncode == 0, again.stdout
        check_goes_on(directory, stopped, again.stdout, step, end)
    return saved


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        pytest.param(("scene=bricks", *SMALL_PYRAMID), "none", id="bricks as on a GPU"),
        pytest.param(("scene=bricks",), "none", marks=pytest.mark.slow, id="bricks"),
        pytest.param((*LEGO,), "none", marks=pytest.mark.slow, id="lego"),
        pytest.param((*LEGO, *SMALL_PYRAMID), "none", marks=pytest.mark.slow, id="lego as on a GPU"),
        pytest.param(("scene={room}",), "none", marks=pytest.mark.slow, id="photographs"),
        pytest.param(("scene={room}", *SMALL_PYRAMID), "none", marks=pytest.mark.slow, id="photographs as on a GPU"),
        pytest.param(("scene={sky}", *SMALL_PYRAMID), "map", marks=pytest.mark.slow, id="photographs with a sky"),
        pytest.param(("scene=bricks", "camera=refine", *SMALL_PYRAMID), "none", marks=pytest.mark.slow, id="refine"),
        pytest.param(("scene={room}", "camera=adjust", *SMALL_PYRAMID), "none", marks=pytest.mark.slow, id="adjust"),
    ],
)
def test_a_run_goes_on_after_ctrl_c(tmp_path, captures, overrides, chosen):
    filled = (text.format_map(captures) for text in overrides)
    assert check_ctrl_c(tmp_path, warm_python, *SMALL, *filled, "device=cpu").model.environment == chosen


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("overrides", "chosen", "steps"),
    [
        pytest.param(("scene=bricks",), "none", None, id="bricks"),
        pytest.param((*LEGO,), "none", None, id="lego"),
        pytest.param(("scene={room}",), "none", None, id="photographs"),
        pytest.param(("scene={sky}",), "map", None, id="photographs with a sky"),
        # Its stages are shares of the steps.
        pytest.param(("scene=bricks", "camera=refine"), "none", 40, id="refine"),
        pytest.param(("scene={room}", "camera=adjust", "camera.test_steps=0"), "none", None, id="adjust"),
    ],
)
def test_a_run_on_a_gpu_goes_on_after_ctrl_c(tmp_path, captures, overrides, chosen, steps):
    filled = (text.format_map(captures) for text in overrides)
    assert check_ctrl_c(tmp_path, on_gpu, *filled, "devices=1", steps=steps).model.environment == chosen


def check_processes(directory: Path, *overrides: str, **environment: str) -> None:
    """Stops a run of two processes, and continues it."""
    command = (*TRAIN, "scene=bricks", *FEW_RESULTS, "devices=2", *overrides)
    with Group(directory, "trainer.steps=1000000", command=command, **environment) as running:
        running.wait_for_checkpoint(directory)
        running.launcher.send_signal(signal.SIGINT)
        code, output, err = running.finish()
    assert (code, err) == (130, ""), output
    step, advice = stopped_at(output)
    with Group(directory, f"trainer.steps={step + 2}", advice, command=command, **environment) as running:
        code, output, err = running.finish()
    assert (code, err) == (0, ""), output
    check_goes_on(directory, checkpoint_path(directory, step), output, step, step + 2)


@pytest.mark.slow
def test_two_processes_go_on_after_ctrl_c(tmp_path):
    check_processes(tmp_path, *SMALL, *SMALL_PYRAMID)


@pytest.mark.cuda
def test_two_gpus_go_on_after_ctrl_c(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    check_processes(tmp_path, "device=cuda", CUDA_VISIBLE_DEVICES="0,1")
