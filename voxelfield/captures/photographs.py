"""Photographs for structure from motion: copies of given ones, frames of a video, and reduced copies."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import ExifTags, Image, ImageOps

from voxelfield.captures.measures import sharpness
from voxelfield.datasets.images import IMAGE_SUFFIXES, Size, open_image
from voxelfield.media.video import import_av

REDUCTIONS = (2, 4, 8)
"""Factors of the reduced copies, in the folders ``images_2``, ``images_4`` and ``images_8``."""

# Formats that stay as they are, by suffix; COLMAP does not read WebP. Phones write MPO, a JPEG and more, as .jpg.
_COPIED = {".png": ("PNG",), ".jpg": ("JPEG", "MPO"), ".jpeg": ("JPEG", "MPO")}
_JPEG_QUALITY = 95


def photographs_in(folder: Path) -> list[Path]:
    """Lists the photographs of a folder, without those of its subfolders, in the order of their names."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())


def copy_photographs(photographs: Sequence[Path], folder: Path, max_size: int) -> None:
    """Copies photographs, upright and shrunk where they are large.

    The EXIF orientation is applied to the pixels and removed, because later steps read pixels as they are stored. PNG
    and JPEG files that need no change are copied byte by byte; other formats become PNG.

    Args:
        photographs: At least one.
        folder: Where the copies go; it is created.
        max_size: Longest side in pixels above which a copy is shrunk.

    Raises:
        ValueError: A photograph is one that :func:`voxelfield.datasets.images.open_image` refuses, or two copies would
            have one name.
        OSError: A copy cannot be written.
    """
    names = [path.name if path.suffix.lower() in _COPIED else f"{path.stem}.png" for path in photographs]
    first: dict[str, Path] = {}
    for path, name in zip(photographs, names, strict=True):
        if first.setdefault(name, path) != path:
            raise ValueError(f"photographs must have different names, got {first[name]} and {path}")
    folder.mkdir(parents=True)

    def copy(index: int) -> None:
        path, target = photographs[index], folder / names[index]
        with open_image(path, upright=True) as image:
            image.load()
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
            copied = image.format in _COPIED.get(path.suffix.lower(), ())
            upright = ImageOps.exif_transpose(image) if turned else image
        if copied and not turned and max(upright.size) <= max_size:
            shutil.copyfile(path, target)
        else:
            _save(_shrunk(upright, max_size), target)

    _in_threads(copy, len(photographs))


def extract_frames(video: Path, folder: Path, count: int, max_size: int) -> None:
    """Writes frames of a video, spread evenly: the sharpest of each of ``count`` windows of equal length.

    Args:
        video: The file.
        folder: Where the frames go, as JPEG; it is created.
        count: How many frames to write; all, if the video has fewer.
        max_size: Longest side in pixels above which a frame is shrunk.

    Raises:
        MissingPackageError: PyAV is not installed.
        ValueError: FFmpeg cannot read the file.
    """
    import_av("read a video")
    folder.mkdir(parents=True)
    best: Image.Image | None = None
    most, at = -1.0, 0
    for window, frame in _windows(video, count):
        if window != at and best is not None:
            _save(_shrunk(best, max_size), folder / f"frame_{at:05d}.jpg")
            most = -1.0
        found = sharpness(frame)
        if found > most:
            best, most, at = frame, found, window
    if best is None:
        raise ValueError(f"{video}: must be a video with at least one frame, got none")
    _save(_shrunk(best, max_size), folder / f"frame_{at:05d}.jpg")


def _windows(video: Path, count: int) -> Iterator[tuple[int, Image.Image]]:
    """Yields the frames of a video, upright, each with the number of the window that it lies in."""
    av = import_av("read a video")
    try:
        with av.open(str(video)) as container:
            total = sum(packet.size > 0 for packet in container.demux(video=0))
        windows = max(1, min(count, total))
        index = 0
        with av.open(str(video)) as container:
            container.streams.video[0].thread_type = "AUTO"
            for packet in container.demux(video=0):
                with contextlib.suppress(av.InvalidDataError):  # a damaged frame among others
                    for frame in packet.decode():
                        # A damaged video may have more frames than were counted.
                        window = min(index * windows // max(total, 1), windows - 1)
                        # Telephones note how they were held.
                        yield window, frame.to_image().rotate(frame.rotation, expand=True)
                        index += 1
    except (OSError, ValueError, IndexError, av.FFmpegError) as error:
        raise ValueError(f"{video}: must be a video that FFmpeg can read ({error})") from error


def write_reductions(folder: Path) -> None:
    """Writes reduced copies of ``folder/images`` into ``folder/images_2``, ``images_4`` and ``images_8``.

    Args:
        folder: Holds ``images``.
    """
    photographs = photographs_in(folder / "images")
    for factor in REDUCTIONS:
        (folder / f"images_{factor}").mkdir()

    def reduce(index: int) -> None:
        path = photographs[index]
        with open_image(path) as image:
            image.load()
        for factor in REDUCTIONS:
            size = (max(1, round(image.width / factor)), max(1, round(image.height / factor)))
            _save(_resized(image, size), folder / f"images_{factor}" / path.name)

    _in_threads(reduce, len(photographs))


def _shrunk(image: Image.Image, max_size: int) -> Image.Image:
    factor = max(image.size) / max_size
    if factor <= 1:
        return image
    return _resized(image, (max(1, round(image.width / factor)), max(1, round(image.height / factor))))


def _resized(image: Image.Image, size: Size) -> Image.Image:
    # Pillow does not interpolate the colours of a palette.
    return (image.convert("RGBA") if image.mode == "P" else image).resize(size, Image.Resampling.LANCZOS)


def _save(image: Image.Image, path: Path) -> None:
    # Structure from motion starts from the focal length in EXIF, which stays valid when the image is resized.
    exif = image.getexif()
    exif.pop(ExifTags.Base.Orientation, None)
    if path.suffix.lower() == ".png":
        image.save(path, exif=exif)
    else:
        image.convert("RGB").save(path, quality=_JPEG_QUALITY, subsampling=0, exif=exif)


def _in_threads(action: Callable[[int], None], count: int) -> None:
    """Calls an action with each number below a count, in several threads at once."""
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.map(action, range(count)):
            pass
