from __future__ import annotations

import builtins
import io
import logging

import pytest
import torch

from voxelfield.training.images import turbo
from voxelfield.training.logging import (
    ERROR_MAXIMUM,
    NullLogger,
    Progress,
    RunLogger,
    TensorBoardLogger,
    comparison_panel,
    flatten_config,
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
    assert [(event.step, event.value) for event in events.Scalars("train/psnr")] == [(10, 20.0)]
    image = events.Images("test/panel")[0]
    assert (image.step, image.height, image.width) == (20, 4, 6)
    (text,) = events.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0] == b"scene: lego"


def test_hyperparameters_are_one_run_with_its_final_metrics(tmp_path):
    plugin_data_pb2 = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    logger = TensorBoardLogger(tmp_path, chosen={"lr", "lr.kind"})
    logger.scalars(300, {"test/psnr": 29.0})
    config = {"lr": 0.1, "scene": {"name": "lego"}, "sizes": [16, 31], "tv": True}
    logger.hyperparameters(config, {"psnr": 30.5, "ssim": 0.9})
    logger.close()

    assert [file.name.split(".")[0] for file in tmp_path.rglob("*")] == ["events"]
    events = _events(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("final/psnr")] == [(300, 30.5)]
    content = events.PluginTagToContent("hparams")
    parsed = {tag: plugin_data_pb2.HParamsPluginData.FromString(value) for tag, value in content.items()}
    experiment = parsed["_hparams_/experiment"].experiment
    assert [info.name.tag for info in experiment.metric_infos] == ["final/psnr", "final/ssim"]
    assert {info.name for info in experiment.hparam_infos if info.differs} == {"lr"}
    columns = parsed["_hparams_/session_start_info"].session_start_info.hparams
    assert columns["lr"].number_value == 0.1
    assert columns["scene.name"].string_value == "lego"
    assert columns["sizes"].string_value == "[16, 31]"
    assert columns["tv"].string_value == "true"
    assert "_hparams_/session_end_info" in parsed


