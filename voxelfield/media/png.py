"""Images as PNG files, and the threads that write files while the caller renders."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from voxelfield.devices import OnDevice
from voxelfield.files import MARK, atomic_path
from voxelfield.rendering.pixels import to_uint8

# zlib's compression level. Renders of Lego take as many bytes as with its default of 6, in 37 ms instead of 65 each.
_COMPRESSION = 4

# Smallest limit on waiting images, regardless of the number of threads.
_MIN_WAITING = 32


class BackgroundWriter(AbstractContextManager["BackgroundWriter"]):
    """Writes files in threads while the caller renders the next images; a context manager.

    Compressing an image on a core takes much longer than rendering it on a GPU. A bounded number of images waits in the
    memory of their device. The exit of the context waits until all files are written, and raises the first error;
    without a context, :meth:`close` does that.

    Args:
        workers: Number of threads; None for one per core, up to 16.
        waiting: Largest number of files that are waiting or being written, beyond which the oldest is waited for; None
            for twice the number of threads, at least 32.
    """

    def __init__(self, workers: int | None = None, waiting: int | None = None) -> None:
        workers = min(16, os.cpu_count() or 1) if workers is None else workers
        self._limit = max(2 * workers, _MIN_WAITING) if waiting is None else waiting
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="writer")
        self._waiting: deque[Future[Any]] = deque()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Queues a call, whose arguments must not change until the context exits.

        Raises:
            Exception: The error of an earlier call, so that rendering stops early, for example if the disk is full.
        """
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= self._limit):
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(function, *arguments))

    def save(self, path: Path, rgb: torch.Tensor) -> None:
        """Copies an image, and writes it as a PNG with 8 bits per channel in the background.

        The image is (H, W, 3) floating point, nominally in [0, 1], on any device, and is rounded as
        :func:`voxelfield.rendering.pixels.to_uint8` does. The folder of the file is created if needed. Raises the error
        of an earlier file that could not be written.
        """
        pixels = OnDevice(to_uint8(rgb))
        self.submit(lambda: write_png(path, Image.fromarray(pixels.fetch().numpy())))

    def close(self, cancel: bool = False) -> None:
        """Waits for all calls, and raises the first error of one.

        After an error or Ctrl-C, calls that have not been started are skipped. ``cancel`` skips them in any case, and
        ignores errors.
        """
        try:
            while self._waiting and not cancel:
                self._waiting.popleft().result()
        finally:
            self._waiting.clear()
            self._pool.shutdown(cancel_futures=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)


def write_png(path: Path, image: Image.Image) -> None:
    """Writes a PNG with :data:`voxelfield.files.MARK`, completely or not at all."""
    info = PngInfo()
    info.add_text("Software", MARK)
    # Waiting for the disk would take longer than compression.
    with atomic_path(path, sync=False) as temporary:
        image.save(temporary, format="PNG", compress_level=_COMPRESSION, pnginfo=info)
