"""``python train.py`` as users run it: its output, and how it stops, resumes and fails."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from composed_run import settings_of_run
from omegaconf import OmegaConf
from PIL import Image
from quick_presets import preset
from short_runs import finish, wait_for_checkpoint
from warm_python import warm_python

import voxelfield
from voxelfield.cli import command as verbs
from voxelfield.cli.train import main, resumed_overrides, with_scene_folder
from voxelfield.cli.train_help import described
from voxelfield.components.logger import flattened
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene, Split
from voxelfield.devices import choose_device
from voxelfield.runs import train as run_training
from voxelfield.settings import RunConfig, parse
from voxelfield.trained.checkpoint_file import checkpoint_path, load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "lego"

TINY = (
    "scene=lego",
    "data.root=tests/fixtures",
    "trainer=smoke",
    "trainer.steps=30",
    "trainer.image_size=50",
    "trainer.visible_samples=4096",
    "trainer.stages=[{step: 0, resolution: 12}, {step: 20, resolution: 16, crop: true}]",
    "trainer.render.voxels_per_step=0.5",
    "trainer.render.min_transmittance=1e-4",
    "trainer.render.min_weight=1e-4",
    "trainer.occupancy.resolution=16",
    "trainer.occupancy.start=15",
    "trainer.occupancy.every=5",
    "trainer.log_every=5",
    "trainer.preview_every=15",
    "trainer.preview_views=2",
    "trainer.checkpoint_every=10",
    "trainer.keep_checkpoints=true",
    "trainer.evaluation.views=2",
    "trainer.evaluation.video_frames=0",
    "trainer.evaluation.report=false",
)


def command(*overrides: str) -> list[str]:
    # The last override of a key wins; flags must not come between overrides.
    flags = [override for override in overrides if override.startswith("-")]
    return [sys.executable, "train.py", *flags, *TINY, *(o for o in overrides if o not in flags)]


def train(*overrides: str, gpu: bool = False, status: int = 0) -> str:
    """Runs train.py to its end, with an exit status; returns all that it has printed."""
    if not gpu:
        done = warm_python.run(*command(*overrides)[1:], merged=True)
    else:
        merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # these runs are too small for more
        done = subprocess.run(command(*overrides), cwd=ROOT, env=environment, timeout=300, check=False, **merged)
    assert done.returncode == status, done.stdout
    return done.stdout


def read_metrics(directory: Path) -> dict:
    return json.loads((directory / "metrics.json").read_text())


# ------------------------------------------------------------------------------------------------- one whole run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A complete run with every optional output: its directory and its printed text."""
    directory = tmp_path_factory.mktemp("runs") / "lego"
    whole = ("trainer.evaluation.video_frames=3", "trainer.evaluation.report=true")
    output = train("model=dense", *whole, f"hydra.run.dir={directory}")
    return directory, output


@pytest.fixture(scope="module")
def events(finished):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(
        str(finished[0]), size_guidance=dict.fromkeys(("images", "scalars", "tensors"), 0)
    )
    reader.Reload()
    return reader


def test_metrics_hold_what_is_promised(finished):
    metrics = read_metrics(finished[0])
    assert {"psnr", "ssim", "train_seconds", "steps", "device", "views"} <= set(metrics)
    assert metrics["steps"] == 30
    assert metrics["views"] == 2
    assert metrics["device"] == "cpu"
    assert metrics["scene"] == "lego"
    assert metrics["drawn_by"] == "render_view"
    assert 0 < metrics["train_seconds"] < 300
    assert 5 < metrics["psnr"] < 40
    assert 0 < metrics["ssim"] < 1
    # two of the four views, evenly spread
    assert list(metrics["psnr_per_view"]) == ["r_0", "r_100"]
    assert metrics["psnr"] == pytest.approx(sum(metrics["psnr_per_view"].values()) / 2)
    assert metrics["ssim"] == pytest.approx(sum(metrics["ssim_per_view"].values()) / 2)
    table = list(csv.DictReader((finished[0] / "per_view.csv").read_text().splitlines()))
    assert [{"name": row["name"], "psnr": float(row["psnr"]), "ssim": float(row["ssim"])} for row in table] == (
        metrics["per_view"]
    )
    assert {row["name"]: row["psnr"] for row in metrics["per_view"]} == metrics["psnr_per_view"]


