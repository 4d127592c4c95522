"""From photographs and their cameras to a scene: its splits, its box, and whether it extends beyond that box."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from voxelfield.datasets.images import from_opacity
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, cameras_of, present_photos, read_split
from voxelfield.datasets.poses import OPENCV_AXES, inverted, turned_about
from voxelfield.datasets.scene import Scene, Split
from voxelfield.datasets.silhouettes import Silhouette, box_of_silhouettes
from voxelfield.datasets.splits import choose_splits, in_order
from voxelfield.datasets.transparency import shows_object, without_transparency
from voxelfield.grids.boxes import box_tensor, parse_box
from voxelfield.rendering.cameras import Cameras
from voxelfield.warps.bounds import box_of_cameras, box_of_points

logger = logging.getLogger(__name__)

# Number of silhouettes that are evaluated, and below which they may agree by chance, whatever the poses are.
_SILHOUETTES = 128
_FEWEST_SILHOUETTES = 4

Silhouettes = Callable[[Split, Sequence[int]], tuple[list[Silhouette], Cameras]]
"""Returns the silhouettes of some images of a split, with their cameras at the size of the silhouettes."""


def load_capture(
    folder: Path,
    source: Path,
    photos: Sequence[Photo],
    options: LoadOptions,
    listed: Mapping[str, Collection[Path]] | None = None,
    points: Tensor | None = None,
    stated_box: Tensor | None = None,
    visible_box: Tensor | None = None,
) -> Scene:
    """Makes a scene of the photographs of a capture, whose format need not list splits.

    Args:
        folder: The scene's folder; its name becomes the scene's.
        source: The file that lists the photographs, for messages.
        photos: All of them. Those whose files are missing are left out, with a warning, unless the options forbid it.
            Shrunk images are used if each has one.
        options: What to load, and how.
        listed: The paths of each split's photographs, if the format lists them.
        points: As for :func:`assemble`, like the following two.
        stated_box: See there.
        visible_box: See there.

    Returns:
        The scene, on the CPU. :func:`voxelfield.datasets.splits.choose_splits` says which splits it has.

    Raises:
        FileNotFoundError: Images are missing.
        ValueError: There is no such split, an image is not as it must be, or as for :func:`assemble`.
    """
    there = in_order(present_photos(folder, source, photos, options.missing_images or "skip"))
    lack = [photo.path for photo in there if photo.shrunk is None]
    if 0 < len(lack) < len(there):
        logger.info("%s: all images are downscaled from full size, as %s has no reduced copy", source, lack[0])
        there = [replace(photo, shrunk=None) for photo in there]
    splits = choose_splits(source, {"train": there} if listed is None else _as_listed(source, there, listed), options)
    loaded = {name: read_split(chosen, options) for name, chosen in splits.items()}
    return scene_of_photos(folder, source, there, loaded, options, points, stated_box, visible_box)


def _as_listed(source: Path, photos: Sequence[Photo], listed: Mapping[str, Collection[Path]]) -> dict[str, list[Photo]]:
    """Divides photographs by the paths that a format lists for each split.

    Those that no list names are for training, if no list for training names any.
    """
    splits = {name: [photo for photo in photos if photo.path in paths] for name, paths in listed.items()}
    rest = [photo for photo in photos if not any(photo.path in paths for paths in listed.values())]
    if not listed.get("train"):
        splits["train"] = rest
    elif rest:
        logger.info("%s: %d photographs are in no split and are not used", source, len(rest))
    return splits


def scene_of_photos(
    folder: Path,
    source: Path,
    photos: Sequence[Photo],
    splits: Mapping[str, Split],
    options: LoadOptions,
    points: Tensor | None = None,
    stated_box: Tensor | None = None,
    visible_box: Tensor | None = None,
) -> Scene:
    """Makes a scene of splits that were read from files; like :func:`load_capture`, whose arguments it shares.

    Args:
        folder: The scene's folder.
        source: The file that lists the photographs.
        photos: All photographs whose files exist, whether their split is loaded or not.
        splits: The loaded splits by name.
        options: What was loaded, and how.
        points: As for :func:`assemble`, like the following two.
        stated_box: See there.
        visible_box: See there.
    """
    if not any(photo.mask is not None or photo.alpha is not None for photo in photos):
        for masks in (folder / "masks", folder / "mask"):
            if masks.is_dir():
                logger.warning("%s: masks in this folder are not used, because %s names none of them", masks, source)
    by_path = {photo.path: photo for photo in photos}

    def silhouettes(split: Split, numbers: Sequence[int]) -> tuple[list[Silhouette], Cameras]:
        # At the size of the files, so that the box does not depend on the size at which images are loaded.
        chosen = [by_path[(split.paths or ())[number]] for number in numbers]
        cameras = cameras_of(chosen, options)
        if all(split.cameras.size(number) == cameras.size(index) for index, number in enumerate(numbers)):
            return [Silhouette.of(split.image(number)[..., 3]) for number in numbers], cameras
        found = from_opacity(
            [photo.path for photo in chosen],
            [photo.alpha for photo in chosen],
            lambda alpha: Silhouette.of(torch.from_numpy(alpha)),
        )
        return found, cameras

    poses = torch.stack([photo.c2w for photo in photos])
    name = folder.resolve().name
    scene = assemble(name, source, splits, options, poses, silhouettes, points, stated_box, visible_box)
    # Sizes of images that are not loaded must be read from their files.
    return scene if scene.bounded else replace(scene, all_cameras=cameras_of(photos, options))


def assemble(
    name: str,
    source: Path,
    splits: Mapping[str, Split],
    options: LoadOptions,
    poses: Tensor,
    silhouettes: Silhouettes,
    points: Tensor | None = None,
    stated_box: Tensor | None = None,
    visible_box: Tensor | None = None,
) -> Scene:
    """Makes a scene of loaded splits and determines its box.

    Images of which at least a tenth is transparent show an object, whose box is that of its silhouettes
    (:func:`voxelfield.datasets.silhouettes.box_of_silhouettes`). All others are photographs of a place that extends
    beyond any estimated box, and their transparent pixels are masked. A box in the options takes precedence and bounds
    the scene.

    Args:
        name: The scene's name.
        source: What lists the photographs, for messages.
        splits: The loaded splits by name.
        options: The user's box, if any.
        poses: (N, 4, 4) poses of all photographs, whether their split is loaded or not.
        silhouettes: Called if the images show an object without a given box.
        points: (M, 3) points that structure from motion found, or that fill what is seen, world units.
        stated_box: The box (2, 3) around the subject that the format states, if any.
        visible_box: The box (2, 3) around everything visible; None: it is estimated from the points or the cameras.

    Raises:
        ValueError: Silhouettes only agree if the poses have another convention, a photograph has no opaque pixels that
            count, or the box is not one.
    """
    cut_out = shows_object(source, splits)
    if not cut_out:
        splits = {name: without_transparency(split) for name, split in splits.items()}
    estimated = False
    if options.aabb is not None:
        aabb = options.aabb
    elif stated_box is not None:
        aabb = stated_box
    elif cut_out:
        aabb = _box_of_object(source, splits, silhouettes)
    else:
        aabb, estimated = _box_of_place(poses, points) if visible_box is None else visible_box, True
    box = box_tensor(parse_box(aabb), torch.device("cpu"))
    return Scene(name, box, dict(splits), cut_out or options.aabb is not None, estimated, points, poses)


def _box_of_object(source: Path, splits: Mapping[str, Split], silhouettes: Silhouettes) -> Tensor:
    """Returns the box (2, 3) of the object that images with a transparent background show.

    Raises:
        ValueError: The silhouettes agree only if the poses have another convention.
    """
    # All runs load the training images.
    split = splits["train"] if "train" in splits else next(iter(splits.values()))
    numbers = torch.linspace(0, len(split) - 1, min(len(split), _SILHOUETTES)).long().tolist()
    found, cameras = silhouettes(split, numbers)
    box = box_of_silhouettes(found, cameras)
    if box is not None:
        return box
    if len(found) >= _FEWEST_SILHOUETTES and 2 * sum(silhouette.whole for silhouette in found) > len(found):
        mistake = inverted(cameras.c2w)
        turned = replace(cameras, c2w=turned_about(cameras.c2w))
        if mistake is None and box_of_silhouettes(found, turned) is not None:
            mistake = OPENCV_AXES
        if mistake is not None:
            raise ValueError(f"{source}: silhouettes must agree on where the object is, got none that do: {mistake}")
    logger.warning(
        "%s: the silhouettes do not tell where the object is, so its box is that of the cameras: check the poses and "
        "the alpha channels, or set scene.aabb",
        source,
    )
    return box_of_cameras(cameras.c2w)


def _box_of_place(c2w: Tensor, points: Tensor | None) -> Tensor:
    if points is None or len(points) == 0 or bool((points == points[0]).all()):
        return box_of_cameras(c2w)
    return box_of_points(points)
