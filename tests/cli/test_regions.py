"""``voxelfield train regions=K``: the queue of regions, runs to their end, failures, interruption and resumption."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from place_capture import OVERRIDES, write_capture
from process_groups import TRAIN, Group

import voxelfield
from voxelfield.cli import launching, regions
from voxelfield.cli.command import main
from voxelfield.regions.division import divide
from voxelfield.training.config import RunConfig, preset
from voxelfield.training.interrupt import Interrupt

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captures") / "corner"
    write_capture(folder)
    return folder


@pytest.fixture
def start(capture):
    """Starts runs over the capture, of which nothing is left after the test."""
    with ExitStack() as started:
        command = (*TRAIN, f"scene={capture}", *OVERRIDES)
        yield lambda *given, **options: started.enter_context(Group(*given, **{"command": command, **options}))


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_queue_gives_each_device_one_region_at_a_time_and_goes_on_after_a_failure(tmp_path):
    code = "import pathlib, sys, time; path = pathlib.Path({path!r}); path.touch(exist_ok=False); time.sleep(0.2)"
    code += "; path.unlink(); sys.exit({number} in (1, 4))"
    given = []

    def command(number: int, device: str) -> list[str]:
        given.append((number, device))
        return python(code.format(path=str(tmp_path / device), number=number))

    assert regions.run_queue(5, command, ["a", "b"], tmp_path, Interrupt()) == [1, 4]
    assert [number for number, _ in given] == [0, 1, 2, 3, 4]
    assert {device for _, device in given} == {"a", "b"}
    assert [path.read_text() for path in sorted(tmp_path.glob("*.log"))] == [""] * 5


def test_a_signal_ends_the_region_in_training_and_begins_no_other():
    interrupt, given = Interrupt(), []

    def command(number: int, device: str) -> list[str]:
        given.append(number)
        interrupt.requested = True
        return python("import time; time.sleep(600)")

    began = time.monotonic()
    assert regions.run_queue(3, command, ["cpu"], None, interrupt) == [0]
    assert given == [0]
    assert time.monotonic() - began < 300, "the process was not told to end"


def test_a_region_has_this_programs_command_line_with_settings_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "voxelfield", "train", "regions=3", "x=1", "--cfg", "job"])
    line = regions.command_line(tmp_path / "it's", ((0.1, -2e-7, 3.0), (1.0, 2.0, 4.0)), "cuda:1")
    own = ["scene.region=[[0.1, -2e-07, 3.0], [1.0, 2.0, 4.0]]", "regions=1", "region_overlap=0.25", "device=cuda:1"]
    own += ["devices=1", f"hydra.run.dir='{tmp_path}/it\\'s'"]
    assert line == [sys.executable, "-m", "voxelfield", "train", "regions=3", "x=1", *own, "--cfg", "job"]


@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ({"regions": 3}, ["cuda:0", "cuda:1"]),
        ({"regions": 3, "devices": "1", "device": "cuda"}, ["cuda:0"]),
        ({"regions": 3, "device": "cuda:1"}, ["cuda:1"]),
        ({"regions": 3, "device": "cpu"}, ["cpu"]),
        ({"regions": 3, "device": "cpu", "devices": "8"}, ["cpu"] * 3),
    ],
)
def test_each_device_trains_a_region_at_a_time(monkeypatch, settings, devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert regions.devices_of(RunConfig(**settings)) == devices


def test_processes_of_one_training_have_no_regions(monkeypatch):
    monkeypatch.setattr(launching, "_started", lambda: 2)
    with pytest.raises(ValueError, match=r"^regions must be 1 for 2 processes of one training, got 3$"):
        launching.count_processes(RunConfig(regions=3), lambda: pytest.fail("a run with regions has one process"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("camera=refine", r"^camera.name must be none with regions=2, because .*, got refine$"),
        ("camera.test_steps=3", r"^camera.test_steps must be 0 with regions=2"),
        ("scene.region=[[0,0,0],[1,1,1]]", r"^scene.region must be null with regions=2, because .*, got \(\(0.0, "),
        ("scene=lego", r"^scene.aabb must be null with regions=2"),
        ("logger.viewer=true", r"^logger.viewer must be false with regions=2"),
        ("resume=runs/mine", r"^resume must be auto or null with regions=2, got runs/mine$"),
        ("region_overlap=1.5", r"^region_overlap must lie in \[0, 1\], got 1.5$"),
        ("regions=0", r"^regions must be at least 1, got 0$"),
    ],
)
def test_settings_that_do_not_go_with_regions(override, message):
    with pytest.raises(ValueError, match=message):
        preset("scene=folder", "regions=2", override, device="cpu")


def test_an_overlap_without_regions_is_refused():
    with pytest.raises(ValueError, match=r"^region_overlap must be left out without regions, got 0.5$"):
        preset("region_overlap=0.5", device="cpu")


def test_a_session_trains_one_field():
    settings = preset("scene=folder", "regions=2", device="cpu")
    with pytest.raises(ValueError, match=r"^regions must be 1 for a session, which trains one field, got 2$"):
        voxelfield.Session(voxelfield.load_scene("bricks", image_size=20), settings)


@pytest.mark.sweep
def test_regions_are_trained_evaluated_and_rendered_as_one_run(start, tmp_path):
    run = tmp_path / "run"
    code, out, err = start(run, "regions=2", "trainer.evaluation.report=true").finish()
    assert (code, err) == (0, "")
    assert re.findall(r"region (\d) of 2 begins on cpu", out) == ["0", "1"]
    folders = run, run / "regions" / "0", run / "regions" / "1"
    whole, *parts = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
    boxes = json.loads((run / "regions.json").read_text())["boxes"]
    assert [part["settings"]["scene"]["region"] for part in parts] == boxes
    assert whole["views"] == 3
    assert set(whole["psnr_per_view"]) == {name for part in parts for name in part["psnr_per_view"]}
    assert (whole["steps"], whole["train_views"]) == (40, sum(part["train_views"] for part in parts))
    assert (run / "report.html").is_file()
    assert len(list((run / "test").glob("*.png"))) == 3

    evaluated, frames = tmp_path / "metrics.json", tmp_path / "frames"
    assert main(["eval", str(run), "--device", "cpu", "--json", str(evaluated)]) == 0
    assert json.loads(evaluated.read_text())["psnr"] == pytest.approx(whole["psnr"], abs=1e-3)
    path = ["--path", "interpolate", "--frames", "3", "--out", str(frames)]
    assert main(["render", str(run), "--device", "cpu", *path]) == 0
    assert len(list(frames.glob("*.png"))) == 3
    assert main(["report", str(run), "--device", "cpu", "--out", str(tmp_path / "report.html")]) == 0
    assert main(["export", str(run), "--device", "cpu", "--mesh", str(tmp_path / "mesh.ply")]) == 2


@pytest.mark.sweep
def test_a_run_that_was_stopped_in_its_second_region_carries_on_there(start, tmp_path):
    running = start(tmp_path, "regions=2", "trainer.steps=200")
    first, second = (tmp_path / "regions" / number for number in "01")
    running.wait_for_checkpoint(second)
    running.launcher.send_signal(signal.SIGTERM)
    code, out, err = running.finish()
    assert (code, err) == (130, "")
    assert f"stopped; continue with resume=auto hydra.run.dir={tmp_path}" in out
    (step,) = re.findall(r"stopped after step (\d+)", out)
    assert not (tmp_path / "metrics.json").exists()
    written = (first / "metrics.json").stat().st_mtime_ns

    code, out, err = start(tmp_path, "regions=2", "trainer.steps=200", "resume=auto").finish()
    assert (code, err) == (0, "")
    assert f"resumed at step {step}" in out
    assert f"the run in {first} is finished" in out
    assert (first / "metrics.json").stat().st_mtime_ns == written
    assert (tmp_path / "metrics.json").is_file()

    code, _, err = start(tmp_path, "regions=3", "resume=auto").finish()
    assert code == 2
    assert "hydra.run.dir must be a new one, or that of the same regions with resume=auto, got" in err


FAILING = """
import os, sys
from voxelfield.cli.train import main
from voxelfield.training.session import Session

