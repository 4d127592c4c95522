"""Videos of rendered views."""

from __future__ import annotations

import contextlib
import io
import queue
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from voxelfield.files import atomic_path
from voxelfield.media.ffmpeg import ffmpeg_program
from voxelfield.media.video_formats import VideoFormat, video_format
from voxelfield.rendering.pixels import to_uint8
from voxelfield.training.transfers import AHEAD, OnDevice

Frame = npt.NDArray[np.uint8]

# Smallest number of frames that may wait for the encoder, regardless of their size.
_MIN_WAITING = 8

# Seconds after which a thread that waits for the other one checks whether that has ended.
_POLLED_EVERY = 0.1


@dataclass
class Pace:
    """Timing of the rendering and encoding of a video.

    Attributes:
        frames: Number of frames.
        rendering: Seconds spent on producing the frames.
        encoding: Seconds spent by the encoder, in a separate thread.
        waited: Seconds in which rendering was stopped because the queue for the encoder was full.
    """

    frames: int = 0
    rendering: float = 0.0
    encoding: float = 0.0
    waited: float = 0.0

    def __str__(self) -> str:
        """Returns the speeds in one line."""
        rendered, encoded = (self.frames / max(seconds, 1e-9) for seconds in (self.rendering, self.encoding))
        share = self.waited / max(self.rendering + self.waited, 1e-9)
        return (
            f"{rendered:.3g} frames rendered and {encoded:.3g} encoded per second; "
            f"rendering waited for the encoder {100 * share:.0f} % of the time"
        )


def write_views(
    path: Path,
    images: Iterable[Tensor],
    fps: float = 30,
    codec: str | VideoFormat | None = None,
    *,
    room: int = 2 << 30,
) -> Pace:
    """Renders a video; each image is encoded in a thread while the next ones are rendered.

    Args:
        path: As for :func:`write_video`.
        images: (H, W, 3) floating point, nominally in [0, 1], any device, such as the ``rgb`` of views; consumed one at
            a time.
        fps: As for :func:`write_video`.
        codec: As for :func:`write_video`.
        room: Bytes of host memory for 8-bit frames that wait for the encoder; at least eight frames may wait. Encoders
            are slower than a GPU. The default holds 300 frames of 1920 x 1080, so that the GPU is free as soon as these
            are rendered.

    Returns:
        The timing.

    Raises:
        Exception: As for :func:`write_video`, or any error from ``images``. No file is written then.
    """
    handover = _Handover(room)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="video") as thread:
        encoding = thread.submit(write_video, path, handover.frames(), fps, codec)
        started = time.perf_counter()
        try:
            for frame in _on_host(images):
                if not handover.give(frame, encoding):
                    break
            handover.pace.rendering = time.perf_counter() - started - handover.pace.waited
            handover.give(None, encoding)
            encoding.result()
        except BaseException:
            handover.aborted.set()
            raise
    return handover.pace


def _on_host(images: Iterable[Tensor]) -> Iterator[Frame]:
    """Yields images as 8-bit frames, each after its device has finished it.

    Otherwise the encoder would wait for the device, and rendering time would be counted as encoding time.
    """
    on_the_way: deque[OnDevice] = deque()
    for image in images:
        on_the_way.append(OnDevice(to_uint8(image)))
        if len(on_the_way) > AHEAD:
            yield on_the_way.popleft().fetch().numpy()
    while on_the_way:
        yield on_the_way.popleft().fetch().numpy()


class _IncompleteError(Exception):
    """The iterable of images ended with an error, so no video must be written."""


