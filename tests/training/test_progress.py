from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from quick_presets import preset

from voxelfield import progress
from voxelfield.cli.command import ShortFormatter, TerminalHandler
from voxelfield.progress import Progress, size_in_words, tracked
from voxelfield.rendering.render import View
from voxelfield.training import session


class _Clock:
    now = 100.0

    def __call__(self):
        return self.now


def _unread() -> str:
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
    with contextlib.closing(Progress("step", 1000, initial=200)) as progress:
        for step in range(201, 401):
            clock.now += 0.1
            due = step in (300, 400)
            progress.update(step, note=(lambda: "PSNR 28.31 dB") if due else _unread, rays=4096)
            # 0.1 is not exact in binary: start the next interval on time
            clock.now = round(clock.now, 6)
    assert caplog.messages == [
        "step 300/1000 (30 %), PSNR 28.31 dB, 41.0k rays/s, ETA 01:10",
        "step 400/1000 (40 %), PSNR 28.31 dB, 41.0k rays/s, ETA 01:00",
    ]
    assert capsys.readouterr().err == ""


def test_progress_shows_the_last_step(caplog, clock):
    caplog.set_level(logging.INFO, logger="voxelfield")
    progress = Progress("step", 3)
    for step in (1, 2, 3):
        progress.update(step, note=lambda: "PSNR 30.00 dB")
    progress.close()
    assert caplog.messages == ["step 3/3 (100 %), PSNR 30.00 dB, ETA 00:00"]


def test_progress_does_not_count_pauses(caplog, clock):
    caplog.set_level(logging.INFO, logger="voxelfield")
    progress = Progress("step", 200)
    clock.now += 5
    with progress.paused():
        clock.now += 1000
    progress.update(50, note=_unread, rays=1_000_000)
    clock.now += 5
    progress.update(100, note=lambda: "PSNR 29.00 dB", rays=2_000_000)
    assert caplog.messages == ["step 100/200 (50 %), PSNR 29.00 dB, 300k rays/s, ETA 00:10"]


def test_progress_draws_a_bar_on_a_terminal(caplog, clock, monkeypatch):
    caplog.set_level(logging.INFO, logger="voxelfield")
    stream = _Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress("step", 100, initial=10)
    before = len(stream.getvalue())
    progress.update(11, note=_unread, rays=10)
    assert len(stream.getvalue()) == before
    clock.now += 1
    progress.update(40, note=lambda: "PSNR 31.00 dB", rays=3_000_000)
    assert "40/100, PSNR 31.00 dB, 3.00M rays/s, ETA 00:02" in stream.getvalue()
    with progress.paused():
        pass
    progress.update(55, note=_unread)
    progress.close()
    assert stream.getvalue().rpartition("\r")[0].endswith(" ")
    assert caplog.records == []


def test_items_are_counted_and_the_bar_goes_with_the_last(caplog, clock, monkeypatch):
    caplog.set_level(logging.INFO, logger="voxelfield")
    for item in tracked("abcd", "letters"):
        clock.now += 6
        assert item in "abcd"
    assert caplog.messages == ["letters 2/4 (50 %), ETA 00:12", "letters 4/4 (100 %), ETA 00:00"]
    monkeypatch.setattr(sys, "stderr", stream := _Terminal())
    assert list(tracked("abcd", "letters")) == list("abcd")
    assert "letters" not in stream.getvalue(), "a bar flickers"
    monkeypatch.setattr(progress, "_BAR_EVERY", 0.0)
    assert list(tracked((letter for letter in "abcd"), "letters", 4)) == list("abcd")
    assert "letters: 100%" in stream.getvalue()
    assert stream.getvalue().endswith("\r")
    assert len(caplog.messages) == 2
    assert list(tracked([], "letters")) == []
    list(tracked("abcd", "letters", silent=True))
    assert stream.getvalue().count("100%") == 1


def test_lines_stand_above_the_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := _Terminal())
    monkeypatch.setattr(sys, "stdout", stream)
    handler = TerminalHandler(stream)
    handler.setFormatter(ShortFormatter())
    with contextlib.closing(Progress("step", 10)):
        for level, text in ((logging.INFO, "a line"), (logging.WARNING, "another")):
            handler.handle(logging.makeLogRecord({"levelno": level, "levelname": "WARNING", "msg": text}))
    shown = [line.rpartition("\r")[2] for line in stream.getvalue().split("\n")]
    assert re.fullmatch(r"\d\d:\d\d:\d\d a line", shown[0]), shown
    assert re.fullmatch(r"\d\d:\d\d:\d\d warning: another", shown[1]), shown
    assert "0/10" in stream.getvalue().rpartition("\n")[2], "the bar is drawn again"


def test_sizes_are_those_of_files_and_folders(tmp_path):
    (tmp_path / "inner").mkdir()
    for name, size in (("a.glb", 3214), ("inner/b.bin", 2_000_000)):
        (tmp_path / name).write_bytes(bytes(size))
    assert (size_in_words(tmp_path / "a.glb"), size_in_words(tmp_path)) == ("3.21 kB", "2.00 MB")


def test_a_notebook_shows_a_picture_that_sharpens(scene, monkeypatch, caplog):
    ipython = pytest.importorskip("IPython.display")
    small = ("model=dense", "trainer=smoke", "trainer.steps=4", "trainer.stages=[{step: 0, resolution: 12}]")
    shown: list[View] = []

    def field(notebook: bool) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(session, "in_notebook", lambda: notebook)
        trained = session.Session(scene, preset(*small, "trainer.preview_every=0", device="cpu", name="train_cpu"))
        assert trained.fit()
        return trained.model.state_dict()

    without = field(False)
    assert shown == []
    monkeypatch.setattr(progress, "_PICTURE_EVERY", 0.0)
    monkeypatch.setattr(progress.NotebookPicture, "due", True)
    handle = SimpleNamespace(update=shown.append)
    monkeypatch.setattr(ipython, "display", lambda view, display_id: shown.append(view) or handle)
    torch.testing.assert_close(field(True), without, rtol=0, atol=0)
    assert len(shown) == 5, "after each step, and in the end"
    assert not torch.equal(shown[0].rgb, shown[-1].rgb)
    assert shown[0]._repr_png_().startswith(b"\x89PNG")
    monkeypatch.setattr(session.Session, "result", lambda self: 1 / 0)
    torch.testing.assert_close(field(True), without, rtol=0, atol=0)
    assert set(caplog.messages) >= {"the field is not shown: division by zero"}
