from __future__ import annotations

import time

import pytest
import torch

from voxelfield.report.history import read_history
from voxelfield.training.logs.logging import TensorBoardLogger


@pytest.fixture(autouse=True)
def _event_files_in_order(monkeypatch):
    """Of files that are begun in one second, TensorBoard reads the tenth of a process before the ninth."""
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))


def test_the_history_is_what_was_recorded(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    for step in range(1, 2001):
        logger.scalars(step, {"loss/rgb": 1 / step})
    logger.images(3, "test/panel", torch.rand(4, 6, 3))
    logger.histogram(3, "density", torch.rand(100))
    logger.close()
    history = read_history(tmp_path)
    assert list(history) == ["loss/rgb"]
    assert len(history["loss/rgb"]) == 2000
    assert history["loss/rgb"][-1] == (2000, torch.tensor(1 / 2000).item())


def test_what_an_interrupted_run_logged_too_much_is_left_out(tmp_path):
    first = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3, 4):
        first.scalars(step, {"loss/rgb": float(step)})
    first.close()
    second = TensorBoardLogger(tmp_path, 2)
    second.scalars(3, {"loss/rgb": 30.0})
    second.close()
    assert read_history(tmp_path)["loss/rgb"] == ((1, 1.0), (2, 2.0), (3, 30.0))


def test_a_clock_that_is_set_back_loses_no_curve(tmp_path, monkeypatch):
    """TensorBoard reads the files of a folder by name, which begins with the second in which they were begun."""
    now = time.time()
    for part, (shift, first_step) in enumerate(((0, None), (5, 2), (-3600, 4), (-3600, 6))):
        monkeypatch.setattr(time, "time", lambda shift=shift: now + shift)
        logger = TensorBoardLogger(tmp_path, first_step)
        for step in range(2 * part + 1, 2 * part + 5):
            logger.scalars(step, {"loss/rgb": step + 100.0 * part})
        logger.close()
        if part == 2:  # another machine has begun one in the same second
            (latest,) = tmp_path.glob(f"events.out.tfevents.{int(now - 3600):010d}.*")
            latest.rename(latest.with_name(f"events.out.tfevents.{int(now - 3600):010d}.zebra.1.0"))
    expected = (
        (1, 1.0),
        (2, 2.0),
        (3, 103.0),
        (4, 104.0),
        (5, 205.0),
        (6, 206.0),
        *((n, n + 300.0) for n in range(7, 11)),
    )
    assert read_history(tmp_path)["loss/rgb"] == expected
    assert len(list(tmp_path.iterdir())) == 4


def test_a_run_without_records_has_no_history(tmp_path):
    assert read_history(tmp_path) == {}
