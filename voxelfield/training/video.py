"""Videos of rendered views."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from voxelfield.files import atomic_path
from voxelfield.installed import MissingPackageError
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.render import View


def video_frames(views: Iterable[View]) -> Iterator[npt.NDArray[np.uint8]]:
    """Turns views into frames for :func:`write_video`, one at a time.

    Args:
        views: Rendered views on any device, such as :meth:`voxelfield.training.run.Run.render_path` yields.
    """
    for view in views:
        yield to_uint8(view.rgb).cpu().numpy()


def write_video(path: Path, frames: Iterable[npt.NDArray[np.uint8]], fps: int = 30) -> None:
    """Encodes frames as H.264 video (yuv420p, which every browser and player decodes).

    An odd height or width is padded by repeating the last row or column, since yuv420p halves the colour resolution; no
    frame is rescaled. The file appears when the last frame is encoded, and not at all on failure.

    Args:
        path: File to write, usually ``*.mp4``; its parent directory is created if needed.
        frames: (H, W, 3) uint8 arrays of one size; consumed one at a time.
        fps: Frames per second.

    Raises:
        MissingPackageError: imageio or its ffmpeg plugin is not installed.
        OSError: The file cannot be written.
        TypeError: A frame is not uint8.
        ValueError: There is no frame, or a frame has another shape than (H, W, 3) or than the first.
    """
    if importlib.util.find_spec("imageio") is None or importlib.util.find_spec("imageio_ffmpeg") is None:
        raise MissingPackageError("write_video needs imageio with ffmpeg: pip install 'imageio[ffmpeg]'")
    first: tuple[int, ...] | None = None
    with atomic_path(path) as temporary:
        with contextlib.closing(_writer(temporary, fps)) as writer:
            for index, frame in enumerate(frames):
                if frame.dtype != np.uint8:
                    raise TypeError(f"frames[{index}] must be uint8, got {frame.dtype}")
                if frame.ndim != 3 or frame.shape[-1] != 3 or (first is not None and frame.shape != first):
                    raise ValueError(f"frames[{index}] must have shape {first or '(H, W, 3)'}, got {frame.shape}")
                first = frame.shape
                height, width, _ = frame.shape
                padded = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
                try:
                    writer.append_data(padded)
                except OSError as error:  # with the whole command line
                    raise OSError(f"{path} could not be written: ffmpeg stopped at frame {index}") from error
        if first is None:
            raise ValueError("frames must hold at least one frame")
        # imageio does not look at ffmpeg's exit status.
        if path.suffix == ".mp4" and not _is_whole(temporary):
            raise OSError(f"{path} could not be written: ffmpeg left it incomplete, as it does on a full disk")


def _writer(path: Path, fps: int) -> Any:
    import imageio.v2 as imageio

    # macro_block_size=1: the plugin's own way to an even size is to rescale the image
    return imageio.get_writer(
        path, format="FFMPEG", fps=fps, codec="libx264", pixelformat="yuv420p", quality=8, macro_block_size=1
    )


def _is_whole(path: Path) -> bool:
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
