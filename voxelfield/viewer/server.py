"""viser's server, extended by checks of requests and messages.

viser passes neither allowed origins nor request hooks to websockets, accepts messages of all its types from every
client, and sets any attribute of a control that a client names. Its constructor starts to serve, so the arguments of
websockets' ``serve`` are extended while it runs. A viser that bypasses these checks is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import logging
import math
import socket
import time
import warnings
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import viser
import websockets.asyncio.server
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import DATA_OPCODES, Frame
from websockets.http11 import Request, Response
from websockets.sync.client import connect

from voxelfield.datasets.camera_path import FIELDS_OF_VIEW
from voxelfield.datasets.poses import FARTHEST
from voxelfield.installed import MissingPackageError
from voxelfield.messages import clipped
from voxelfield.viewer.address import Address

logger = logging.getLogger(__name__)

_quiet = functools.partial(contextlib.redirect_stdout, None)  # viser prints banners

MOST_CONNECTIONS = 32  # twice as many with those that are being opened or closed
MESSAGES_PER_SECOND = 300  # that are read from a connection, on average; further ones wait in the browser
LARGEST_MESSAGE = 1 << 16  # bytes
MOST_FRAMES = 100  # of a message, and pings while the browser does not read the answers
READING_SECONDS = 30.0  # within which a browser must read something of what waits for it
LARGEST_CANVAS = 8192  # pixels along a side of a browser's canvas

_SHORTEST = 1e-6  # relative length below which the direction of a vector is lost in rounding
_MOST_WARNINGS = 100
_POLICY_VIOLATION = 1008
_PROBE_SECONDS = 10.0


def start_server(address: Address, label: str) -> Any:
    """Starts viser's server.

    Raises ValueError if another program has just taken the port, and MissingPackageError if the installed version of
    viser bypasses the checks.
    """
    log = _LogOnce()
    server: Any = None

    def control_of(uuid: str) -> Any:
        return None if server is None else server.gui._gui_input_handle_from_uuid.get(uuid)

    def serve(
        handler: Any, *place: Any, process_request: Callable[..., Response | None] | None = None, **options: Any
    ) -> Any:
        def check(connection: ServerConnection, request: Request) -> Response | None:
            refusal = address.refusal(request.path, request.headers)
            if len(connection.server.connections) >= MOST_CONNECTIONS:
                refusal = http.HTTPStatus.SERVICE_UNAVAILABLE, f"at most {MOST_CONNECTIONS} browsers may be connected"
            if refusal is not None:
                log.warning("refused a request: %s", refusal[1])
                return connection.respond(refusal[0], refusal[1] + "\n")
            return None if process_request is None else process_request(connection, request)

        def add_headers(_: ServerConnection, request: Request, response: Response) -> None:
            if response.status_code == http.HTTPStatus.OK:
                for name, value in address.response_headers(request.path, request.headers["Host"]).items():
                    response.headers[name] = value

        options |= {
            "process_request": check,
            "process_response": add_headers,
            "create_connection": functools.partial(_Connection, control_of, log),
            "logger": log,
            "max_size": LARGEST_MESSAGE,
        }
        return original(handler, *place, **options)

    # The response to a client's request may be ready only after it has left.
    warnings.filterwarnings("ignore", r"Queued a \w+ on a closed connection", UserWarning)
    original = websockets.asyncio.server.serve
    websockets.asyncio.server.serve = serve  # type: ignore[misc, assignment]
    try:
        with _quiet():
            server = viser.ViserServer(address.host, address.port, label=label, verbose=False)
    finally:
        websockets.asyncio.server.serve = original  # type: ignore[misc]
    try:
        if server.get_port() != address.port:
            raise ValueError(f"{address.names[1]} must be a free port, got {address.port}, which was just taken")
        bypassed = _bypassed(server, address)
        if bypassed is not None:
            raise MissingPackageError(
                f"viser must be a version of which voxelfield can check {bypassed}, got {viser.__version__}: "
                'pip install "viser==1.1.1"'
            )
    except BaseException:
        with _quiet():
            server.stop()
        raise
    server.get_event_loop().set_exception_handler(
        lambda _, context: log.warning("a browser's request failed: %s", context.get("exception") or context["message"])
    )
    log.enabled = True
    return server


def _bypassed(server: Any, address: Address) -> str | None:
    """Tries what no browser may do; returns the name of a check that does not take place, or None."""
    control = server.gui.add_checkbox("", False)
    known = control in getattr(server.gui, "_gui_input_handle_from_uuid", {}).values()
    control.remove()
    if not known:
        return "controls"

    def code(message: bytes, **options: Any) -> int | None:
        """Returns the status with which a connection is refused, or the code with which a message ends it."""
        try:
            stream = socket.create_connection((address.reached_at, address.port))
            options |= {"subprotocols": [f"viser-v{viser.__version__}"], "open_timeout": _PROBE_SECONDS}
            with connect(address.url.replace("http", "ws", 1), sock=stream, **options) as connection:
                connection.send(message)
                while True:
                    connection.recv(timeout=_PROBE_SECONDS)
        except InvalidStatus as refused:
            return refused.response.status_code
        except ConnectionClosed as closed:
            return None if closed.rcvd is None else closed.rcvd.code
        except (OSError, websockets.exceptions.WebSocketException):
            return None

    with _quiet():
        if code(b"", origin="http://another.invalid") != http.HTTPStatus.FORBIDDEN:
            return "requests"
        return None if code(b"\xc1") == _POLICY_VIOLATION else "messages"


class _LogOnce(logging.Logger):
    """Logs each kind of warning once, in one line, so that no client can fill the log; nothing until it is enabled.

    It has no lock, because all warnings come from the thread of viser's event loop.
    """

    def __init__(self) -> None:
        super().__init__(__name__, logging.WARNING)
        self.enabled = False
        self._logged: set[str] = set()

    def handle(self, record: logging.LogRecord) -> None:
        """Logs a warning unless a similar one, which differs in the value after ``, got``, has been logged."""
        error = record.exc_info and record.exc_info[1]
        message = clipped(" ".join((record.getMessage() + (f" ({error})" if error else "")).split()))
        kind = message.partition(", got ")[0]
        if self.enabled and kind not in self._logged and len(self._logged) < _MOST_WARNINGS:
            self._logged.add(kind)
            logger.warning("viewer: %s (logged once)", message)


class _Connection(ServerConnection):
    """A connection whose messages are counted and checked before viser processes them."""

    def __init__(self, control_of: Callable[[str], Any], log: _LogOnce, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._control_of = control_of
        self._log = log
        self._paid_until = 0.0
        self._parts = self._pings = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ends a connection if too many others are open, or are being opened or closed."""
        super().connection_made(transport)
        if len(self.server.handlers) > 2 * MOST_CONNECTIONS:
            self._end(f"at most {2 * MOST_CONNECTIONS} connections may be open, opening or closing")

    def process_event(self, event: Any) -> None:
        """Ends a connection at a message of too many frames, or at pings whose answers it does not read."""
        super().process_event(event)
        if isinstance(event, Frame):
            if event.opcode not in DATA_OPCODES:
                self._pings = self._pings + 1 if self.paused else 0
            else:
                self._parts = 0 if event.fin else self._parts + 1
            if max(self._parts, self._pings) > MOST_FRAMES:
                self._end(f"a message must have at most {MOST_FRAMES} frames, and answers to pings must be read")

    def pause_writing(self) -> None:
        """Ends the connection unless the browser goes on reading: pictures and files for all would wait for it."""
        super().pause_writing()
        self._watch(math.inf)

    def _watch(self, unread: float) -> None:
        now = self.transport.get_write_buffer_size()
        if self.paused and now >= unread:
            self._end(f"it must read what it is sent, got nothing read in {READING_SECONDS:g} seconds")
        elif self.paused:
            self.loop.call_later(READING_SECONDS, self._watch, now)

    def _end(self, reason: str) -> None:
        self._log.warning("a browser was disconnected: %s", reason)
        self.transport.abort()

    async def recv(self, decode: bool | None = None) -> Any:
        """Returns the next valid message, and closes the connection at an invalid one."""
        while True:
            data = await super().recv(decode)
            now = time.monotonic()
            # After a pause, a second's worth of messages is read at once.
            self._paid_until = max(self._paid_until, now - 1) + 1 / MESSAGES_PER_SECOND
            await asyncio.sleep(max(0.0, self._paid_until - now))
            with contextlib.suppress(OSError):  # which ends the next call
                await self.drain()  # what a browser asks for waits while it does not read
            try:
                message = validated(data, self._control_of)
            except RefusedMessageError as error:
                self._log.warning("a browser was disconnected: %s", error)
                await self.close(_POLICY_VIOLATION, clipped(str(error)))
                raise self.protocol.close_exc from error
            if message is not None:
                return message