def test_the_report_tells_of_the_run(finished):
    directory, _ = finished
    text = (directory / "report.html").read_text(encoding="utf-8")
    metrics = read_metrics(directory)
    assert f"<dd>{metrics['psnr']:.2f} <small>dB</small></dd>" in text
    worst = min(metrics["per_view"], key=lambda row: row["psnr"])
    assert f"<h3>1. {worst['name']} " in text
    titles = re.findall(r"<figure>\n<h3>([^<]+?)(?: <span>|</h3>)", text)
    assert titles[:3] == ["PSNR", "Loss terms, weighted", "Rays per second"]
    assert metrics["environment"]["torch"] == torch.__version__
    assert {"parameters", "samples"} <= set(metrics["estimated_gib"])
    assert 0 < len(text) < 2_000_000


def test_pictures_are_those_that_were_judged(finished):
    directory, _ = finished
    assert sorted(path.name for path in (directory / "test").iterdir()) == ["r_0.png", "r_100.png"]
    metrics = read_metrics(directory)
    for name, reported in metrics["psnr_per_view"].items():
        picture = np.asarray(Image.open(directory / "test" / f"{name}.png")) / 255.0
        assert picture.shape == (50, 50, 3)
        source = np.asarray(Image.open(ROOT / "tests" / "fixtures" / "lego" / "test" / f"{name}.png")) / 255.0
        colour, alpha = source[..., :3] * source[..., 3:], source[..., 3:]
        # premultiplied colours average over 2x2 pixels; white shows through the rest
        truth = (colour + 1 - alpha).reshape(50, 2, 50, 2, 3).mean(axis=(1, 3))
        psnr = -10 * np.log10(((picture - truth) ** 2).mean())
        assert psnr == pytest.approx(reported, abs=0.1)


def test_the_video_is_written(finished):
    av = pytest.importorskip("av")
    with av.open(str(finished[0] / "orbit.mp4")) as container:
        frames = [warp.to_ndarray(format="rgb24") for warp in container.decode(video=0)]
        assert float(container.streams.video[0].average_rate) == len(frames) / 6, "it takes six seconds"
    assert len(frames) == 3
    assert frames[0].shape == (50, 50, 3)
    assert np.abs(frames[0].astype(int) - frames[1].astype(int)).mean() > 1, "the camera must move"


def test_the_model_file_draws_what_the_checkpoint_draws(finished):
    directory, _ = finished
    model, checkpoint = (voxelfield.load(path, "cpu") for path in (directory / "model.safetensors", directory))
    assert model.steps == checkpoint.steps == 30
    # In a notebook.
    assert repr(model) == "TrainedModel(scene='lego', model='dense', steps=30, device=cpu)"
    with Image.open(io.BytesIO(model._repr_png_())) as picture:
        assert picture.size == (320, 320)
        assert np.asarray(picture).std() > 1, "the overview must show something"
    camera = load_blender(FIXTURE, LoadOptions(splits=("test",), downscale=4)).test.cameras
    difference = model.render(camera).rgb - checkpoint.render(camera).rgb
    assert checkpoint.render(camera).rgb.std() > 0.05
    assert difference.abs().max() < 5e-3, "features are rounded to float16"


def test_checkpoints_load(finished):
    directory, _ = finished
    names = sorted(path.name for path in directory.glob("*.pt"))
    assert names == ["checkpoint_0000010.pt", "checkpoint_0000020.pt", "checkpoint_0000030.pt"]
    state = load_checkpoint(directory)
    assert state["step"] == 30
    assert state["config"]["trainer"]["steps"] == 30
    assert state["config"]["scene"]["name"] == "lego"
    assert list(state["model"]["field.grid.features"].shape[:3]) == read_metrics(directory)["resolution"]
    assert state["train_seconds"] == read_metrics(directory)["train_seconds"]


