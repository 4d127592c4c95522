"""Addresses, missing packages, curves, and viewers that fail."""

from __future__ import annotations

import logging
import socket
import sys

import pytest
import torch
from free_ports import free_port
from viewer_scene import session

from voxelfield.cli.command import main
from voxelfield.installed import MissingPackageError
from voxelfield.training.config import LoggerConfig
from voxelfield.training.logs.logging import NullLogger
from voxelfield.viewer import watch
from voxelfield.viewer.curves import Curves, RecordingLogger, read_curves
from voxelfield.viewer.page import address
from voxelfield.viewer.page.address import Address


@pytest.fixture
def taken_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 0, "--port must be 1 to 65535, got 0"),
        ("127.0.0.1", 70000, "--port must be 1 to 65535, got 70000"),
        ("203.0.113.7", 8080, "--host must be an address of this machine, got 203.0.113.7"),
        ("not a host", 8080, "--host must be an address of this machine, got not a host"),
    ],
)
def test_addresses_that_cannot_be_served_at_are_named(host, port, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Address(host, port).check()


def test_a_port_in_use_is_one_line(taken_port, tmp_path, capsys, caplog):
    pytest.importorskip("viser")
    assert main(["view", str(tmp_path), "--port", str(taken_port)]) == 2
    assert caplog.messages == [f"--port must be a free port, got {taken_port}, which another program is using"]


def test_training_names_its_own_keys(taken_port):
    pytest.importorskip("viser")
    with pytest.raises(ValueError, match=r"^logger\.viewer_port must be a free port, got"):
        watch.TrainingViewer(LoggerConfig(viewer_port=taken_port))


def test_a_local_page_tells_of_the_tunnel_and_an_open_one_warns(caplog):
    caplog.set_level(logging.INFO)
    Address("127.0.0.1", 8123).tell()
    assert "http://127.0.0.1:8123" in caplog.text
    assert "ssh -L 8123:127.0.0.1:8123" in caplog.text
    assert "not encrypted" not in caplog.text
    caplog.clear()
    everywhere = Address("0.0.0.0", 8123)
    everywhere.tell()
    assert f"open http://127.0.0.1:8123/?token={everywhere.token}" in caplog.text
    assert f"open http://{socket.gethostname()}:8123/?token={everywhere.token}" in caplog.text
    assert "not encrypted" in caplog.text
    assert Address("::1").is_local
    assert Address("localhost").is_local
    assert Address("::1").url == "http://[::1]:8080"


def test_without_viser_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "viser", None)
    with pytest.raises(MissingPackageError, match=r'viser must be installed .*: pip install "voxelfield\[viewer\]"'):
        address.import_viser()


def test_a_viewer_that_fails_does_not_end_training(monkeypatch, caplog):
    pytest.importorskip("viser")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no page today")

    monkeypatch.setattr(watch, "ViewerPage", fail)
    viewer = watch.TrainingViewer(LoggerConfig(viewer_port=free_port()))
    training = session(steps=5, on_step=viewer.after_step)
    viewer.begin(training)
    assert training.fit()
    viewer.end()
    assert "the viewer failed (no page today), and training continues without it" in caplog.messages


def test_a_copy_that_fails_does_not_end_training(monkeypatch, caplog):
    pytest.importorskip("viser")
    monkeypatch.setattr(watch, "ViewerPage", lambda *_: None)
    monkeypatch.setattr(watch.LiveField, "_copy", lambda *_: torch.empty(-1))
    viewer = watch.TrainingViewer(LoggerConfig(viewer_port=free_port()))
    training = session(steps=5, on_step=viewer.after_step)
    viewer.begin(training)
    assert training.fit()
    viewer.end()
    assert sum("and training continues without it" in message for message in caplog.messages) == 1


def test_what_is_logged_reaches_the_charts_and_the_log():
    curves, seen = Curves(), []

    class Log(NullLogger):
        def scalars(self, step, values):
            seen.append((step, values))

    log = RecordingLogger(Log(), curves)
    for step in (20, 10, 10):
        log.scalars(step, {"train/psnr": step / 10, "loss/photometric": float("nan")})
    assert len(seen) == 3
    assert curves.series("train/psnr") == ([10.0, 20.0], [1.0, 2.0])
    assert curves.series("loss/photometric") == ([], [])
    assert curves.series("unknown") == ([], [])


def test_a_finished_runs_curves_are_read_from_its_events(tmp_path):
    from voxelfield.training.logs.logging import TensorBoardLogger

    log = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3):
        log.scalars(step, {"test/psnr": 10.0 * step})
    log.images(1, "test/view", torch.zeros(4, 4, 3))
    log.close()
    curves = Curves()
    read_curves(tmp_path, curves)
    assert curves.series("test/psnr") == ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0])
    read_curves(tmp_path / "nothing", curves)
