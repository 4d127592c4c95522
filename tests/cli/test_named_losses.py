"""Loss terms that the command line names: imported from the working directory, checked, recorded and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from short_runs import ROOT, TINY
from warm_python import warm_python

import voxelfield
from voxelfield import Session
from voxelfield.settings import preset

MINE = """
def faint(outputs, batch):
    return 0.01 * outputs.mean_over_rays(outputs.rendering.opacity)

def small(outputs, batch):
    return 1e-3 * outputs.field.grid.features.square().mean()

def failing(outputs, batch):
    return outputs.nothing

def vector(outputs, batch):
    return outputs.pixels

number = 3
"""
QUICK = (*TINY, "device=cpu", "logger=none", "trainer.model_file=none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("working")
    (folder / "terms_of_mine.py").write_text(MINE)
    return folder


def run(folder: Path, losses: str, *overrides: str):
    return warm_python.run(str(ROOT / "train.py"), *QUICK, f"losses={losses}", *overrides, cwd=folder)


def test_terms_train_and_are_recorded_and_resumed(folder):
    both, first = (["terms_of_mine:faint", "terms_of_mine:small"], folder / "first")
    done = run(folder, f"[{','.join(both)}]", f"hydra.run.dir={first}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((first / "metrics.json").read_text())["settings"]["losses"] == both
    # Loading a run imports none of its losses.
    assert voxelfield.load(first, "cpu").config.losses == both
    done = run(folder, both[1], f"hydra.run.dir={folder / 'second'}", f"resume={first}", "trainer.steps=22")
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"losses is ['terms_of_mine:small'] instead of {both}" in done.stdout
    assert json.loads((first / "metrics.json").read_text())["psnr"] > 5
    refused = run(folder, both[0], f"hydra.run.dir={first}", "resume=auto")
    assert "losses must be that of the finished run" in refused.stderr


@pytest.mark.parametrize(
    ("losses", "message", "status"),
    [
        ("terms_of_mine:number", "losses must name functions of outputs and batch, got terms_of_mine:number: ", 2),
        ("terms_of_mine:none", "functions of outputs and batch, got terms_of_mine:none: AttributeError: ", 2),
        ("no_module:x", "got no_module:x: ModuleNotFoundError: No module named 'no_module'", 2),
        ("terms_of_mine", "losses[0] must be module:function, got 'terms_of_mine'", 2),
        ("[terms_of_mine:faint,terms_of_mine:faint]", "losses must name functions of different names, got", 2),
        ("terms_of_mine:vector", "losses['vector'] must return a scalar tensor, of shape (), on cpu, got one", 2),
        ("terms_of_mine:failing", "training was ended by losses=terms_of_mine:failing, which raised Attribute", 1),
    ],
)
def test_terms_that_cannot_be_used_are_named_in_one_line(folder, tmp_path, losses, message, status):
    done = run(folder, losses, f"hydra.run.dir={tmp_path / 'run'}")
    assert (done.returncode, done.stderr.count("\n")) == (status, 1), done.stderr
    assert message in done.stderr


def test_a_session_takes_them_from_its_settings_and_prefers_its_own(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    settings = preset(*QUICK, "losses=terms_of_mine:failing", device="cpu")
    scene = voxelfield.load_scene(ROOT / "tests" / "fixtures" / "lego", downscale=8)
    with pytest.raises(AttributeError, match="nothing"):
        Session(scene, settings).train_step()
    Session(scene, settings, losses={"failing": lambda outputs, batch: outputs.pixels.mean()}).train_step()
