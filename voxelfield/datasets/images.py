"""Image files of a scene, as every format of data sets reads them."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image, ImageChops, TiffImagePlugin
from torch import Tensor

from voxelfield import processes
from voxelfield.files import HEIC_SUFFIXES, IMAGE_SUFFIXES, open_regular
from voxelfield.installed import import_optional
from voxelfield.messages import reason_of
from voxelfield.progress import tracked

logger = logging.getLogger(__name__)

Size = tuple[int, int]
"""Width and height in pixels."""

_S = TypeVar("_S")
_T = TypeVar("_T")

CUT_OUT = 0.1
"""Least transparency of images that show an object without its background. Undistorting photographs leaves a few
percent of each without a value, and editing them stray pixels; cutting an object out removes tens of percent."""

# Of Pillow's formats, only these. Others run programs (EPS starts Ghostscript), or depend on how Pillow was built.
_FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP")
_FORMAT_NAMES = "PNG, JPEG, WebP, TIFF or BMP"

_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")

# Stems of masks beside an image a.jpg: a_mask, a.jpg_mask (3DGRUT, Metashape) and dynamic_mask_a (instant-ngp).
_MASK = re.compile(r"^(?:dynamic_)?mask_(.+)$|^(.+?)(?:\.[a-z]{3,4})?[._-]mask$", re.IGNORECASE)


def image_files(folder: Path, pattern: str = "*", *, masks: bool = False) -> list[Path]:
    """Lists the image files of a folder, which need not exist, sorted by path; ``**/*`` includes its subfolders.

    Hidden files, such as a Mac's ``._NAME.jpg``, are left out, and so are :func:`masks_beside` unless asked for.
    """
    if folder.is_dir():
        next(folder.iterdir(), None)  # raises an error for an unreadable folder, in which glob finds nothing
    paths = {path for path in folder.glob(pattern) if path.suffix.lower() in IMAGE_SUFFIXES}
    paths -= {path for path in paths if "/." in f"/{path.relative_to(folder).as_posix()}"}
    return sorted(paths if masks else paths - {*masks_beside(paths).values()})


def masks_beside(paths: Iterable[Path]) -> dict[Path, Path]:
    """Returns, of some image files, those that are masks of others that lie beside them, by the paths of these."""
    by_name = {comparable(path.with_suffix("")): path for path in sorted(paths)}
    images = {path: by_name.get(comparable(_masked(path.with_suffix("")))) for path in by_name.values()}
    return {image: path for path, image in images.items() if image is not None and image != path}


def masks_within(folder: Path, images: Sequence[Path]) -> list[Path | None]:
    """Returns the masks in a folder of images, given by their relative paths; None for all if there is no such folder.

    A mask has the name of its image, with or without its suffix, or one of a mask beside it. Where there is none,
    COLMAP's name of it is returned.
    """
    if not folder.is_dir():
        return [None] * len(images)
    masks: dict[str, Path] = {}
    for path in image_files(folder, "**/*", masks=True):
        name = path.relative_to(folder).with_suffix("")
        for each in (name, _masked(name)):
            masks.setdefault(comparable(each), path)
    found = ([masks.get(comparable(name)) for name in (image, image.with_suffix(""))] for image in images)
    return [whole or bare or folder / f"{image}.png" for (whole, bare), image in zip(found, images, strict=True)]


def comparable(path: Path) -> str:
    """Returns a path in the form of Unicode in which paths are compared; a Mac has another."""
    return unicodedata.normalize("NFC", str(path))


def _masked(name: Path) -> Path:
    """Returns the name without suffix of the image of which a file is a mask, as its name says; else its own."""
    return name.with_name(_MASK.sub(r"\1\2", name.name))


def read_array(path: Path) -> npt.NDArray[Any]:
    """Reads a NumPy array from a file ``.npy``.

    Raises:
        ValueError: The file is damaged, or no such array.
    """
    with open_regular(path) as file:
        try:
            array = np.load(file, allow_pickle=False)
        except Exception as error:  # NumPy evaluates the header: a broken one ends in exceptions of any type
            raise ValueError(f"{path}: not a NumPy array of numbers ({reason_of(error)})") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path}: not a NumPy array of numbers, but an archive")
    return array