# NaN fails these limits too.
Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
Vector: TypeAlias = tuple[Number, Number, Number]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=255)]
Side: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class RefusedMessageError(ValueError):
    """A message that viser's client does not send for this page."""


class _Message(msgspec.Struct, tag=True, tag_field="type"):
    """A message of the protocol of viser's client; ``type`` is the name of the class."""


class ViewerCameraMessage(_Message):
    """The camera of a browser."""

    wxyz: tuple[Number, Number, Number, Number]
    position: Vector
    look_at: Vector
    up_direction: Vector
    fov: Number
    near: Number
    far: Number
    image_height: Side
    image_width: Side


class _Updates(msgspec.Struct, forbid_unknown_fields=True):
    value: bool | float | str | list[float]


class GuiUpdateMessage(_Message):
    """A new value of a control; viser would also set the control's other attributes."""

    uuid: Text
    updates: _Updates


class SceneNodeClickMessage(_Message):
    """A click at an object of the scene."""

    name: Annotated[str, msgspec.Meta(max_length=4096)]
    instance_index: int | None
    ray_origin: Vector
    ray_direction: Vector
    screen_pos: tuple[Number, Number]
    modifier: Text | None
    owner: Text = ""


_DECODER = msgspec.msgpack.Decoder(ViewerCameraMessage | GuiUpdateMessage | SceneNodeClickMessage)


