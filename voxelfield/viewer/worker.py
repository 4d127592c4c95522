"""The thread that draws for all connected browsers."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from voxelfield.trained.trained_model import TrainedModel
from voxelfield.viewer.pictures import Painter, Viewpoint

logger = logging.getLogger(__name__)

_REST_SECONDS = 0.15
"""Seconds without movement after which a camera is at rest."""

_BAND_SECONDS = 0.06
"""Longest delay before a moving camera cancels a sharp picture."""

_POLL_SECONDS = 0.02

_UPDATE_FRACTION = 0.1
"""Fraction of the time that is spent on drawing a field in training while no camera moves."""

_MIN_SECONDS_BETWEEN_UPDATES = 0.5
_SECONDS_AFTER_ERROR = 5.0

_CLOSING_SECONDS = 5.0
"""Longest time that closing waits for the picture being drawn."""

_FEWEST_PIXELS = 64 * 64

_DURATION_TOLERANCE = 1.25
"""Pictures whose duration is within this factor of the target keep their size, because constant changes flicker."""


@dataclass(frozen=True)
class PictureRequest:
    """A client's request for a picture, with the size that it has at rest."""

    viewpoint: Viewpoint
    mode: str
    height: int
    width: int


class Detail(IntEnum):
    """Level of detail at which a request has been drawn, or is being drawn."""

    NONE = 0
    COARSE = 1
    SHARP = 2


class _Client:
    """The request of a client, when it was last changed, and how far it has been drawn."""

    def __init__(self, client_id: int, request: PictureRequest) -> None:
        self.client_id = client_id
        self.pixels_per_second = 1.0
        self.change(request)

    def change(self, request: PictureRequest) -> None:
        self.request, self.changed, self.detail = request, time.perf_counter(), Detail.NONE

    def size(self, request: PictureRequest, seconds: float) -> tuple[int, int]:
        """Returns height and width of a picture that is drawn and delivered in ``seconds``."""
        pixels = max(_FEWEST_PIXELS, self.pixels_per_second * seconds)
        scale = min(1.0, math.sqrt(pixels / (request.height * request.width)))
        return max(1, round(request.height * scale)), max(1, round(request.width * scale))

    def record(self, pixels: int, seconds: float) -> None:
        """Records how long a picture took."""
        speed = pixels / max(seconds, 1e-6)
        if not 1 / _DURATION_TOLERANCE < speed / self.pixels_per_second < _DURATION_TOLERANCE:
            self.pixels_per_second = speed