@dataclass
class _Handover:
    """A queue of frames between the rendering and the encoding thread."""

    room: int
    pace: Pace = field(default_factory=Pace)
    aborted: threading.Event = field(default_factory=threading.Event)
    _waiting: queue.Queue[Frame | None] = field(default_factory=queue.Queue)

    def give(self, item: Frame | None, encoding: Future[None]) -> bool:
        """Waits until there is room in the queue; returns False if the encoder has ended. None ends the video."""
        if item is not None:
            self._waiting.maxsize = max(_MIN_WAITING, self.room // max(item.nbytes, 1))
        timeout, started = 0.0, time.perf_counter()
        while not encoding.done():
            try:
                self._waiting.put(item, block=timeout > 0, timeout=timeout)
            except queue.Full:
                timeout = _POLLED_EVERY
                continue
            if timeout > 0:
                self.pace.waited += time.perf_counter() - started
            return True
        return False

    def frames(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Yields the frames to the encoder and measures its time."""
        while True:
            try:
                item = self._waiting.get(timeout=_POLLED_EVERY)
            except queue.Empty:
                item = None
                if not self.aborted.is_set():
                    continue
            # Frames that still wait are dropped then, because the video would be incomplete.
            if self.aborted.is_set():
                raise _IncompleteError
            if item is None:
                return
            started = time.perf_counter()
            yield item
            self.pace.encoding += time.perf_counter() - started
            self.pace.frames += 1


def write_video(
    path: Path, frames: Iterable[npt.NDArray[np.uint8]], fps: float = 30, codec: str | VideoFormat | None = None
) -> None:
    """Encodes frames as a video.

    An odd height or width is padded by repeating the last row or column, since most codecs halve the colour resolution;
    no frame is rescaled. The file is created only after the last frame has been encoded, and not at all on failure.

    Args:
        path: File to write; its suffix selects the container, see
            :data:`voxelfield.media.video_formats.CONTAINERS`; its parent directory is created if needed.
        frames: (H, W, 3) uint8 arrays of one size; consumed one at a time.
        fps: Frames per second.
        codec: A codec from :data:`voxelfield.media.video_formats.CODECS`; None for the container's default, which
            for ``*.mp4`` is H.264, supported by every browser and player. A :class:`VideoFormat` from
            :func:`voxelfield.media.video_formats.video_format` also sets quality and pixel format.

    Raises:
        MissingPackageError: ffmpeg, which imageio-ffmpeg provides, is not installed.
        OSError: The file cannot be written.
        TypeError: A frame is not uint8.
        ValueError: There is no frame, a frame has another shape than (H, W, 3) or than the first, ``fps`` is not
            positive, or there is no such container or codec.
    """
    program = ffmpeg_program("write a video")  # before the first frame is rendered, which may take long
    if not fps > 0:
        raise ValueError(f"fps must be above 0, got {fps}")
    chosen = codec if isinstance(codec, VideoFormat) else video_format("path", path, codec)
    first: tuple[int, ...] | None = None
    count = 0
    with atomic_path(path) as temporary, contextlib.ExitStack() as running:
        encoder: _Encoder | None = None
        for index, frame in enumerate(frames):
            if frame.dtype != np.uint8:
                raise TypeError(f"frames[{index}] must be uint8, got {frame.dtype}")
            if frame.ndim != 3 or frame.shape[-1] != 3 or (first is not None and frame.shape != first):
                raise ValueError(f"frames[{index}] must have shape {first or '(H, W, 3)'}, got {frame.shape}")
            first = frame.shape
            height, width, _ = frame.shape
            padded = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            if encoder is None:
                encoder = running.enter_context(_Encoder(program, temporary, padded.shape, fps, chosen))
            try:
                encoder.append(padded)
            except OSError as error:
                raise OSError(f"{path} could not be written: ffmpeg stopped at frame {index}") from error
            count += 1
        if encoder is None:
            raise ValueError("frames must hold at least one frame")
        status = encoder.finish()
        if status != 0 or not _is_whole(temporary, count):
            raise OSError(f"{path} could not be written: ffmpeg left it incomplete, as it does on a full disk")


class _Encoder:
    """An ffmpeg process that reads frames from a pipe; a context manager that kills it if it has not finished.

    imageio's writers run Python between fork and exec, which occasionally crashes if other threads are running.
    """

    def __init__(self, program: str, path: Path, shape: tuple[int, ...], fps: float, chosen: VideoFormat) -> None:
        height, width, _ = shape
        given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-framerate", str(fps), "-i", "-"]
        quality = [] if chosen.crf is None else ["-crf", str(chosen.crf)]
        made = ["-an", "-c:v", chosen.encoder, "-pix_fmt", chosen.pixels, *chosen.options, *quality, str(path)]
        self._process = subprocess.Popen(
            [program, "-y", "-hide_banner", "-loglevel", "error", *given, *made],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Ctrl-C must reach only this program, which then ends the encoder properly.
            start_new_session=True,
        )

    def append(self, frame: npt.NDArray[np.uint8]) -> None:
        """Encodes a frame; raises OSError if ffmpeg has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(np.ascontiguousarray(frame).data)

    def finish(self) -> int:
        """Waits until the file is complete; returns the exit status."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # unwritten data for an ffmpeg that has already ended
            self._process.stdin.close()
        return self._process.wait()

    def __enter__(self) -> _Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self.finish()


def _is_whole(path: Path, count: int) -> bool:
    """Returns whether a video contains all of its frames."""
    if path.suffix in (".mp4", ".mov"):
        return _boxes_are_whole(path)
    import imageio_ffmpeg

    try:
        found: int = imageio_ffmpeg.count_frames_and_secs(str(path))[0]
    except (RuntimeError, OSError):  # not a video
        return False
    return found == count


def _boxes_are_whole(path: Path) -> bool:
    """Returns whether an MP4 file ends with its last box and has an index, which ffmpeg writes last."""
    size = path.stat().st_size if path.is_file() else 0
    position, kinds = 0, []
    with path.open("rb") if size > 0 else io.BytesIO() as file:
        while position + 16 <= size:
            file.seek(position)
            length, kind, long_length = struct.unpack(">I4sQ", file.read(16))
            kinds.append(kind)
            # A length of 1 means that a 64-bit length follows, and 0 means the rest of the file.
            position += max({0: size, 1: long_length}.get(length, length), 8)
    return position == size and b"moov" in kinds
