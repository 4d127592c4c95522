"""Images as PNG files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from voxelfield.files import MARK, atomic_path
from voxelfield.rendering.pixels import to_uint8
from voxelfield.transfers import OnDevice

# zlib's compression level. Renders of Lego take as many bytes as with its default of 6, in 37 ms instead of 65 each.
_COMPRESSION = 4

# Smallest limit on waiting images, regardless of the number of threads.
_MIN_WAITING = 32


class PngWriter:
    """Writes images in threads while the caller renders the next ones; a context manager.

    Compressing an image on a core takes much longer than rendering it on a GPU. A bounded number of images waits in the
    memory of their device. The exit of the context waits until all files are written, and raises the first error;
    without a context, :meth:`close` does that.

    Args:
        workers: Number of threads; None for one per core, up to 16.
        waiting: Largest number of images that are waiting or being written; None for twice the number of threads, at
            least 32.
    """

    def __init__(self, workers: int | None = None, waiting: int | None = None) -> None:
        workers = min(16, os.cpu_count() or 1) if workers is None else workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="png")
        self._room = threading.Semaphore(max(2 * workers, _MIN_WAITING) if waiting is None else waiting)
        self._writing: list[Future[None]] = []
        self._failed: Future[None] | None = None

    def save(self, path: Path, rgb: torch.Tensor) -> None:
        """Copies an image and writes it in the background, with 8 bits per channel.

        Args:
            path: File to write; its parent directory is created if needed.
            rgb: (H, W, 3) floating point, nominally in [0, 1], any device; rounded as
                :func:`voxelfield.rendering.pixels.to_uint8` does.

        Raises:
            ValueError: ``rgb`` has another shape.
        """
        if rgb.ndim != 3 or rgb.shape[-1] != 3:
            raise ValueError(f"rgb must have shape (H, W, 3), got {tuple(rgb.shape)}")
        pixels = OnDevice(to_uint8(rgb))
        self.submit(lambda: _write_png(path, pixels))

    def submit(self, write: Callable[[], None]) -> None:
        """Runs a function that writes an image of another kind in the background.

        Args:
            write: Writes the image. Its inputs must not change until the context exits.

        Raises:
            Exception: The error of an earlier image, so that rendering stops early, for example if the disk is full.
        """
        self._room.acquire()
        if self._failed is not None:
            self._room.release()
            self._failed.result()
        try:
            writing = self._pool.submit(write)
        except RuntimeError:  # the writer is closed
            self._room.release()
            raise
        writing.add_done_callback(self._written)
        self._writing.append(writing)

    def close(self, cancel: bool = False) -> None:
        """Waits for all files to be written.

        Args:
            cancel: Skip images that have not been started, and ignore errors.

        Raises:
            Exception: The error of the first image that could not be written.
        """
        self._pool.shutdown(cancel_futures=cancel)
        if not cancel:
            for writing in self._writing:
                writing.result()

    def _written(self, writing: Future[None]) -> None:
        if not writing.cancelled() and writing.exception() is not None and self._failed is None:
            self._failed = writing
        self._room.release()

    def __enter__(self) -> PngWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)


def _write_png(path: Path, pixels: OnDevice) -> None:
    # Waiting for the disk would take longer than compression.
    with atomic_path(path, sync=False) as temporary:
        Image.fromarray(pixels.fetch().numpy()).save(
            temporary, format="PNG", compress_level=_COMPRESSION, pnginfo=marked()
        )


def marked() -> PngInfo:
    """Returns metadata that tell a rendered PNG from photographs (:func:`voxelfield.files.is_replaceable`)."""
    info = PngInfo()
    info.add_text("Software", MARK)
    return info