def test_events_hold_the_scalars(finished, events):
    tags = set(events.Tags()["scalars"])
    every_log = {
        "loss/photometric",
        "loss/sample_rgb",
        "PSNR/training_pixels",
        "train/rays_per_second",
        "train/rays_per_step",
        "train/samples_per_ray",
        "train/candidates_per_ray",
        "train/occupancy",
        "train/seconds",
        "lr/grid",
        "lr/network",
    }
    assert every_log <= tags
    for tag in every_log:
        assert [event.step for event in events.Scalars(tag)] == [5, 10, 15, 20, 25, 30], tag
    assert [(event.step, event.value) for event in events.Scalars("stage/resolution")] == [(0, 12), (20, 16)]
    assert "stage/vertices" in tags
    assert [event.step for event in events.Scalars("PSNR/previewed_views")] == [15, 30]
    metrics = read_metrics(finished[0])
    assert all(event.value > 0 for event in events.Scalars("train/rays_per_second"))
    seconds = [event.value for event in events.Scalars("train/seconds")]
    assert seconds == sorted(seconds)
    assert seconds[-1] <= metrics["train_seconds"]


def test_events_hold_pictures_and_configuration(finished, events):
    assert sorted(events.Tags()["images"]) == ["test/r_0", "test/r_100"]
    pictures = events.Images("test/r_0")
    assert [picture.step for picture in pictures] == [15, 30]
    assert (pictures[0].width, pictures[0].height) == (800, 800), "render, truth, error and depth, of 50 pixels"
    text = next(tag for tag in events.Tags()["tensors"] if tag.startswith("config"))
    content = events.Tensors(text)[0].tensor_proto.string_val[0].decode()
    assert "resolution: 16" in content
    assert "grid_lr: 0.2" in content
    assert "${" not in content, "interpolations must be resolved"
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    columns = plugin.FromString(content).session_start_info.hparams
    assert columns["final/psnr"].number_value == pytest.approx(read_metrics(finished[0])["psnr"])
    assert (columns["model"].string_value, columns["trainer.log_every"].number_value) == ("dense", 5)
    assert "trainer.chunk" not in columns, "which was not given"


def test_the_log_names_the_choices_and_the_result(finished):
    directory, output = finished
    assert "scene=lego model=dense trainer=smoke" in output
    assert "are the defaults" not in output, "the trainer is another"
    assert "lego: 24 train views, 50 x 50" in output
    assert f"PSNR {read_metrics(directory)['psnr']:.2f} dB" in output
    assert "Traceback" not in output
    assert "Warning" not in output
    logged = (directory / "train.log").read_text().splitlines()[-1]
    assert re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\]\[voxelfield\.runs\.results\]\[INFO\] - ", logged)
    *lines, blank, header, results, between, view, export, report = output.splitlines()
    assert blank == between == ""
    assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in lines), "the time of day and a message"
    assert lines[-1][9:] == logged.partition(" - ")[2]
    metrics = read_metrics(directory)
    assert header.split() == ["PSNR", "SSIM", "seconds", "folder"]
    assert results.split() == [
        *(f"{metrics['psnr']:.2f}", "dB", f"{metrics['ssim']:.3f}", f"{metrics['train_seconds']:.1f}", str(directory))
    ]
    assert view == f"voxelfield view {directory}"
    assert export == f"voxelfield export {directory} --mesh mesh.glb"
    assert report == f"voxelfield report {directory}"