def validated(data: bytes | str, control_of: Callable[[str], Any]) -> bytes | None:
    """Returns a message in the form in which viser may process it, or None if it is obsolete.

    Values beyond the range of a control, and cameras beyond the limits of rendering, are moved to the nearest valid
    ones. ``control_of`` returns viser's handle of a control of the page by its identifier, or None. Raises
    RefusedMessageError for a message that viser's client does not send for this page.
    """
    try:
        message = _DECODER.decode(data.encode() if isinstance(data, str) else data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise RefusedMessageError(f"a message must be one of the page's: {error}") from error
    if isinstance(message, ViewerCameraMessage):
        if min(message.image_height, message.image_width) < 1:
            return None  # a window that is not shown
        _normalise(message)
    elif isinstance(message, GuiUpdateMessage):
        control = control_of(message.uuid)
        if control is None or getattr(control, "disabled", True):
            return None  # since the user has seen it; a progress bar is for nobody
        message.updates.value = control_value(control, message.updates.value)
    return msgspec.msgpack.encode(message)


def control_value(control: Any, value: object) -> Any:
    """Returns a value that a client has sent for a control, moved into its range.

    Raises RefusedMessageError for a value of the wrong type, or one that is not among the control's options.
    """
    present = control.value
    refusal = RefusedMessageError(f"a {type(control).__name__} cannot have such a value, got {value!r:.40}")
    if hasattr(control, "options") or isinstance(present, bool):
        if type(value) is not type(present) or value not in getattr(control, "options", (False, True)):
            raise refusal
        return value
    numbers = np.asarray(value)
    fits = numbers.dtype.kind in "if" and numbers.shape == np.shape(present) and bool(np.isfinite(numbers).all())
    if not fits or not hasattr(control, "min"):
        raise refusal
    nearest = np.clip(numbers.astype(np.float64), control.min, control.max)
    return round(float(nearest)) if isinstance(present, int) else nearest.tolist()


def _normalise(camera: ViewerCameraMessage) -> None:
    """Moves a camera within the limits of rendering, in place."""
    factor = min(1.0, LARGEST_CANVAS / max(camera.image_height, camera.image_width))
    camera.image_height, camera.image_width = (
        max(1, round(side * factor)) for side in (camera.image_height, camera.image_width)
    )
    camera.fov = float(np.clip(camera.fov, *np.radians(FIELDS_OF_VIEW)))
    position, look_at = (np.clip(point, -FARTHEST, FARTHEST) for point in (camera.position, camera.look_at))
    if np.linalg.norm(look_at - position) <= _SHORTEST * np.abs((position, look_at)).max():
        raise RefusedMessageError("look_at must be apart from position")
    camera.position, camera.look_at = tuple(position.tolist()), tuple(look_at.tolist())
    camera.wxyz, camera.up_direction = _unit("wxyz", camera.wxyz), _unit("up_direction", camera.up_direction)


def _unit(name: str, vector: tuple[float, ...]) -> Any:
    """Returns a vector or quaternion scaled to unit length."""
    length = float(np.linalg.norm(vector))
    if length < _SHORTEST:
        raise RefusedMessageError(f"{name} must have a direction, got a length of {length:g}")
    return tuple(component / length for component in vector)
