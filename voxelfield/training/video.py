"""Videos of rendered views."""

from __future__ import annotations

import contextlib
import io
import queue
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from voxelfield.ffmpeg import ffmpeg_program
from voxelfield.files import atomic_path
from voxelfield.rendering.pixels import to_uint8
from voxelfield.training.transfers import AHEAD, OnDevice
from voxelfield.training.video_formats import VideoFormat, video_format

Frame = npt.NDArray[np.uint8]

# Frames that may wait to be encoded, however large they are.
_LEAST_WAITING = 8


@dataclass
class Pace:
    """How fast a video was made.

    Attributes:
        frames: Number of frames.
        rendering: Seconds that the frames took to be asked for and handed over.
        encoding: Seconds that the encoder took, in a thread of its own.
        waited: Seconds that rendering stood still because no further frame had room to wait for the encoder.
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
            f"{rendered:.3g} frames rendered and {encoded:.3g} encoded a second; "
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
    """Renders a video: each image is encoded in a thread while the next ones are made.

    Args:
        path: As for :func:`write_video`.
        images: (H, W, 3) floating point, nominally in [0, 1], any device, such as the ``rgb`` of views; asked for one
            at a time.
        fps: As for :func:`write_video`.
        codec: As for :func:`write_video`.
        room: Bytes of host memory for 8-bit frames that wait for the encoder; at least eight frames may wait. No
            encoder keeps up with a GPU. The default holds 300 frames of 1920 x 1080, so that the GPU is free again as
            soon as they are drawn.

    Returns:
        How fast it was.

    Raises:
        Exception: As for :func:`write_video`, or what making an image raises. There is no file then.
    """
    handover = _Handover(room)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="video") as thread:
        encoding = thread.submit(write_video, path, handover.frames(), fps, codec)
        started, complete = time.perf_counter(), False
        try:
            for frame in _on_host(images):
                if not handover.give(frame, encoding):
                    break
            complete = True
        finally:
            handover.pace.rendering = time.perf_counter() - started - handover.pace.waited
            handover.end(encoding, complete)
        encoding.result()
    return handover.pace


def _on_host(images: Iterable[Tensor]) -> Iterator[Frame]:
    """Yields images as 8-bit frames, each once its device has finished it.

    Without this, the encoder would be what waits for the device, and the time of rendering would be taken for its own.
    """
    on_the_way: deque[OnDevice] = deque()
    for image in images:
        on_the_way.append(OnDevice(to_uint8(image)))
        if len(on_the_way) > AHEAD:
            yield on_the_way.popleft().fetch().numpy()
    while on_the_way:
        yield on_the_way.popleft().fetch().numpy()


class _IncompleteError(Exception):
    """Making images ended early, so that there must be no video."""


@dataclass
class _Handover:
    """Frames on their way from the thread that renders to the one that encodes."""

    room: int
    pace: Pace = field(default_factory=Pace)
    _waiting: queue.Queue[Frame | bool] = field(default_factory=queue.Queue)

    def give(self, item: Frame | bool, encoding: Future[None]) -> bool:
        """Waits for room; returns False if the encoder has ended."""
        if not isinstance(item, bool):
            self._waiting.maxsize = max(_LEAST_WAITING, self.room // max(item.nbytes, 1))
        timeout, started = 0.0, time.perf_counter()
        while not encoding.done():
            try:
                self._waiting.put(item, block=timeout > 0, timeout=timeout)
            except queue.Full:
                timeout = 0.1
                continue
            if timeout > 0:
                self.pace.waited += time.perf_counter() - started
            return True
        return False

    def end(self, encoding: Future[None], complete: bool) -> None:
        """Tells the encoder that there are no more frames, and whether these were all."""
        self.give(complete, encoding)
        if not complete:
            # The error of the images is the one to report.
            with contextlib.suppress(Exception):
                encoding.result()

    def frames(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Yields the frames to the encoder, and times it."""
        while True:
            item = self._waiting.get()
            if isinstance(item, bool):
                if item:
                    return
                raise _IncompleteError
            started = time.perf_counter()
            yield item
            self.pace.encoding += time.perf_counter() - started
            self.pace.frames += 1


def write_video(
    path: Path, frames: Iterable[npt.NDArray[np.uint8]], fps: float = 30, codec: str | VideoFormat | None = None
) -> None:
    """Encodes frames as a video.

    An odd height or width is padded by repeating the last row or column, since most codecs halve the colour resolution;
    no frame is rescaled. The file appears when the last frame is encoded, and not at all on failure.

    Args:
        path: File to write, whose ending says which container it is, see
            :data:`voxelfield.training.video_formats.CONTAINERS`; its parent directory is created if needed.
        frames: (H, W, 3) uint8 arrays of one size; consumed one at a time.
        fps: Frames per second.
        codec: How to encode, see :data:`voxelfield.training.video_formats.CODECS`; None: the container's default,
            which for ``*.mp4`` is H.264, which every browser and player decodes. A :class:`VideoFormat`, as
            :func:`voxelfield.training.video_formats.video_format` makes, sets quality and layout of pixels too.

    Raises:
        MissingPackageError: ffmpeg, which imageio-ffmpeg brings, is not installed.
        OSError: The file cannot be written.
        TypeError: A frame is not uint8.
        ValueError: There is no frame, a frame has another shape than (H, W, 3) or than the first, ``fps`` is not
            positive, or there is no such container or codec.
    """
    program = ffmpeg_program("write a video")  # before the first frame is drawn, which may take long
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
    """ffmpeg, which takes frames through a pipe; a context manager that kills it if it has not finished.

    The writers of imageio run Python between fork and exec, which crashes now and then where other threads are at work.
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
            # Ctrl-C is for this program, which then ends the encoder as it should.
            start_new_session=True,
        )

    def append(self, frame: npt.NDArray[np.uint8]) -> None:
        """Encodes a frame; raises OSError if ffmpeg has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(np.ascontiguousarray(frame).data)

    def finish(self) -> int:
        """Waits for the file; returns the exit status."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was still to be written, to an ffmpeg that has ended
            self._process.stdin.close()
        return self._process.wait()

    def __enter__(self) -> _Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self.finish()


def _is_whole(path: Path, count: int) -> bool:
    """Tells whether a video has all of its frames."""
    if path.suffix in (".mp4", ".mov"):
        return _boxes_are_whole(path)
    import imageio_ffmpeg

    try:
        found: int = imageio_ffmpeg.count_frames_and_secs(str(path))[0]
    except (RuntimeError, OSError):  # no video at all
        return False
    return found == count


def _boxes_are_whole(path: Path) -> bool:
    """Tells whether an MP4 file ends where its last box does, and has an index, which ffmpeg writes last."""
    size = path.stat().st_size if path.is_file() else 0
    position, kinds = 0, []
    with path.open("rb") if size > 0 else io.BytesIO() as file:
        while position + 16 <= size:
            file.seek(position)
            length, kind, long_length = struct.unpack(">I4sQ", file.read(16))
            kinds.append(kind)
            # 1 stands for a length of 64 bits, and 0 for the rest of the file.
            position += max({0: size, 1: long_length}.get(length, length), 8)
    return position == size and b"moov" in kinds
