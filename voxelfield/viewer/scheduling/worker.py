"""The thread that draws for all connected clients."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import IntEnum

import torch
from torch import Tensor

from voxelfield.viewer.drawing.look import Look
from voxelfield.viewer.drawing.painter import Painter
from voxelfield.viewer.drawing.photographs import Photographs
from voxelfield.viewer.drawing.viewpoint import Viewpoint
from voxelfield.viewer.scheduling.resolution import SMALLEST_SIDE, ResolutionControl
from voxelfield.viewer.scheduling.source import Source

logger = logging.getLogger(__name__)

_REST_SECONDS = 0.15
"""A camera that has not moved for so long is at rest."""

_BAND_SECONDS = 0.06
"""About how long a movement waits for a sharp picture to be given up."""

_MEDIUM_SECONDS = 1.0
"""Where a sharp picture takes longer, one of middling size comes first, which takes so long."""

_IDLE_SECONDS = 0.1
"""How often the thread looks for a newer field while there is nothing to draw."""

_SHARE_FOR_UPDATES = 0.1
"""Share of the time spent on drawing a field that is being trained, while nobody moves."""

_MIN_SECONDS_BETWEEN_UPDATES = 0.5
_SECONDS_AFTER_ERROR = 5.0


@dataclass(frozen=True)
class Request:
    """A client's request for a picture.

    Attributes:
        viewpoint: Where from.
        height: Height of the picture at rest, pixels.
        width: Width of the picture at rest, pixels.
        photo: Number of the photograph that was taken from there; None: none was.
    """

    viewpoint: Viewpoint
    height: int
    width: int
    photo: int | None = None


@dataclass(frozen=True, eq=False)
class Frame:
    """A picture that was drawn.

    Attributes:
        pixels: (H, W, 3) uint8 on the CPU.
        sharp: Whether it is one of a camera at rest, in full size.
        seconds: What drawing took.
        request: What was asked for.
        absence: The reason why a sharp picture shows nothing of the field; otherwise empty.
    """

    pixels: Tensor
    sharp: bool
    seconds: float
    request: Request
    absence: str = ""


class _Stage(IntEnum):
    """How finely a request has been drawn."""

    NOT = 0
    COARSE = 1
    MEDIUM = 2
    SHARP = 3


@dataclass(eq=False)
class _Seen:
    """How far a client's request has been drawn."""

    request: Request
    control: ResolutionControl
    since: float
    stage: _Stage = _Stage.NOT


@dataclass(eq=False)
class _Still:
    """A single picture, for a file."""

    request: Request
    look: Look
    result: Future[Tensor] = field(default_factory=Future)


