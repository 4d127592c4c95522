"""Captures: scenes whose format lists photographs, but no splits and no box."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from voxelfield.datasets.frames import make_scene
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, present_photos, read_split
from voxelfield.datasets.scene import Scene
from voxelfield.datasets.splits import choose_splits, in_order

logger = logging.getLogger(__name__)


def load_capture(
    folder: Path,
    source: Path,
    photos: Sequence[Photo],
    options: LoadOptions,
    listed: Mapping[str, Collection[Path]] | None = None,
    points: Tensor | None = None,
    stated_box: Callable[[], Tensor] | None = None,
    visible_box: Callable[[], Tensor] | None = None,
) -> Scene:
    """Makes a scene of photographs.

    Args:
        folder: The scene's folder; its name becomes the scene's.
        source: The file that lists the photographs, for messages.
        photos: All of them. Those whose files are missing are left out, with a warning, unless the options forbid it.
            Shrunk images are used if each has one.
        options: What to load, and how.
        listed: The paths of each split's photographs, if the format lists them after all.
        points: As for :func:`voxelfield.datasets.frames.make_scene`.
        stated_box: As for that function.
        visible_box: As for that function.

    Returns:
        The scene, on the CPU. :func:`voxelfield.datasets.splits.choose_splits` says which splits it has.

    Raises:
        FileNotFoundError: Images are missing.
        ValueError: There is no such split, an image is not as it must be, or as for that function.
    """
    there = in_order(present_photos(folder, source, photos, options.missing_images or "skip"))
    lack = [photo.path for photo in there if photo.shrunk is None]
    if 0 < len(lack) < len(there):
        logger.info("%s: all images are downscaled from full size, as %s has no reduced copy", source, lack[0])
        there = [replace(photo, shrunk=None) for photo in there]
    splits = choose_splits(source, {"train": there} if listed is None else _as_listed(source, there, listed), options)
    loaded = {name: read_split(chosen, options) for name, chosen in splits.items()}
    return make_scene(folder, source, there, loaded, options, points, stated_box, visible_box)


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