if "regions=1" in sys.argv and any(text.endswith("regions/0'") for text in sys.argv):
    def fail(self):
        raise OSError("the disk is on fire")
    Session._advance = fail
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.sweep
def test_a_region_that_fails_is_named_and_the_others_are_trained(start, capture, tmp_path):
    command = (sys.executable, "-c", FAILING, f"scene={capture}", *OVERRIDES)
    code, _, err = start(tmp_path, "regions=2", "devices=2", command=command).finish()
    assert code == 1
    assert f"1 of 2 regions failed: 0; the logs in {tmp_path / 'regions'} say why; continue with resume=auto" in err
    assert "the disk is on fire" in (tmp_path / "regions" / "0.log").read_text()
    assert (tmp_path / "regions" / "1" / "metrics.json").is_file()
    assert not (tmp_path / "metrics.json").exists()

    code, _, err = start(tmp_path, "regions=2", "resume=auto").finish()
    assert (code, err) == (0, ""), "the run does not carry on"


@pytest.mark.slow
def test_an_object_and_too_few_photographs_are_not_divided(start, capture, tmp_path):
    code, _, err = start(tmp_path / "few", "regions=7").finish()
    assert (code, "regions must be at most 6 for 12 photographs, got 7" in err) == (2, True)
    lego = Path(__file__).parents[1] / "fixtures" / "lego"
    code, _, err = start(tmp_path / "lego", "regions=2", command=(*TRAIN, f"scene={lego}", *OVERRIDES)).finish()
    assert (code, "regions must be 1 for lego, an object that ends at its box, got 2" in err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_regions_have_all_photographs_and_the_split_of_the_capture(capture):
    scene = voxelfield.load_scene(capture, holdout=4)
    division = divide(scene.poses(), 2, overlap=0.25)
    parts = [voxelfield.load_scene(capture, holdout=4, region=box) for box in division.boxes]
    assert {name for part in parts for name in part.test.names} == set(scene.test.names)
    assert {name for part in parts for name in part.train.names} == set(scene.train.names)
    for part in parts:
        assert len(part.poses()) == len(part.train) + len(part.test) < len(scene.poses())
