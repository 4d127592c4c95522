from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from voxelfield.components.logger import LoggerSettings, NullLogger, RunLogger
from voxelfield.components.registry import registered
from voxelfield.components.tensorboard import TensorBoardLogger
from voxelfield.installed import MissingPackageError
from voxelfield.runs.train import build_logger, train_as_configured
from voxelfield.settings import RunConfig, preset
from voxelfield.settings.schema import LoggerConfig, parse_recorded

pytestmark = pytest.mark.usefixtures("event_files_in_order")


def _events(directory):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(directory), size_guidance={"tensors": 0, "images": 0})
    return events.Reload()


def test_scalars_text_and_pictures_arrive(tmp_path, device):
    picture = torch.rand(4, 6, 3, device=device)
    logger: RunLogger = TensorBoardLogger(tmp_path)
    logger.scalars(10, {"loss/rgb": 0.5, "train/psnr": 20.0})
    logger.scalars(20, {"loss/rgb": 0.25})
    logger.images(20, "test/panel", picture)
    logger.text("config", "scene: lego")
    logger.close()
    events = _events(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("loss/rgb")] == [(10, 0.5), (20, 0.25)]
    assert [(event.step, event.value) for event in events.Scalars("PSNR/training_pixels")] == [(10, 20.0)]
    assert min(events.Tags()["scalars"]).startswith("PSNR/"), "TensorBoard shows charts in this order"
    image = events.Images("test/panel")[0]
    assert (image.step, image.height, image.width) == (20, 4, 6)
    (text,) = events.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0] == b"scene: lego"


def test_hyperparameters_are_one_run_with_its_final_metrics(tmp_path):
    plugin_data_pb2 = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    logger = TensorBoardLogger(tmp_path)
    logger.scalars(300, {"test/psnr": 29.0})
    config = {"lr": "0.1", "scene": {"name": "lego"}, "sizes": [16, 31], "tv": True, "views": None}
    logger.hyperparameters(config, {"psnr": 30.5, "ssim": 0.9})
    logger.close()

    assert [file.name.split(".")[0] for file in tmp_path.rglob("*")] == ["events"]
    events = _events(tmp_path)
    assert events.Tags()["scalars"] == ["PSNR/previewed_views"], "a final metric would be a chart of one point"
    content = events.PluginTagToContent("hparams")
    parsed = {tag: plugin_data_pb2.HParamsPluginData.FromString(value) for tag, value in content.items()}
    columns = parsed["_hparams_/session_start_info"].session_start_info.hparams
    assert (columns["final/psnr"].number_value, columns["final/ssim"].number_value) == (30.5, 0.9)
    assert columns["lr"].number_value == 0.1
    assert columns["scene.name"].string_value == "lego"
    assert columns["sizes"].string_value == "[16, 31]"
    assert columns["tv"].string_value == "true"
    assert columns["views"].string_value == "null"
    assert "_hparams_/session_end_info" in parsed


@pytest.mark.parametrize(
    ("first_step", "shown"),
    [(2, [(1, 1.0), (2, 2.0), (3, 30.0)]), (0, [(3, 30.0)]), (None, [(1, 1.0), (2, 2.0), (3, 3.0), (3, 30.0)])],
)
def test_resuming_hides_what_will_be_logged_again_and_nothing_else(tmp_path, first_step, shown):
    first = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3):
        first.scalars(step, {"loss/rgb": float(step)})
    first.close()
    second = TensorBoardLogger(tmp_path, first_step)
    second.scalars(3, {"loss/rgb": 30.0})
    second.close()
    assert [(e.step, e.value) for e in _events(tmp_path).Scalars("loss/rgb")] == shown


