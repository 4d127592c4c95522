"""The thread that draws for all connected browsers."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from voxelfield.training.trained_model import TrainedModel
from voxelfield.viewer.display import SMALLEST_SIDE, Display, Viewpoint
from voxelfield.viewer.painter import Painter
from voxelfield.viewer.photographs import Photographs

logger = logging.getLogger(__name__)

_REST_SECONDS = 0.15
"""Seconds without movement after which a camera is at rest."""

_BAND_SECONDS = 0.06
"""Longest delay before a moving camera cancels a sharp picture."""

_MEDIUM_SECONDS = 1.0
"""A sharp picture that takes longer is preceded by one of medium size, which takes this long."""

_POLL_SECONDS = 0.02

_UPDATE_SHARE = 0.1
"""Share of the time spent on drawing a field in training while no camera moves."""

_MIN_SECONDS_BETWEEN_UPDATES = 0.5
_SECONDS_AFTER_ERROR = 5.0

_FEWEST_PIXELS = 64 * 64
# Pictures whose duration is within this factor of the target keep their size, because constant changes flicker.
_DURATION_TOLERANCE = 1.25
_LARGEST_CHANGE = 3.0


@dataclass(frozen=True)
class PictureRequest:
    """A client's request for a picture.

    Attributes:
        viewpoint: The camera.
        height: Height of the picture at rest, pixels.
        width: Width of the picture at rest, pixels.
        photo: Number of the photograph that was taken from there, if any.
    """

    viewpoint: Viewpoint
    height: int
    width: int
    photo: int | None = None


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
    MEDIUM = 2
    SHARP = 3


class ResolutionControl:
    """Chooses the size of pictures such that each takes a given time."""

    def __init__(self) -> None:
        self._pixels = float(_FEWEST_PIXELS)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width of the next picture, at most those given and of the same aspect."""
        scale = min(1.0, math.sqrt(self._pixels / (height * width)))
        return max(SMALLEST_SIDE, round(height * scale)), max(SMALLEST_SIDE, round(width * scale))

    def record(self, pixels: int, seconds: float, full_size: int, target: float) -> None:
        """Records a picture.

        Args:
            pixels: Number of its pixels.
            seconds: Its duration.
            full_size: Number of pixels at full size.
            target: Desired duration, seconds.
        """
        factor = target / max(seconds, 1e-6)
        if 1 / _DURATION_TOLERANCE < factor < _DURATION_TOLERANCE:
            return
        factor = min(max(factor, 1 / _LARGEST_CHANGE), _LARGEST_CHANGE)
        # Growth is damped, because a part of the duration does not depend on the size.
        pixels_wanted = pixels * (factor if factor < 1 else math.sqrt(factor))
        self._pixels = min(max(pixels_wanted, _FEWEST_PIXELS), full_size)


class _Client:
    """The request of a client, when it was last changed, and the detail at which it has been drawn."""

    def __init__(self, client_id: int, request: PictureRequest) -> None:
        self.client_id = client_id
        self.resolution = ResolutionControl()
        self.change(request)

    def change(self, request: PictureRequest) -> None:
        self.request, self.changed, self.detail = request, time.perf_counter(), Detail.NONE


