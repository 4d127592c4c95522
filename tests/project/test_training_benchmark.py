"""benchmarks/training.py, which trains at several sizes: its settings and measurements; a failure does not stop it."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import re
from pathlib import Path

import pytest

from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.settings import preset

ROOT = Path(__file__).resolve().parents[2]
SCENES = ROOT / "tests" / "fixtures"

TINY = (
    "trainer=smoke",
    "trainer.steps=6",
    "trainer.image_size=25",
    "trainer.visible_samples=2048",
    "trainer.candidate_samples=16384",
    "trainer.max_rays=1000",
    "trainer.stages=[{step: 0, resolution: 8, crop: true}, {step: 4, resolution: 12}]",
    "trainer.occupancy.resolution=12",
    "trainer.occupancy.start=2",
    "trainer.occupancy.every=2",
    "model=pyramid",
    "model.resolutions=[4,8,12]",
    "model.width=16",
    # On CUDA its networks run in 16 bits whatever the precision: their gradients must not underflow.
    "trainer.loss_scale=4096",
)


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("training")


@pytest.fixture
def sweep(training, tmp_path, monkeypatch):
    """Runs the benchmark on the CPU; returns the rows that it wrote."""
    # The copy bandwidth takes longer than these trainings, and is the other benchmarks' matter.
    monkeypatch.setattr(training.harness, "copy_bandwidth", lambda device: 1e9)
    # Every training has a process of its own; forked from one that has imported torch, it starts in a moment.
    multiprocessing.set_forkserver_preload(["voxelfield.training.session"])
    monkeypatch.setattr(training, "get_context", lambda _: multiprocessing.get_context("forkserver"))

    def run(*arguments: str) -> list[dict]:
        result = tmp_path / "figures" / "training.json"
        training.main([*TINY, "--data-root", str(SCENES), "--device", "cpu", "--json", str(result), *arguments])
        return json.loads(result.read_text())["rows"]

    return run


# ------------------------------------------------------------------------------------------------- what varies


@pytest.mark.parametrize(
    ("finest", "levels", "stages"),
    [
        (64, [16, 32, 64], [(0, 64)]),
        (128, [16, 32, 64, 128], [(0, 64), (150, 128)]),
        (192, [16, 32, 64, 128, 192], [(0, 64), (150, 128), (400, 192)]),
        (256, [16, 32, 64, 128, 256], [(0, 64), (150, 128), (400, 256)]),
        (1024, [16, 32, 64, 128, 256, 1024], [(0, 64), (150, 128), (400, 256), (900, 1024)]),
    ],
)
def test_levels_and_stages_follow_the_finest(training, finest, levels, stages):
    settings = training.resized(preset(name="train"), training.Size(finest, 2**19))
    assert settings.model.resolutions == levels
    assert settings.trainer.finest_resolution == finest
    assert [(stage.step, stage.resolution) for stage in settings.trainer.stages] == stages
    assert [stage.crop for stage in settings.trainer.stages] == [True, *[False] * (len(stages) - 1)]


# ------------------------------------------------------------------------------------------------- what is measured


@pytest.mark.slow
def test_a_sweep_trains_judges_and_writes(sweep, training, capsys):
    rows = sweep("--finest-resolution", "8", "--samples", "1024")
    found = [(row["finest_resolution"], row["samples"], row["sweeps"]) for row in rows]
    assert found == [(8, 2048, ["finest_resolution"]), (12, 1024, ["samples"])]
    names = load_blender(SCENES / "lego", LoadOptions(splits=("train",), downscale=4)).train.names
    for row in rows:
        assert row["scene"] == "lego"
        assert row["overrides"] == list(TINY)
        assert (row["steps"], row["hold_out"]) == (6, 10)
        assert row["views"] == [names[0], names[10], names[20]]
        assert row["ms_per_step"] == pytest.approx(1e3 * row["train_seconds"] / 6)
        assert 5 < row["psnr"] < 40
        assert 0 < row["ssim"] < 1
        assert row["rays"] > 1
        assert row["peak_gib"] is None
        assert row["drawn_by"] == "render_pyramid_image"
    assert rows[0]["parameters"] < rows[1]["parameters"]
    assert max(rows[0]["resolution"]) < max(rows[1]["resolution"])
    output = capsys.readouterr().out
    assert training.as_table(rows) in output
    assert re.search(r"^finest resolution 8, samples 2048: [0-9.]+ s, [0-9.]+ dB$", output, re.MULTILINE)


@pytest.mark.slow
def test_a_training_that_fails_is_a_row_and_the_sweep_goes_on(sweep, capsys):
    rows = sweep("model.density.initial=1e-9", "--finest-resolution", "8", "12", "--samples")
    assert [row["finest_resolution"] for row in rows] == [12, 8]
    for row in rows:
        assert "the field has become empty everywhere" in row["error"]
        assert "psnr" not in row
    output = capsys.readouterr().out
    assert output.splitlines()[-2:] == [
        f"finest resolution {row['finest_resolution']}, samples 2048: {row['error']}" for row in rows[::-1]
    ]
