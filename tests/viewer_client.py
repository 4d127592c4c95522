"""A client that speaks viser's protocol, and says whatever a test wants."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any

import msgspec
import viser
import zstandard
from websockets.sync.client import connect

PATIENCE = 60


class Client:
    """A connection to a page that is served on this machine.

    Args:
        port: Where.
        path: Path and query that are asked for.
        host: What the client calls the machine; None: by its address.
        options: Of websockets' ``connect``, such as ``origin`` and ``additional_headers``.
    """

    def __init__(self, port: int, path: str = "/", host: str | None = None, **options: Any) -> None:
        self.socket = connect(
            f"ws://{host or '127.0.0.1'}:{port}{path}",
            sock=socket.create_connection(("127.0.0.1", port)),
            subprotocols=[f"viser-v{viser.__version__}"],
            compression=None,
            max_size=None,
            open_timeout=PATIENCE,
            **options,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.send(msgspec.msgpack.encode({"type": kind, **fields}))

    def look(self, **changes: Any) -> None:
        """Sends a camera, which also makes viser count this client as connected."""
        self.send("ViewerCameraMessage", **{**CAMERA, **changes})

    def set(self, control: Any, value: Any) -> None:
        """Sends a value for a control, as a browser does."""
        self.send("GuiUpdateMessage", uuid=control._impl.uuid, updates={"value": value})

    def receive(self, kind: str, patience: float = PATIENCE) -> dict[str, Any]:
        """Waits for a message; raises TimeoutError."""
        while True:
            data = self.socket.recv(timeout=patience)
            packed = int.from_bytes(data[8:16], "little")
            inner = zstandard.ZstdDecompressor().decompress(
                data[16 : 16 + packed], max_output_size=int.from_bytes(data[:8], "little")
            )
            for message in msgspec.msgpack.decode(inner)["messages"]:
                if message["type"] == kind and message.get("rgb_data", ()) is not None:
                    return message

    def is_refused(self, code: int = 1008) -> bool:
        """Waits until the server has closed the connection with a code; False if it does not."""
        import websockets

        try:
            while True:
                self.socket.recv(timeout=PATIENCE)
        except websockets.ConnectionClosed as closed:
            return closed.rcvd is not None and closed.rcvd.code == code
        except TimeoutError:
            return False


CAMERA: dict[str, Any] = {
    "wxyz": [0.0, 1.0, 0.0, 0.0],
    "position": [0.0, 0.0, 3.0],
    "look_at": [0.0, 0.0, 0.0],
    "up_direction": [0.0, 1.0, 0.0],
    "fov": 0.8,
    "near": 0.01,
    "far": 100.0,
    "image_height": 40,
    "image_width": 60,
}
