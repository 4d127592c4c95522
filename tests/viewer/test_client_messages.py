"""What a client may send: values out of range are moved into it, and anything else ends its connection."""

from __future__ import annotations

import json
import logging
import math
import socket
import time

import pytest
import torch
from viewer_scene import served_page

from voxelfield.viewer.client_messages import LARGEST_FILE, RefusedMessageError, control_value, validated
from voxelfield.viewer.painter import Painter

pytest.importorskip("viser")

PATIENCE = 60


@pytest.fixture(scope="module")
def page():
    with served_page() as served:
        yield served


@pytest.fixture
def client(page):
    from viewer_client import Client

    with Client(page.address.port) as connected:
        connected.look()
        connected.receive("BackgroundImageMessage")
        yield connected


def eventually(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def controls(page) -> dict:
    return page.server.gui._gui_input_handle_from_uuid


def test_every_control_has_limits(page):
    plain = [control for control in controls(page).values() if isinstance(control.value, bool)]
    chosen = [control for control in controls(page).values() if hasattr(control, "options")]
    numeric = [control for control in controls(page).values() if hasattr(control, "min")]
    # One more takes a file, and one shows a command.
    assert len(plain) + len(chosen) + len(numeric) + 2 == len(controls(page)) > 25
    for control in numeric:
        for sent, end in ((1e300, control.max), (-1e300, control.min)):
            if isinstance(control.value, tuple):
                expected = list(end) if isinstance(end, tuple) else [end] * len(control.value)
                assert control_value(control, [sent] * len(control.value)) == expected
            else:
                assert control_value(control, sent) == end
    for control in (*plain, *chosen):
        for sent in (5, 0.5, None, "no such option", [True], {}):
            with pytest.raises(RefusedMessageError):
                control_value(control, sent)
    for control in (page.path.upload, page.path.command):
        with pytest.raises(RefusedMessageError):
            control_value(control, "file")


def test_values_out_of_range_are_moved_into_it(page, client):
    view, path = page.view, page.path
    for control, sent, taken in (
        (view.rows, -1, 100),
        (view.rows, 1 << 40, 2160),
        (view.rate, 0, 1),
        (page.cameras.fraction, 1e300, 1.0),
        (page.cameras.fraction, 0, 0.0),
        (path.seconds, 1e300, 3600.0),
        (path.fps, -3, 1),
        (path.size, [1e29, -1], (8192.0, 16.0)),
        (page.region.sides[0], [1e9, -1e9], (page.region.sides[0].max, page.region.sides[0].min)),
    ):
        client.set(control, sent)
        eventually(lambda control=control, taken=taken: control.value == taken)
        assert type(control.value) is type(taken)
    eventually(lambda: page.worker.frames_per_second == 1)


def test_a_camera_can_be_computed_with(page, client):
    client.look(position=[1e8, 0, 0], fov=1e9, image_height=4096, image_width=400000)
    camera = next(reversed(page.server.get_clients().values())).camera
    eventually(lambda: camera.image_width == 8192)
    assert camera.image_height == 84
    assert camera.position.tolist() == [1e6, 0, 0]
    assert camera.fov < math.pi
    client.look(wxyz=[0, 1e-3, 0, 0])
    eventually(lambda: camera.wxyz.tolist() == [0, 1, 0, 0])


REFUSED = {
    "text": "hello",
    "no MessagePack": b"\xc1",
    "nothing": b"",
    "deeper than Python's stack": b"\x91" * 100_000,
    "a list longer than the message": b"\xdd\xff\xff\xff\xff",
    "no object": [1, 2],
    "no type": {},
    "a type that is a number": {"type": 5},
    "an unknown type": {"type": "Message"},
    "a tunnel to the internet": {"type": "ShareUrlRequest"},
    "a message for browsers": {"type": "RunJavascriptMessage", "source": "alert(1)"},
    "a quaternion of length 0": {"wxyz": [0, 0, 0, 0]},
    "a quaternion of three numbers": {"wxyz": [1, 0, 0]},
    "a position that is not finite": {"position": [math.nan, 0, 0]},
    "a position far beyond the limits": {"position": [1e300, 0, 0]},
    "a position of text": {"position": "abc"},
    "no upward direction": {"up_direction": [0, 0, 0]},
    "a camera that looks at itself": {"look_at": [0, 0, 3]},
    "an infinite field of view": {"fov": math.inf},
    "a field of view that is true": {"fov": True},
    "a height of text": {"image_height": "40"},
    "no position": {"position": None},
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_messages_end_the_connection(page, client, what, capfd, caplog):
    import msgspec
    from viewer_client import Client

    sent = REFUSED[what]
    if isinstance(sent, dict) and sent and "type" not in sent:
        client.look(**sent)
    else:
        client.socket.send(sent if isinstance(sent, str | bytes) else msgspec.msgpack.encode(sent))
    assert client.is_refused()
    with Client(page.address.port) as other:
        other.look()
        other.receive("BackgroundImageMessage")
    captured = capfd.readouterr()
    assert "Traceback" not in captured.out + captured.err + caplog.text
    assert len(caplog.messages) <= 1
    assert page.server._share_tunnel is None


@pytest.mark.parametrize(
    "updates",
    [
        {"removed": True},
        {"update_cb": []},
        {"value": 300, "min": -1},
        {},
        [],
        {"value": "300"},
        {"value": [300]},
        {"value": None},
        {"value": math.nan},
    ],
)
def test_a_client_sets_values_and_nothing_else(page, client, updates):
    before = page.view.rows.value
    client.send("GuiUpdateMessage", uuid=page.view.rows._impl.uuid, updates=updates)
    assert client.is_refused()
    assert page.view.rows.value == before
    assert page.view.rows._impl.update_cb


def test_what_is_disabled_or_gone_is_not_heard(page, client):
    client.set(page.path.play, True)  # without key frames
    client.send("GuiUpdateMessage", uuid="gone", updates={"value": 1})
    client.set(page.view.rate, 7)
    eventually(lambda: page.worker.frames_per_second == 7)
    assert page.path.play.label == "Play"


def test_callbacks_run_one_after_another(page, client, monkeypatch):
    inside, most = [], []
    original = page.region._apply_crop

    def slow():
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.05)
        original()
        inside.pop()

    monkeypatch.setattr(page.region, "_apply_crop", slow)
    for number in range(4):
        client.set(page.region.crop, number % 2 == 0)
    eventually(lambda: len(most) == 4 and not inside)
    assert most == [1] * 4


def test_a_callback_that_fails_is_one_line(page, client, monkeypatch, capfd, caplog):
    def fail():
        raise RuntimeError("no such box")

    monkeypatch.setattr(page.region, "_apply_crop", fail)
    client.set(page.region.crop, True)
    line = "viewer: a browser's request failed: RuntimeError: no such box"
    eventually(lambda: caplog.messages == [line])
    captured = capfd.readouterr()
    assert "Traceback" not in captured.out + captured.err + caplog.text


def test_a_screenshot_has_a_largest_size(page, client, monkeypatch):
    asked: list = []

    monkeypatch.setattr(page.worker, "screenshot", lambda request, _: asked.append(request))
    for height, width, expected in (
        (4096, 400000, (84, 8192)),
        (1, 8192, (2, 8192)),
        (3000, 3000, (4096, 4096)),
        (40, 60, (160, 240)),
    ):
        client.look(image_height=height, image_width=width)
        client.set(page.view.scale, 1000)
        client.set(page.view.screenshot, True)
        eventually(lambda: asked)
        request = asked.pop()
        assert (request.height, request.width) == expected


def test_a_screenshot_ends_when_its_client_leaves(page, monkeypatch):
    from viewer_client import Client

    original, ended = page.worker.screenshot, []

    def screenshot(request, is_wanted):
        ended.append(original(request, is_wanted))

    def slow(self, *arguments, **options):
        time.sleep(0.01)
        return torch.zeros(options["rows"][1] - options["rows"][0], 2000, 3, dtype=torch.uint8)

    monkeypatch.setattr(page.worker, "screenshot", screenshot)
    with Client(page.address.port) as client:
        client.look(image_height=2000, image_width=2000)
        client.receive("BackgroundImageMessage")
        monkeypatch.setattr(Painter, "picture", slow)
        monkeypatch.setattr("voxelfield.viewer.worker._BAND_SECONDS", 0.0)
        client.set(page.view.screenshot, True)
        client.set(page.view.screenshot, True)
        eventually(lambda: page.view._taking)
    eventually(lambda: ended)
    assert ended == [None]
    assert not page.view._taking


def test_a_path_has_a_largest_number_of_frames(page, client):
    client.set(page.path.add, True)
    eventually(lambda: page.path.keys and not page.path.export.disabled)
    client.set(page.path.seconds, 1e300)
    client.set(page.path.fps, 1e300)
    client.set(page.path.export, True)
    told = client.receive("NotificationShowMessage")["props"]
    assert told["body"] == "seconds times fps must be at most 36000 frames, got 3600 x 240"
    client.set(page.path.seconds, 0.5)
    client.set(page.path.export, True)
    assert client.receive("FileTransferStartDownload")["filename"] == "camera_path.json"
    client.set(page.path.edit, "Clear")
    eventually(lambda: page.path.keys == [])


def upload(client, control, name: str, content: bytes, size: int | None = None) -> None:
    names = {"source_component_uuid": control._impl.uuid, "transfer_uuid": name}
    client.send(
        "FileTransferStartUpload",
        **names,
        filename=name,
        mime_type="application/json",
        part_count=1,
        size_bytes=len(content) if size is None else size,
    )
    client.send("FileTransferPart", **names, part_index=0, content=content)


def test_a_path_is_loaded_or_refused_by_name(page, client):
    upload(client, page.path.upload, "bad.json", b'{"keyframes": [{"matrix": [NaN], "fov": 50}]}')
    told = client.receive("NotificationShowMessage")["props"]
    assert told["body"].startswith("bad.json: keyframes[0]: 'matrix' must be 16 finite numbers")
    matrix = [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    good = {"keyframes": [{"matrix": matrix, "fov": 50}], "seconds": 2, "fps": 5}
    good |= {"render_height": 20, "render_width": 30}
    upload(client, page.path.upload, "good.json", json.dumps(good).encode())
    eventually(lambda: len(page.path.keys) == 1)
    client.set(page.path.edit, "Clear")
    eventually(lambda: page.path.keys == [])


def start(size: int, parts: int = 1, control: str = "upload") -> dict:
    names = {"source_component_uuid": control, "transfer_uuid": "t", "filename": "f", "mime_type": "m"}
    return {"type": "FileTransferStartUpload", **names, "part_count": parts, "size_bytes": size}


@pytest.mark.parametrize(
    "message", [start(LARGEST_FILE + 1), start(-1), start(1 << 20, parts=1 << 20), start(2, control="rows")]
)
def test_uploads_have_limits(page, message):
    import msgspec

    controls = {"upload": page.path.upload, "rows": page.view.rows}
    assert validated(msgspec.msgpack.encode(start(2)), controls.get) is not None
    assert validated(msgspec.msgpack.encode(start(2, control="gone")), controls.get) is None
    with pytest.raises(RefusedMessageError):
        validated(msgspec.msgpack.encode(message), controls.get)


PROBES = (
    b"",
    b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # TLS
    b"SSH-2.0-OpenSSH_9\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"\x00" * 100_000,
)
OPENING = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
)


def test_probes_leave_one_line_at_most(capfd, caplog):
    import viser
    from viewer_client import Client

    caplog.set_level(logging.INFO)
    protocol = f"Sec-WebSocket-Protocol: viser-v{viser.__version__}\r\n\r\n".encode()
    frames = (b"\xff" * 20, b"\x82\x05hello", b"\x82\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x88\x80", b"")
    with served_page() as page:
        caplog.clear()
        for probe in (*PROBES, OPENING + b"\r\n", *(OPENING + protocol + frame for frame in frames)):
            with socket.create_connection(("127.0.0.1", page.address.port), timeout=PATIENCE) as probing:
                probing.sendall(probe)
                if len(probe) % 2:
                    probing.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        with Client(page.address.port) as client:
            client.look()
            client.receive("BackgroundImageMessage")
    captured = capfd.readouterr()
    assert "Traceback" not in captured.out + captured.err + caplog.text
    lines = [message for message in caplog.messages if message.startswith("viewer: ")]
    assert len(lines) == len(set(lines))
    assert all("\n" not in line for line in lines)
    assert [record.message for record in caplog.records if record.name.startswith(("asyncio", "websockets"))] == []


def test_a_runs_name_is_quoted_for_the_shell():
    with served_page(name="runs/$(reboot) `b`<img src=x onerror=alert(1)>") as page:
        command = page.path.command.value
    assert command == "voxelfield render 'runs/$(reboot) `b`<img src=x onerror=alert(1)>' --path camera_path.json"
