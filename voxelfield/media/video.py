"""Videos of rendered views: H.264 in MP4, encoded by imageio's plugin for PyAV."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from voxelfield.devices import AHEAD, OnDevice
from voxelfield.files import atomic_write
from voxelfield.installed import import_optional
from voxelfield.media.png import BackgroundWriter
from voxelfield.rendering.pixels import to_uint8

LARGEST_SIDE = 16384
"""Largest width and height of an image, in pixels; encoders accept no larger ones."""

FPS_RANGE = (0.001, 1000)
"""Numbers of frames per second that the clock of an MP4 file can represent, as imageio sets it."""

# Smallest number of frames that may wait for the encoder, regardless of their size.
_MIN_WAITING = 8


def check_video(name: str, path: Path) -> None:
    """Raises an error, in which the path is called ``name``, unless a video can be written to it.

    Raises:
        MissingPackageError: imageio or PyAV is not installed.
        ValueError: The suffix is not ``.mp4``.
    """
    if path.suffix.lower() != ".mp4":
        raise ValueError(
            f"{name} must be a video *.mp4, got {path}: write one, or a folder of images, and convert it with ffmpeg"
        )
    for package in ("imageio", "av"):
        import_optional(package, "write a video")


def write_video(path: Path, images: Iterable[Tensor], fps: float = 30, *, room: int = 2 << 30) -> None:
    """Writes a video as H.264 in MP4; each image is encoded in a thread while the next ones are rendered.

    An odd height or width is padded by repeating the last row or column, since the format halves the colour resolution;
    no image is rescaled. The encoded video stays in memory until it is complete; there is no file if anything fails.

    Args:
        path: File to write, as :func:`check_video` accepts it; its parent directory is created if needed.
        images: At least one, (H, W, 3) floating point, nominally in [0, 1], all of one size, any device, such as the
            ``rgb`` of views; consumed one at a time.
        fps: Frames per second, in :data:`FPS_RANGE`.
        room: Bytes of host memory for 8-bit frames that wait for the encoder; at least eight frames may wait. Encoders
            are slower than a GPU. The default suffices for 300 frames of 1920 x 1080, so that the GPU is free as soon
            as these are rendered.

    Raises:
        Exception: Any error from ``images``.
        MissingPackageError: imageio or PyAV is not installed.
        OSError: The file cannot be written.
        TypeError: An image is not floating point.
        ValueError: A side is longer than :data:`LARGEST_SIDE`.
    """
    av, imageio = (import_optional(name, "write a video") for name in ("av", "imageio.v3"))
    frames = map(_even, _on_host(images))
    first = next(frames)
    # Encoded in memory, because imageio cannot close a video whose file it could not write, as on a full disk.
    encoded = io.BytesIO()
    try:
        with imageio.imopen(encoded, "w", plugin="pyav", extension=".mp4") as video:
            video.init_video_stream("libx264", fps=float(fps), pixel_format="yuv420p")
            # Players guess the colours of a video that does not state them, from 720 rows on as BT.709's, so that they
            # would differ from the images. These are sRGB, and libswscale converts to YUV by the matrix of BT.601.
            codec, values = video._video_stream.codec_context, av.video.reformatter
            codec.colorspace, codec.color_range = values.Colorspace.ITU601, values.ColorRange.MPEG
            codec.color_primaries, codec.color_trc = values.ColorPrimaries.BT709, values.ColorTrc.IEC61966_2_1
            # This opens the encoder, which is flushed also after an error of `images`.
            video.write_frame(first)
            with BackgroundWriter(1, max(_MIN_WAITING, room // first.nbytes)) as writer:
                for frame in frames:
                    writer.submit(video.write_frame, frame)
    except av.FFmpegError as error:
        raise OSError(f"{path} could not be written: FFmpeg stopped ({error})") from error
    with atomic_write(path) as file:
        file.write(encoded.getbuffer())


def _on_host(images: Iterable[Tensor]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields images as 8-bit frames; a few stay queued on the device, so that it does not wait for the host."""
    queued: deque[OnDevice] = deque()
    for image in images:
        queued.append(OnDevice(to_uint8(image)))
        if len(queued) > AHEAD:
            yield queued.popleft().fetch().numpy()
    while queued:
        yield queued.popleft().fetch().numpy()


def _even(frame: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns a frame with even sides."""
    height, width, _ = frame.shape
    if max(height, width) > LARGEST_SIDE:
        raise ValueError(f"images must have 1 to {LARGEST_SIDE} pixels along each side, got {width}x{height}")
    odd = height % 2 or width % 2
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge") if odd else frame
