from __future__ import annotations

import pytest
import torch

from voxelfield.components.tensorboard import TensorBoardLogger
from voxelfield.report.record import read_history


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


def test_a_run_without_records_has_no_history(tmp_path):
    assert read_history(tmp_path) == {}
