"""Videos of rendered views, encoded by the FFmpeg libraries that PyAV contains."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from torch import Tensor

from voxelfield.files import atomic_write
from voxelfield.installed import MissingPackageError
from voxelfield.media.background import BackgroundWriter
from voxelfield.rendering.pixels import to_uint8
from voxelfield.transfers import AHEAD, OnDevice

Frame = npt.NDArray[np.uint8]

# Smallest number of frames that may wait for the encoder, regardless of their size.
_MIN_WAITING = 8

# Side of a coding unit. x265 writes past its memory for some smaller widths, from 34 to 48 (x265 4.1, AVX-512).
_MIN_HEVC = 64


@dataclass(frozen=True)
class VideoFormat:
    """Encoding options.

    Attributes:
        encoder: FFmpeg's name of the encoder.
        pixels: FFmpeg's name of the pixel format.
        options: Further options of the encoder.
        crf: Constant rate factor: higher values give smaller files of lower quality. The defaults are nearly visually
            lossless. None if the encoder has no such option.
        max_crf: Largest constant rate factor.
    """

    encoder: str
    pixels: str = "yuv420p"
    options: dict[str, str] = field(default_factory=dict)
    crf: int | None = None
    max_crf: int = 51


CODECS = {
    "h264": VideoFormat("libx264", options={"preset": "veryfast"}, crf=16),
    "hevc": VideoFormat("libx265", options={"x265-params": "log-level=error"}, crf=18),
    "av1": VideoFormat("libsvtav1", options={"preset": "8"}, crf=24, max_crf=63),
    "vp9": VideoFormat("libvpx-vp9", options={"b": "0", "row-mt": "1", "cpu-used": "4"}, crf=20, max_crf=63),
    "prores": VideoFormat("prores_ks", "yuv422p10le", {"profile": "hq"}),
}
"""Codecs by name. ProRes has 10 bits per channel and is meant for editing."""

CONTAINERS = {
    ".mp4": ("h264", "hevc", "av1"),
    ".mkv": ("h264", "hevc", "av1", "vp9"),
    ".webm": ("vp9", "av1"),
    ".mov": ("prores", "h264", "hevc"),
}
"""Supported codecs by file suffix; the first of each is the default."""


def import_av(task: str) -> Any:
    """Returns the module av.

    Args:
        task: The task that needs PyAV, for the message.

    Raises:
        MissingPackageError: PyAV is not installed.
    """
    try:
        import av
    except ModuleNotFoundError as error:
        raise MissingPackageError(f'av must be installed to {task}: pip install "voxelfield[train]"') from error
    return av


def video_format(
    name: str, path: Path, codec: str | None = None, *, crf: int | None = None, pixels: str | None = None
) -> VideoFormat:
    """Returns the encoding options for a file.

    Args:
        name: Name of the argument, for messages.
        path: The file; its suffix selects the container, see :data:`CONTAINERS`.
        codec: One of :data:`CODECS`; None for the container's default, which for ``*.mp4`` is H.264, supported by every
            browser and player.
        crf: Constant rate factor; None for the codec's default.
        pixels: FFmpeg's name of a pixel format of the encoder, such as ``yuv444p`` for colours at full resolution; None
            for the codec's default, which most players support.

    Raises:
        MissingPackageError: ``pixels`` is given, and PyAV, which knows those of each encoder, is not installed.
        ValueError: The suffix is not that of a container, the container does not support the codec, or the codec does
            not support an option.
    """
    suffix = path.suffix.lower()
    if suffix not in CONTAINERS:
        raise ValueError(f"{name} must be a video, *{', *'.join(CONTAINERS)}, got {path}")
    supported = CONTAINERS[suffix]
    codec = codec or supported[0]
    if codec not in supported:
        raise ValueError(f"codec must be one of {', '.join(supported)} in a {suffix} file, got {codec!r}")
    chosen = CODECS[codec]
    if crf is not None:
        if chosen.crf is None:
            raise ValueError(f"crf must be left out for {codec}, which has none, got {crf}")
        if not 0 <= crf <= chosen.max_crf:
            raise ValueError(f"crf must lie in [0, {chosen.max_crf}] for {codec}, got {crf}")
        chosen = replace(chosen, crf=crf)
    if pixels is not None:
        layouts = [layout.name for layout in import_av("write a video").Codec(chosen.encoder, "w").video_formats]
        if pixels not in layouts:
            raise ValueError(f"pixels must be one of {', '.join(layouts)} for {codec}, got {pixels!r}")
        chosen = replace(chosen, pixels=pixels)
    return chosen


def write_video(
    path: Path,
    images: Iterable[Tensor],
    fps: float = 30,
    encoding: VideoFormat | None = None,
    *,
    room: int = 2 << 30,
) -> None:
    """Writes a video; each image is encoded in a thread while the next ones are rendered.

    An odd height or width is padded by repeating the last row or column, since most codecs halve the colour resolution;
    no image is rescaled. The file appears when it is complete, and not at all if anything fails.

    Args:
        path: File to write; its suffix selects the container, see :data:`CONTAINERS`; its parent directory is created
            if needed.
        images: (H, W, 3) floating point, nominally in [0, 1], all of one size, any device, such as the ``rgb`` of
            views; consumed one at a time.
        fps: Frames per second.
        encoding: Options from :func:`video_format`; None for the container's defaults.
        room: Bytes of host memory for 8-bit frames that wait for the encoder; at least eight frames may wait. Encoders
            are slower than a GPU. The default suffices for 300 frames of 1920 x 1080, so that the GPU is free as soon
            as these are rendered.

    Raises:
        Exception: Any error from ``images``.
        MissingPackageError: PyAV is not installed.
        OSError: The file cannot be written.
        TypeError: An image is not floating point.
        ValueError: There is no image, one has another shape than (H, W, 3) or than the first, HEVC frames are less than
            64 pixels wide, ``fps`` is not positive, or there is no such container.
    """
    av = import_av("write a video")  # before the first image is rendered, which may take long
    if not fps > 0:
        raise ValueError(f"fps must be above 0, got {fps}")
    encoding = encoding or video_format("path", path)
    # Through a file of Python's, whose errors name their cause, such as a full disk.
    with atomic_write(path) as file:
        encoder = _Encoder(av, file, path.suffix.lower(), fps, encoding)
        try:
            with BackgroundWriter(1, _MIN_WAITING) as writer:
                for frame in _on_host(images):
                    writer.limit = max(_MIN_WAITING, room // max(frame.nbytes, 1))
                    writer.submit(encoder.append, frame)
            encoder.finish()
        except av.FFmpegError as error:
            raise OSError(f"{path} could not be written: FFmpeg stopped at frame {encoder.count} ({error})") from error
        finally:
            encoder.close()


def _on_host(images: Iterable[Tensor]) -> Iterator[Frame]:
    """Yields images as 8-bit frames; a few stay queued on the device, so that it does not wait for the host."""
    queued: deque[OnDevice] = deque()
    for image in images:
        queued.append(OnDevice(to_uint8(image)))
        if len(queued) > AHEAD:
            yield queued.popleft().fetch().numpy()
    while queued:
        yield queued.popleft().fetch().numpy()


class _Encoder:
    """A video under construction, whose size is that of its first frame."""

    def __init__(self, av: Any, file: BinaryIO, suffix: str, fps: float, encoding: VideoFormat) -> None:
        self.count = 0
        self._av = av
        self._encoding = encoding
        self._container = av.open(file, "w", format={".mkv": "matroska"}.get(suffix, suffix[1:]))
        options = encoding.options if encoding.crf is None else {**encoding.options, "crf": str(encoding.crf)}
        rate = Fraction(fps).limit_denominator(1_000_000)
        self._stream = self._container.add_stream(encoding.encoder, rate=rate, pix_fmt=encoding.pixels, options=options)
        # PyAV's default makes x264 cut frames into slices, which costs quality.
        self._stream.codec_context.thread_type = "AUTO"
        if encoding.encoder == "libx265":
            self._stream.codec_context.codec_tag = "hvc1"  # the only one that Apple's players accept
        # One for all frames: each frame's own would compute its tables again.
        self._reformatter = av.video.reformatter.VideoReformatter()
        self._shape: tuple[int, ...] | None = None

    def append(self, frame: Frame) -> None:
        if frame.ndim != 3 or frame.shape[-1] != 3 or self._shape not in (None, frame.shape):
            shape = self._shape or "(H, W, 3)"
            raise ValueError(f"images[{self.count}] must have shape {shape}, got {frame.shape}")
        height, width, _ = self._shape = frame.shape
        if height % 2 or width % 2:
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if self.count == 0:
            if self._encoding.encoder == "libx265" and width < _MIN_HEVC:
                raise ValueError(f"images must be at least {_MIN_HEVC} pixels wide for hevc, got {width}")
            self._stream.height, self._stream.width = frame.shape[:2]
        picture = self._av.VideoFrame.from_ndarray(frame, format="rgb24")
        # As the program ffmpeg resamples colours.
        picture = self._reformatter.reformat(picture, format=self._encoding.pixels, interpolation="BICUBIC")
        picture.pts = self.count
        self._container.mux(self._stream.encode(picture))
        self.count += 1

    def finish(self) -> None:
        if self.count == 0:
            raise ValueError("images must contain at least one image, got none")
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def close(self) -> None:
        """Frees the encoder of a video that has failed; does nothing after :meth:`finish`."""
        with contextlib.suppress(OSError, self._av.FFmpegError):
            self._container.close()
