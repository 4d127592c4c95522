"""A small capture of a place, in nerfstudio's format, and overrides that train a field of it in a second or two."""

from __future__ import annotations

from pathlib import Path

from room_corner import corner_cameras, write_photographs, write_transforms
from short_runs import TINY

OVERRIDES = (*TINY[2:], "data.holdout=4", "trainer.image_size=24", "trainer.evaluation.views=null")


def write_capture(folder: Path, count: int = 12) -> None:
    """Writes photographs of the corner of a room, which were taken on the way from one wall to the other."""
    cameras = corner_cameras(count, 32, 24)
    write_photographs(folder / "images", cameras)
    write_transforms(folder, cameras, zoom=0.1)
