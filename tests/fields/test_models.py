"""Models of other packages: what docs/models.md shows is found, configured, trained and loaded again."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from installed_package import install
from warm_python import warm_python

from voxelfield.config import parse
from voxelfield.foundation.extensions import load_entry
from voxelfield.models.model_config import ModelConfig, known_models
from voxelfield.models.pyramid import PyramidConfig

ROOT = Path(__file__).parents[2]
LEARNED = 17.0  # dB
FILE = re.compile(r"^`([^`\n]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's package, as if it were installed."""
    folder = tmp_path_factory.mktemp("installed")
    shown = dict(FILE.findall((ROOT / "docs" / "models.md").read_text(encoding="utf-8")))
    (folder / "sdf_field.py").write_text(shown["sdf_field.py"])
    project = configparser.ConfigParser()
    project.read_string(shown["pyproject.toml"])  # these few lines of TOML are an INI file too
    announced = dict(project['project.entry-points."voxelfield.models"'])
    install(folder, "sdf_field", {"voxelfield.models": {name: value.strip('"') for name, value in announced.items()}})
    return folder


def run(package: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run(*command, env={**os.environ, "PYTHONPATH": str(package)})


def test_the_guides_recipe_trains_and_is_loaded_again(package: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    quick = ["trainer=smoke", "trainer.steps=100", "trainer.image_size=50", "device=cpu", "logger=none"]
    quick += ["trainer.evaluation.video_frames=0", "trainer.evaluation.views=1", "trainer.evaluation.report=false"]
    done = run(package, "train.py", "scene=bricks", "model=sdf", "model.beta=0.05", *quick, f"hydra.run.dir={output}")
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["drawn_by"] == "render_view"
    assert metrics["psnr"] > LEARNED
    script = (
        "import torch, voxelfield\n"
        f"run = voxelfield.load({str(output)!r}, 'cpu')\n"
        "print(type(run.field).__name__, float(run.density(torch.zeros(1, 3))) >= 0)"
    )
    loaded = run(package, "-c", script)
    assert loaded.stdout.split() == ["SDFField", "True"], loaded.stderr[-3000:]


def test_settings_of_a_foreign_recipe_are_checked(package: Path) -> None:
    done = run(package, "train.py", "model=sdf", "model.beta=-1", "trainer=smoke")
    assert done.returncode == 2
    assert "model.beta must be positive, got -1.0" in done.stderr


def test_a_recipe_that_cannot_be_imported_harms_no_other_run(tmp_path: Path) -> None:
    install(tmp_path, "broken", {"voxelfield.models": {"broken": "there_is_no_such_module:ModelConfig"}})
    done = run(tmp_path, "train.py", "trainer.steps=-1")
    assert "model=broken is not available" in done.stderr
    assert "trainer.steps must be at least 1, got -1" in done.stderr


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt"])
def test_a_recipe_that_ends_the_program_does_not(tmp_path: Path, kind: str) -> None:
    install(tmp_path, "leaving", {"voxelfield.models": {"leaving": "leaving:ModelConfig"}})
    end = f"raise {kind}('goodbye')"
    constructed = "from voxelfield.models.model_config import ModelConfig as Base\nclass ModelConfig(Base):\n"
    constructed += f"    def __init__(self, kind):\n        {end}\n"
    for source in (constructed, end):
        (tmp_path / "leaving.py").write_text(source)
        done = run(tmp_path, "train.py", "trainer.steps=-1")
        assert "model=leaving is not available, because its model cannot be used: " in done.stderr
        assert "goodbye" in done.stderr
        assert "trainer.steps must be at least 1, got -1" in done.stderr
    script = "from voxelfield.models.model_config import ModelConfig; ModelConfig.choose({'kind': 'leaving'}, 'model')"
    refused = run(tmp_path, "-c", script).stderr.splitlines()[-1]
    wanted = f"ValueError: model.kind=leaving must name a model that can be imported, got {kind}: goodbye"
    assert refused == wanted


def test_a_signal_while_a_recipe_is_imported_is_no_fault_of_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "slow_recipe.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        load_entry(EntryPoint("slow", "slow_recipe:Model", "voxelfield.models"))


def test_without_a_kind_a_recipe_is_a_pyramid() -> None:
    assert parse(ModelConfig, {}, "model") == PyramidConfig()
    assert next(iter(known_models())) == "pyramid"


def test_an_unknown_kind_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^model\.kind must be one of pyramid, sh, dense.*, got 'hash'$"):
        parse(ModelConfig, {"kind": "hash"}, "model")