def test_a_run_that_is_resumed_keeps_its_settings(finished, tmp_path):
    directory, _ = finished
    result = warm_python.run("train.py", f"resume={directory}", "trainer.steps=31", f"hydra.run.dir={tmp_path}")
    assert result.returncode == 0, result.stdout + result.stderr
    before, after = (flattened(read_metrics(each)["settings"]) for each in (directory, tmp_path))
    changed = {"resume": str(directory), "trainer.steps": 31}
    assert {key: value for key, value in after.items() if value != before[key]} == changed
    again = resumed_overrides([f"resume={tmp_path}"])
    assert "trainer.steps=31" in again, "the next one needs only the folder"
    assert not {"trainer.steps=30", f"resume={directory}"} & set(again)


def test_given_settings_replace_those_of_the_run_that_is_resumed(tmp_path):
    records = tmp_path / ".hydra" / "overrides.yaml"
    records.parent.mkdir()
    recorded = ["scene=folder", "data.root='/a'", "trainer=fast", "trainer.steps=9", "+trainer.new=1", "model=sh"]
    records.write_text(json.dumps([*recorded, "resume=other", "hydra.callbacks.x._target_=os.abort"]))
    for given, kept in (
        ((f"resume={tmp_path}",), recorded),
        ((f"resume='{tmp_path}/checkpoint_0000001.pt'", "trainer.steps=3"), [*recorded[:3], *recorded[4:]]),
        (("trainer=best", f"resume={tmp_path}"), ["scene=folder", "data.root='/a'", "model=sh"]),
        (("bricks", f"+resume={tmp_path}"), recorded[2:]),
        (("resume=auto",), []),
        (("resume=null",), []),
        ((f"resume={tmp_path / 'nowhere' / 'last.pt'}",), []),
        (("model=sh",), []),
    ):
        assert resumed_overrides(given) == kept, given
    records.write_text("{")
    with pytest.raises(ValueError, match="must be a list in YAML"):
        resumed_overrides([f"resume={tmp_path}"])


def test_help_lists_every_setting_with_its_value_and_meaning(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["--help", "bricks", "device=cpu", "model=sh", "trainer=fast", "trainer.steps=77"]) == 0
    text = capsys.readouterr().out
    config = preset("model=sh", "trainer=fast", "trainer.steps=77", device="cpu", name="train_cpu")
    keys = flattened(dataclasses.asdict(config))
    assert [key for key, _, meaning in described(config) if not meaning] == []
    lines = text.partition("Settings")[2].splitlines()[2:-2]
    assert [line.split("=")[0].strip() for line in lines] == list(keys)
    assert max(map(len, lines)) <= 100
    assert re.search(r"^  trainer\.steps=77 +Number of optimizer steps$", text, re.MULTILINE)
    assert re.search(r"^  trainer=.*\bfast\b", text, re.MULTILINE)
    assert text.count("\n  voxelfield train") == 10
    assert main(["trainer.steps=0", "--help"]) == 2
    assert capsys.readouterr().err == "trainer.steps must be at least 1, got 0\n"


def test_a_finished_run_is_resumed_with_more_steps(finished, tmp_path):
    directory, _ = finished
    output = train(
        f"resume={directory}", "trainer.steps=34", "trainer.evaluation.save_images=false", f"hydra.run.dir={tmp_path}"
    )
    assert "resumed at step 30" in output
    metrics, before = read_metrics(tmp_path), read_metrics(directory)
    assert metrics["steps"] == 34
    assert metrics["resolution"] == before["resolution"]
    assert metrics["train_seconds"] > before["train_seconds"]
    assert load_checkpoint(tmp_path)["step"] == 34
    assert not (tmp_path / "test").exists()
    assert not (tmp_path / "orbit.mp4").exists()


