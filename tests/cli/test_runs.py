"""RUN left out, or ``latest``, is the run that has finished last; ``voxelfield runs`` lists them all."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from voxelfield.cli.command import VERBS, main
from voxelfield.installed import config_folder
from voxelfield.run_directory import runs_folder

METRICS = {"scene": "bricks", "psnr": 24.567, "train_seconds": 12.34, "steps": 300, "split": "test"}
METRICS |= {"settings": {}, "psnr_per_view": {}, "per_view": []}


def write_run(folder: str, finished: int, **changes: object) -> Path:
    metrics = Path(folder) / "metrics.json"
    (metrics.parent / "test").mkdir(parents=True)
    (metrics.parent / "test" / "view.png").write_bytes(bytes(3 << 19))
    metrics.write_text(json.dumps(METRICS | changes))
    os.utime(metrics, (finished, finished))
    return metrics


@pytest.fixture(autouse=True)
def finished(tmp_path, monkeypatch) -> list[Path]:
    """Metrics of two finished runs, the last one at the end, beside a damaged one and one that was stopped."""
    monkeypatch.chdir(tmp_path)
    last = write_run("runs/bricks/a", 1_700_000_000)
    first = write_run("runs/lego/z", 1_600_000_000, scene="lego\n", psnr=7, train_seconds=1234)
    write_run("runs/bricks/b", 1_800_000_000, psnr="high")
    Path("runs/sweeps/c/0/.hydra").mkdir(parents=True)
    return [first, last]


@pytest.mark.parametrize("verb", ["eval", "render", "view", "report", "export"])
def test_each_verb_takes_the_run_that_has_finished_last_unless_one_is_named(verb, caplog):
    caplog.set_level("INFO")
    module, parser = importlib.import_module(f"voxelfield.cli.{VERBS[verb][0]}"), argparse.ArgumentParser()
    getattr(module, f"add_{verb}_arguments")(parser)
    for arguments in ((), ("latest", "--device", "cpu"), ("--device", "cpu")):
        assert parser.parse_args(arguments).run == Path("runs/bricks/a")
    assert caplog.messages == ["RUN is runs/bricks/a, which finished last"] * 3
    assert parser.parse_args(("--device", "cpu", "./latest")).run == Path("latest")


def test_without_a_finished_run_one_must_be_named(finished, tmp_path, caplog):
    for metrics in finished:
        metrics.unlink()
    assert main(["eval", "--views", "1"]) == 2
    expected = "RUN must be a run directory, a checkpoint or a model file, got the latest run"
    assert caplog.messages == [f"{expected}, but none in {tmp_path / 'runs'} has finished"]


def test_the_table_has_the_finished_runs_and_the_others_are_named(finished, capsys, caplog):
    assert main(["runs"]) == 0
    first, last = (f"{datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M}" for path in finished)
    assert capsys.readouterr().out.splitlines() == [
        "scene    PSNR  seconds  MiB              date  folder",
        f"lego\\n   7.00   1234.0  1.5  {first}  runs/lego/z",
        f"bricks  24.57     12.3  1.5  {last}  runs/bricks/a",
    ]
    damaged = "runs/bricks/b/metrics.json: must have the entry 'psnr' of a finished run"
    assert caplog.messages == [damaged, "runs/sweeps/c/0: not finished"]
    assert main(["runs", "nowhere"]) == 0
    assert caplog.messages[-1] == "there are no runs in nowhere"


def test_runs_are_looked_for_where_training_puts_them():
    hydra = yaml.safe_load((config_folder() / "train.yaml").read_text())["hydra"]
    assert all(hydra[mode]["dir"].startswith(f"{runs_folder()}/") for mode in ("run", "sweep"))


def test_the_list_of_runs_does_not_import_torch(tmp_path):
    """Which takes a second or more."""
    program = "import sys; from voxelfield.cli.command import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", program, "runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines()[-1] == "False"