class RenderWorker:
    """Draws the requests of all clients in its thread.

    While a camera moves, pictures are as large as the desired rate allows, which may be changed at any time. At rest
    one of full size follows. It is drawn in bands, between which a movement can cancel it.

    Args:
        device: Device of the field.
        deliver: Called by the thread with a client, its picture (H, W, 3) uint8 on the CPU, whether it has full size,
            for a camera at rest, and the seconds of drawing. This call counts as part of a picture's duration.
        frames_per_second: Desired rate while a camera moves.
        poll: Called by the thread; returns the field if it has changed since the last call, otherwise None. Nobody else
            may change this field.
    """

    def __init__(
        self,
        device: torch.device,
        deliver: Callable[[int, Tensor, bool, float], None],
        frames_per_second: float,
        poll: Callable[[], TrainedModel | None],
    ) -> None:
        self.frames_per_second = frames_per_second
        self._deliver = deliver
        self._poll = poll
        self._clients: dict[int, _Client] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._painter: Painter | None = None
        self._next_update = 0.0
        self._last_error = ""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._loop, name="viewer", daemon=True)
        self._thread.start()

    def request(self, client_id: int, request: PictureRequest) -> None:
        """Sets the request of a client, which replaces its previous one."""
        with self._wake:
            client = self._clients.get(client_id)
            if client is None:
                self._clients[client_id] = _Client(client_id, request)
            elif client.request != request:
                client.change(request)
            self._wake.notify()

    def disconnect(self, client_id: int) -> None:
        """Stops drawing for a client."""
        with self._wake:
            self._clients.pop(client_id, None)

    def close(self) -> None:
        """Ends the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(_CLOSING_SECONDS)

    def _loop(self) -> None:
        # A separate stream, so that neither drawing nor training waits for the other.
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.no_grad(), stream:
            while not self._closed:
                try:
                    self._update()
                    with self._wake:
                        client = self._next_client()
                        if client is None or self._painter is None:
                            self._wake.wait(_POLL_SECONDS)
                            continue
                        request, sharp = client.request, client.detail == Detail.COARSE
                        # Set before drawing, because a change of the request sets it back.
                        client.detail = Detail.SHARP if sharp else Detail.COARSE
                    try:
                        self._draw(self._painter, client, request, sharp=sharp)
                    except Exception:
                        with self._wake:
                            if client.detail != Detail.NONE:
                                client.detail = Detail.SHARP  # the request is drawn again only after a change
                        raise
                except Exception as error:  # a user's field may raise anything
                    self._fail(error)
                    time.sleep(_POLL_SECONDS)

    def _next_client(self) -> _Client | None:
        """Returns the client to draw for: one that has seen nothing yet, otherwise one at rest; the longest waiting."""
        rested = time.perf_counter() - _REST_SECONDS
        waiting = (
            client
            for client in self._clients.values()
            if client.detail == Detail.NONE or (client.detail == Detail.COARSE and client.changed <= rested)
        )
        return min(waiting, key=lambda client: (client.detail, client.changed), default=None)

    def _draw(self, painter: Painter, client: _Client, request: PictureRequest, *, sharp: bool) -> None:
        """Draws and delivers a picture, unless it is sharp and no longer wanted."""
        started = time.perf_counter()
        if sharp:
            pixels = self._sharp(painter, client, request)
        else:
            size = client.size(request, 1 / self.frames_per_second)
            pixels = painter.picture(request.viewpoint, request.mode, *size)
        if pixels is None:
            return
        self._deliver(client.client_id, pixels, sharp, time.perf_counter() - started)
        now = time.perf_counter()
        if sharp:
            pause = (now - started) * (1 / _UPDATE_FRACTION - 1)
            self._next_update = now + max(_MIN_SECONDS_BETWEEN_UPDATES, pause)
        else:
            client.record(pixels.shape[0] * pixels.shape[1], now - started)

    def _sharp(self, painter: Painter, client: _Client, request: PictureRequest) -> Tensor | None:
        """Draws a picture of full size in bands; returns None as soon as it is no longer wanted."""
        bands, first, size = [], 0, (request.height, request.width)
        pixels_per_second = client.pixels_per_second
        while first < request.height:
            with self._wake:
                clients = self._clients.values()
                # Includes this client, if its request has changed.
                moving = any(other.detail == Detail.NONE for other in clients)
                if self._closed or moving or client not in clients:
                    client.detail = min(client.detail, Detail.COARSE)
                    return None
            rows = max(8, round(_BAND_SECONDS * pixels_per_second / request.width))
            end = first + rows if first + rows <= request.height - 8 else request.height
            started = time.perf_counter()
            bands.append(painter.picture(request.viewpoint, request.mode, *size, rows=(first, end), sharp=True))
            pixels_per_second = (end - first) * request.width / max(time.perf_counter() - started, 1e-6)
            first = end
        return torch.cat(bands)

    def _update(self) -> None:
        """Switches to a newer field when due."""
        resting = not self._clients or time.perf_counter() < self._next_update
        if self._painter is not None and resting:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        run = self._poll()
        if run is None:
            return
        painter = Painter(run)
        with self._wake:
            self._painter = painter
            for client in self._clients.values():
                # The present picture serves as the coarse one.
                client.detail = min(client.detail, Detail.COARSE)

    def _fail(self, error: Exception) -> None:
        """Logs an error once, and delays the next update."""
        if str(error) != self._last_error:
            logger.error("the viewer cannot draw: %s", error)
        self._last_error = str(error)
        self._next_update = time.perf_counter() + _SECONDS_AFTER_ERROR
