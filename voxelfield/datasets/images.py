"""Image files of a scene, as every format of data sets reads them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

logger = logging.getLogger(__name__)

Size = tuple[int, int]
"""Width and height in pixels."""

_T = TypeVar("_T")

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
"""Endings of the names of image files, in lower case."""

# Seconds between two log messages about the progress of reading.
_NEWS_EVERY = 10.0

_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")


def count_images(folder: Path) -> int:
    """Returns how many images a capture has, judged by the names of its files alone.

    Args:
        folder: The capture. Copies of other sizes lie in folders of their own, so that with the most images counts.
    """
    holders = [folder.iterdir(), *(entry.rglob("*") for entry in folder.iterdir() if entry.is_dir())]
    return max(sum(path.suffix.lower() in IMAGE_SUFFIXES for path in files) for files in holders)


def read_images(paths: Sequence[Path], size: Size | None = None) -> Tensor:
    """Reads the images of a split, several at a time.

    Args:
        paths: N PNG or JPEG files, N at least 1, all of one size: RGB, grey or with a palette, 8 bits per channel, with
            or without alpha. Pixels are read as they are stored, whatever orientation EXIF notes.
        size: What to resize them to by :func:`area_resized`; None keeps them as they are.

    Returns:
        (N, H, W, 4) uint8 on the CPU, RGBA with straight alpha; images without alpha become opaque.

    Raises:
        ValueError: An image is unreadable, of another kind, of another size than the first, or has no alpha channel
            where others have transparent pixels.
    """
    # All headers come before the first pixels, so that a single huge image is refused before it takes memory.
    headers = _in_threads(lambda index: _header(paths[index]), len(paths), "looked at")
    width, height = first = headers[0].size
    for path, header in zip(paths, headers, strict=True):
        if header.size != first:
            found = f"{header.size[0]}x{header.size[1]}"
            raise ValueError(f"{path}: size must be {width}x{height}, like {paths[0]}, got {found}")
    shown = first if size is None else size
    images = np.empty((len(paths), shown[1], shown[0], 4), dtype=np.uint8)

    def fill(index: int) -> None:
        image = _decode(paths[index], into=images[index] if shown == first else None)
        if image.shape[:2] != (height, width):  # the file has changed meanwhile
            found = f"{image.shape[1]}x{image.shape[0]}"
            raise ValueError(f"{paths[index]}: size must be {width}x{height}, as it was before, got {found}")
        if shown != first:
            images[index] = area_resized(image, shown)

    _in_threads(fill, len(paths), "read")
    _check_alpha(paths, headers, images)
    return torch.from_numpy(images)


class _Header(NamedTuple):
    """The header of an image file."""

    size: Size
    has_alpha: bool


def _header(path: Path) -> _Header:
    try:
        with Image.open(path) as image:
            _check_kind(image)
            return _Header(image.size, "A" in image.getbands() or "transparency" in image.info)
    except UNREADABLE as error:
        raise unreadable(path, error) from error


def _check_alpha(paths: Sequence[Path], headers: Sequence[_Header], images: npt.NDArray[np.uint8]) -> None:
    """Refuses images (N, H, W, 4) without alpha among others that are transparent around their subject."""
    opaque = [index for index, header in enumerate(headers) if not header.has_alpha]
    if not 0 < len(opaque) < len(paths):
        return
    with_alpha = (index for index, header in enumerate(headers) if header.has_alpha)
    other = next((index for index in with_alpha if images[index, ..., 3].min() < 255), None)
    if other is not None:
        raise ValueError(
            f"{paths[opaque[0]]}: must have an alpha channel, as {paths[other]} has one with transparent pixels, got "
            "none: cut its background out too, or leave the image out"
        )


def read_masks(paths: Sequence[Path | None], size: Size, shown: Size) -> Tensor:
    """Reads the masks of a split's images: black is what must be ignored.

    Args:
        paths: N image files; None where an image has no mask and all of its pixels count.
        size: What they must have.
        shown: The size of the images that they are for. Of several pixels that are averaged into one all must count.

    Returns:
        (N, H, W) bool on the CPU: True where a pixel counts.

    Raises:
        FileNotFoundError: A mask is missing.
        ValueError: A mask is unreadable, of another size, or leaves no pixel.
    """
    masks = np.ones((len(paths), shown[1], shown[0]), dtype=np.bool_)

    def fill(index: int) -> None:
        path = paths[index]
        if path is None:
            return
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such mask")
        ignored = _decode(path, "L") == 0
        if ignored.shape != size[::-1]:
            found = f"{ignored.shape[1]}x{ignored.shape[0]}"
            raise ValueError(f"{path}: size must be {size[0]}x{size[1]}, like that of its image, got {found}")
        if shown != size:
            share = Image.fromarray(ignored.astype(np.float32)).resize(shown, Image.Resampling.BOX)
            ignored = np.asarray(share) > 0
        if ignored.all():
            raise ValueError(f"{path}: must leave some pixels of the image, got a mask that is black throughout")
        masks[index] = ~ignored

    _in_threads(fill, len(paths), "read")
    return torch.from_numpy(masks)


def image_size(path: Path) -> Size:
    """Returns the size of an image from the beginning of its file.

    Args:
        path: The image.

    Raises:
        ValueError: It is unreadable.
    """
    try:
        with Image.open(path) as image:
            return image.size
    except UNREADABLE as error:
        raise unreadable(path, error) from error


def area_resized(image: npt.NDArray[np.uint8], size: Size) -> npt.NDArray[np.uint8]:
    """Resizes an RGBA image by averaging the pixels that fall into each new one, weighting colours by their alpha.

    Transparent pixels have no say in a colour, so silhouettes get no dark or stray fringe.

    Args:
        image: (H, W, 4) uint8 RGBA, straight alpha.
        size: The new width and height.

    Returns:
        (height, width, 4) uint8, straight alpha, rounded to nearest; black where fully transparent.
    """
    alpha = image[..., 3:].astype(np.float32)
    weighted = np.concatenate((image[..., :3] * alpha, alpha), axis=-1)
    channels = (Image.fromarray(np.ascontiguousarray(weighted[..., channel])) for channel in range(4))
    means = np.stack([np.asarray(channel.resize(size, Image.Resampling.BOX)) for channel in channels], axis=-1)
    mean_alpha = means[..., 3:]
    rgb = np.divide(means[..., :3], mean_alpha, out=np.zeros_like(means[..., :3]), where=mean_alpha > 0)
    return np.floor(np.concatenate((rgb, mean_alpha), axis=-1) + 0.5).astype(np.uint8)


def _in_threads(action: Callable[[int], _T], count: int, done: str) -> list[_T]:
    """Calls an action with each number below a count; returns what it returned, or raises the first error.

    Args:
        action: May run in several threads at once.
        count: How often.
        done: What has happened to an image then, for the log.
    """
    results = []
    told = time.monotonic()
    # Pillow releases the GIL while it decodes, so threads are enough and nothing is copied between processes.
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        try:
            for result in pool.map(action, range(count)):
                results.append(result)
                if time.monotonic() - told > _NEWS_EVERY:
                    told = time.monotonic()
                    logger.info("%s %d of %d images", done, len(results), count)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


def _decode(
    path: Path, mode: Literal["RGBA", "L"] = "RGBA", into: npt.NDArray[np.uint8] | None = None
) -> npt.NDArray[np.uint8]:
    """Returns an image's pixels, in ``into`` if they fit there.

    Args:
        path: The file.
        mode: Mode of the returned pixels.
        into: (H, W, 4) contiguous; None: in new memory.
    """
    try:
        with Image.open(path) as opened:
            _check_kind(opened)
            # Converting an image to its own mode would copy it, and no other thread could decode meanwhile.
            image = opened if opened.mode == mode else opened.convert(mode)
            if into is None or into.shape[1::-1] != image.size:
                return np.asarray(image)
            # NumPy would have the pixels twice more in new memory, in which all threads wait for the system.
            target = Image.frombuffer(mode, image.size, into, "raw", mode, 0, 1)
            target.readonly = 0
            target.paste(image)
            return into
    except UNREADABLE as error:
        raise unreadable(path, error) from error


def _check_kind(image: Image.Image) -> None:
    """Raises ValueError for pixels that would not be read as they are."""
    # Pillow clips wider channels to 255 or drops their lower 8 bits, and converts other colours without their profile.
    tiles = getattr(image, "tile", ())
    raw = str(tiles[0][3]) if tiles else ""
    if image.mode not in _MODES or ";16" in raw:
        mode = f"{image.mode} of 16 bits" if image.mode in _MODES else image.mode
        raise ValueError(
            f"must be RGB or grey with 8 bits per channel, got pixel mode {mode}: convert the images first"
        )


UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""The exceptions that Pillow raises for files that it cannot read."""


def unreadable(path: Path, error: Exception) -> ValueError:
    """Returns what to raise, in one line, where one of :data:`UNREADABLE` stopped Pillow from reading a file."""
    # Pillow's own words for an unidentified file repeat the path.
    reason = "not an image" if isinstance(error, Image.UnidentifiedImageError) else str(error)
    return ValueError(f"{path}: unreadable image ({reason})")
