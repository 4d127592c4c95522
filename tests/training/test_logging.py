from __future__ import annotations

import builtins

import pytest
import torch

from voxelfield.installed import MissingPackageError
from voxelfield.training.logs import (
    NullLogger,
    RunLogger,
    TensorBoardLogger,
)


@pytest.fixture(autouse=True)
def _event_files_in_order(monkeypatch):
    """Of files that are begun in one second, TensorBoard reads the tenth of a process before the ninth."""
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))


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
    real_import = builtins.__import__

    def without_tensorboard(name, *arguments, **keywords):
        if name == "torch.utils.tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
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