# ------------------------------------------------------------------------------------------------------- stopping


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_the_run_can_go_on(tmp_path):
    directory = tmp_path / "first"
    options = ("trainer.evaluation.save_images=false", "trainer.preview_every=0", "logger=none")
    endless = command("trainer.steps=1000000", "trainer.checkpoint_every=50", *options, f"hydra.run.dir={directory}")
    running = warm_python.start(*endless[1:], merged=True)
    wait_for_checkpoint(running, directory)
    running.send_signal(signal.SIGINT)
    status, output, _ = finish(running)
    assert status == 130, output
    stopped = re.search(r"stopped after step (\d+); continue with: voxelfield train resume=(\S+)", output)
    assert stopped, output
    step, advice = int(stopped[1]), stopped[2]
    assert step >= 50
    assert Path(advice) == checkpoint_path(directory, step)
    assert load_checkpoint(directory)["step"] == step
    assert not (directory / "metrics.json").exists()

    again = tmp_path / "second"
    output = train(f"resume={advice}", f"trainer.steps={step + 3}", *options, f"hydra.run.dir={again}")
    assert f"resumed at step {step}" in output
    assert read_metrics(again)["steps"] == step + 3


# --------------------------------------------------------------------------------------------------------- sweeps


def test_a_sweep_makes_a_run_directory_for_each_choice(tmp_path):
    train("-m", "model=dense,sh", "logger=none", "trainer.steps=8", f"hydra.sweep.dir={tmp_path}")
    runs = sorted(path.parent for path in tmp_path.glob("*/metrics.json"))
    assert [run.name for run in runs] == ["0", "1"]
    kinds = [OmegaConf.load(run / ".hydra" / "config.yaml").model.kind for run in runs]
    assert kinds == ["dense", "sh"]
    for run in runs:
        assert read_metrics(run)["steps"] == 8
        assert read_metrics(run)["psnr"] > 5
        assert list((run / "test").glob("*.png"))
        assert not list(run.rglob("events.out.*")), "logger=none"
        assert not (run / "orbit.mp4").exists(), "video_frames=0"
    # density and 3 * (degree + 1)**2 coefficients, against density and 11 features
    fields = [load_checkpoint(run)["model"] for run in runs]
    grids = [[value for name, value in field.items() if name.endswith("features")] for field in fields]
    assert [{grid.shape[-1] for grid in levels} for levels in grids] == [{12}, {28}]


@pytest.mark.slow
def test_runs_of_a_sweep_may_run_at_once(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    options = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", f"hydra.sweep.dir={tmp_path}")
    train("-m", "seed=0,1,2", "model=dense", "logger=none", "trainer.steps=8", *options)
    assert sorted(path.parent.name for path in tmp_path.glob("*/metrics.json")) == ["0", "1", "2"]
    assert len({read_metrics(tmp_path / str(number))["psnr"] for number in range(3)}) == 3


# ------------------------------------------------------------------------------------------------------- mistakes


def test_a_missing_scene_is_one_clear_message(tmp_path):
    output = train(f"data.root={tmp_path / 'nowhere'}", f"hydra.run.dir={tmp_path / 'run'}", status=2)
    assert "Traceback" not in output
    assert len([line for line in output.splitlines() if " error: " in line]) == 1
    assert output.count("scene must be in a folder of scenes, got 'lego'") == 1
    assert str(tmp_path / "nowhere" / "lego") in output
    assert "voxelfield download lego" in output
    assert "scene=bricks" in output
    assert not (tmp_path / "run").exists(), "a run that is refused leaves its directory behind"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.stpes=3", "configuration has no key trainer.stpes; did you mean trainer.steps?"),
        (
            "trainer=fst",
            "trainer must be one of auto, best, cpu, default, fast, few_photographs, "
            "forward_facing, many_photographs, many_photographs_best, sh, smoke, got 'fst'",
        ),
        ("seed=abc", "seed must be an integer, got 'abc'"),
        ("device=cuda", "no CUDA device, got 'cuda'"),
        ("resume=/nowhere/at/all", "/nowhere/at/all does not exist"),
    ],
)
def test_a_mistake_is_all_that_is_written_to_stderr(override, message, tmp_path):
    result = warm_python.run("train.py", override, f"hydra.run.dir={tmp_path / 'run'}")
    assert result.returncode == 2, result.stdout + result.stderr
    (line,) = result.stderr.splitlines()
    assert message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("overrides", "told"), [((), True), (("trainer=smoke",), False), (("model=sh",), False)])