class RenderWorker:
    """Draws the requests of all clients in a thread of its own.

    While a camera moves, pictures are as large as the desired rate allows. At rest one of full size follows. It is
    drawn in bands, between which a movement can cancel it.

    Args:
        device: Device of the field.
        deliver: Called by the thread with a client and its picture. Its time counts as part of the picture's.
        run: A field that does not change.
        poll: Returns the field if it has changed since the last call, otherwise None; called by the thread. The field
            is then the worker's alone.
        photographs: Photographs of the scene.
        frames_per_second: Desired rate while a camera moves.

    Attributes:
        frames_per_second: The desired rate, which may be changed at any time.
    """

    def __init__(
        self,
        device: torch.device,
        deliver: Callable[[int, Picture], None],
        *,
        run: TrainedModel | None = None,
        poll: Callable[[], TrainedModel | None] = lambda: None,
        photographs: Photographs | None = None,
        frames_per_second: float = 20.0,
    ) -> None:
        self.frames_per_second = frames_per_second
        self._device = device
        self._deliver = deliver
        self._poll = poll
        self._photographs = photographs
        self._display = Display()
        self._clients: dict[int, _Client] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._painter = None if run is None else Painter(run, photographs)
        self._pixels_per_second = 1e5
        self._next_update = 0.0
        self._last_error = ""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._loop, name="viewer", daemon=True)
        self._thread.start()

    @property
    def display(self) -> Display:
        """How all clients see the field; a change is drawn at once."""
        return self._display

    @display.setter
    def display(self, display: Display) -> None:
        with self._wake:
            if display != self._display:
                self._display = display
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

    def screenshot(self, request: PictureRequest, is_wanted: Callable[[], bool]) -> Tensor | None:
        """Draws a sharp picture in the calling thread, while clients still get their pictures.

        Args:
            request: The picture.
            is_wanted: Called between bands; drawing ends early if it returns False.

        Returns:
            (H, W, 3) uint8 on the CPU; None if it is no longer wanted, or there is no field yet.
        """
        painter = self._painter
        if painter is None:
            return None
        with torch.no_grad(), self._on_own_stream():
            # A painter of its own, because it is not safe for concurrent use.
            return self._draw_in_bands(Painter(painter.run), request, self._display, is_wanted)

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
        with torch.no_grad(), self._on_own_stream():
            while not self._closed:
                try:
                    self._update()
                    with self._wake:
                        client = self._next_client()
                        if client is None or self._painter is None:
                            self._wake.wait(_POLL_SECONDS)
                            continue
                        request, display = client.request, self._display
                    self._draw(self._painter, client, request, display)
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

    def _draw(self, painter: Painter, client: _Client, request: PictureRequest, display: Display) -> None:
        """Draws a client's request at the next level of detail."""
        try:
            detail = self._deliver_next(painter, client, request, display)
        except Exception as error:  # a user's field may raise anything
            self._fail(error)
            detail = Detail.SHARP  # the request is drawn again only after a change
        with self._wake:
            if client.request == request and self._display == display:
                client.detail = detail

    def _deliver_next(self, painter: Painter, client: _Client, request: PictureRequest, display: Display) -> Detail:
        """Draws and delivers a picture, and returns the level of detail that has been reached."""
        started = time.perf_counter()
        detail, pixels = self._refine(painter, client, request, display)
        if pixels is None:
            return client.detail
        drawn = time.perf_counter()
        self._deliver(client.client_id, Picture(pixels, detail == Detail.SHARP, drawn - started, request))
        delivered = time.perf_counter()
        if detail == Detail.COARSE:
            count = pixels.shape[0] * pixels.shape[1]
            target = 1 / self.frames_per_second
            client.resolution.record(count, delivered - started, request.height * request.width, target)
            self._pixels_per_second = count / max(drawn - started, 1e-6)
        elif detail == Detail.SHARP:
            pause = (delivered - started) * (1 / _UPDATE_SHARE - 1)
            self._next_update = delivered + max(_MIN_SECONDS_BETWEEN_UPDATES, pause)
        return detail

    def _refine(
        self, painter: Painter, client: _Client, request: PictureRequest, display: Display
    ) -> tuple[Detail, Tensor | None]:
        """Returns the next level of detail and its picture, or None if it is no longer wanted."""
        if client.detail == Detail.NONE:
            height, width = client.resolution.size(request.height, request.width)
            return Detail.COARSE, painter.picture(request.viewpoint, display, height, width, photo=request.photo)

        def is_wanted() -> bool:
            with self._wake:
                moving = any(other.detail == Detail.NONE for other in self._clients.values())
                connected = client in self._clients.values()
                changed = client.request != request or self._display != display
                return connected and not (self._closed or moving or changed)

        detail, share = Detail.SHARP, _MEDIUM_SECONDS * self._pixels_per_second / (request.height * request.width)
        drawn = request
        if client.detail == Detail.COARSE and share < 0.5:
            detail = Detail.MEDIUM
            height, width = (max(SMALLEST_SIDE, round(side * share**0.5)) for side in (request.height, request.width))
            drawn = replace(request, height=height, width=width)
        return detail, self._draw_in_bands(painter, drawn, display, is_wanted)

    def _draw_in_bands(
        self, painter: Painter, request: PictureRequest, display: Display, is_wanted: Callable[[], bool]
    ) -> Tensor | None:
        """Returns a sharp picture, or None if ``is_wanted``, which is called before each band, returns False."""
        bands, first = [], 0
        while first < request.height:
            if not is_wanted():
                return None
            rows = max(8, round(_BAND_SECONDS * self._pixels_per_second / request.width))
            end = first + rows if first + rows <= request.height - 8 else request.height
            started = time.perf_counter()
            bands.append(
                painter.picture(
                    request.viewpoint,
                    display,
                    request.height,
                    request.width,
                    rows=(first, end),
                    sharp=True,
                    photo=request.photo,
                )
            )
            self._pixels_per_second = (end - first) * request.width / max(time.perf_counter() - started, 1e-6)
            first = end
        return torch.cat(bands)

    def _update(self) -> None:
        """Switches to a newer field when due."""
        if self._painter is not None and (not self._clients or time.perf_counter() < self._next_update):
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
        run = self._poll()
        if run is None:
            return
        painter = Painter(run, self._photographs)
        with self._wake:
            self._painter = painter
            for client in self._clients.values():
                # The present picture serves as the coarse one.
                client.detail = min(client.detail, Detail.MEDIUM)

    def _fail(self, error: Exception) -> None:
        """Logs an error once, and delays the next update."""
        if str(error) != self._last_error:
            logger.error("the viewer cannot draw: %s", error)
        self._last_error = str(error)
        self._next_update = time.perf_counter() + _SECONDS_AFTER_ERROR

    def _on_own_stream(self) -> contextlib.AbstractContextManager[object]:
        """Separates work on CUDA from that of training, so that neither waits for the other."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
