"""The command ``voxelfield``: every verb as users call it."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from build_testing import forge
from PIL import Image
from warm_python import warm_python

from voxelfield import __version__, _build, _library
from voxelfield.cli import machine
from voxelfield.cli.command import TRAINING_PACKAGES, VERBS, exit_status, main

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("trainer=smoke", "trainer.steps=40", "trainer.preview_every=0", "trainer.evaluation.video_frames=0")


def voxelfield(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command away from the clone, without a GPU."""
    # Where torch would look for weights there are none.
    variables = {**os.environ, "TORCH_HOME": str(cwd)}
    variables.pop("VOXELFIELD_DATA", None)
    return warm_python.run("-m", "voxelfield", *arguments, cwd=cwd, env=variables)


def succeed(*arguments: str, cwd: Path) -> str:
    """Runs a command that must succeed; returns what it has logged."""
    done = voxelfield(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the bundled scene, trained in an empty folder."""
    folder = tmp_path_factory.mktemp("empty")
    succeed("train", *QUICK, "logger=none", "hydra.run.dir=run", cwd=folder)
    return folder


def test_train_finds_configurations_and_the_bundled_scene_anywhere(trained: Path) -> None:
    assert json.loads((trained / "run" / "metrics.json").read_text())["steps"] == 40
    assert (trained / "run" / "model.safetensors").is_file()


def test_eval_repeats_the_runs_own_figures(trained: Path) -> None:
    succeed("eval", "run", "--views", "2", "--json", "eval.json", "--images", "images", cwd=trained)
    found = json.loads((trained / "eval.json").read_text())
    own = json.loads((trained / "run" / "metrics.json").read_text())["psnr_per_view"]
    assert {view["name"]: view["psnr"] for view in found["per_view"]} == pytest.approx(own, abs=1e-4)
    assert (found["split"], found["views"]) == ("test", 2)
    assert len(list((trained / "images").rglob("*.png"))) == 2


def test_eval_judges_any_split_at_any_size(trained: Path) -> None:
    options = ("--split", "train", "--downscale", "4", "--views", "3", "--csv", "table/train.csv")
    assert "over 3 train views of 50 x 50" in succeed("eval", "run", *options, cwd=trained)
    rows = list(csv.DictReader((trained / "table" / "train.csv").read_text().splitlines()))
    assert [list(row) for row in rows] == [["name", "psnr", "ssim"]] * 3
    assert all(5 < float(row["psnr"]) < 50 for row in rows)


def test_eval_holds_out_as_it_is_told(trained: Path, tmp_path: Path) -> None:
    capture = tmp_path / "bricks"
    capture.mkdir()
    frames = json.loads((ROOT / "data" / "bricks" / "transforms_train.json").read_text())
    (capture / "transforms.json").write_text(json.dumps(frames | {"frames": frames["frames"][:9]}))
    shutil.copytree(ROOT / "data" / "bricks" / "train", capture / "train")
    for holdout, split, views in ((4, "test", 3), (4, "train", 6), (0, "train", 9)):
        options = ("--data-root", str(tmp_path), "--split", split, "--holdout", str(holdout), "--downscale", "8")
        assert f"over {views} {split} views of 25 x 25" in succeed("eval", "run", *options, cwd=trained)


def test_render_writes_images_or_a_video(trained: Path) -> None:
    succeed("render", "run/model.safetensors", "--frames", "2", "--out", "orbit", cwd=trained)
    frames = sorted((trained / "orbit").iterdir())
    assert [frame.name for frame in frames] == ["0000.png", "0001.png", "frames.json"]
    with Image.open(frames[0]) as first, Image.open(frames[1]) as second:
        assert first.size == second.size
        assert first.tobytes() != second.tobytes()
    pytest.importorskip("av")
    succeed("render", "run", "--frames", "2", "--out", "orbit.mp4", cwd=trained)
    assert (trained / "orbit.mp4").stat().st_size > 1000


def test_report_is_written_at_the_end_of_a_run_and_again(trained: Path) -> None:
    def pictures(path: Path) -> list[str]:
        return re.findall(r'<img .*?src="([^"]+)".*? alt="([^"]+)"', path.read_text(encoding="utf-8"))

    assert "wrote again.html" in succeed("report", "run", "--out", "again.html", cwd=trained)
    first, again = pictures(trained / "run" / "report.html"), pictures(trained / "again.html")
    assert first == again
    assert len(first) == 4 * 2 + 2 * 2, "two views, also at the top"
    text = (trained / "again.html").read_text(encoding="utf-8")
    assert "voxelfield train trainer=smoke trainer.steps=40" in text
    assert "Nothing was recorded" in text
    assert f"{json.loads((trained / 'run' / 'metrics.json').read_text())['psnr']:.2f}" in text


def test_export_writes_what_other_programs_read(trained: Path) -> None:
    pytest.importorskip("skimage")
    trimesh = pytest.importorskip("trimesh")
    faint = ("--level", "1", "--resolution", "40")  # after 40 steps
    files = ("--mesh", "out/a.ply", "--points", "out/p.ply", "--count", "5000", "--volume", "out/v.npz")
    told = succeed("export", "run", *files, "--cameras", "out/c.json", *faint, cwd=trained)
    mesh, points = (trimesh.load(trained / "out" / name) for name in ("a.ply", "p.ply"))
    assert mesh.is_watertight
    assert f"wrote {len(mesh.faces)} triangles of {len(mesh.vertices)} vertices to out/a.ply" in told
    assert len(points.vertices) == 5000
    # The harbour stands on a plate that is 1.76 wide, and is 1.86 high.
    for bounds in (mesh.bounds, points.bounds):
        assert bounds[1] - bounds[0] == pytest.approx([1.8, 1.8, 1.9], abs=0.35)
    with np.load(trained / "out" / "v.npz") as volume:
        assert max(volume["density"].shape) == 41
    frames = json.loads((trained / "out" / "c.json").read_text())["frames"]
    own = json.loads((ROOT / "data" / "bricks" / "transforms_train.json").read_text())["frames"]
    assert len(frames) == 125
    assert np.allclose(frames[7]["transform_matrix"], own[7]["transform_matrix"], atol=1e-6)
    assert (frames[7]["file_path"], frames[7]["w"]) == ("train/r_7.png", 200)


def test_export_writes_splats_that_look_like_the_scene(trained: Path) -> None:
    plyfile = pytest.importorskip("plyfile")
    options = ("--count", "3000", "--fit-steps", "1")
    told = succeed("export", "run/model.safetensors", "--splats", "out/s.ply", *options, cwd=trained)
    vertex = plyfile.PlyData.read(str(trained / "out" / "s.ply"))["vertex"]
    assert f"wrote {vertex.count} Gaussians to out/s.ply" in told
    assert 300 < vertex.count <= 3000
    assert all(np.abs(vertex[axis]).max() < 1.3 for axis in "xyz")


def test_export_writes_a_file_for_each_level_of_detail(trained: Path) -> None:
    trimesh = pytest.importorskip("trimesh")
    options = ("--count", "2000", "--fit-steps", "0", "--lod", "2")
    told = succeed("export", "run", "--splats", "lod/s.glb", *options, cwd=trained)
    names = [path.name for path in sorted((trained / "lod").iterdir())]
    assert names == ["s.glb", "s.lod1.glb"]
    fine, coarse = (next(iter(trimesh.load(trained / "lod" / name).geometry.values())) for name in names)
    assert f"wrote {len(fine.vertices)} Gaussians, {len(coarse.vertices)} to s.lod1.glb to lod/s.glb" in told
    assert 20 < len(coarse.vertices) <= len(fine.vertices) // 4


@pytest.mark.sweep
def test_export_fuses_depth_of_a_model_file(trained: Path) -> None:
    pytest.importorskip("skimage")
    trimesh = pytest.importorskip("trimesh")
    pytest.importorskip("fast_simplification")
    options = ("--surface", "tsdf", "--largest-component", "--fill-holes", "--max-faces", "2000", "--resolution", "40")
    succeed("export", "run/model.safetensors", "--mesh", "small.glb", *options, cwd=trained)
    (mesh,) = trimesh.load(trained / "small.glb").geometry.values()
    assert 1000 < len(mesh.faces) <= 2000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("eval nowhere", "nowhere does not exist"),
        ("eval run --views 0", "--views must be at least 1, got 0"),
        ("eval run --backend splats", "for this field, or None, got 'splats'"),
        ("eval run --device cuda", "finds no CUDA device"),
        ("eval run --downscale 0", "downscale must be a whole number of at least 1, got 0"),
        ("eval run --holdout 1", "holdout must be 0, or a whole number of at least 2, got 1"),
        ("eval run --lpips", "LPIPS"),
        ("render run --frames 0", "--frames must lie in [1, 1000000], got 0"),
        (
            "render run --out orbit.avi",
            "--out must be a video *.mp4, got orbit.avi: write one, or a folder of images, and convert it with ffmpeg",
        ),
        (
            "export run",
            "export must be given at least one of --cameras, --collision, --environment, --mesh, --points, "
            "--splats, --volume and --web, got none",
        ),
        ("export run --splats a.splat", "--splats must be a file *.ply, *.spz, *.sog, *.glb, *.usdz, got a.splat"),
        ("export run --splats a.ply --spz-version 3", "--spz-version must be written to an spz, got --splats a.ply"),
        ("export run --splats a.spz --spz-version 2", "--spz-version must lie in [3, 4], got 2"),
        ("export run --splats a.ply --lod 0", "--lod must be at least 1, got 0"),
        ("export run --splats a.ply --fit-steps -1", "--fit-steps must be at least 0, got -1"),
        ("export run --mesh a.ply --fit-steps 9", "--fit-steps must come with --splats, got 9 without it"),
        ("export run --mesh a.stl", "--mesh must be a file *.ply, *.obj, *.glb, got a.stl"),
        ("export run --points a.ply --count 0", "--count must be at least 1, got 0"),
        ("export run --mesh a.ply --max-faces 0", "--max-faces must be at least 1, got 0"),
        ("export run --mesh a.ply --texture 64", "--texture must be written to an obj or glb, got --mesh a.ply"),
        ("export run --mesh a.ply --surface sdf", "--surface: invalid choice: 'sdf' (choose from "),
        ("export run --mesh a.ply --level -1", "--level must be positive, got -1"),
        ("export run --volume a.npz --resolution 0", "--resolution must be at least 1, got 0"),
        ("export run --volume a.npz --box 2", "box must be 1 to 1, as many as the field has, got 2"),
        ("report nowhere", "RUN must be the directory of a finished run, got nowhere, which has no valid metrics.json"),
        ("report .", "RUN must be the directory of a finished run, got ., which has no valid metrics.json"),
        ("bench --points 1", "--points must be at least 2, got 1"),
        (
            "fly",
            "verb must be one of train, runs, eval, render, view, report, export, push, download, process, "
            "inspect, doctor, build, bench, got 'fly'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    trained: Path,
    monkeypatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(trained)
    # Where torch would look for weights there are none.
    monkeypatch.setenv("TORCH_HOME", str(trained))
    monkeypatch.delenv("VOXELFIELD_DATA", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        status = main(arguments.split())
    except SystemExit as end:
        status = end.code
    assert status == 2
    # In a process of its own, records of the log go to the standard error stream.
    told = capfd.readouterr().err.splitlines() + caplog.messages
    assert len(told) == 1
    assert message in told[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval", "nowhere"), "nowhere does not exist; checkpoints in .: none"),
        # Hydra sets logging up anew, so these need a process in any case.
        (("train", "trainer.evaluation.lpips=true"), "LPIPS"),
        (("train", "model.wdith=3"), "configuration has no key model.wdith; did you mean model.width?"),
    ],
)
def test_a_refusal_is_the_exit_status_of_the_process(trained: Path, arguments: tuple[str, ...], message: str) -> None:
    done = voxelfield(*arguments, cwd=trained)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("error", "status"), [(IsADirectoryError(), 2), (NotADirectoryError(), 2), (OSError(), 1)])
def test_wrong_paths_are_mistakes_and_other_errors_of_files_are_failures(error, status) -> None:
    assert exit_status(error) == status


def test_doctor_describes_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert torch.__version__ in told
    assert str(_library.loaded_modules()[_build.sources.CPU_MODULE]) in told
    assert f"_C compiled from       sources {_build.sources.source_digest()}; no CUDA\n" in told
    assert told.endswith("all checks passed\n")


def test_doctor_tells_what_a_wheel_of_compiled_kernels_serves(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(_build.sources, "_PACKAGE", tmp_path)
    forge(tmp_path / "_C_cuda.abi3.so", "0123ab", cuda=13, sm="120", ptx="90")
    assert list(machine.packaged_kernels()) == [
        ("_C in the package", "none"),
        (
            "_C_cuda in the package",
            "sources 0123ab; CUDA 13 (driver version 580 or later); compute capability 12.0 and PTX of 9.0; no macros",
        ),
    ]
    ((name, found),) = machine.compilers()
    assert name == "compilers"
    assert found == "not used: this voxelfield was installed from a wheel of compiled kernels"


def test_doctor_names_the_first_thing_that_fails(monkeypatch, capsys) -> None:
    def fail(device: str) -> bool:
        raise RuntimeError("no compiled CPU kernels fit")

    monkeypatch.setattr(_library, "ensure_loaded", fail)
    monkeypatch.setattr(machine.ops, "sample_trilinear", lambda *_: fail("cpu"))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED cpu kernels: no compiled CPU kernels fit"


@pytest.mark.cuda
def test_doctor_describes_gpus_and_their_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert torch.cuda.get_device_name(0) in told
    assert "kernels on cuda:0" in told
    stamp = _build.sources.read_stamp(_library.loaded_modules()[_build.sources.CUDA_MODULE])
    assert f"_C_cuda compiled from  {stamp}\n" in told


def test_bench_compares_with_grid_sample(device, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", str(device), "--resolution", "9", "--points", "50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["forward", "backward"]
    assert all(line.endswith("x") for line in lines[2:])


@pytest.fixture(scope="module")
def without_packages_for_training(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Exit status, complaints and output of commands, by their verb, in one process that has no optional package."""
    commands = [
        # First, because messages are logged to the error stream of the first verb that runs.
        ("download", "lego", "--root", str(tmp_path_factory.mktemp("scenes")), "--url", "http://127.0.0.1:9/toy.zip"),
        ("train", "scene=bricks"),
        ("eval", "run"),
        ("render", "run"),
        ("export", "run", "--mesh", "a.ply"),
        ("process", "in", "-o", "out"),
        ("inspect", "in"),
        ("bench", "--resolution", "9", "--points", "50"),
        ("doctor",),
    ]
    script = (
        "import contextlib, importlib.metadata, io, json, sys\n"
        f"for name in {sorted(TRAINING_PACKAGES.keys() - {'numpy'})!r}:\n"
        "    sys.modules[name] = None\n"
        "def version(name, found=importlib.metadata.version):\n"
        f"    if name in {sorted(machine.EXTRAS)!r}:\n"
        "        raise importlib.metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "importlib.metadata.version = version\n"
        "from voxelfield.cli.command import main\n"
        "found = {}\n"
        f"for arguments in {commands!r}:\n"
        "    out, err = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "        status = main(arguments)\n"
        "    found[arguments[0]] = status, err.getvalue(), out.getvalue()\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["bench", "doctor"])
def test_verbs_that_train_nothing_need_no_package_for_training(without_packages_for_training, verb: str) -> None:
    status, *told = without_packages_for_training[verb]
    assert status == 0, told


@pytest.mark.slow
def test_doctor_names_each_optional_package_that_is_not_installed_and_its_extra(without_packages_for_training) -> None:
    *_, told = without_packages_for_training["doctor"]
    lines = told.splitlines()
    for name, extra in machine.EXTRAS.items():
        assert f'{name:22} optional, not installed: pip install "voxelfield[{extra}]"' in lines
    assert lines[-1] == "all checks passed"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "eval", "render", "export", "process", "inspect"])
