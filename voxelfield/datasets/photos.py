"""Photographs with their cameras: the common representation of all capture formats."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from voxelfield import processes
from voxelfield.datasets.image_paths import why_missing
from voxelfield.datasets.images import (
    Size,
    comparable,
    exif_orientation,
    image_files,
    image_sizes,
    masks_beside,
    read_depths,
    read_images,
    read_masks,
)
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.poses import FARTHEST, OPENCV_AXES, check_poses, scale_of
from voxelfield.datasets.scene import MASK_WEIGHT, Split
from voxelfield.messages import printable
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens, join_lenses

logger = logging.getLogger(__name__)

Intrinsics = tuple[float, float, float, float]
"""fx, fy, cx, cy in pixels."""

# In pixels, the shortest focal length, and the largest distance of a principal point from the corner of its image.
# Other values come from damaged files.
_SHORTEST_FOCAL_LENGTH, _FARTHEST_CENTER = 1e-3, 1e6


@dataclass(frozen=True, eq=False)
class Photo:
    """An image file and the camera that took it.

    Attributes:
        path: The file, which may be missing.
        c2w: (4, 4) float64, camera to world, OpenGL axes.
        intrinsics: Returns the intrinsics for an image of a width and a height in pixels; may raise ValueError if the
            camera took images of another size.
        lens: The lens, for one camera; None for a pinhole.
        shrunk: A file of the same image, already shrunk by the requested factor; None if there is none.
        mask: An image of the same size that is black where pixels must be ignored; None if all of them count.
        alpha: An image of the same size that replaces the alpha channel, black where the background of an object is
            seen; None if the image keeps its own.
        time: When it was taken, in the unit of the format; None if unknown.
        depth: A file of depths along the optical axis (:func:`voxelfield.datasets.images.read_depths`); None without.
        depth_unit: Length of one unit of ``depth``, world units.
        observed: (K, 4) float64, the points that structure from motion found in the image: column and row as shares of
            its width and height, depth along the optical axis in world units, and how reliable it is, from 0 to 1; None
            if that is not known.
        pose_name: Name of the pose in messages, with the file that states it; None if the path is enough.
        motion: (6,) float64, how the camera turns, a rotation vector in radians, and moves, world units, in its own
            frame while all rows of the image are exposed, the middle one with the pose ``c2w``; None: it stands still.
        wrong_axes: The remedy, for messages, if the pose has the axes of OpenCV where those of OpenGL belong.
    """

    path: Path
    c2w: Tensor
    intrinsics: Callable[[int, int], Intrinsics]
    lens: Lens | None = None
    shrunk: Path | None = None
    mask: Path | None = None
    alpha: Path | None = None
    time: float | None = None
    depth: Path | None = None
    depth_unit: float = 1e-3
    observed: Tensor | None = None
    pose_name: str | None = None
    motion: Tensor | None = None
    wrong_axes: str = OPENCV_AXES


def points_near(source: Path, points: Tensor, photos: Sequence[Photo]) -> Tensor:
    """Returns those of the points (N, 3) that can lie in a scene, with a warning about the others."""
    middle = torch.stack([photo.c2w[:3, 3] for photo in photos]).median(dim=0).values
    usable = ((points - middle).abs() <= FARTHEST).all(dim=1)  # False for NaN
    if not bool(usable.all()):
        logger.warning(
            "%s: %d of %d points are left out, because they are not within %g world units of the cameras, the first at "
            "%s",
            *(source, int((~usable).sum()), len(points), FARTHEST, points[~usable][0].tolist()),
        )
    return points[usable]


def checked_poses(source: Path, photos: Sequence[Photo]) -> list[Photo]:
    """Returns photographs with rotations divided by the factor that scales all of them, with a warning, if one does.

    Refuses other poses as :func:`check_poses` does, by their names or else by ``source`` and the images' paths. The
    cameras may be far from the origin, because positions become relative to one among them.
    """
    poses = torch.stack([photo.c2w for photo in photos])
    middle = poses[:, :3, 3].median(dim=0).values.clamp(-(FARTHEST**2), FARTHEST**2)
    if (factor := scale_of(poses)) != 1:
        logger.warning("%s: all rotations are scaled by %.4g and are divided by it; positions stay", source, factor)
        poses[:, :3, :3] /= factor
    check_poses(lambda index: photos[index].pose_name or f"{source}: pose of {photos[index].path}", poses, middle)
    return [replace(photo, c2w=pose) for photo, pose in zip(photos, poses, strict=True)]


def present_photos(
    folder: Path, source: Path, photos: Sequence[Photo], missing_images: Literal["error", "skip"]
) -> list[Photo]:
    """Returns the photographs whose files exist; refuses missing ones, or warns of them unless all are missing.

    The ``source`` lists them, and if all are missing, the scene's folder is searched for the files, for the message.
    Those without a mask get the one that lies beside them.
    """
    missing = [photo.path for photo in photos if not photo.path.exists()]
    if missing:
        lack = f"{len(missing)} of {len(photos)} images are missing, the first is {missing[0]}"
        if len(missing) == len(photos):
            raise FileNotFoundError(f"{source}: {lack}{why_missing(folder, missing[0])}")
        if missing_images == "error":
            raise FileNotFoundError(f"{source}: {lack}: data.missing_images=skip leaves such views out")
        logger.warning("%s: %s; their frames are left out", source, lack)
    absent = set(missing)
    photos = [photo for photo in photos if photo.path not in absent]
    listed, bare = {photo.path for photo in photos}, {photo.path for photo in photos if photo.mask is None}
    files = [path for folder in {path.parent for path in bare} for path in image_files(folder, masks=True)]
    masks = {path: mask for path, mask in masks_beside(files).items() if path in bare and mask not in listed}
    if masks:
        text = "%s: of %d photographs, %d have a mask beside them, which is used: the first is %s"
        level = logging.INFO if len(masks) == len(listed) else logging.WARNING
        logger.log(level, text, source, len(listed), len(masks), min(masks.values()))
    return [replace(photo, mask=photo.mask or masks.get(photo.path)) for photo in photos]


def with_shrunk_images(photos: Sequence[Photo], images: Path, downscale: int) -> list[Photo]:
    """Returns photographs with their shrunk images, found by name without suffix in ``images_4`` beside ``images``."""
    folder = images.with_name(f"{images.name}_{downscale}")
    shrunk = {comparable(path.relative_to(folder).with_suffix("")): path for path in image_files(folder, "**/*")}
    names = [comparable(Path(os.path.relpath(photo.path, images)).with_suffix("")) for photo in photos]
    return [replace(photo, shrunk=shrunk.get(name)) for photo, name in zip(photos, names, strict=True)]


def read_split(name: str, photos: Sequence[Photo], options: LoadOptions) -> Split:
    """Reads the images of a split, with their masks, depths and times, of at least one photograph.

    All files of images exist. Shrunk images are read in place of whole ones if all have one. Images for training are
    divided over processes if the options say so, and if there are as many.

    Raises:
        FileNotFoundError: A mask is missing.
        ValueError: An image is unreadable, or not of the size that its camera takes; intrinsics are invalid; a mask is
            unreadable, of another size than its image, or leaves no pixel; depths are unreadable or of another shape
            than their image; or only some photographs have a time.
    """
    whole = [photo.path for photo in photos]
    shrunk = [photo.shrunk for photo in photos if photo.shrunk is not None]
    sizes = image_sizes(whole)
    if len(shrunk) == len(whole):
        paths, limited = shrunk, replace(options, downscale=1)
        found, factor = image_sizes(shrunk), options.downscale
        for path, (width, height), (w, h) in zip(shrunk, found, sizes, strict=True):
            if abs(width - w / factor) > 1 or abs(height - h / factor) > 1:
                raise ValueError(
                    f"{path}: size must be {w / factor:g}x{h / factor:g}, rounded, as the whole image is {w}x{h} and "
                    f"downscale is {factor}, got {width}x{height}"
                )
        read = [limited.size_of(size) for size in found]
    else:
        paths, read = whole, [options.size_of(size) for size in sizes]
    # Before the pixels are read, which takes much longer than to find invalid cameras.
    cameras = cameras_of(photos, options, sizes, read)
    divided = options.divided and name == "train" and 1 < processes.count() <= len(photos)
    local_slice = processes.rows(len(photos)) if divided else None
    images = read_images(paths, read, [photo.alpha for photo in photos], local_slice)
    files = [photo.mask for photo in photos]
    extras = _times(photos) | (_depths(photos, sizes, read, local_slice) if options.depth else {})
    masks = None
    if any(files):
        kind = {"inverted": options.invert_masks, "soft": options.soft_masks}
        masks, weights = read_masks(files, sizes, read, local_slice, **kind)
        extras |= {MASK_WEIGHT: weights} if options.soft_masks else {}
    names = [printable(path.stem) for path in whole]
    if len(set(names)) < len(names):  # two images have one name, or are one
        names = [f"{index}_{name}" for index, name in enumerate(names)]
    entries: dict[str, Sequence[Any]] = {"mask_path": files, "time": [p.time for p in photos]}
    entries["depth_file_path"] = [p.depth for p in photos]
    entries["depth_unit_scale_factor"] = [None if p.depth is None else p.depth_unit for p in photos]
    return Split(images, cameras, tuple(names), masks, tuple(whole), extras, local_slice, entries)


def _times(photos: Sequence[Photo]) -> dict[str, Tensor]:
    """Returns ``time`` (N,) float32, if photographs have one."""
    times = [photo.time for photo in photos if photo.time is not None]
    if 0 < len(times) < len(photos):
        bare = next(photo.path for photo in photos if photo.time is None)
        raise ValueError(
            f"{bare}: must have a time, as {len(times)} of {len(photos)} images of its split have, got none"
        )
    found = torch.tensor(times, dtype=torch.float32)
    if (merged := len(set(times)) - len(found.unique())) > 0:
        text = "%s: %d different times are equal to others in float32, as %g is so large: count from the first"
        logger.warning(text, photos[0].path.parent, merged, max(times, key=abs))
    return {"time": found} if times else {}


def _depths(
    photos: Sequence[Photo], sizes: Sequence[Size], read: Sequence[Size], local_slice: slice | None
) -> dict[str, Tensor]:
    """Returns ``depth`` (N, H, W) float32, or a slice of it, if photographs have depths.

    Depths of points come with ``depth_weight`` (N, H, W) float16, how reliable each is.
    """
    if any(photo.depth is not None for photo in photos):
        units = torch.tensor([photo.depth_unit for photo in photos], dtype=torch.float32)
        depths = read_depths([photo.depth for photo in photos], sizes, read, local_slice)
        return {"depth": depths * units[local_slice or slice(None), None, None]}
    if all(photo.observed is None for photo in photos):
        return {}
    width, height = (max(sides) for sides in zip(*read, strict=True))
    own = range(len(photos))[local_slice or slice(None)]
    depths, weights = (torch.zeros(len(own), height, width, dtype=dtype) for dtype in (torch.float32, torch.float16))
    for number, depth, weight in zip(own, depths, weights, strict=True):
        observed = photos[number].observed
        if observed is not None:
            size = torch.tensor(read[number])
            # If several points fall into one pixel, NumPy keeps the last, which is the most reliable.
            sorted_points = observed[observed[:, 3].argsort(stable=True)]
            column, row = (sorted_points[:, :2] * size).long().clamp(min=0).minimum(size - 1).numpy().T
            depth.numpy()[row, column] = sorted_points[:, 2]
            weight.numpy()[row, column] = sorted_points[:, 3]
    return {"depth": depths, "depth_weight": weights}


def scaled(intrinsics: Intrinsics, size: tuple[float, float], source: str) -> Callable[[int, int], Intrinsics]:
    """Returns a function that computes intrinsics for images that were resized after the cameras were found.

    ``intrinsics`` are those of the original images of a ``size``, width and height in pixels, which was found in
    ``source``. It raises ValueError for an image that no resizing gives: one with another ratio of its sides, to a
    pixel of rounding. Raises ValueError for an original size below one pixel.
    """
    fx, fy, cx, cy = intrinsics
    w, h = size
    if not min(size) >= 1:
        raise ValueError(f"{source} must have a size of at least 1x1, got {w:g}x{h:g}")

    def of(width: int, height: int) -> Intrinsics:
        # A pixel of the smaller of both sizes changes these products by a side of the larger one.
        pixel = max(width, height, w, h)
        if abs(width * h - height * w) > pixel:
            rotated = abs(width * w - height * h) <= pixel
            cause = "rotated?" if rotated else "is it cropped, or not the image that the camera was computed for?"
            raise ValueError(
                f"size must be in proportion to {w:g}x{h:g} (from {source}), got {width}x{height}: {cause}"
            )
        x, y = width / w, height / h
        return fx * x, fy * y, cx * x, cy * y

    return of


def cameras_of(
    photos: Sequence[Photo],
    options: LoadOptions,
    sizes: Sequence[Size] | None = None,
    read: Sequence[Size] | None = None,
) -> Cameras:
    """Returns the cameras of at least one photograph, whose files exist.

    Without the ``sizes`` of the files, these are looked up; without those at which they are ``read``, they are those of
    the files. Raises ValueError if an image is unreadable, or intrinsics are invalid.
    """
    sizes = image_sizes([photo.path for photo in photos]) if sizes is None else sizes
    read = read or sizes
    scale = torch.tensor(read, dtype=torch.float64) / torch.tensor(sizes)
    of_files = [_intrinsics_of(photo, size) for photo, size in zip(photos, sizes, strict=True)]
    intrinsics = torch.tensor(of_files, dtype=torch.float64)
    check_intrinsics(lambda index: str(photos[index].path), intrinsics)
    intrinsics = intrinsics * scale.repeat(1, 2)
    c2w = torch.stack([photo.c2w for photo in photos])
    lens = join_lenses([photo.lens for photo in photos])
    if lens is not None and not options.lens_distortion:
        lens = join_lenses([lens.without_distortion()])
    cameras = Cameras.of_sizes(c2w.float(), intrinsics.float(), torch.tensor(read), lens)
    if all(photo.motion is None for photo in photos):
        return cameras
    still = torch.zeros(6, dtype=torch.float64)
    motion = torch.stack([still if photo.motion is None else photo.motion for photo in photos])
    heights = torch.tensor(read, dtype=torch.float64)[:, 1:]
    return replace(cameras, rolling=torch.cat((motion / heights, heights / 2), dim=1).float())


def centred(intrinsics: Intrinsics, width: int, height: int) -> Intrinsics:
    """Returns intrinsics as they are, for an image whose original size is unknown.

    Raises ValueError if the principal point is outside the image, as it is if the image was resized.
    """
    _, _, cx, cy = intrinsics
    if not (0 <= cx <= width and 0 <= cy <= height):
        raise ValueError(
            f"size must be that of the image that the principal point ({cx:g}, {cy:g}) belongs to, got "
            f"{width}x{height}: was the image resized?"
        )
    return intrinsics


def check_intrinsics(name: Callable[[int], str], intrinsics: Tensor) -> None:
    """Refuses intrinsics (N, 4) that no camera can have: directions through its pixels would overflow float32.

    ``name`` returns the name of a view in messages, from its index.
    """
    focal, center = intrinsics[:, :2], intrinsics[:, 2:]
    sound = (focal >= _SHORTEST_FOCAL_LENGTH) & focal.float().isfinite() & (center.abs() <= _FARTHEST_CENTER)
    if not bool(sound.all()):
        bad = int(sound.all(dim=-1).logical_not().nonzero()[0])
        raise ValueError(
            f"{name(bad)}: focal lengths must be finite and at least {_SHORTEST_FOCAL_LENGTH:g} pixels, and the "
            f"principal point within {_FARTHEST_CENTER:g} pixels, got {intrinsics[bad].tolist()} as fl_x, fl_y, cx, cy"
        )


def _intrinsics_of(photo: Photo, size: Size) -> Intrinsics:
    try:
        return photo.intrinsics(*size)
    except ValueError as error:
        hint = ""
        # Where the camera belongs to the image as EXIF rotates it.
        with contextlib.suppress(ValueError):
            if exif_orientation(photo.path) >= 5:
                photo.intrinsics(*size[::-1])
                hint = "; EXIF rotates the image, but pixels are read as they are stored: rotate the file itself"
        raise ValueError(f"{photo.path}: {error}{hint}") from error