class RenderWorker:
    """Draws the current requests of all clients in a thread of its own.

    While a camera moves, pictures are as large as the wished rate allows. At rest one in full size follows, drawn in
    bands, so that the next movement need not wait for it.

    Args:
        source: Where the field comes from.
        deliver: Called by the thread with who asked, and the picture. Its time counts as part of the picture's.
        photographs: As for :class:`Painter`.
        frames_per_second: Wished while a camera moves.

    Attributes:
        frames_per_second: May be changed at any time.
    """

    def __init__(
        self,
        source: Source,
        deliver: Callable[[int, Frame], None],
        *,
        photographs: Photographs | None = None,
        frames_per_second: float = 20.0,
    ) -> None:
        self.frames_per_second = frames_per_second
        self._source = source
        self._deliver = deliver
        self._photographs = photographs
        self._look = Look()
        self._seen: dict[int, _Seen] = {}
        self._stills: dict[int, _Still] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._painter: Painter | None = None
        self._pixels_per_second = 1e5
        self._next_news = 0.0
        self._last_error = ""
        device = source.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name="viewer", daemon=True)
        self._thread.start()

    @property
    def look(self) -> Look:
        """The look that all clients see; a change is drawn at once."""
        return self._look

    @look.setter
    def look(self, look: Look) -> None:
        with self._wake:
            if look == self._look:
                return
            self._look = look
            for seen in self._seen.values():
                seen.stage, seen.since = _Stage.NOT, time.perf_counter()
            self._wake.notify()

    def ask(self, who: int, request: Request) -> None:
        """Sets a client's request, which replaces its previous one."""
        with self._wake:
            seen = self._seen.get(who)
            now = time.perf_counter()
            if seen is None:
                self._seen[who] = _Seen(request, ResolutionControl(1 / self.frames_per_second), now)
            elif seen.request != request:
                seen.request, seen.since, seen.stage = request, now, _Stage.NOT
            self._wake.notify()

    def request_of(self, who: int) -> Request | None:
        """Returns a client's request, or None."""
        with self._wake:
            seen = self._seen.get(who)
            return None if seen is None else seen.request

    def forget(self, who: int) -> None:
        """Stops drawing for a client; a still that it is waiting for is cancelled."""
        with self._wake:
            self._seen.pop(who, None)
            still = self._stills.pop(who, None)
        if still is not None:
            still.result.cancel()

    def still(self, who: int, request: Request) -> Future[Tensor]:
        """Asks for one picture with the present look, as sharp as the run's evaluation has it.

        It is drawn between the pictures of other requests. One that the same client is still waiting for is cancelled.

        Args:
            who: The client.
            request: What to draw.

        Returns:
            What will be (H, W, 3) uint8 on the CPU.
        """
        still = _Still(request, self._look)
        with self._wake:
            before, self._stills[who] = self._stills.pop(who, None), still
            self._wake.notify()
        if before is not None:
            before.result.cancel()
        return still.result

    def close(self, timeout: float = 5.0) -> None:
        """Ends the thread; pictures that are still wanted are cancelled.

        Args:
            timeout: Seconds to wait at most for what is being drawn.
        """
        with self._wake:
            self._closed = True
            stills, self._stills = list(self._stills.values()), {}
            self._wake.notify()
        for still in stills:
            still.result.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        with torch.no_grad(), self._on_own_stream():
            while not self._closed:
                try:
                    self._take_news()
                    self._draw_next()
                except Exception as error:  # a field of somebody else's may raise anything
                    self._give_up(error)
                    time.sleep(_IDLE_SECONDS)

    def _draw_next(self) -> None:
        with self._wake:
            still = next(iter(self._stills.items()), None) if self._painter is not None else None
            who = None if still is not None else self._next()
            if still is None and who is None:
                self._wake.wait(self._patience())
                return
        if still is not None:
            self._draw_still(*still)
        elif who is not None:
            self._draw(who)

    def _next(self) -> int | None:
        """Returns for whom to draw: who has seen nothing yet, then who is at rest; of those who waited longest."""
        if self._painter is None:
            return None
        waiting = [(seen.since, who) for who, seen in self._seen.items() if seen.stage == _Stage.NOT]
        if waiting:
            return min(waiting)[1]
        rested = time.perf_counter() - _REST_SECONDS
        resting = [
            (seen.stage, seen.since, who)
            for who, seen in self._seen.items()
            if seen.stage < _Stage.SHARP and seen.since <= rested
        ]
        return min(resting)[2] if resting else None

    def _patience(self) -> float:
        """Returns how long to wait for a change, seconds: shorter where a camera is about to be at rest."""
        blurred = [seen.since for seen in self._seen.values() if seen.stage < _Stage.SHARP]
        if not blurred or self._painter is None:
            return _IDLE_SECONDS
        return min(_IDLE_SECONDS, max(0.001, min(blurred) + _REST_SECONDS - time.perf_counter()))

    def _draw(self, who: int) -> None:
        """Draws a client's request, one stage finer than before."""
        seen = self._seen.get(who)
        if seen is None:
            return
        request, look = seen.request, self._look
        try:
            self._draw_request(who, seen, request, look)
        except Exception as error:  # a field of somebody else's may raise anything
            self._give_up(error)
            # It is tried again only after a change.
            self._reach(seen, request, look, _Stage.SHARP)

    def _draw_request(self, who: int, seen: _Seen, request: Request, look: Look) -> None:
        began = time.perf_counter()
        stage, pixels = self._finer(seen, request, look)
        if pixels is None:
            return
        drawn = time.perf_counter()
        absence = self._absence(pixels, request, look) if stage == _Stage.SHARP else ""
        self._deliver(who, Frame(pixels, stage == _Stage.SHARP, drawn - began, request, absence))
        took = time.perf_counter() - began
        self._reach(seen, request, look, stage)
        if stage == _Stage.COARSE:
            count = pixels.shape[0] * pixels.shape[1]
            seen.control.record(count, took, request.height * request.width)
            self._pixels_per_second = count / max(drawn - began, 1e-6)
        elif stage == _Stage.SHARP:
            pause = max(_MIN_SECONDS_BETWEEN_UPDATES, took * (1 / _SHARE_FOR_UPDATES - 1))
            self._next_news = time.perf_counter() + pause

    def _reach(self, seen: _Seen, request: Request, look: Look, stage: _Stage) -> None:
        with self._wake:
            if seen.request == request and self._look == look:
                seen.stage = stage

    def _absence(self, pixels: Tensor, request: Request, look: Look) -> str:
        """Says why a picture of one colour shows nothing of the field, if it does not."""
        assert self._painter is not None
        if bool((pixels != pixels[0, 0]).any()):
            return ""
        return self._painter.absence(request.viewpoint, look)

    def _finer(self, seen: _Seen, request: Request, look: Look) -> tuple[_Stage, Tensor | None]:
        """Returns the next stage of a request and its picture; None if it is not wanted any more."""
        assert self._painter is not None
        if seen.stage == _Stage.NOT:
            seen.control.seconds = 1 / self.frames_per_second
            height, width = seen.control.size(request.height, request.width)
            picture = self._painter.picture(request.viewpoint, look, height, width, photo=request.photo)
            return _Stage.COARSE, picture
        whole = request.height * request.width
        share = _MEDIUM_SECONDS * self._pixels_per_second / whole
        if seen.stage == _Stage.COARSE and share < 0.5:
            scale = math.sqrt(share)
            height, width = (max(SMALLEST_SIDE, round(side * scale)) for side in (request.height, request.width))
            smaller = replace(request, height=height, width=width)
            return _Stage.MEDIUM, self._in_bands(smaller, look, lambda: self._is_wanted(seen, request, look))
        return _Stage.SHARP, self._in_bands(request, look, lambda: self._is_wanted(seen, request, look))

    def _in_bands(self, request: Request, look: Look, go_on: Callable[[], bool]) -> Tensor | None:
        """Returns a picture in full size, or None if ``go_on``, which is called before each band, returns False."""
        assert self._painter is not None
        bands, first = [], 0
        while first < request.height:
            if not go_on():
                return None
            rows = max(8, round(_BAND_SECONDS * self._pixels_per_second / request.width))
            end = min(first + rows, request.height)
            if request.height - end < 8:
                end = request.height
            began = time.perf_counter()
            bands.append(
                self._painter.picture(
                    request.viewpoint,
                    look,
                    request.height,
                    request.width,
                    rows=(first, end),
                    sharp=True,
                    photo=request.photo,
                )
            )
            self._pixels_per_second = (end - first) * request.width / max(time.perf_counter() - began, 1e-6)
            first = end
        return torch.cat(bands)

    def _is_wanted(self, seen: _Seen, request: Request, look: Look) -> bool:
        """Tells whether to go on with a sharp picture; no longer if something else must be drawn first."""
        with self._wake:
            moving = any(other.stage == _Stage.NOT for other in self._seen.values())
            left = all(other is not seen for other in self._seen.values())
            return not (self._closed or moving or left or seen.request != request or self._look != look)

    def _draw_still(self, who: int, still: _Still) -> None:
        """Draws a still, and between its bands whatever others wait for."""

        def go_on() -> bool:
            with self._wake:
                other = self._next()
            if other is not None:
                self._draw(other)
            return not (still.result.cancelled() or self._closed)

        pixels, error = None, None
        try:
            pixels = self._in_bands(still.request, still.look, go_on)
        except Exception as caught:
            error = caught
        with self._wake:
            if self._stills.get(who) is still:
                del self._stills[who]
        if not still.result.set_running_or_notify_cancel():
            return
        if pixels is not None:
            still.result.set_result(pixels)
        else:
            still.result.set_exception(error or RuntimeError("the viewer was closed"))

    def _take_news(self) -> None:
        """Goes over to a newer field, if there is one and it is time."""
        if self._painter is not None and (not self._seen or time.perf_counter() < self._next_news):
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._source.device))
        run = self._source.poll()
        if run is None:
            return
        painter = Painter(run, self._photographs)
        with self._wake:
            self._painter = painter
            for seen in self._seen.values():
                # What is there already serves as the coarse picture.
                seen.stage = min(seen.stage, _Stage.MEDIUM)

    def _give_up(self, error: Exception) -> None:
        """Tells an error once, and waits before a newer field is taken."""
        if str(error) != self._last_error:
            logger.error("the viewer cannot draw: %s", error)
        self._last_error = str(error)
        with self._wake:
            self._next_news = time.perf_counter() + _SECONDS_AFTER_ERROR

    def _on_own_stream(self) -> contextlib.AbstractContextManager[object]:
        """Keeps this thread's work on CUDA apart from training's, so that neither is queued behind the other."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