def read_images(
    paths: Sequence[Path],
    sizes: Sequence[Size] | None = None,
    alphas: Sequence[Path | None] | None = None,
    local_slice: slice | None = None,
) -> Tensor:
    """Reads the images of a split, several at a time.

    Args:
        paths: N files that :func:`open_image` opens.
        sizes: N sizes to which they are shrunk by :func:`area_resized`; None keeps them as they are.
        alphas: N files of grey images that replace the alpha channels; None for images that keep their own.
        local_slice: The images that this process of a group reads and returns, while other processes read the others;
            an error in one of them is raised in all. None: all images.

    Returns:
        (N, H, W, 4) uint8 on the CPU, RGBA with straight alpha; images without alpha become opaque. H and W are the
        largest height and width. A smaller image lies at the top left, with opaque black beside it.

    Raises:
        ValueError: An image is unreadable, of another kind, has no alpha channel although the others show an object
            without its background, or is so large that most of the memory would be empty room beside the others.
    """
    # All headers come before the first pixels, so that a single huge image is refused before it takes memory.
    shown = image_sizes(paths) if sizes is None else sizes
    areas = [width * height for width, height in shown]
    width, height = (max(sides) for sides in zip(*shown, strict=True))
    # Landscape and portrait photographs of 16:9 fill more than half of the room that each gets.
    if 4 * sum(areas) < len(areas) * width * height:
        largest = areas.index(max(areas))
        raise ValueError(
            f"{paths[largest]}: size must be at most a few times that of the other images, because each takes the "
            f"memory of the largest, got {shown[largest][0]}x{shown[largest][1]}: shrink it, or limit the longest side "
            "of all images (trainer.image_size; in Python, image_size)"
        )

    def fill(index: int, pixels: npt.NDArray[Any]) -> float | None:
        image, (width, height) = _decode(paths[index], alphas[index] if alphas is not None else None), shown[index]
        room = (pixels.shape[1], pixels.shape[0])
        if room != (width, height):
            pixels[:] = (0, 0, 0, 255)
        # NumPy would have the pixels twice more in new memory, in which all threads wait for the system.
        target = Image.frombuffer("RGBA", room, pixels, "raw", "RGBA", 0, 1)
        target.readonly = 0
        target.paste(image if image.size == (width, height) else area_resized(image, (width, height)))
        # The mean opacity, unless the image has no alpha channel.
        return float(pixels[:height, :width, 3].mean()) if image.mode == "RGBA" else None

    images, means = _stacked(shown, local_slice, (4,), np.uint8, fill)
    known = [mean for mean in means if mean is not None]
    if 0 < len(known) < len(means) and np.mean(known) <= 255 * (1 - CUT_OUT):
        raise ValueError(
            f"{paths[means.index(None)]}: must have an alpha channel, as others have that show an object without its "
            "background, got none: cut its background out too, or leave the image out"
        )
    return images


def read_opacity(path: Path, alpha: Path | None) -> npt.NDArray[np.uint8]:
    """Returns the opacity (H, W) of an image at the size of its file; a grey image may replace its alpha channel."""
    image = _decode(path, alpha)
    opaque = image.mode != "RGBA"
    return np.full(image.size[::-1], 255, np.uint8) if opaque else np.array(image.getchannel("A"))