def test_the_defaults_without_a_gpu_are_told_where_they_run(overrides, told, tmp_path):
    missing = (f"data.root={tmp_path / 'nowhere'}", f"hydra.run.dir={tmp_path / 'run'}")
    result = warm_python.run("train.py", "scene=lego", *overrides, *missing)
    assert result.returncode == 2, result.stdout + result.stderr
    assert ("on a CPU, model=dense and trainer=cpu are the defaults" in result.stdout) == told


def test_a_folder_is_a_scene_without_any_settings(tmp_path):
    folder = tmp_path / "somebody's scenes" / "my, capture"
    folder.mkdir(parents=True)
    meta = json.loads((FIXTURE / "transforms_train.json").read_text())
    shutil.copytree(FIXTURE / "train", folder / "train")
    (folder / "transforms.json").write_text(json.dumps(meta))
    options = ("trainer=smoke", "trainer.steps=5", "trainer.image_size=25", "trainer.evaluation.views=null")
    train(f"scene={folder}", *options, f"hydra.run.dir={tmp_path / 'run'}")
    metrics = read_metrics(tmp_path / "run")
    assert metrics["scene"] == "my, capture"
    assert (metrics["split"], metrics["views"]) == ("test", 3)
    run = voxelfield.load(tmp_path / "run", "cpu")
    assert torch.equal(torch.tensor(run.config.scene.aabb), voxelfield.load_scene(folder).aabb)
    assert verbs.main(["eval", str(tmp_path / "run"), "--device", "cpu"]) == 0


