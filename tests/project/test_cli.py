"""The command ``voxelfield``: every verb as users call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from voxelfield import _build, _library
from voxelfield.cli import doctor
from voxelfield.cli.command import VERBS, main

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("trainer=smoke", "trainer.steps=40", "trainer.preview_every=0", "trainer.evaluation.video_frames=0")


def voxelfield(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command away from the clone, without a GPU."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    variables.pop("VOXELFIELD_DATA", None)
    return subprocess.run(
        [sys.executable, "-m", "voxelfield", *arguments],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the bundled scene, trained in an empty folder."""
    folder = tmp_path_factory.mktemp("empty")
    done = voxelfield("train", *QUICK, "logger=none", "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_train_finds_configurations_and_the_bundled_scene_anywhere(trained: Path) -> None:
    assert json.loads((trained / "run" / "metrics.json").read_text())["steps"] == 40
    assert (trained / "run" / "model.safetensors").is_file()


def test_eval_repeats_the_runs_own_figures(trained: Path) -> None:
    done = voxelfield("eval", "run", "--views", "2", "--json", "eval.json", "--images", "images", cwd=trained)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((trained / "eval.json").read_text())
    own = json.loads((trained / "run" / "metrics.json").read_text())["psnr_per_view"]
    assert {name: view["psnr"] for name, view in found["views"].items()} == pytest.approx(own, abs=1e-4)
    assert len(list((trained / "images").rglob("*.png"))) == 2


def test_render_writes_images_or_a_video(trained: Path) -> None:
    done = voxelfield("render", "run/model.safetensors", "--frames", "2", "--out", "orbit", cwd=trained)
    assert done.returncode == 0, done.stderr[-3000:]
    frames = sorted((trained / "orbit").iterdir())
    assert [frame.name for frame in frames] == ["0000.png", "0001.png"]
    with Image.open(frames[0]) as first, Image.open(frames[1]) as second:
        assert first.size == second.size
        assert first.tobytes() != second.tobytes()
    pytest.importorskip("imageio_ffmpeg")
    done = voxelfield("render", "run", "--frames", "2", "--out", "orbit.mp4", cwd=trained)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (trained / "orbit.mp4").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval", "nowhere"), "no checkpoint nowhere"),
        (("eval", "run", "--views", "0"), "--views must be at least 1, got 0"),
        (("eval", "run", "--device", "cuda"), "finds no CUDA device"),
        (("render", "run", "--frames", "0"), "--frames must be at least 1, got 0"),
        (("render", "run", "--out", "orbit.gif"), "--out must be a file *.mp4 or a folder, got orbit.gif"),
        (("bench", "--points", "1"), "--points must be at least 2, got 1"),
        (("train", "model.wdith=3"), "configuration has no key model.wdith; did you mean model.width?"),
        (("fly",), "verb must be one of train, eval, render, download, doctor, build, bench, got 'fly'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(trained: Path, arguments: tuple[str, ...], message: str) -> None:
    done = voxelfield(*arguments, cwd=trained)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_doctor_describes_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert torch.__version__ in told
    assert str(_library.loaded_modules()[_build.CPU_MODULE]) in told
    assert told.endswith("all that is here works\n")


def test_doctor_names_the_first_thing_that_fails(monkeypatch, capsys) -> None:
    def fail(device: str) -> bool:
        raise RuntimeError("no compiled CPU kernels fit")

    monkeypatch.setattr(_library, "ensure_loaded", fail)
    monkeypatch.setattr(doctor.ops, "sample_trilinear", lambda *_: fail("cpu"))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED cpu kernels: no compiled CPU kernels fit"


@pytest.mark.cuda
def test_doctor_describes_gpus_and_their_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert torch.cuda.get_device_name(0) in told
    assert "kernels on cuda:0" in told


def test_bench_compares_with_grid_sample(device, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", str(device), "--resolution", "9", "--points", "50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["forward", "backward"]
    assert all(line.endswith("x") for line in lines[2:])


@pytest.mark.parametrize("verb", [("bench", "--resolution", "9", "--points", "50"), ("doctor",)])
def test_verbs_that_train_nothing_need_no_package_for_training(verb: tuple[str, ...]) -> None:
    script = (
        "import sys\n"
        "for name in ('hydra', 'omegaconf', 'PIL', 'safetensors', 'tensorboard', 'imageio', 'pooch', 'tqdm'):\n"
        "    sys.modules[name] = None\n"
        "from voxelfield.cli.command import main\n"
        f"sys.exit(main({list(verb)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_usage_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {verb} " in told for verb in VERBS)
