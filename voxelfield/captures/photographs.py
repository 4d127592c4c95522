"""Photographs for structure from motion: upright copies, and frames of a video."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import ExifTags, Image, ImageOps

from voxelfield.datasets.images import image_files, in_threads, open_image
from voxelfield.datasets.measures import sharpness
from voxelfield.files import HEIC_SUFFIXES, open_regular
from voxelfield.installed import import_optional

# Formats and suffixes that COLMAP reads; other photographs become PNG, but HEIC becomes JPEG, because COLMAP finds no
# focal length in a PNG. Phones write MPO, an extended JPEG, as .jpg.
_READABLE, _READABLE_SUFFIXES = ("PNG", "JPEG", "MPO"), (".png", ".jpg", ".jpeg")
_JPEG_QUALITY = 95
# FFmpeg's formats of videos that consist of one file. Others are lists of files and addresses.
_FORMATS = "mov,matroska,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,mxf,gif,dv,ivf,h264,hevc,m4v,mjpeg,yuv4mpegpipe"


def photographs_in(folder: Path) -> list[Path]:
    """Lists the photographs of a folder, without its subfolders, sorted by name."""
    return [path for path in image_files(folder) if path.is_file()]


def copy_photographs(photographs: Sequence[Path], folder: Path, max_size: int) -> None:
    """Copies photographs to a new folder, upright, and reduced where their longest side is above ``max_size`` pixels.

    The EXIF orientation is applied to the pixels and removed, because later steps read pixels as they are stored. PNG
    and JPEG files that need no change are copied byte by byte; HEIC becomes JPEG, other formats become PNG. Raises the
    errors of :func:`voxelfield.datasets.images.open_image`, and ValueError if two copies would have one name.
    """
    targets: dict[str, Path] = {}
    for path in photographs:
        suffix = path.suffix.lower()
        written = ".jpg" if suffix in HEIC_SUFFIXES else ".png"
        name = path.name if suffix in _READABLE_SUFFIXES else f"{path.stem}{written}"
        if targets.setdefault(name, path) != path:
            raise ValueError(f"photographs must have different names, got {targets[name]} and {path}")
    folder.mkdir(parents=True)

    def copy(name: str) -> None:
        path = targets[name]
        with open_image(path, upright=True) as image:
            image.load()
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
            upright = ImageOps.exif_transpose(image) if turned else image
        if name == path.name and image.format in _READABLE and not turned and max(image.size) <= max_size:
            shutil.copyfile(path, folder / name)
        else:
            _save(upright, folder / name, max_size)

    in_threads(copy, list(targets), "copying images")


def extract_frames(video: Path, folder: Path, count: int, max_size: int) -> None:
    """Writes frames of a video, spread evenly: the sharpest of each of ``count`` windows of equal length.

    They go to a new folder, as JPEG, reduced where their longest side is above ``max_size`` pixels. If the video has
    fewer frames than ``count``, all are written. Raises ValueError if FFmpeg cannot read the file.
    """
    for window, frames in itertools.groupby(_windows(video, count), key=lambda each: each[0]):
        folder.mkdir(parents=True, exist_ok=True)
        sharpest = max((frame for _, frame in frames), key=sharpness)
        _save(sharpest, folder / f"frame_{window:05d}.jpg", max_size)


def _windows(video: Path, count: int) -> Iterator[tuple[int, Image.Image]]:
    """Yields the frames of a video, upright, each with the number of the window that contains it."""
    av = import_optional("av", "read a video")
    limits = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
    try:
        with open_regular(video) as file, av.open(file, options=limits) as container:
            total = sum(packet.size > 0 for packet in container.demux(video=0))
        if total == 0:
            raise ValueError("it has no frame")
        windows, index = min(count, total), 0
        with open_regular(video) as file, av.open(file, options=limits) as container:
            container.streams.video[0].thread_type = "AUTO"
            for packet in container.demux(video=0):
                with contextlib.suppress(av.InvalidDataError):  # a damaged frame among others
                    for frame in packet.decode():
                        # Phones record their orientation. A damaged video may have more frames than were counted.
                        upright = frame.to_image().rotate(frame.rotation, expand=True)
                        yield min(index * windows // total, windows - 1), upright
                        index += 1
    except (OSError, ValueError, IndexError, av.FFmpegError) as error:
        reason = str(error).partition(": ")[0]  # without a name of the file, which FFmpeg does not know
        raise ValueError(f"{video}: must be a video that FFmpeg can read, and no list of others ({reason})") from error


def _save(image: Image.Image, path: Path, max_size: int) -> None:
    """Writes an image, reduced if its longest side is above ``max_size``."""
    # Structure from motion starts from the focal length in EXIF, which stays valid when the image is resized.
    exif = image.getexif()
    exif.pop(ExifTags.Base.Orientation, None)
    if max(image.size) > max_size:
        # Pillow does not interpolate the colours of a palette.
        image = image.convert("RGBA") if image.mode == "P" else image
        image = ImageOps.contain(image, (max_size, max_size), Image.Resampling.LANCZOS)
    if path.suffix.lower() == ".png":
        image.save(path, exif=exif)
    else:
        image.convert("RGB").save(path, quality=_JPEG_QUALITY, subsampling=0, exif=exif)
