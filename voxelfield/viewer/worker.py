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

from voxelfield.training.trained_model import TrainedModel
from voxelfield.viewer.pictures import Mode, Painter, Viewpoint

logger = logging.getLogger(__name__)

_REST_SECONDS = 0.15
"""Seconds without movement after which a camera is at rest."""

_BAND_SECONDS = 0.06
"""Longest delay before a moving camera cancels a sharp picture."""

_POLL_SECONDS = 0.02

_UPDATE_SHARE = 0.1
"""Share of the time spent on drawing a field in training while no camera moves."""

_MIN_SECONDS_BETWEEN_UPDATES = 0.5
_SECONDS_AFTER_ERROR = 5.0

_FEWEST_PIXELS = 64 * 64

_DURATION_TOLERANCE = 1.25
"""Pictures whose duration is within this factor of the target keep their size, because constant changes flicker."""


@dataclass(frozen=True)
class PictureRequest:
    """A client's request for a picture.

    Attributes:
        viewpoint: The camera.
        height: Height of the picture at rest, pixels.
        width: Width of the picture at rest, pixels.
    """

    viewpoint: Viewpoint
    height: int
    width: int


@dataclass(frozen=True, eq=False)
class Picture:
    """A drawn picture.

    Attributes:
        pixels: (H, W, 3) uint8 on the CPU.
        sharp: Whether it has full size, for a camera at rest.
        seconds: Drawing time.
        request: The request.
    """

    pixels: Tensor
    sharp: bool
    seconds: float
    request: PictureRequest


class Detail(IntEnum):
    """Level of detail at which a request has been drawn."""

    NONE = 0
    COARSE = 1
    SHARP = 2


class _Client:
    """The request of a client, when it was last changed, and the detail at which it has been drawn."""

    def __init__(self, client_id: int, request: PictureRequest) -> None:
        self.client_id = client_id
        self._pixels = float(_FEWEST_PIXELS)
        self.change(request)

    def change(self, request: PictureRequest) -> None:
        self.request, self.changed, self.detail = request, time.perf_counter(), Detail.NONE

    def size(self) -> tuple[int, int]:
        """Returns height and width of the next picture while the camera moves."""
        height, width = self.request.height, self.request.width
        scale = min(1.0, math.sqrt(self._pixels / (height * width)))
        return max(1, round(height * scale)), max(1, round(width * scale))

    def record(self, pixels: int, seconds: float, target: float) -> None:
        """Records how long a picture took, so that the next one takes ``target`` seconds."""
        factor = target / max(seconds, 1e-6)
        if not 1 / _DURATION_TOLERANCE < factor < _DURATION_TOLERANCE:
            full_size = self.request.height * self.request.width
            self._pixels = min(max(pixels * factor, _FEWEST_PIXELS), full_size)


