"""A finished run loaded again, and benchmarks/render.py, which times and judges the frames of one."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from quick_presets import preset
from small_sessions import fitted

import voxelfield
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene
from voxelfield.evaluation.evaluation import evaluate_split
from voxelfield.export import save_model
from voxelfield.models.dense import DenseConfig
from voxelfield.rendering.lens import Lens
from voxelfield.trained import trained_model
from voxelfield.trained.checkpoint_file import (
    CheckpointError,
    check_state,
    load_checkpoint,
    pack_checkpoint,
    write_checkpoint,
)
from voxelfield.training.session import Session

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "lego"

TINY = (
    "scene=lego",
    "trainer=smoke",
    "trainer.steps=6",
    "trainer.visible_samples=4096",
    "trainer.preview_every=0",
    "trainer.checkpoint_every=0",
    "trainer.stages=[{step: 0, resolution: 8, crop: true}, {step: 4, resolution: 12, crop: true}]",
    "trainer.occupancy.resolution=12",
    "trainer.occupancy.start=2",
    "trainer.occupancy.every=2",
    "trainer.render.min_weight=1e-4",
    "trainer.evaluation.supersampling=2",
)
MODELS = {
    # On CUDA its networks run in 16 bits whatever the precision: their gradients must not underflow.
    "render_pyramid_image": (
        "model=pyramid",
        "model.resolutions=[4,8,12]",
        "model.width=16",
        "trainer.loss_scale=4096",
    ),
    "render_grid_image": ("model=sh", "model.resolutions=[4,12]"),
    "render_view": ("model=dense",),
}
backends = pytest.mark.parametrize("backend", MODELS)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return load_blender(FIXTURE, LoadOptions(downscale=4))


@pytest.fixture
def train(scene, tmp_path):
    """Trains for some steps into a run directory."""

    def make(backend: str, device: torch.device, *overrides: str) -> Session:
        settings = preset("model=dense", "trainer=cpu", *TINY, *MODELS[backend], *overrides, f"device={device}")
        return fitted(Session(scene, settings, output=tmp_path / "run"))

    return make


def test_buffers_that_are_not_saved_are_computed_again(train, monkeypatch):
    output = train("render_view", torch.device("cpu")).output
    build = DenseConfig.build

    def with_table(model, aabb, resolutions, device):
        field = build(model, aabb, resolutions, device)
        field.decoder.register_buffer("table", torch.arange(3.0, device=device), persistent=False)
        return field

    monkeypatch.setattr(DenseConfig, "build", with_table)
    loaded = voxelfield.load(output, "cpu")
    assert loaded.field.decoder.table.tolist() == [0, 1, 2]
    assert loaded.field.grid.features.std() > 0


def test_a_checkpoint_of_a_stranger_has_plain_settings_and_sound_tensors(train, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    state = load_checkpoint(train("render_view", torch.device("cpu")).output)
    state = {name: state[name] for name in ("step", "config", "model")}
    state["config"]["scene"]["name"] = "${oc.env:TOKEN}"
    write_checkpoint(tmp_path / "last.pt", pack_checkpoint(state))
    loaded = voxelfield.load(tmp_path / "last.pt", "cpu")
    assert loaded.config.scene.name == "${oc.env:TOKEN}"
    assert "secret" not in repr(loaded)
    seen = state["model"]["occupancy.density_ema_max"]
    for changes, message in (
        ({"occupancy.density_ema_max": seen.half()}, "occupancy.density_ema_max must be torch.float32"),
        ({"field.grid.aabb": torch.zeros(2, 3)}, "field.grid.aabb must be finite with low < high"),
    ):
        write_checkpoint(tmp_path / "last.pt", pack_checkpoint(state | {"model": {**state["model"], **changes}}))
        with pytest.raises(CheckpointError, match=message):
            voxelfield.load(tmp_path / "last.pt", "cpu")
    # Copying makes these bytes ones, so pack_checkpoint cannot pack them.
    odd = {"occupancy.occupied": torch.full_like(loaded.occupancy.occupied, 7, dtype=torch.uint8).view(torch.bool)}
    with pytest.raises(ValueError, match=r"occupancy\.occupied must contain bools, got other bytes"):
        check_state(loaded.model, odd)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@backends
def test_a_loaded_run_draws_what_the_trainer_draws(train, scene, device, backend, precision):
    trainer = train(backend, device, f"trainer.precision={precision}")
    loaded = voxelfield.load(str(trainer.output), str(device))
    assert loaded.steps == 6
    assert loaded.config.scene.name == "lego"
    assert not any(parameter.requires_grad for parameter in loaded.field.parameters())
    renderer = loaded.renderer()
    assert renderer.backend == trainer.renderer().backend == backend
    for index in range(2):
        view, expected = renderer.view(scene.test.cameras, index), trainer.renderer().view(scene.test.cameras, index)
        assert expected.rgb.std() > 0.01
        torch.testing.assert_close(view.rgb, expected.rgb, atol=1e-5, rtol=0)
        torch.testing.assert_close(view.depth, expected.depth, atol=1e-4, rtol=0)


def test_a_run_judges_itself_as_the_session_did(train, scene, device):
    session = train("render_grid_image", device)
    loaded = voxelfield.load(session.output, device)
    cameras = scene.test.cameras
    assert loaded.backend_for(cameras) == "render_grid_image"
    panoramas = replace(cameras, lens=Lens(["equirectangular"] * len(cameras), torch.zeros(len(cameras), 0)))
    assert loaded.backend_for(panoramas) == "render_view"
    found = loaded.evaluate(scene.test, views=3, progress=False)
    assert len(found.names) == 3
    assert found.psnr == pytest.approx(session.evaluate(views=3, progress=False).psnr, abs=1e-3)
    general = loaded.evaluate(scene.test, views=3, progress=False, backend="render_view")
    assert general.psnr == pytest.approx(found.psnr, abs=0.01)
    with pytest.raises(ValueError, match="backend must be render_grid_image or render_view for this field"):
        loaded.evaluate(scene.test, views=1, progress=False, backend="render_pyramid_image")
    with pytest.raises(ValueError, match="views must be an int of at least 1, got 0"):
        loaded.evaluate(scene.test, views=0)
    with pytest.raises(ValueError, match=r"views must be an int of at least 1, got 2\.5"):
        loaded.evaluate(scene.test, views=2.5)
    with pytest.raises(TypeError, match=r"split must be a Split, such as scene\.test, got 'test'"):
        loaded.evaluate("test")
    with pytest.raises(ValueError, match=r"points must have shape \(\.\.\., 3\), got \(3, 2\)"):
        loaded.density(torch.zeros(3, 2, device=device))
    folder = session.output / "views"
    loaded.evaluate(scene.test, views=1, images=str(folder), progress=False)
    assert len(list(folder.iterdir())) == 1


def test_a_run_says_what_drawing_from_stored_values_costs(train, scene, device, monkeypatch, caplog):
    general = train("render_view", device).result()
    assert general.baking_cost(scene.test, general.evaluate(scene.test, views=1, progress=False)) is None
    loaded = voxelfield.load(train("render_pyramid_image", device, "model.shading=deferred").output, device)
    evaluation = loaded.evaluate(scene.test, views=2, progress=False)
    stored, exact = evaluation.psnr, loaded.evaluate(scene.test, views=2, progress=False, backend="render_view").psnr
    assert stored != exact
    for least, level in ((exact - stored + 0.01, logging.INFO), (exact - stored - 0.01, logging.WARNING)):
        monkeypatch.setattr(trained_model, "_LARGE_COST", least)
        with caplog.at_level(logging.INFO, logger=trained_model.__name__):
            caplog.clear()
            assert loaded.baking_cost(scene.test, evaluation) == pytest.approx(exact - stored, abs=1e-6)
        (record,) = caplog.records
        assert record.levelno == level
        assert f"mean PSNR {stored:.2f} dB drawn from stored values, {exact:.2f} dB without" in record.message

    for error, words in (
        (torch.OutOfMemoryError("CUDA out of memory"), "not enough memory to measure what drawing from stored values"),
        (FloatingPointError("rendered view 'a' has 3"), "is not known: without them, rendered view 'a' has 3"),
    ):
        monkeypatch.setattr(trained_model, "evaluate_split", Mock(side_effect=error))
        assert loaded.baking_cost(scene.test, evaluation) is None
        assert words in caplog.text


def test_a_run_draws_a_path_and_goes_on_as_a_model_file(train, scene, device, tmp_path):
    run = train("render_grid_image", device).result()
    save_model(tmp_path / "model.safetensors", run, quality="exact")
    again = voxelfield.load(tmp_path / "model.safetensors", device)
    views = list(again.render_path(scene.test.cameras))
    assert len(views) == len(scene.test.cameras) > 1
    for index, view in enumerate(views):
        torch.testing.assert_close(view.rgb, run.render(scene.test.cameras, index).rgb, atol=2e-3, rtol=0)
    with pytest.raises(ValueError, match="quality must be"):
        save_model(tmp_path / "model.safetensors", run, quality="tiny")


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} contains no checkpoint"):
        voxelfield.load(tmp_path, torch.device("cpu"))


# --------------------------------------------------------------------------------------------------- the benchmark


@pytest.fixture
def render_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("render").main


@pytest.fixture
def incomplete(tmp_path):
    """A folder of scenes whose lego has images of 50 x 50, and lacks one of its four test images."""
    folder = tmp_path / "data" / "lego"
    (folder / "test").mkdir(parents=True)
    shutil.copy(FIXTURE / "transforms_test.json", folder)
    for name in ("r_0", "r_50", "r_150"):
        with Image.open(FIXTURE / "test" / f"{name}.png") as image:
            image.resize((50, 50)).save(folder / "test" / f"{name}.png")
    return folder.parent


@pytest.mark.slow
@backends
def test_frames_of_a_run_are_timed_and_judged(train, render_benchmark, incomplete, device, backend, tmp_path, capsys):
    overrides = (f"data.root={incomplete}", "data.missing_images=skip", "trainer.image_size=25")
    trainer = train(backend, device, *overrides)
    result = tmp_path / "figures" / "render.json"
    render_benchmark([str(trainer.output), "--device", device.type, "--quick", "--json", str(result)])
    written = json.loads(result.read_text())
    assert written["benchmark"] == "render"
    assert written["machine"]["torch"] == torch.__version__
    rows = written["rows"]
    assert [row["backend"] for row in rows] == list(dict.fromkeys([backend, "render_view"]))

    # The images' own resolution, not that of training; of the three that are there.
    split = load_blender(incomplete / "lego", LoadOptions(splits=("test",), missing_images="skip")).test
    for row in rows:
        assert row["size"] == [50, 50]
        assert row["frames"] == 3
        assert list(row["ms_per_view"]) == ["r_0", "r_50", "r_150"]
        assert row["fps"] == pytest.approx(1000 / row["ms"]["mean"])
        assert row["sampling"]["supersampling"] == 2
        assert row["sampling"]["pixel_averaging"] == "linear_light"
        assert row["steps_trained"] == 6
        renderer = voxelfield.load(trainer.output, device).renderer(row["backend"])
        expected = evaluate_split(renderer.view, split, trainer.model.background, progress=False)
        assert row["psnr"] == pytest.approx(expected.psnr, abs=1e-3)
        assert row["ssim"] == pytest.approx(expected.ssim, abs=1e-4)
        # One grid is straight where a sum of grids bends: these are drawn from one.
        assert row["off"] < (3e-3 if backend == "render_grid_image" else 1e-3)
        assert row["sampling"]["min_weight"] == 1e-4
    if device.type == "cpu":  # what the profiler can see of a GPU is up to its driver
        steps = {step["name"] for step in rows[0]["profile"]}
        assert ("voxelfield::composite" if backend == "render_view" else f"voxelfield::{backend}") in steps
    output = capsys.readouterr().out
    assert "lego, test: 3 frames of 50 x 50" in output
    assert (f"{backend}, a frame" in output) == bool(rows[0]["profile"])


@pytest.mark.slow
def test_frames_are_timed_with_the_settings_that_are_stated(train, render_benchmark, incomplete, tmp_path):
    overrides = (f"data.root={incomplete}", "data.missing_images=skip", "trainer.image_size=25")
    run, result = train("render_pyramid_image", torch.device("cpu"), *overrides).output, tmp_path / "render.json"
    stated = ["--supersampling", "1", "--min-weight", "0.2", "--only", "image", "--json", str(result)]
    render_benchmark([str(run), "--device", "cpu", *stated])
    (row,) = json.loads(result.read_text())["rows"]
    trained = voxelfield.load(run, "cpu")
    split = load_blender(incomplete / "lego", LoadOptions(splits=("test",), missing_images="skip")).test
    usual = evaluate_split(trained.renderer().view, split, trained.model.background, progress=False).psnr
    trained.model.sampling = replace(trained.model.sampling, supersampling=1, min_weight=0.2)
    expected = evaluate_split(trained.renderer().view, split, trained.model.background, progress=False).psnr
    assert row["psnr"] == pytest.approx(expected, abs=1e-3)
    assert abs(row["psnr"] - usual) > 0.01


def test_missing_images_are_an_error_unless_configured(train, render_benchmark, incomplete):
    trainer = train("render_grid_image", torch.device("cpu"), f"data.root={incomplete}")
    with pytest.raises(FileNotFoundError, match="1 of 4 images are missing"):
        render_benchmark([str(trainer.output), "--device", "cpu"])


def test_frames_must_be_some(render_benchmark, tmp_path, capsys):
    with pytest.raises(SystemExit):
        render_benchmark([str(tmp_path), "--views", "0"])
    assert "--views must be at least 1, got 0" in capsys.readouterr().err