@pytest.mark.parametrize("override", ["scene=", "scene=bricks", "scene=nowhere", "seed=data"])
def test_what_names_no_folder_stays_as_it_is(override, tmp_path, monkeypatch):
    for name in ("data", "bricks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "transforms.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert with_scene_folder([override]) == ([override], None)
    for path, name in (*((path, "data") for path in ("data", "./data", "data/", "~/data")), ("./bricks", "bricks")):
        replaced, found = with_scene_folder([f"scene={path}"])
        assert replaced == ["scene=folder", f"scene.name='{name}'", f"data.root='{tmp_path}'"]
        assert (found.folder, found.formats[0].name) == (tmp_path / name, "nerfstudio or instant-ngp")


@pytest.mark.parametrize(
    ("scene", "message"),
    [
        ("captures/scan2", "got 'captures/scan2', which does not exist; did you mean captures/scan1?"),
        ("catpures/scan1", "got 'catpures/scan1', which does not exist; did you mean captures/scan1?"),
        ("mine/scan1", "got 'mine/scan1', which does not exist, as mine does not"),
        ("captures/scan1/transforms.json", "which is a file; it is a part of the scene {folder}/captures/scan1"),
        ("./notes.txt", "got './notes.txt', which is a file"),
        ("captures", "got captures; its folder captures/scan1 is a scene"),
        ("captures/scan1/images", "images; it is a part of the scene {folder}/captures/scan1"),
        (f"captures/{300 * 'x'}", ": File name too long"),
    ],
)
def test_a_path_that_is_no_scene_is_named_with_its_trouble(scene, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "captures" / "scan1" / "images").mkdir(parents=True)
    (tmp_path / "captures" / "scan1" / "transforms.json").touch()
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    for argument in (f"scene={scene}", scene):
        assert main(["seed=1", argument]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert message.format(folder=tmp_path) in line


def test_a_scene_may_be_given_by_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b=c").mkdir(parents=True)
    assert with_scene_folder(["lego", "seed=1,2"]) == (["scene=lego", "seed=1,2"], None)
    assert capsys.readouterr().err == "lego is read as scene=lego\n"
    (tmp_path / "a" / "b=c" / "transforms.json").touch()
    replaced, found = with_scene_folder(["seed=1", "a/b=c"])
    assert found.folder == tmp_path / "a" / "b=c"
    assert replaced == ["seed=1", "scene=folder", "scene.name='b=c'", f"data.root='{tmp_path / 'a'}'"]
    for twice in (["a/b", "a/b=c"], ["a/b", "a/b"], ["scene=lego", "a/b"]):
        with pytest.raises(ValueError, match=f"scene must be given once, got {' and '.join(twice)}$"):
            with_scene_folder(twice)
    for untouched in (["hydra/launcher=joblib"], ["~logger"], ["+x"], [""]):
        assert with_scene_folder(untouched) == (untouched, None)


def test_a_scene_without_settings_that_is_found_by_its_name_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "chair").mkdir(parents=True)
    (tmp_path / "data" / "chair" / "transforms.json").touch()
    assert main(["scene=chair"]) == 2
    assert capsys.readouterr().err.endswith("got 'chair': scene=data/chair is a scene of that name\n")


def test_a_folder_whose_name_is_read_as_a_reference_is_refused(tmp_path, monkeypatch):
    (tmp_path / "${oc.env:TOKEN}" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "secret")
    for folder in ("${oc.env:TOKEN}", "${oc.env:TOKEN}/inside"):
        with pytest.raises(ValueError, match=r"scene must be a folder without \$\{ in its path") as raised:
            with_scene_folder([f"scene={folder}"])
        assert "secret" not in str(raised.value)


@pytest.fixture(scope="module")
def places() -> dict[int, Scene]:
    """Scenes of photographs of a place, by their number."""
    train = load_blender(FIXTURE, LoadOptions(splits=("train",), downscale=20)).train
    scenes = {}
    for count in (99, 100):
        cameras = train.cameras[[index % len(train) for index in range(count)]]
        split = Split(train.images[:1].expand(count, -1, -1, -1), cameras, tuple(map(str, range(count))))
        scenes[count] = Scene("place", torch.tensor([[-1.0] * 3, [1.0] * 3]), {"train": split}, bounded=False)
    return scenes


@pytest.mark.parametrize(
    ("count", "overrides", "expected"),
    [
        (99, (), "few_photographs"),
        (99, ("trainer.finest_resolution=320",), "few_photographs"),
        (100, (), "many_photographs"),
        (100, ("trainer=auto", "model=pyramid", "seed=1", "camera=none"), "many_photographs"),
        (100, ("camera=refine",), "many_photographs"),
        (100, ("model.resolutions=[16,32,320]",), "many_photographs"),
        (100, ("trainer=fast",), "fast"),
        (99, ("trainer=default",), "default"),
        (100, ("model=sh",), "sh"),
        (100, ("model=dense",), "default"),
    ],
)
def test_photographs_of_a_place_have_trainers_of_their_own(places, count, overrides, expected, tmp_path, monkeypatch):
    given = ("warp.boxes=4", *overrides)
    settings = settings_of_run(monkeypatch, tmp_path, *given, scene=places[count])
    assert settings == preset(*given, f"trainer={expected}", device="cpu", name="train")


def test_settings_apply_to_the_trainer_that_the_scene_chooses(places, tmp_path, monkeypatch):
    steps = ("trainer.steps=500", "trainer.loss.tv_until=${trainer.steps}")
    overrides = ("warp.boxes=4", *steps, "++trainer.finest_resolution=320")
    settings = settings_of_run(monkeypatch, tmp_path, *overrides, scene=places[100])
    assert settings == preset(*overrides, "trainer=many_photographs", device="cpu", name="train")
    assert (settings.trainer.loss.tv_until, settings.model.resolutions[-1]) == (500, 320)
    recorded = OmegaConf.load(tmp_path / ".hydra" / "config.yaml")
    assert parse(RunConfig, recorded) == settings
    given = OmegaConf.load(tmp_path / ".hydra" / "overrides.yaml")
    assert given == [*overrides, "device=cpu", "trainer=many_photographs"]


def test_a_scene_that_ends_at_its_box_is_not_loaded_to_choose_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(run_training, "load_configured_scene", lambda *_, **__: pytest.fail("loaded"))
    before = list(sys.argv)
    assert settings_of_run(monkeypatch, tmp_path) == preset("trainer=default", device="cpu", name="train")
    assert sys.argv == before, "the command line of this process is not that of the run"


def test_a_capture_of_which_nothing_is_held_out_is_judged_by_its_training_views(tmp_path):
    folder = tmp_path / "capture"
    shutil.copytree(FIXTURE / "train", folder / "train")
    shutil.copy(FIXTURE / "transforms_train.json", folder / "transforms.json")
    options = ("trainer=smoke", "trainer.steps=5", "trainer.image_size=25", "data.holdout=0")
    train(f"scene={folder}", *options, f"hydra.run.dir={tmp_path / 'run'}")
    metrics = read_metrics(tmp_path / "run")
    assert (metrics["split"], metrics["views"]) == ("train", 2)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "train"),
        (["device=cpu"], "train_cpu"),
        (["device=cpu", "device=cuda"], "train"),
        (["+device=cpu"], "train_cpu"),
        (["device=cpu,cuda"], "train"),
    ],
)
def test_the_device_that_is_asked_for_decides_on_the_defaults(overrides, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    chosen = []

    monkeypatch.setattr("voxelfield.cli.train._run_hydra", lambda configuration, *_: chosen.append(configuration))
    assert main(overrides) == 0
    assert chosen == [expected]


def test_choosing_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"device must be cpu where .*no CUDA device, got 'cuda:1'"):
        choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    expected = "device must be cuda:0 to cuda:1, as torch finds 2 CUDA devices, got 'cuda:2'"
    with pytest.raises(ValueError, match=expected):
        choose_device("cuda:2")
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:<index>, got 'gpu'"):
        choose_device("gpu")


