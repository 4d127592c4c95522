"""What a client may send: values out of range are moved into it, and anything else ends its connection."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from chromium import eventually
from viewer_scene import served_page

pytest.importorskip("viser")

from viewer_client import CAMERA, Client
from websockets.exceptions import InvalidStatus

from voxelfield.viewer import server
from voxelfield.viewer.page import MOST_WAITING
from voxelfield.viewer.server import LARGEST_MESSAGE, RefusedMessageError, control_value

PATIENCE = 60


@pytest.fixture(scope="module")
def page():
    with served_page() as served:
        yield served


@contextlib.contextmanager
def looking(page):
    """A client that has received a picture."""
    with Client(page.address.port) as connected:
        connected.look()
        connected.receive("BackgroundImageMessage")
        yield connected


@pytest.fixture
def client(page):
    with looking(page) as connected:
        yield connected


@pytest.fixture
def path(page, client):
    """The panel of a path, without key cameras, also after the test."""
    page.path._next_file = 0.0
    yield page.path
    client.set(page.path.edit, "Clear")
    eventually(lambda: page.path.keys == [])


def upgrade() -> bytes:
    """A request for a socket, as viser's client makes it."""
    import viser

    return OPENING + f"Sec-WebSocket-Protocol: viser-v{viser.__version__}\r\n\r\n".encode()


def controls(page) -> dict:
    return page.server.gui._gui_input_handle_from_uuid


def test_every_control_has_limits(page):
    plain = [control for control in controls(page).values() if isinstance(control.value, bool)]
    chosen = [control for control in controls(page).values() if hasattr(control, "options")]
    numeric = [control for control in controls(page).values() if hasattr(control, "min")]
    # Two more show a command and a progress.
    assert len(plain) + len(chosen) + len(numeric) + 2 == len(controls(page)) > 10
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
    with pytest.raises(RefusedMessageError):
        control_value(page.path.command, "voxelfield render elsewhere")


def test_values_out_of_range_are_moved_into_it(page, client):
    view, path = page.view, page.path
    for control, sent, taken in (
        (view.rows, -1, 100),
        (view.rows, 1 << 40, 2160),
        (view.rate, 0, 1),
        (path.seconds, 1e300, 3600.0),
        (path.fps, -3, 1),
        (path.size, [1e29, -1], (3840.0, 16.0)),
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
    "deeper than Python's stack": b"\x91" * 60_000,
    "a list longer than the message": b"\xdd\xff\xff\xff\xff",
    "no object": [1, 2],
    "no type": {},
    "a type that is a number": {"type": 5},
    "an unknown type": {"type": "Message"},
    "a tunnel to the internet": {"type": "ShareUrlRequest"},
    "a message for browsers": {"type": "RunJavascriptMessage", "source": "alert(1)"},
    "a file": {"type": "FileTransferStartUpload", "transfer_uuid": "t", "part_count": 1, "size_bytes": 1},
    "a part of a file": {"type": "FileTransferPart", "transfer_uuid": "t", "part_index": 0, "content": b"a"},
    "a message that is too long": {"type": "SceneNodeClickMessage", "name": "a" * LARGEST_MESSAGE},
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

    sent = REFUSED[what]
    if isinstance(sent, dict) and sent and "type" not in sent:
        client.look(**sent)
    else:
        client.socket.send(sent if isinstance(sent, str | bytes) else msgspec.msgpack.encode(sent))
    assert client.is_refused(1009 if what == "a message that is too long" else 1008)
    with looking(page):
        pass
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
    client.set(page.path.export, True)  # without key cameras
    client.set(page.path.progress, 5.0)
    client.send("GuiUpdateMessage", uuid="gone", updates={"value": 1})
    client.set(page.view.rate, 7)
    eventually(lambda: page.worker.frames_per_second == 7)
    with pytest.raises(TimeoutError):
        client.receive("FileTransferStartDownload", patience=0.2)


def test_callbacks_run_one_after_another(path, client, monkeypatch):
    inside, most = [], []
    original = path.change

    def slow(*keys):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.05)
        original(*keys)
        inside.pop()

    monkeypatch.setattr(path, "change", slow)
    for _ in range(4):
        client.set(path.add, True)
    eventually(lambda: len(most) == 4 and not inside)
    assert most == [1] * 4
    assert len(path.keys) == 4