class RenderWorker:
    """Draws the requests of all clients in a thread of its own.

    While a camera moves, pictures are as large as the desired rate allows. At rest one of full size follows. It is
    drawn in bands, between which a movement can cancel it.

    Args:
        device: Device of the field.
        deliver: Called by the thread with a client and its picture. Its time counts as part of the picture's.
        frames_per_second: Desired rate while a camera moves.
        source: A field that does not change; or a function, called by the thread, that returns the field if it has
            changed since the last call, otherwise None. The field is then the worker's alone.

    Attributes:
        frames_per_second: The desired rate, which may be changed at any time.
    """

    def __init__(
        self,
        device: torch.device,
        deliver: Callable[[int, Picture], None],
        frames_per_second: float,
        source: TrainedModel | Callable[[], TrainedModel | None],
    ) -> None:
        self.frames_per_second = frames_per_second
        self._device = device
        self._deliver = deliver
        self._poll = source if callable(source) else None
        self._mode: Mode = "rgb"
        self._clients: dict[int, _Client] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._painter = None if callable(source) else Painter(source)
        self._pixels_per_second = 1e5
        self._next_update = 0.0
        self._last_error = ""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._loop, name="viewer", daemon=True)
        self._thread.start()

    @property
    def mode(self) -> Mode:
        """The quantity that all clients see; a change is drawn at once."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        with self._wake:
            if mode != self._mode:
                self._mode = mode
                for client in self._clients.values():
                    client.change(client.request)
                self._wake.notify()

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

    def close(self, timeout: float = 5.0) -> None:
        """Ends the thread.

        Args:
            timeout: Longest time to wait for the picture being drawn, seconds.
        """
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout)

    def _loop(self) -> None:
        # Separates work on CUDA from that of training, so that neither waits for the other.
        own_stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.no_grad(), own_stream:
            while not self._closed:
                try:
                    self._update()
                    with self._wake:
                        client = self._next_client()
                        if client is None or self._painter is None:
                            self._wake.wait(_POLL_SECONDS)
                            continue
                        request, mode = client.request, self._mode
                    self._draw(self._painter, client, request, mode)
                except Exception as error:  # a user's field may raise anything
                    self._fail(error)
                    time.sleep(_POLL_SECONDS)

    def _next_client(self) -> _Client | None:
        """Returns the client to draw for: one that has seen nothing yet, otherwise one at rest; the longest waiting."""
        rested = time.perf_counter() - _REST_SECONDS
        waiting = (
            client
            for client in self._clients.values()
            if client.detail == Detail.NONE or (client.detail < Detail.SHARP and client.changed <= rested)
        )
        return min(waiting, key=lambda client: (client.detail, client.changed), default=None)

    def _draw(self, painter: Painter, client: _Client, request: PictureRequest, mode: Mode) -> None:
        """Draws a client's request at the next level of detail."""
        try:
            detail = self._deliver_next(painter, client, request, mode)
        except Exception as error:  # a user's field may raise anything
            self._fail(error)
            detail = Detail.SHARP  # the request is drawn again only after a change
        with self._wake:
            if client.request == request and self._mode == mode:
                client.detail = detail

    def _deliver_next(self, painter: Painter, client: _Client, request: PictureRequest, mode: Mode) -> Detail:
        """Draws and delivers a picture, and returns the level of detail that has been reached."""
        started, sharp = time.perf_counter(), client.detail == Detail.COARSE
        if sharp:
            pixels = self._sharp(painter, client, request, mode)
            if pixels is None:
                return client.detail
        else:
            pixels = painter.picture(request.viewpoint, mode, *client.size())
        drawn = time.perf_counter()
        self._deliver(client.client_id, Picture(pixels, sharp, drawn - started, request))
        delivered = time.perf_counter()
        if sharp:
            pause = (delivered - started) * (1 / _UPDATE_SHARE - 1)
            self._next_update = delivered + max(_MIN_SECONDS_BETWEEN_UPDATES, pause)
            return Detail.SHARP
        count = pixels.shape[0] * pixels.shape[1]
        client.record(count, delivered - started, 1 / self.frames_per_second)
        self._pixels_per_second = count / max(drawn - started, 1e-6)
        return Detail.COARSE

    def _sharp(self, painter: Painter, client: _Client, request: PictureRequest, mode: Mode) -> Tensor | None:
        """Draws a picture of full size in bands; returns None as soon as it is no longer wanted."""
        bands, first = [], 0
        while first < request.height:
            with self._wake:
                moving = any(other.detail == Detail.NONE for other in self._clients.values())
                changed = client.request != request or self._mode != mode
                if self._closed or moving or changed or client not in self._clients.values():
                    return None
            rows = max(8, round(_BAND_SECONDS * self._pixels_per_second / request.width))
            end = first + rows if first + rows <= request.height - 8 else request.height
            started = time.perf_counter()
            size = (request.height, request.width)
            bands.append(painter.picture(request.viewpoint, mode, *size, rows=(first, end), sharp=True))
            self._pixels_per_second = (end - first) * request.width / max(time.perf_counter() - started, 1e-6)
            first = end
        return torch.cat(bands)

    def _update(self) -> None:
        """Switches to a newer field when due."""
        resting = not self._clients or time.perf_counter() < self._next_update
        if self._poll is None or (self._painter is not None and resting):
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
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
