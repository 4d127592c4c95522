"""Pictures of a field from any viewpoint, and the thread that draws them for all connected browsers."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.view_pictures import depth_range, picture
from voxelfield.rendering.viewpoints import Viewpoint
from voxelfield.trained.trained_model import TrainedModel

logger = logging.getLogger(__name__)

_LOOK_ROWS = 48  # of the picture that finds the range of depths

_REST_SECONDS = 0.15  # without movement, after which a camera is at rest
_BAND_SECONDS = 0.06  # longest delay before a moving camera cancels a sharp picture
_POLL_SECONDS = 0.02
# Fraction of the time that is spent on drawing a field in training while no camera moves.
_UPDATE_FRACTION = 0.1
_MIN_SECONDS_BETWEEN_UPDATES = 0.5
_SECONDS_AFTER_ERROR = 5.0
_CLOSING_SECONDS = 5.0  # longest time that closing waits for the picture being drawn
_FEWEST_PIXELS = 64 * 64
# Pictures whose duration is within this factor of the target keep their size, because constant changes flicker.
_DURATION_TOLERANCE = 1.25


@dataclass(frozen=True)
class PictureRequest:
    """A picture of one of :data:`PICTURES`, as a client asks for it; its size is that at rest."""

    viewpoint: Viewpoint
    mode: str
    height: int
    width: int


class Painter:
    """Draws a field that does not change, with the settings of its evaluation."""

    def __init__(self, run: TrainedModel) -> None:
        self.run = run
        self._renderer = renderer = functools.cache(lambda supersampling: run.renderer(supersampling=supersampling))

        @functools.lru_cache(1)
        def depths(viewpoint: Viewpoint, aspect: float) -> tuple[float, float]:
            return depth_range(renderer(1), viewpoint.cameras(_LOOK_ROWS, max(1, round(_LOOK_ROWS * aspect))))

        self._depths = depths

    @torch.no_grad()
    def picture(self, request: PictureRequest, rows: tuple[int, int] | None = None, *, sharp: bool = False) -> Tensor:
        """Draws a picture, or a band of its rows, (rows, width, 3) uint8 on the CPU.

        A sharp one has as many rays per pixel as the run's evaluation instead of one.
        """
        viewpoint, height, width = request.viewpoint, request.height, request.width
        view = self._renderer(self.run.trainer.evaluation.supersampling if sharp else 1).view(
            viewpoint.cameras(height, width, rows).to(self.run.model.device), 0
        )
        depths = self._depths(viewpoint, width / height) if request.mode == "depth" else (0.5, 1.0)
        return to_uint8(picture(view, request.mode, depths)).cpu()


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

    def reduced(self, request: PictureRequest, seconds: float) -> PictureRequest:
        """Returns the request with a size at which its picture is drawn and delivered in ``seconds``."""
        pixels = max(_FEWEST_PIXELS, self.pixels_per_second * seconds)
        scale = min(1.0, math.sqrt(pixels / (request.height * request.width)))
        height, width = (max(1, round(side * scale)) for side in (request.height, request.width))
        return replace(request, height=height, width=width)

    def record(self, pixels: int, seconds: float) -> None:
        """Adapts the size of later pictures to how long one took."""
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

    Attributes:
        painter: Draws the newest field; None until there is one.
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
        self.painter: Painter | None = None
        self._update_fraction = _UPDATE_FRACTION
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

    def hurry(self) -> None:
        """Draws newer fields without the pauses that leave time for training."""
        self._update_fraction, self._next_update = 1.0, 0.0

    def close(self) -> None:
        """Ends the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(_CLOSING_SECONDS)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Draws without gradients, in a separate stream, so that neither drawing nor training waits for the other."""
        with torch.no_grad(), contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def _loop(self) -> None:
        with self.stream():
            while not self._closed:
                try:
                    self._update()
                    self._draw_next()
                except Exception as error:  # a user's field may raise anything
                    if str(error) != self._last_error:
                        logger.error("the viewer cannot draw: %s", error)
                    self._last_error = str(error)
                    self._next_update = time.perf_counter() + _SECONDS_AFTER_ERROR
                    time.sleep(_POLL_SECONDS)

    def _draw_next(self) -> None:
        """Draws and delivers a picture for the client whose turn it is, or waits a little."""
        with self._wake:
            # One that has seen nothing yet, otherwise one at rest; the longest waiting.
            rested, clients = time.perf_counter() - _REST_SECONDS, self._clients.values()
            resting = [each for each in clients if each.detail == Detail.COARSE and each.changed <= rested]
            waiting = [each for each in clients if each.detail == Detail.NONE] or resting
            client = min(waiting, key=lambda each: each.changed, default=None)
            if client is None or self.painter is None:
                self._wake.wait(_POLL_SECONDS)
                return
            request, sharp = client.request, client.detail == Detail.COARSE
            # Set before drawing, because a change of the request sets it back.
            client.detail = Detail.SHARP if sharp else Detail.COARSE
        started = time.perf_counter()
        try:
            if sharp:
                pixels = self._sharp(self.painter, client, request)
            else:
                pixels = self.painter.picture(client.reduced(request, 1 / self.frames_per_second))
            if pixels is None:
                return
            self._deliver(client.client_id, pixels, sharp, time.perf_counter() - started)
        except Exception:
            with self._wake:
                if client.detail != Detail.NONE:
                    client.detail = Detail.SHARP  # the request is drawn again only after a change
            raise
        now = time.perf_counter()
        if sharp:
            pause = (now - started) * (1 / self._update_fraction - 1)
            self._next_update = now + max(_MIN_SECONDS_BETWEEN_UPDATES, pause)
        else:
            client.record(pixels.shape[0] * pixels.shape[1], now - started)

    def _sharp(self, painter: Painter, client: _Client, request: PictureRequest) -> Tensor | None:
        """Draws a picture of full size in bands; returns None as soon as it is no longer wanted."""
        bands, first = [], 0
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
            bands.append(painter.picture(request, (first, end), sharp=True))
            pixels_per_second = (end - first) * request.width / max(time.perf_counter() - started, 1e-6)
            first = end
        return torch.cat(bands)

    def _update(self) -> None:
        """Switches to a newer field when due."""
        resting = not self._clients or time.perf_counter() < self._next_update
        if self.painter is not None and resting:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        run = self._poll()
        if run is None:
            return
        painter = Painter(run)
        with self._wake:
            self.painter = painter
            for client in self._clients.values():
                # The present picture serves as the coarse one.
                client.detail = min(client.detail, Detail.COARSE)
