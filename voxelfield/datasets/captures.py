"""Captures: scenes whose format lists photographs, but no splits and no box."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, held_out, present_photos, read_split
from voxelfield.datasets.scene import Scene
from voxelfield.grids.boxes import box_tensor, parse_box


def load_capture(
    folder: Path,
    source: Path,
    photos: Sequence[Photo],
    options: LoadOptions,
    box: Callable[[], Tensor],
    listed: Mapping[str, Sequence[Photo]] | None = None,
) -> Scene:
    """Makes a scene of photographs.

    Args:
        folder: The scene's folder; its name becomes the scene's.
        source: The file that lists the photographs, for messages.
        photos: All of them. Those whose files are missing are left out, with a warning, unless the options forbid it.
        options: What to load, and how.
        box: Computes the box (2, 3) of the scene if the options name none.
        listed: The splits, if the format lists them after all.

    Returns:
        The scene, on the CPU. With ``holdout=0`` it has no test split, unless the format lists one.

    Raises:
        FileNotFoundError: Images are missing.
        ValueError: There is no such split, or an image is not as it must be.
    """
    there = present_photos(source, photos, options.missing_images or "skip")
    if listed is None:
        splits: Mapping[str, Sequence[Photo]] = held_out(there, options.holdout)
    else:
        splits = {name: [photo for photo in there if photo in some] for name, some in listed.items()}
    if options.splits is None:
        wanted = [name for name, some in splits.items() if some]
    else:
        wanted = [name for name in options.splits if name != "test" or options.holdout > 0 or listed is not None]
    loaded = {}
    for name in wanted:
        if not splits.get(name):
            has = ", ".join(split for split, some in splits.items() if some)
            raise ValueError(f"splits must be of those that {source} has ({has}), got {name}")
        loaded[name] = read_split(splits[name], options)
    aabb = box_tensor(parse_box(box() if options.aabb is None else options.aabb), torch.device("cpu"))
    return Scene(folder.resolve().name, aabb, loaded)
