"""What a report reads from a run directory: commands, warnings of the log, and the time at which the run finished."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from records import METRICS

from voxelfield.components.tensorboard import TensorBoardLogger
from voxelfield.report.record import RunRecord, read_history
from voxelfield.settings import RunConfig


def read(directory: Path) -> RunRecord:
    return RunRecord.read(directory, METRICS, RunConfig(), {})


def test_the_command_that_trained_is_given_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my run"
    overrides = ["scene=folder", "scene.name='a b'", "++trainer.steps=5", "resume=auto", "hydra.run.dir=elsewhere"]
    (run / ".hydra").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(overrides), run / ".hydra" / "overrides.yaml")
    found = dict(read(run).commands)
    repeated = ["voxelfield", "train", "scene=folder", "scene.name='a b'", "trainer.steps=5"]
    assert shlex.split(found["Repeat the training"]) == repeated
    assert found["Repeat the evaluation"] == "voxelfield eval 'my run'"
    verbs = [command.split()[1] for command in found.values() if command.startswith("voxelfield")]
    assert verbs == ["view", "render", "export", "train", "eval", "report"]


def test_a_strangers_record_of_overrides_is_plain_text(tmp_path):
    record = tmp_path / ".hydra" / "overrides.yaml"
    record.parent.mkdir()
    record.write_text("- scene.name=${oc.env:HOME}\n- 5\n- !!python/name:os.system x\n")
    command = dict(read(tmp_path).commands)["Repeat the training"]
    assert shlex.split(command) == ["voxelfield", "train", "scene.name=${oc.env:HOME}", "5", "x"]
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(60))
    for content in (bomb, "[" * 10_000, "- [a]", "a: b", "- *a", "\0"):
        record.write_text(content)
        with pytest.raises(ValueError, match=r"overrides\.yaml must be a .*, got ") as raised:
            read(tmp_path)
        assert "\n" not in str(raised.value)


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes")
def test_records_that_are_no_files_are_refused_without_waiting(tmp_path):
    for name in ("train.log", "events.out.tfevents.1"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name} must be a file, got a named pipe"):
            read(tmp_path)
        (tmp_path / name).unlink()


def test_the_video_and_the_names_of_previewed_views_are_read(tmp_path):
    assert (read(tmp_path).video, read(tmp_path).previewed) == (b"", ())
    logger = TensorBoardLogger(tmp_path)
    for name in ("r_0", "far/r_1"):
        logger.images(3, f"test/{name}", torch.rand(4, 6, 3))
    logger.scalars(3, {"test/psnr": 20.0})
    logger.close()
    (tmp_path / "orbit.mp4").write_bytes(b"mp4")
    found = read(tmp_path)
    assert (found.video, found.previewed) == (b"mp4", ("r_0", "far/r_1"))
    assert found.curve("test/psnr") == ((3, 20.0),), "under the name that other loggers get"


def test_without_hydras_record_the_other_commands_are_given(tmp_path):
    found = read(tmp_path).commands
    assert "Repeat the training" not in dict(found)
    assert found[0][1] == f"voxelfield view {shlex.quote(str(tmp_path))}"


def test_warnings_of_the_log_are_given_once(tmp_path):
    (tmp_path / "train.log").write_text(
        "[2026-01-31 12:00:00,000][train][INFO] - scene=bricks\n"
        "[2026-01-31 12:00:01,000][voxelfield.datasets.photos][WARNING] - 2 images are missing\n"
        "[2026-01-31 12:00:01,000][voxelfield.datasets.photos][WARNING] - 2 images are missing\n"
        "Traceback of something\n"
        "[2026-01-31 12:00:02,000][voxelfield.runs.results][ERROR] - orbit.mp4: No space left on device\n"
    )
    assert read(tmp_path).logged == ("2 images are missing", "orbit.mp4: No space left on device")


def test_a_run_has_finished_when_its_metrics_were_written(tmp_path):
    assert read(tmp_path).finished == ""
    (tmp_path / "metrics.json").write_text("{}")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d at \d\d:\d\d \(UTC[+-]\d{4}\)", read(tmp_path).finished)


def test_the_history_is_what_was_recorded(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    for step in range(1, 2001):
        logger.scalars(step, {"loss/rgb": 1 / step})
    logger.images(3, "test/panel", torch.rand(4, 6, 3))
    logger.close()
    history = read_history(tmp_path)
    assert list(history) == ["loss/rgb"]
    assert len(history["loss/rgb"]) == 2000
    assert history["loss/rgb"][-1] == (2000, torch.tensor(1 / 2000).item())


@pytest.mark.usefixtures("event_files_in_order")
def test_what_an_interrupted_run_logged_too_much_is_left_out(tmp_path):
    first = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3, 4):
        first.scalars(step, {"loss/rgb": float(step)})
    first.close()
    second = TensorBoardLogger(tmp_path, 2)
    second.scalars(3, {"loss/rgb": 30.0})
    second.close()
    assert read_history(tmp_path)["loss/rgb"] == ((1, 1.0), (2, 2.0), (3, 30.0))


def test_a_run_without_records_has_no_history(tmp_path):
    assert read_history(tmp_path) == {}