def test_clicks_that_wait_are_limited_and_end_with_the_page(monkeypatch):
    with served_page() as page, Client(page.address.port) as client:
        client.look()
        started, release = [], threading.Event()

        def slow(keys):
            started.append(keys)
            assert release.wait(PATIENCE)

        monkeypatch.setattr(page.path, "change", slow)
        for _ in range(3 * MOST_WAITING):
            client.set(page.path.add, True)
        client.set(page.view.rows, 120)
        eventually(lambda: page.view.rows.value == 120)
        assert page._threads._work_queue.qsize() == 0
        threads = list(page._threads._threads)
        assert len(threads) == MOST_WAITING
        page.close()
        release.set()
        page._threads.shutdown()
        assert len(started) == 1


def test_closing_the_page_ends_the_reading_of_photographs(monkeypatch):
    with served_page() as page:
        read, frustum = [], page.cameras._frustum

        def slow(name, *photograph):
            read.append(name)
            page.close()
            return frustum(name, *photograph)

        monkeypatch.setattr(page.cameras, "_frustum", slow)
        page.cameras.shown.value = True
        eventually(lambda: read)
        page._threads.shutdown()
    assert len(read) == 1 < len(page.cameras.photographs)


def test_a_callback_that_fails_is_one_line(page, client, monkeypatch, capfd, caplog):
    def fail(keys):
        raise RuntimeError("no such path")

    monkeypatch.setattr(page.path, "change", fail)
    client.set(page.path.add, True)
    line = "viewer: a browser's request failed: RuntimeError: no such path"
    eventually(lambda: caplog.messages == [line])
    captured = capfd.readouterr()
    assert "Traceback" not in captured.out + captured.err + caplog.text


def told(client) -> str:
    return client.receive("NotificationShowMessage")["props"]["body"]


def test_a_path_has_a_largest_number_of_frames(path, client):
    client.set(path.add, True)
    eventually(lambda: path.keys and not path.export.disabled)
    client.set(path.seconds, 1e300)
    client.set(path.fps, 1e300)
    client.set(path.export, True)
    assert told(client) == "seconds times fps must be at most 36000 frames, got 3600 x 240"
    client.set(path.seconds, 0.5)
    client.set(path.export, True)
    assert client.receive("FileTransferStartDownload")["filename"] == "camera_path.json"


def test_a_path_has_a_largest_number_of_key_cameras(path, client, monkeypatch):
    monkeypatch.setattr("voxelfield.viewer.page.MOST_KEYS", 2)
    for _ in range(3):
        client.set(path.add, True)
    assert told(client) == "a path has at most 2 key cameras"
    assert len(path.keys) == 2


def test_files_are_not_asked_for_one_after_another(path, client, monkeypatch):
    """A browser that reads none of them would fill the memory."""
    monkeypatch.setattr("voxelfield.viewer.page._SECONDS_BETWEEN_FILES", 1e6)
    client.set(path.add, True)
    eventually(lambda: not path.export.disabled)
    client.set(path.export, True)
    client.receive("FileTransferStartDownload")
    client.set(path.export, True)
    assert told(client) == "a path can be saved once per second"


def test_messages_of_a_connection_are_read_at_a_limited_rate(page, client, monkeypatch):
    """What a browser sends beyond that waits in the browser, so that callbacks cannot pile up here."""
    slept, count = [], server.MESSAGES_PER_SECOND

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: 1e9))
    monkeypatch.setattr(server, "asyncio", SimpleNamespace(sleep=sleep))
    for number in range(count + 50):
        client.set(page.view.rate, 1 + number % 100)
    eventually(lambda: len(slept) == count + 50)
    assert max(slept[:count]) < 0.01
    assert slept[-1] == pytest.approx(50 / count, abs=1e-3)
    with looking(page):
        pass
    assert slept[count + 50 :] == [0.0], "each connection is counted by itself"


def test_connections_are_limited(page, monkeypatch):
    eventually(lambda: not page.server.get_clients())
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
    with looking(page), looking(page), pytest.raises(InvalidStatus, match="503"), Client(page.address.port):
        pass
    eventually(lambda: not page.server.get_clients())
    with looking(page):
        pass