def test_what_training_needs_is_told_in_one_line_where_it_is_not_installed(
    without_packages_for_training, verb: str
) -> None:
    status, complaints, _ = without_packages_for_training[verb]
    assert status == 2
    wanted = rf'[a-z0-9-]+ must be installed for `voxelfield {verb}`: pip install "voxelfield\[train\]"\n'
    assert re.fullmatch(wanted, complaints)


@pytest.mark.slow
def test_a_download_without_its_package_ends_with_that_line(without_packages_for_training) -> None:
    status, complaints, _ = without_packages_for_training["download"]
    assert status == 2, complaints
    told = complaints.splitlines()[-1]
    assert told == 'pooch must be installed to download scenes: pip install "voxelfield[train]"'


@pytest.mark.parametrize(
    ("module", "package"), [("hydra.core", "hydra-core"), ("omegaconf", "hydra-core"), ("PIL", "pillow")]
)
def test_a_package_that_a_verb_meets_as_it_runs_is_named_too(monkeypatch, capsys, module: str, package: str) -> None:
    def fail(options: object) -> int:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(machine, "run_doctor", fail)
    assert main(["doctor"]) == 2
    told = capsys.readouterr().err
    assert told == f'{package} must be installed for `voxelfield doctor`: pip install "voxelfield[train]"\n'


