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
from voxelfield.files import write_file
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
        path: File to write, ``*.mp4``; its parent directory is created if needed.
        images: (H, W, 3) floating point, nominally in [0, 1], all of one size, any device, such as the ``rgb`` of
            views; consumed one at a time.
        fps: Frames per second.
        room: Bytes of host memory for 8-bit frames that wait for the encoder; at least eight frames may wait. Encoders
            are slower than a GPU. The default suffices for 300 frames of 1920 x 1080, so that the GPU is free as soon
            as these are rendered.

    Raises:
        Exception: Any error from ``images``.
        MissingPackageError: imageio or PyAV is not installed.
        OSError: The file cannot be written.
        TypeError: An image is not floating point.
        ValueError: There is no image, one has another shape than (H, W, 3) or than the first, a side is longer than
            16384 pixels, ``fps`` is not in [0.001, 1000], or ``path`` does not end in ``.mp4``.
    """
    check_video("path", path)  # before the first image is rendered, which may take long
    if not FPS_RANGE[0] <= fps <= FPS_RANGE[1]:
        raise ValueError(f"fps must lie in [{FPS_RANGE[0]}, {FPS_RANGE[1]}], got {fps}")
    av, imageio = (import_optional(name, "write a video") for name in ("av", "imageio.v3"))
    frames = _checked(_on_host(images))
    first = next(frames, None)
    if first is None:
        raise ValueError("images must contain at least one image, got none")
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
    write_file(path, encoded.getbuffer())


def _on_host(images: Iterable[Tensor]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields images as 8-bit frames; a few stay queued on the device, so that it does not wait for the host."""
    queued: deque[OnDevice] = deque()
    for image in images:
        queued.append(OnDevice(to_uint8(image)))
        if len(queued) > AHEAD:
            yield queued.popleft().fetch().numpy()
    while queued:
        yield queued.popleft().fetch().numpy()


def _checked(frames: Iterable[npt.NDArray[np.uint8]]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields frames with even sides; raises ValueError for one of another shape than the first."""
    shape: tuple[int, ...] | None = None
    for index, frame in enumerate(frames):
        if frame.ndim != 3 or frame.shape[-1] != 3 or shape not in (None, frame.shape):
            raise ValueError(f"images[{index}] must have shape {shape or '(H, W, 3)'}, got {frame.shape}")
        height, width, _ = shape = frame.shape
        if not (min(height, width) > 0 and max(height, width) <= LARGEST_SIDE):
            raise ValueError(f"images must have 1 to {LARGEST_SIDE} pixels along each side, got {width}x{height}")
        odd = height % 2 or width % 2
        yield np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge") if odd else frame