def test_missing_tensorboard_names_the_ways_out(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    wanted = r'tensorboard must be installed .*, unless logger=none: pip install "voxelfield\[train\]"'
    with pytest.raises(MissingPackageError, match=wanted):
        TensorBoardLogger(tmp_path)


def test_null_logger_takes_every_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger: RunLogger = NullLogger()
    logger.scalars(1, {"loss/rgb": 1.0})
    logger.images(1, "panel", torch.zeros(1, 1, 3))
    logger.text("config", "")
    logger.hyperparameters({}, {})
    logger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_is_read_after_the_one_before_although_the_clock_was_set_back(tmp_path):
    for value, first_step in ((1.0, None), (2.0, 1)):
        logger = TensorBoardLogger(tmp_path, first_step)
        logger.scalars(2, {"train/psnr": value})
        logger.close()
        if first_step is None:
            (path,) = tmp_path.glob("events*")
            path.rename(path.with_name("events.out.tfevents.9999999999.host.1.0"))
    events = _events(tmp_path)
    assert [event.value for event in events.Scalars("PSNR/training_pixels")] == [2.0]


# ------------------------------------------------------------------------------------------------ other libraries

LIBRARIES = ("wandb", "mlflow", "trackio", "rerun")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_an_error_before_the_scene_is_loaded(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    settings = preset(f"logger=[tensorboard,{name}]", "scene.name=absent", device="cpu")
    wanted = rf'{name} must be installed to record a run with logger={name}: pip install "voxelfield\[{name}\]"'
    with pytest.raises(MissingPackageError, match=wanted):
        train_as_configured(settings, tmp_path / "run", tmp_path)
    assert not (tmp_path / "run").exists()


def test_settings_of_loggers_in_a_file_are_not_needed_to_read_it():
    recorded = {"seed": 3, "logger": {"tensorboard": True, "of_another_package": {"where": "here"}}}
    assert parse_recorded(recorded) == RunConfig(seed=3)


def written_by_wandb(folder: Path) -> dict[str, list[float]]:
    """Reads the log of an offline run, a sequence of protocol buffers that another process finishes in the end."""
    (picture,) = folder.glob("run/wandb/offline-run-*/files/media/images/test/panel_*.png")
    assert Image.open(picture).size == (6, 4)
    (log,) = folder.glob("run/wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 20
    while b"final/psnr" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b'"voxels_per_step":' in log.read_bytes(), "the settings"
    found: dict[str, list[float]] = {}
    for tag, value in re.findall(rb"\x12.([\w/]+)\x82\x01.([\d.]+)", log.read_bytes(), re.DOTALL):
        found.setdefault(tag.decode(), []).append(float(value))
    return {tag: list(dict.fromkeys(values)) for tag, values in found.items()}  # the summary repeats them


def written_by_mlflow(folder: Path) -> dict[str, list[float]]:
    client = pytest.importorskip("mlflow").MlflowClient()
    (experiment,) = (each for each in client.search_experiments() if each.name == "voxelfield")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == f"{folder.name} run"
    assert run.info.status == "FINISHED"
    assert run.data.params["trainer.steps"] == str(RunConfig().trainer.steps)
    (picture,) = folder.rglob("artifacts/images/*panel*.png")
    assert Image.open(picture).size == (6, 4)
    history = {tag: client.get_metric_history(run.info.run_id, tag) for tag in run.data.metrics}
    assert [each.step for each in history["loss/rgb"]] == [10, 20]
    return {tag: [each.value for each in values] for tag, values in history.items()}


def written_by_trackio(folder: Path) -> dict[str, list[float]]:
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    name = f"{folder.name} run"
    (picture,) = folder.rglob("media/**/20/*.png")
    assert Image.open(picture).size == (6, 4)
    records = storage.get_logs("voxelfield", name)
    tags = {tag for record in records for tag in record if "/" in tag and isinstance(record[tag], float)}
    return {tag: [record[tag] for record in records if tag in record] for tag in tags}


def written_by_rerun(folder: Path) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "rerun", "rrd", "print", "-vvv", folder / "run" / "rerun_0000000.rrd"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "/test/panel" in text
    assert "trainer:" in text, "the settings"
    found: dict[str, list[float]] = {}
    for tag in ("loss/rgb", "train/psnr", "final/psnr"):
        (table,) = re.findall(rf"/{tag} - .*?(?=\nChunk|\Z)", text, re.DOTALL)
        found[tag] = [float(value) for value in re.findall(r"\[(\d+\.\d+)\]", table)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_records_numbers_pictures_settings_and_final_metrics(name, tmp_path, monkeypatch):
    """In the library's own offline mode, without connecting to anything."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # so that the small package suffices
    pytest.importorskip(name)  # not before: Trackio reads its variable when it is imported
    (tmp_path / "run").mkdir()
    logger = build_logger(RunConfig(logger=LoggerConfig(**{name: True})), tmp_path / "run", 0)
    logger.text("config", "```yaml\ntrainer:\n  steps: 20\n```")
    logger.scalars(10, {"loss/rgb": 0.5, "train/psnr": 20.0})
    logger.images(20, "test/panel", torch.rand(4, 6, 3))
    logger.scalars(20, {"loss/rgb": 0.25})
    logger.hyperparameters({"trainer": "smoke"}, {"psnr": 30.5})
    logger.flush()
    logger.close()
    logger.close()
    found = globals()[f"written_by_{name}"](tmp_path)
    assert found["loss/rgb"] == [0.5, 0.25]
    assert found["train/psnr"] == [20.0]
    assert found["final/psnr"] == [30.5]


def test_every_logger_is_a_choice_of_its_own():
    names = {kind.name for kind in registered() if issubclass(kind, LoggerSettings)}
    assert names == {"tensorboard", *LIBRARIES}
    for name in names:
        chosen = preset(f"logger={name}", device="cpu").logger
        assert [other for other in sorted(names) if getattr(chosen, other)] == [name]