@pytest.mark.parametrize("module", ["voxelfield.nowhere", "filelock", None])
def test_a_module_of_no_such_package_is_a_fault_and_stays_one(monkeypatch, module: str | None) -> None:
    def fail(options: object) -> int:
        raise ModuleNotFoundError("No module", name=module)

    monkeypatch.setattr(machine, "run_doctor", fail)
    with pytest.raises(ModuleNotFoundError):
        main(["doctor"])


def test_optional_packages_are_those_of_the_extras_for_users() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("test", "fuzz", "benchmarks", "docs", "dev"):
        extras.pop(name)
    assert {
        (re.match(r"[\w-]+", wanted)[0], extra)
        for extra, packages in extras.items()
        for wanted in packages
        if wanted != "voxelfield[train]"
    } == set(machine.EXTRAS.items())


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"voxelfield {__version__}\n"


@pytest.mark.parametrize(
    "launcher",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ],
    ids=["torchrun", "srun"],
)
def test_verbs_other_than_train_and_build_are_run_by_one_process(launcher, monkeypatch, caplog, capsys) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    for verb, *arguments in (("eval", "nowhere"), ("render", "nowhere"), ("export", "nowhere"), ("doctor",)):
        caplog.clear()
        assert main([verb, *arguments]) == 2
        assert caplog.messages == [f"{verb} must be run by one process, got 2 that torchrun or srun has started"]
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        assert "by one process; several of torchrun or srun are refused" in " ".join(capsys.readouterr().out.split())
    caplog.clear()
    assert main(["build", "--only", "nothing"]) == 2
    assert "one process" not in caplog.text


def test_usage_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {verb} " in told for verb in VERBS)
