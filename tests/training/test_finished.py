"""When ``resume=auto`` may call a run finished: all of its results are there, and it is the run that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quick_presets import preset

from voxelfield.runs.results import finished_metrics
from voxelfield.settings import RunConfig
from voxelfield.training.checkpoints import changed_settings, recorded_settings

RESULTS = ("per_view.csv", "model.safetensors", "orbit.mp4", "report.html", "test/r_0.png", "test/far/r_1.png")


def settings(*overrides: str) -> RunConfig:
    return preset("trainer=smoke", "trainer.steps=30", "trainer.evaluation.video_frames=2", *overrides, device="cpu")


def write_run(directory: Path, **metrics: Any) -> None:
    for name in RESULTS:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    views = {"r_0": 1.0, "far/r_1": 2.0}
    rows = [{"name": name, "psnr": psnr} for name, psnr in views.items()]
    content = {"scene": "bricks", "per_view": rows, "psnr": 1.5, "train_seconds": 2.5, "steps": 30, "split": "test"}
    content["settings"] = recorded_settings(settings())
    (directory / "metrics.json").write_text(json.dumps(content | {"psnr_per_view": views} | metrics))


def test_a_run_is_finished_when_all_that_was_asked_for_is_there(tmp_path):
    assert finished_metrics(tmp_path / "nowhere", settings()) is None
    write_run(tmp_path)
    assert finished_metrics(tmp_path, settings())["psnr"] == 1.5
    for name in RESULTS:
        (tmp_path / name).unlink()
        assert finished_metrics(tmp_path, settings()) is None, name
        (tmp_path / name).touch()
    (tmp_path / "report.html").unlink()
    without = settings("trainer.evaluation.report=false")
    assert finished_metrics(tmp_path, without) is None, "it was to write a report"
    write_run(tmp_path, settings=recorded_settings(without))
    (tmp_path / "report.html").unlink()
    assert finished_metrics(tmp_path, without)["psnr"] == 1.5


@pytest.mark.parametrize(
    "overrides",
    [("trainer.steps=20",), ("device=auto", "logger=none", "trainer.log_every=7"), ("trainer.checkpoint_every=3",)],
)
def test_settings_without_effect_on_the_results_may_differ(tmp_path, overrides):
    write_run(tmp_path)
    assert finished_metrics(tmp_path, settings(*overrides)) is not None


@pytest.mark.parametrize(
    "override",
    ["trainer.steps=31", "trainer.evaluation.views=1", "trainer.evaluation.lpips=true", "trainer.model_file=none"],
)
def test_a_run_that_is_to_do_more_is_not_finished(tmp_path, override):
    write_run(tmp_path)
    assert finished_metrics(tmp_path, settings(override)) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("scene=lego",), r"scene\.name must be that of the finished run in \S+, 'bricks', .* got 'lego'"),
        (("data.root=/elsewhere",), r"data\.root must be that of the finished run in \S+, 'data', .* got '/elsewhere'"),
        (("model=sh",), r"model\.kind must be .*, 'dense', for resume=auto, got 'sh': choose another hydra\.run\.dir"),
        (("seed=4",), r"seed must be that of the finished run in \S+, 0, for resume=auto, got 4"),
        (("trainer.finest_resolution=40",), r"trainer\.finest_resolution must be that of the finished run"),
        (("trainer.rates.grid=0.5",), r"trainer\.rates\.grid must be that of the finished run"),
    ],
)
def test_another_run_is_refused_by_name(tmp_path, overrides, message):
    write_run(tmp_path)
    with pytest.raises(ValueError, match=f"^{message}"):
        finished_metrics(tmp_path, settings(*overrides))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "3", '"text"', "{}", '{"steps": 30}', '{"psnr": 1.5}', 100_000 * "[", "\0\0\0\0"]
)
def test_metrics_that_no_run_has_written_finish_none(tmp_path, content):
    write_run(tmp_path)
    (tmp_path / "metrics.json").write_text(content)
    assert finished_metrics(tmp_path, settings()) is None


@pytest.mark.parametrize(
    "wrong",
    [{"psnr": None}, {"psnr": "high"}, {"steps": "30"}, {"settings": []}, {"psnr_per_view": [1]}, {"per_view": {}}],
)
def test_metrics_with_wrong_values_finish_none(tmp_path, wrong):
    write_run(tmp_path, **wrong)
    assert finished_metrics(tmp_path, settings()) is None


def test_changes_are_listed_by_key_with_both_values():
    saved = recorded_settings(settings())
    assert changed_settings(saved, settings()) == {}
    assert changed_settings(saved, settings("optimizer.grid_lr=0.5", "trainer.evaluation.views=1")) == {
        "optimizer.grid_lr": (saved["optimizer"]["grid_lr"], 0.5)
    }
    del saved["optimizer"]["eps"]
    assert changed_settings(saved, settings()) == {"optimizer.eps": (None, settings().optimizer.eps)}