def test_training_and_evaluation_state_what_stored_values_cost(tmp_path):
    shape = ("model=pyramid", "model.resolutions=[4,8,12]", "model.width=16", "model.shading=deferred")
    output = train(*shape, f"hydra.run.dir={tmp_path}")
    metrics = read_metrics(tmp_path)
    assert metrics["drawn_by"] == "render_baked_image"
    stated = "2 views: mean PSNR "
    (line,) = (line for line in output.splitlines() if stated in line)
    assert len(line) <= 100, "it fits into a terminal"
    figures = tmp_path / "figures.json"
    evaluation = ("-m", "voxelfield", "eval", str(tmp_path), "--views", "2", "--json", str(figures))
    evaluated = warm_python.run(*evaluation, merged=True)
    assert stated in evaluated.stdout
    assert json.loads(figures.read_text())["baking_cost"] == pytest.approx(metrics["baking_cost"], abs=1e-3)
    evaluated = warm_python.run(*evaluation, "--backend", "render_view", merged=True)
    assert "stored values" not in evaluated.stdout
    assert "baking_cost" not in json.loads(figures.read_text())


# ------------------------------------------------------------------------------------------------------------ GPU


@pytest.mark.cuda
def test_a_run_on_a_gpu(tmp_path):
    narrow = ("trainer.precision=float16", "trainer.loss_scale=1024")
    shape = ("model=pyramid", "model.resolutions=[4,8,12]")
    output = train("device=cuda", *shape, *narrow, f"hydra.run.dir={tmp_path}", gpu=True)
    assert re.search(r"training needs about \d+\.\d\d GiB \(parameters .*\) of GPU memory", output)
    metrics = read_metrics(tmp_path)
    assert metrics["device"] == torch.cuda.get_device_name(0)
    assert metrics["drawn_by"] == "render_pyramid_image"
    assert metrics["peak_gpu_gib"] > 0
    assert metrics["psnr"] > 5
