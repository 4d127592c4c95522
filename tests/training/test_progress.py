from __future__ import annotations

import contextlib
import io
import logging
import sys
import time

import pytest

from voxelfield.training.logs import Progress


class _Clock:
    now = 100.0

    def __call__(self):
        return self.now


def _unread() -> float:
    """Stands for a number on a busy device."""
    raise AssertionError("read although nothing is displayed")


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_progress_logs_lines_without_a_terminal(caplog, capsys, clock):
    caplog.set_level(logging.INFO, logger="voxelfield")
    with contextlib.closing(Progress(1000, initial=200)) as progress:
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
    assert capsys.readouterr().err == ""


def test_progress_shows_the_last_step(caplog, clock):
    caplog.set_level(logging.INFO, logger="voxelfield")
    progress = Progress(3)
    for step in (1, 2, 3):
        progress.update(step, psnr=lambda: 30.0)
    progress.close()
    assert [record.getMessage() for record in caplog.records] == ["step 3/3 (100 %), PSNR 30.00 dB, ETA 00:00"]


def test_progress_does_not_count_pauses(caplog, clock):
    caplog.set_level(logging.INFO, logger="voxelfield")
    progress = Progress(200)
    clock.now += 5
    with progress.paused():
        clock.now += 1000
    progress.update(50, psnr=_unread, rays=1_000_000)
    clock.now += 5
    progress.update(100, psnr=lambda: 29.0, rays=2_000_000)
    assert [record.getMessage() for record in caplog.records] == [
        "step 100/200 (50 %), PSNR 29.00 dB, 300k rays/s, ETA 00:10"
    ]


def test_progress_draws_a_bar_on_a_terminal(caplog, clock, monkeypatch):
    caplog.set_level(logging.INFO, logger="voxelfield")
    stream = _Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(100, initial=10)
    before = len(stream.getvalue())
    progress.update(11, psnr=_unread, rays=10)
    assert len(stream.getvalue()) == before
    clock.now += 1
    progress.update(40, psnr=lambda: 31.0, rays=3_000_000)
    assert "40/100, PSNR 31.00 dB, 3.00M rays/s, ETA 00:02" in stream.getvalue()
    with progress.paused():
        pass
    progress.update(55, psnr=_unread)
    progress.close()
    assert "55/100" in stream.getvalue()
    assert caplog.records == []