def _read_grey(path: Path, size: Size) -> Image.Image:
    """Returns the grey image that masks an image of a size, or is its alpha channel."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such mask")
    with open_image(path, depth=None) as image:
        if image.mode.startswith("I"):
            levels = np.asarray(image.convert("I")).clip(0, 65535)
            grey = Image.fromarray(((levels + 256) // 257).astype(np.uint8))
        else:
            # A pixel is black if all of its channels are.
            grey = functools.reduce(ImageChops.lighter, _converted(image, "RGB").split())
        if "A" in image.getbands() or "transparency" in image.info:
            alpha = image.convert("RGBA").getchannel("A")
            low, high = cast("tuple[int, int]", grey.getextrema())  # of a single channel
            # Where nothing is black, or all is, the mask is the alpha channel.
            if low > 0:
                grey = ImageChops.darker(grey, alpha)
            elif high == 0 and alpha.getextrema() != (255, 255):
                grey = alpha
    if grey.size != size:
        found = f"{grey.size[0]}x{grey.size[1]}"
        raise ValueError(f"{path}: size must be {size[0]}x{size[1]}, like that of its image, got {found}")
    return grey


def read_masks(
    paths: Sequence[Path | None],
    sizes: Sequence[Size],
    shown: Sequence[Size],
    local_slice: slice | None = None,
    *,
    inverted: bool = False,
    soft: bool = False,
) -> tuple[Tensor, Tensor]:
    """Reads the masks of a split's images: which pixels count, (N, H, W) bool, and their weights, uint8 up to 255.

    The N files must have the N ``sizes``; None where an image has no mask, and all of its pixels count. Pixels count
    where a mask is not black, or where it is black if it is ``inverted``. With ``soft``, grey values are weights, or
    their differences from white if it is inverted; without, weights are 0 or 255. The images are ``shown`` at other
    sizes: of several pixels that are averaged into one all must count. The masks have the same room as the images of
    :func:`read_images`, and ``local_slice`` is that of the images.

    Raises:
        FileNotFoundError: A mask is missing.
        ValueError: A mask is unreadable, of another size, or leaves no pixel.
    """

    def fill(index: int, plane: npt.NDArray[Any]) -> None:
        if (path := paths[index]) is None:
            return
        # instant-ngp's are white where it ignores pixels.
        white = path.name.lower().startswith("dynamic_mask_") != inverted
        grey = np.asarray(_read_grey(path, sizes[index]))
        lost = grey if white else 255 - grey
        if not soft:
            lost = np.where((grey == 0) != white, np.uint8(255), np.uint8(0))
        ignored = lost == 255
        if shown[index] != sizes[index]:
            averaged = (
                np.asarray(Image.fromarray(part.astype(np.float32)).resize(shown[index], Image.Resampling.BOX))
                for part in (lost, ignored)
            )
            lost, ignored = next(averaged).round().astype(np.uint8), next(averaged) > 0
        if ignored.all():
            raise ValueError(f"{path}: must leave some pixels of the image, got a mask that leaves none")
        plane[: lost.shape[0], : lost.shape[1]] = np.where(ignored, 255, lost.clip(max=254))

    weights = 255 - _stacked(shown, local_slice, (), np.uint8, fill)[0]
    return weights > 0, weights


def read_depths(
    paths: Sequence[Path | None], sizes: Sequence[Size], shown: Sequence[Size], local_slice: slice | None = None
) -> Tensor:
    """Reads the depths of a split's images, in the units of the files, as (N, H, W) float32, 0 where none is known.

    The N files are grey images with 16 bits, or files ``.npy`` of an array (H, W) or (H, W, 1) of floating point, in
    which values that are not finite or below 0 are unknown; None where an image has no depths. Their resolution may be
    higher or lower than the N ``sizes`` of the image files: each pixel of the images, as they are ``shown``, has the
    depth of the nearest one in the file, because a mean over an edge would lie on neither side of it. The depths have
    the same room as the images of :func:`read_images`, and ``local_slice`` is that of the images.

    Raises:
        ValueError: A file is unreadable, of another kind, or has another ratio of its sides than its image.
    """

    def fill(index: int, plane: npt.NDArray[Any]) -> None:
        if (path := paths[index]) is None:
            return
        image, (w, h) = _depth_image(path), sizes[index]
        if abs(image.width * h - image.height * w) > max(*image.size, w, h):
            found = f"{image.width}x{image.height}"
            raise ValueError(f"{path}: size must be in proportion to its image's, {w}x{h}, got {found}")
        plane[: shown[index][1], : shown[index][0]] = image.resize(shown[index], Image.Resampling.NEAREST)

    return _stacked(shown, local_slice, (), np.float32, fill)[0]


def _depth_image(path: Path) -> Image.Image:
    """Reads the depths of an image, from a file ``.npy`` in mode F and from others in mode I."""
    if path.suffix.lower() != ".npy":
        with open_image(path, depth=True) as image:
            return image.convert("I")
    array = read_array(path)
    array = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if array.ndim != 2 or array.dtype.kind != "f" or 0 in array.shape:
        raise ValueError(f"{path}: must be an array (H, W) of floating point, got {array.shape} of {array.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        depths = array.astype(np.float32)
        return Image.fromarray(np.where(np.isfinite(depths) & (depths > 0), depths, np.float32(0)))


def _stacked(
    shown: Sequence[Size],
    local_slice: slice | None,
    channels: tuple[int, ...],
    dtype: npt.DTypeLike,
    fill: Callable[[int, npt.NDArray[Any]], _T],
) -> tuple[Tensor, list[_T]]:
    """Makes zeros (N, H, W, ...), each plane of which ``fill(index, plane)`` fills, in several threads.

    Returns the planes of the local images, and what ``fill`` has returned for the images of all processes.
    """
    width, height = (max(sides) for sides in zip(*shown, strict=True))
    own = range(len(shown))[local_slice or slice(None)]
    planes = np.zeros((len(own), height, width, *channels), dtype)

    def read() -> list[_T]:
        return in_threads(lambda index: fill(index, planes[own.index(index)]), own)

    return torch.from_numpy(planes), read() if local_slice is None else processes.concatenated(read)


@contextlib.contextmanager
def open_image(path: Path, upright: bool = False, depth: bool | None = False) -> Iterator[Image.Image]:
    """Opens an image file, whose pixels are read when they are first used; this package opens images in no other way.

    The format is recognised by the file's content, not by the suffix: PNG, JPEG, WebP, TIFF or BMP; HEIC is read only
    from files called so. Of a TIFF with several pages and of the MPO files that phones write, the first picture counts.
    The size is that of the pixels as they are stored; those of HEIC are always upright.

    Args:
        path: The file.
        upright: Whether the caller turns the pixels as EXIF says, by Pillow's ``exif_transpose``, and damaged EXIF is
            therefore refused. Without, pixels are read as they are stored: poses and intrinsics refer to those.
        depth: Whether it must be a grey image with 16 bits, which is refused otherwise; None: it may be one.

    Raises:
        ValueError: The file is no regular file or not in one of these formats, damaged, animated, or has pixels other
            than RGB or grey with 8 bits per channel (or RGB with 16); or the caller's code could not read it. The
            message is one line that begins with the path.
        MissingPackageError: The file is called HEIC, and pillow-heif is not installed.
    """
    if is_heic := path.suffix.lower() in HEIC_SUFFIXES:
        import_optional("pillow_heif", f"read {path.name}", "heic").register_heif_opener()
    formats = (*_FORMATS, "HEIF") if is_heic else _FORMATS
    try:
        with open_regular(path) as file, Image.open(file, formats=formats) as image:
            is_deep = image.mode.startswith("I")
            if not depth and not (is_deep and depth is None):
                _check_kind(image)
            elif not is_deep:
                raise ValueError(f"must be grey with 16 bits, as depths are, got Pillow's mode {image.mode}")
            if upright:
                _check_exif(image)
            elif isinstance(image, TiffImagePlugin.TiffImageFile):
                # Pillow turns TIFF files by itself, unlike all others.
                image.getexif().pop(ExifTags.Base.Orientation, None)
                image._size = image.tag_v2[TiffImagePlugin.IMAGEWIDTH], image.tag_v2[TiffImagePlugin.IMAGELENGTH]
            yield image
    # Damaged files end in exceptions of any type.
    except Exception as error:
        reason = reason_of(error)
        if isinstance(error, Image.UnidentifiedImageError):  # Pillow's own words repeat the path
            reason = f"not a {'HEIC' if is_heic else _FORMAT_NAMES} image"
        elif isinstance(error, Image.DecompressionBombError):
            reason = f"{reason.partition(',')[0]}: shrink the file itself, for example to half its width and height"
        raise ValueError(f"{path}: unreadable image ({reason})") from error


def image_size(path: Path) -> Size:
    """Returns the size of an image, as it is stored, from the beginning of its file."""
    with open_image(path) as image:
        return image.size


def image_sizes(paths: Sequence[Path]) -> list[Size]:
    """Returns the sizes of several images, as :func:`image_size` does of one."""
    return in_threads(image_size, paths, "looking at images")


def exif_orientation(path: Path) -> int:
    """Returns the orientation of an image in EXIF, 1 to 8; 1 if unknown. From 5 on, its sides are swapped on screen."""
    with open_image(path, upright=True) as image:
        found = image.getexif().get(ExifTags.Base.Orientation)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def exif_exposures(paths: Sequence[Path]) -> Tensor | None:
    """Returns natural logarithms (N,) of the exposures of photographs; None unless the EXIF data of all state theirs.

    An exposure is the time multiplied by the sensitivity (ISO) and divided by the square of the f-number. If the first
    file states none, no other is opened.
    """
    tags = (ExifTags.Base.ExposureTime, ExifTags.Base.ISOSpeedRatings, ExifTags.Base.FNumber)

    def read(path: Path) -> float:
        with open_image(path) as image, contextlib.suppress(Exception):  # EXIF data may be damaged
            exif = image.getexif().get_ifd(ExifTags.IFD.Exif)
            # Some cameras list several sensitivities.
            time, sensitivity, aperture = (float(np.ravel(exif[tag])[0]) for tag in tags)
            return math.log(time * sensitivity / aperture**2)
        return math.nan

    if not paths or not math.isfinite(read(paths[0])):
        return None
    found = torch.tensor(in_threads(read, paths, "reading EXIF data"))
    return found if bool(found.isfinite().all()) else None


def area_resized(image: Image.Image, size: Size) -> Image.Image:
    """Shrinks an image by averaging the pixels that fall into each new one, weighting colours by their alpha.

    Colours of transparent pixels do not count, so silhouettes get no dark or stray fringe. Averages are rounded to
    nearest. Those of opaque images may differ from the exact average by up to 1 of 255, unless both sides are divided
    by the same power of two. The image has mode RGB, or RGBA with straight alpha; so has the result, which is RGB if it
    is opaque, and otherwise black where it is fully transparent.
    """
    if image.mode == "RGB" or image.getchannel("A").getextrema() == (255, 255):
        opaque = image if image.mode == "RGB" else image.convert("RGB")
        factors = image.width // size[0], image.height // size[1]
        pixels_per_pixel = factors[0] * factors[1]
        is_whole = image.size == (factors[0] * size[0], factors[1] * size[1])
        # Several times as fast, and exact, but only where Pillow divides by a power of two.
        if is_whole and pixels_per_pixel.bit_count() == 1:
            return opaque.reduce(factors)
        return opaque.resize(size, Image.Resampling.BOX)
    rgba = np.asarray(image)
    alpha = rgba[..., 3:].astype(np.float32)
    weighted = np.concatenate((rgba[..., :3] * alpha, alpha), axis=-1)
    channels = (Image.fromarray(np.ascontiguousarray(weighted[..., channel])) for channel in range(4))
    means = np.stack([np.asarray(channel.resize(size, Image.Resampling.BOX)) for channel in channels], axis=-1)
    mean_alpha = means[..., 3:]
    rgb = np.divide(means[..., :3], mean_alpha, out=np.zeros_like(means[..., :3]), where=mean_alpha > 0)
    return Image.fromarray(np.floor(np.concatenate((rgb, mean_alpha), axis=-1) + 0.5).astype(np.uint8))


def in_threads(action: Callable[[_S], _T], items: Sequence[_S], doing: str = "reading images") -> list[_T]:
    """Returns the results of an action for all items, run in several threads, whose progress is displayed."""
    # Pillow releases the GIL while it decodes, so threads are enough and nothing is copied between processes.
    pool = ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1))
    with warnings.catch_warnings():
        # Pillow warns of images of half the size from which on it refuses them, as panoramas are.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            return list(tracked(pool.map(action, items), doing, len(items)))
        finally:
            pool.shutdown(cancel_futures=True)


def _decode(path: Path, alpha: Path | None = None) -> Image.Image:
    """Returns an image whose pixels are read, as RGBA if it has alpha or a file that replaces it, otherwise as RGB."""
    with open_image(path) as image:
        has_alpha = "A" in image.getbands() or "transparency" in image.info
        decoded = _converted(image, "RGBA" if has_alpha else "RGB")
    if alpha is not None:
        decoded.putalpha(_read_grey(alpha, decoded.size))
    return decoded


def _converted(image: Image.Image, mode: str) -> Image.Image:
    image.load()
    # Converting an image to its own mode would copy it, and no other thread could decode meanwhile.
    return image if image.mode == mode else image.convert(mode)


def _check_exif(image: Image.Image) -> None:
    """Raises ValueError for EXIF data that cannot be read, which Pillow would say in words about TIFF files."""
    if image.format == "PNG":
        image.load()  # its EXIF data may come after the pixels
    try:
        image.getexif()
        # Opening a JPEG file has tried already, and a second failure is not reported.
        Image.Exif().load(image.info.get("exif", b""))
    except Exception as error:
        raise ValueError("its EXIF data are damaged: remove them from the file") from error


def _check_kind(image: Image.Image) -> None:
    """Raises ValueError for pixels that would not be read as they are, and for animations."""
    tiles = getattr(image, "tile", ())
    raw = str(tiles[0][3]) if tiles else ""
    found = None
    if image.mode.startswith("I;16") or "LA;16" in raw:  # Pillow clips the former to 255
        found = "grey with 16 bits"
    elif ";16" in raw and "transparency" in image.info:  # which Pillow compares with pixels of 8 bits
        found = "RGB with 16 bits and a transparent colour"
    elif image.mode not in _MODES:  # Pillow would clip them, or convert them without their profile
        found = f"Pillow's mode {image.mode}"
    if found is not None:
        raise ValueError(f"must be RGB with 8 or 16 bits per channel or grey with 8, got {found}: convert the images")
    # The further pages of a TIFF, and the further pictures of a phone's MPO, are previews and depths.
    frames = getattr(image, "n_frames", 1) if image.format in ("PNG", "WEBP") else 1
    if frames > 1:
        raise ValueError(f"must be a single picture, got an animation of {frames} frames")
