"""Hostile words on the command line: one line each, and the exit status of a user's mistake."""

from __future__ import annotations

import json
import shutil

import pytest
from short_runs import ROOT, run

pytestmark = pytest.mark.sweep

LONG, DIGITS = 10_000 * "x", 400 * "9"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"scene=/tmp/{LONG}", "scene must be a folder, or one of bricks, folder, lego, got '/tmp/xxx"),
        (f"scene.name={LONG}", "File name too long"),
        (f"data.root=/tmp/{LONG}", "File name too long"),
        (f"resume=/tmp/{LONG}", "File name too long"),
        (f"trainer.steps={DIGITS}", "trainer.steps must be an integer of at most 64 bits, got 999"),
        (f"optimizer.grid_lr={DIGITS}", "optimizer.grid_lr must be"),
        (f"seed={DIGITS}", "seed must be an integer of at most 64 bits"),
        (f"trainer.stages=[{{step: 0, resolution: {DIGITS}}}]", "resolution must be an integer of at most 64 bits"),
        (f"trainer.stages=[{{step: 0, resolution: {10**18}}}]", "resolution must be at most 2^31 - 1"),
        ("scene.name=null", "scene.name must be text, got null"),
        ("data.root=null", "data.root must be text, got null"),
        ("hydra.run.dir=/proc/run", "hydra.run.dir must be a folder that can be written to, got /proc/run"),
        (f"hydra.run.dir=/tmp/{LONG}", "hydra.run.dir must be a folder that can be written to, got /tmp/xxx"),
    ],
    ids=lambda text: text[:20],
)
def test_a_hostile_word_is_one_line(tmp_path, override, message):
    steps = () if override.startswith("trainer.steps") else ("trainer.steps=2",)
    status, text = run(f"hydra.run.dir={tmp_path / 'run'}", *steps, "logger=none", override)
    assert status in (1, 2), text
    last = text.splitlines()[-1]
    assert message in last
    assert len(last) < 1200


def test_poses_with_opencv_axes_end_before_training(tmp_path):
    scene = tmp_path / "lego"
    shutil.copytree(ROOT / "tests" / "fixtures" / "lego", scene)
    file = scene / "transforms_train.json"
    content = json.loads(file.read_text())
    for frame in content["frames"]:
        for row in frame["transform_matrix"][:3]:
            row[1], row[2] = -row[1], -row[2]
    file.write_text(json.dumps(content))
    status, text = run(f"hydra.run.dir={tmp_path / 'run'}", f"data.root={tmp_path}")
    assert status == 2
    assert "the poses seem to have OpenCV's axes (y down, looking along z)" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("lego", "hydra.run.dir must not be the folder of the scene, got"),
        ("lego/test", "which contains r_0.png of something else: choose another folder"),
        ("another", "which contains report.html of something else: choose another folder"),
    ],
)
def test_a_run_directory_of_something_else_is_refused_and_left_alone(tmp_path, place, message):
    shutil.copytree(ROOT / "tests" / "fixtures" / "lego", tmp_path / "lego")
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "report.html").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status, text = run(f"scene={tmp_path / 'lego'}", f"hydra.run.dir={tmp_path / place}")
    assert status == 2
    assert message in text.splitlines()[-1]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
