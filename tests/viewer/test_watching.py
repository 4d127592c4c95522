"""Addresses, missing packages, and viewers that fail."""

from __future__ import annotations

import logging
import socket
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from viewer_scene import watched

from voxelfield.cli.command import main
from voxelfield.installed import MissingPackageError
from voxelfield.runs import watching
from voxelfield.settings import LoggerConfig
from voxelfield.viewer.address import Address


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
        ("203.0.113.7", 8080, "--host and --port must be an address of this machine and a free port, got 203.0.113.7"),
        ("not a host", 8080, "--host and --port must be an address of this machine and a free port, got not a host"),
    ],
)
def test_addresses_that_cannot_be_served_at_are_named(host, port, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Address(host, port).check()


def test_a_port_in_use_is_one_line(taken_port, tmp_path, caplog):
    pytest.importorskip("viser")
    assert main(["view", str(tmp_path), "--port", str(taken_port)]) == 2
    (message,) = caplog.messages
    assert f"a free port, got 127.0.0.1 and {taken_port} (Address already in use" in message


def test_training_names_its_own_keys(taken_port):
    pytest.importorskip("viser")
    with pytest.raises(ValueError, match=r"^logger\.viewer_host and logger\.viewer_port must be"):
        watching.TrainingViewer(LoggerConfig(viewer_port=taken_port))


def test_a_local_page_tells_of_the_tunnel_and_an_open_one_warns(caplog):
    caplog.set_level(logging.INFO)
    Address("127.0.0.1", 8123).log_urls()
    assert "http://127.0.0.1:8123" in caplog.text
    assert "ssh -L 8123:127.0.0.1:8123" in caplog.text
    assert "not encrypted" not in caplog.text
    caplog.clear()
    everywhere = Address("0.0.0.0", 8123)
    everywhere.log_urls()
    assert f"open http://127.0.0.1:8123/?token={everywhere.token}" in caplog.text
    assert f"open http://{socket.gethostname()}:8123/?token={everywhere.token}" in caplog.text
    assert "not encrypted" in caplog.text
    assert Address("::1").is_local
    assert Address("localhost").is_local
    assert Address("::1").url == "http://[::1]:8080"
    assert Address("::", 8123, token="t").url == "http://[::1]:8123/?token=t"


def test_without_viser_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "viser", None)
    with pytest.raises(MissingPackageError, match=r'viser must be installed .*: pip install "voxelfield\[viewer\]"'):
        Address().check()


@pytest.mark.parametrize("failing", ["page", "copy"])
def test_a_viewer_that_fails_does_not_end_training(monkeypatch, caplog, failing):
    pytest.importorskip("viser")

    def fail(*_: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(watching, "ViewerPage", fail if failing == "page" else MagicMock())
    monkeypatch.setattr(watching.TrainingViewer, "_copy", fail)
    viewer, training = watched(steps=5)
    assert training.fit()
    viewer.end()
    assert caplog.messages.count("the viewer failed (not today), and training continues without it") == 1


def test_a_field_in_training_is_shown():
    pytest.importorskip("viser")
    from viewer_client import Client

    viewer, training = watched(steps=3)
    page = viewer.page
    assert training.fit()
    with Client(page.address.port) as client:
        client.look()
        client.receive("BackgroundImageMessage")
        viewer.finish(training)
        assert viewer.status.content.startswith("**Step 3 of 3**")
        while page.worker.painter.run.steps < 3:
            client.receive("BackgroundImageMessage")
        viewer.end()
        assert client.receive("NotificationShowMessage")["props"]["body"].endswith("with: voxelfield view RUN")
    assert viewer.page is None


def test_the_curve_of_a_training_is_shown():
    pytest.importorskip("viser")
    recorded = []
    logger = SimpleNamespace(scalars=lambda step, values: recorded.append(values))
    viewer, training = watched(steps=30, logger=logger)
    assert training.fit()
    viewer.finish(training)
    steps, scores = viewer.chart.data
    assert steps.tolist() == [10, 20, 30]
    given = [values["train/psnr"] for values in recorded if "train/psnr" in values]
    assert scores.tolist() == given
    assert f"{given[-1]:.2f} dB training pixels" in viewer.status.content
    viewer.end()
