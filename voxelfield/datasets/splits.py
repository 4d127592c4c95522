"""Division of a scene's photographs into those to train on and those to evaluate."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
"""Names of splits."""


def in_order(photos: Sequence[Photo]) -> list[Photo]:
    """Returns photographs sorted by path, so that the order in which a file lists them is of no consequence."""
    return sorted(photos, key=lambda photo: photo.path.as_posix())


def held_out(photos: Sequence[Photo], every: int) -> dict[str, list[Photo]]:
    """Divides photographs into a training and a test split.

    Args:
        photos: All of them.
        every: Every ``every``-th photograph, sorted by path and beginning with the first, is for the test; at least 2.
    """
    ordered = in_order(photos)
    return {
        "train": [photo for index, photo in enumerate(ordered) if index % every != 0],
        "test": ordered[::every],
    }


def choose_splits(
    source: Path, listed: Mapping[str, Sequence[Photo]], options: LoadOptions
) -> dict[str, Sequence[Photo]]:
    """Returns the photographs of each split to load.

    Without photographs for the test, those of val stand in if the test split is asked for by name. Without either, some
    are held out of the training split. With ``holdout=0``, none are, and the test split is left out.

    Args:
        source: The file that lists the photographs, for messages.
        listed: The photographs of train, val and test; those of a split may be absent or none.
        options: Which splits to load (None: all that have photographs), and how many photographs are held out.

    Raises:
        ValueError: A split has no photographs; the message says which have some, and what to do.
    """
    splits = {name: listed.get(name, ()) for name in SPLITS}
    if not splits["test"] and not splits["val"] and splits["train"] and options.holdout > 0:
        count = len(splits["train"])
        logger.info("%s: one in %d photographs is held out for the test (data.holdout)", source, options.holdout)
        splits |= held_out(splits["train"], options.holdout)
        if not splits["train"] and (options.splits is None or "train" in options.splits):
            raise ValueError(
                f"{source}: there must be at least two photographs if one is held out for the test, got {count}: set "
                "data.holdout=0, or add photographs"
            )
    there = [name for name, photos in splits.items() if photos]
    if options.splits is None:
        return {name: splits[name] for name in there}
    chosen = {}
    for name in options.splits:
        if splits.get(name):
            chosen[name] = splits[name]
        elif name == "test" and splits["val"]:
            logger.info("%s: there are no test views; those of val stand in", source)
            chosen[name] = splits["val"]
        elif name == "test" and splits["train"]:
            if "train" in options.splits:
                logger.info("%s: there are no test views, so training views are evaluated", source)
        else:
            raise ValueError(f"splits must be among those of {source} ({', '.join(there)}), got {name}")
    return chosen