def frame(opcode: int, data: bytes, *, last: bool = True) -> bytes:
    return bytes([128 * last | opcode, 128 | len(data)]) + bytes(4) + data


@pytest.mark.parametrize(
    ("first", "repeated"),
    [
        (b"", frame(9, bytes(125))),  # pings whose answers are not read
        (frame(2, b"", last=False), frame(0, b"", last=False)),  # a message that never ends
        (frame(1, b"a", last=False), frame(0, b"a", last=False)),
    ],
)
def test_unfinished_uploads_do_not_fill_the_memory(page, first, repeated):
    with socket.create_connection(("127.0.0.1", page.address.port), timeout=PATIENCE) as browser:
        browser.sendall(upgrade() + first)
        with pytest.raises(ConnectionError):
            browser.sendall(repeated * ((12 << 20) // len(repeated)))


@contextlib.contextmanager
def browser_that_does_not_read(page):
    """Yields the socket of a browser that has asked for a picture, and viser's handle of it."""
    import msgspec

    eventually(lambda: not page.server.get_clients())
    with socket.create_connection(("127.0.0.1", page.address.port), timeout=PATIENCE) as browser:
        camera = msgspec.msgpack.encode({"type": "ViewerCameraMessage", **CAMERA})
        browser.sendall(upgrade() + b"\x82\xfe" + len(camera).to_bytes(2, "big") + bytes(4) + camera)
        eventually(page.server.get_clients)
        yield browser, next(iter(page.server.get_clients().values()))


def test_a_browser_that_reads_nothing_is_disconnected(page, monkeypatch):
    monkeypatch.setattr(server, "READING_SECONDS", 0.1)
    with browser_that_does_not_read(page) as (_, handle):
        handle.send_file_download("large", bytes(random.Random(0).randbytes(32 << 20)))
        eventually(lambda: not page.server.get_clients())


def test_what_a_browser_asks_for_waits_until_it_reads(page, monkeypatch):
    import msgspec

    waits, original = threading.Event(), server._Connection.pause_writing
    monkeypatch.setattr(server._Connection, "pause_writing", lambda self: (original(self), waits.set()))
    with browser_that_does_not_read(page) as (browser, handle):
        handle.send_file_download("large", bytes(random.Random(0).randbytes(32 << 20)))
        assert waits.wait(PATIENCE)
        uuid = page.view.rate._impl.uuid
        click = msgspec.msgpack.encode({"type": "GuiUpdateMessage", "uuid": uuid, "updates": {"value": 9}})
        browser.sendall(frame(2, click))
        with looking(page):
            pass
        assert page.view.rate.value != 9
        while page.view.rate.value != 9:
            assert browser.recv(1 << 20)


def test_pings_and_messages_in_a_few_frames_are_answered(page, client):
    import msgspec

    for _ in range(3 * server.MOST_FRAMES):
        assert client.socket.ping().wait(PATIENCE)
    data = msgspec.msgpack.encode({"type": "ViewerCameraMessage", **CAMERA, "image_height": 44})
    client.socket.send(data[start : start + 8] for start in range(0, len(data), 8))
    camera = next(reversed(page.server.get_clients().values())).camera
    eventually(lambda: camera.image_height == 44)


def test_connections_that_are_not_opened_are_limited(page, monkeypatch):
    eventually(lambda: not page.server.get_clients())
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
    with contextlib.ExitStack() as stack:
        waiting = []
        for _ in range(10):
            waiting.append(stack.enter_context(socket.create_connection(("127.0.0.1", page.address.port))))
            waiting[-1].settimeout(PATIENCE)
            waiting[-1].sendall(b"GET / HTTP/1.1\r\n")
        for refused in waiting[4:]:
            with contextlib.suppress(ConnectionError):
                assert refused.recv(1) == b""
        waiting[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            waiting[0].recv(1)


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
    caplog.set_level(logging.INFO)
    frames = (b"\xff" * 20, b"\x82\x05hello", b"\x82\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x88\x80", b"")
    with served_page() as page:
        caplog.clear()
        for probe in (*PROBES, OPENING + b"\r\n", *(upgrade() + frame for frame in frames)):
            with socket.create_connection(("127.0.0.1", page.address.port), timeout=PATIENCE) as probing:
                probing.sendall(probe)
                if len(probe) % 2:
                    probing.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        with looking(page):
            pass
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