def test_custom_charts_are_laid_out(tmp_path):
    layout_pb2 = pytest.importorskip("tensorboard.plugins.custom_scalar.layout_pb2")
    TensorBoardLogger(tmp_path).close()
    (event,) = _events(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert list(charts.items()) == [
        ("PSNR", ["train/psnr", "test/psnr"]),
        ("loss terms", ["loss/.*"]),
        ("rays per second", ["train/rays_per_second"]),
    ]


def test_histograms_arrive_without_what_is_not_finite(tmp_path, device):
    logger: RunLogger = TensorBoardLogger(tmp_path)
    logger.histogram(10, "density", torch.tensor([0.5, 1.5, 1.6, float("nan"), float("inf")], device=device))
    logger.histogram(20, "density", torch.full((3,), float("nan"), device=device))
    logger.close()
    (event,) = _events(tmp_path).Histograms("density")
    counted = event.histogram_value
    assert (event.step, counted.num, counted.min, counted.max) == (10, 3, 0.5, pytest.approx(1.6))


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


def test_the_results_of_a_run_that_had_no_steps_left_are_those_of_its_last_step(tmp_path):
    logger = TensorBoardLogger(tmp_path, 30)
    logger.hyperparameters({"seed": 0}, {"psnr": 25.0})
    logger.close()
    assert [(e.step, e.value) for e in _events(tmp_path).Scalars("final/psnr")][-1] == (30, 25.0)


def test_missing_tensorboard_names_the_ways_out(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_tensorboard(name, *arguments, **keywords):
        if name == "torch.utils.tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    with pytest.raises(ImportError, match=r"pip install 'voxelfield\[train\]', or choose logger=none"):
        TensorBoardLogger(tmp_path)


def test_null_logger_takes_every_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger: RunLogger = NullLogger()
    logger.scalars(1, {"loss/rgb": 1.0})
    logger.images(1, "panel", torch.zeros(1, 1, 3))
    logger.histogram(1, "density", torch.zeros(1))
    logger.text("config", "")
    logger.hyperparameters({}, {})
    logger.close()
    assert list(tmp_path.iterdir()) == []


def test_flatten_config():
    nested = {"a": {"b": {"c": 1}, "d": [1, {"e": 2}]}, "f": None, "g": False, "h": 0.5, "i": "text", "j": {}}
    assert flatten_config(nested) == {
        "a.b.c": 1,
        "a.d": "[1, {'e': 2}]",
        "f": "null",
        "g": False,
        "h": 0.5,
        "i": "text",
    }


def test_panel_shows_render_truth_error_depth(device):
    height, width = 5, 7
    rgb, truth = torch.rand(2, height, width, 3, device=device).unbind()
    depth = torch.linspace(2, 6, height * width, device=device).reshape(height, width)
    opacity = torch.ones(height, width, device=device)
    opacity[0, :3] = 0.5
    panel = comparison_panel(rgb.requires_grad_(), truth, depth, opacity, (2.0, 6.0))
    assert panel.shape == (height, 4 * width, 3)
    assert not panel.requires_grad
    first, second, third, fourth = panel.split(width, dim=1)
    assert torch.equal(first, rgb)
    assert torch.equal(second, truth)
    torch.testing.assert_close(third, turbo((rgb - truth).abs().mean(-1) / ERROR_MAXIMUM).detach())
    assert (fourth[0, :3] == 1).all()
    torch.testing.assert_close(fourth[1:], turbo((depth[1:] - 2) / 4))


def test_panel_error_scale_does_not_depend_on_the_picture():
    truth, flat = torch.zeros(4, 4, 3), torch.ones(4, 4)
    for error in (0.01, 0.1, ERROR_MAXIMUM, 0.9):
        column = comparison_panel(truth + error, truth, flat, flat)[:, 8:12]
        torch.testing.assert_close(column, turbo(torch.full((4, 4), min(error / ERROR_MAXIMUM, 1.0))))


def test_panel_depth_ignores_outliers_and_empty_pixels():
    depth = torch.linspace(2, 4, 10_000).reshape(100, 100)
    opacity = torch.ones(100, 100)
    plain = comparison_panel(torch.zeros(100, 100, 3), torch.zeros(100, 100, 3), depth, opacity)[:, 300:]
    wild = depth.clone()
    wild[50, :10] = 1e6
    wild[60, :10] = float("nan")
    wild[0] = 0.0
    opacity[0] = 0.0
    panel = comparison_panel(torch.zeros(100, 100, 3), torch.zeros(100, 100, 3), wild, opacity)[:, 300:]
    assert (panel[0] == 1).all()
    assert (panel[60, :10] == 1).all()
    torch.testing.assert_close(panel[70:], plain[70:], atol=0.1, rtol=0)
    torch.testing.assert_close(plain[0, 0], turbo(torch.tensor(0.0)))
    torch.testing.assert_close(plain[-1, -1], turbo(torch.tensor(1.0)))


def test_panel_of_nothing_and_of_a_flat_wall():
    black = torch.zeros(3, 3, 3)
    empty = comparison_panel(black, black, torch.zeros(3, 3), torch.zeros(3, 3))
    assert (empty[:, 9:] == 1).all()
    wall = comparison_panel(black, black, torch.full((3, 3), 2.5), torch.ones(3, 3))
    assert wall.isfinite().all()


def test_panel_names_wrong_arguments():
    rgb, flat = torch.zeros(3, 4, 3), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"rgb must have shape \(H, W, 3\)"):
        comparison_panel(rgb[..., :2], rgb, flat, flat)
    with pytest.raises(ValueError, match=r"truth must have shape \(3, 4, 3\), got \(2, 4, 3\)"):
        comparison_panel(rgb, rgb[:2], flat, flat)
    with pytest.raises(ValueError, match=r"depth must have shape \(3, 4\)"):
        comparison_panel(rgb, rgb, flat.T, flat)
    with pytest.raises(ValueError, match=r"opacity must have shape \(3, 4\)"):
        comparison_panel(rgb, rgb, flat, flat[..., None])
    with pytest.raises(ValueError, match="near_far must be increasing"):
        comparison_panel(rgb, rgb, flat, flat, (2.0, 2.0))


class _Clock:
    now = 100.0

    def __call__(self):
        return self.now


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _unread() -> float:
    """Stands for a number on a busy device."""
    raise AssertionError("read although nothing is displayed")


def test_progress_logs_lines_without_a_terminal(caplog):
    caplog.set_level(logging.INFO, logger="voxelfield")
    stream, clock = io.StringIO(), _Clock()
    with Progress(1000, initial=200, stream=stream, clock=clock) as progress:
        for step in range(201, 401):
            clock.now += 0.1
            due = step in (300, 400)
            progress.update(step, psnr=(lambda: 28.314) if due else _unread, rays=4096)
            # 0.1 is not exact in binary: start the next interval on time
            clock.now = round(clock.now, 6)
    assert [record.getMessage() for record in caplog.records] == [
        "step 300/1000 (30 %), PSNR 28.31 dB, 41.0k rays/s, ETA 01:10",
        "step 400/1000 (40 %), PSNR 28.31 dB, 41.0k rays/s, ETA 01:00",
    ]
    assert stream.getvalue() == ""


def test_progress_shows_the_last_step(caplog):
    caplog.set_level(logging.INFO, logger="voxelfield")
    progress = Progress(3, stream=io.StringIO(), clock=_Clock())
    for step in (1, 2, 3):
        progress.update(step, psnr=lambda: 30.0)
    progress.close()
    assert [record.getMessage() for record in caplog.records] == ["step 3/3 (100 %), PSNR 30.00 dB, ETA 00:00"]


def test_progress_does_not_count_pauses(caplog):
    caplog.set_level(logging.INFO, logger="voxelfield")
    clock = _Clock()
    progress = Progress(200, stream=io.StringIO(), interval=10, clock=clock)
    clock.now += 5
    with progress.paused():
        clock.now += 1000
    progress.update(50, psnr=_unread, rays=1_000_000)
    clock.now += 5
    progress.update(100, rays=2_000_000)
    assert [record.getMessage() for record in caplog.records] == ["step 100/200 (50 %), 300.0k rays/s, ETA 00:10"]


def test_progress_draws_a_bar_on_a_terminal(caplog):
    caplog.set_level(logging.INFO, logger="voxelfield")
    stream, clock = _Terminal(), _Clock()
    progress = Progress(100, initial=10, stream=stream, clock=clock)
    before = len(stream.getvalue())
    progress.update(11, psnr=_unread, rays=10)
    assert len(stream.getvalue()) == before
    clock.now += 1
    progress.update(40, psnr=lambda: 31.0, rays=3_000_000)
    assert "40/100, PSNR 31.00 dB, 3.0M rays/s, ETA 00:02" in stream.getvalue()
    with progress.paused():
        pass
    progress.update(55)
    progress.close()
    assert "55/100" in stream.getvalue()
    assert caplog.records == []
