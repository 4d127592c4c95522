"""From a folder of photographs, or a video, to a scene that ``load_scene`` reads."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from voxelfield.captures.photographs import (
    REDUCTIONS,
    copy_photographs,
    extract_frames,
    photographs_in,
    write_reductions,
)
from voxelfield.captures.reconstruction import Matching, Report, check_camera_model, reconstruct
from voxelfield.datasets.images import IMAGE_SUFFIXES

logger = logging.getLogger(__name__)

REPORT = "report.json"
"""File of the :class:`Report`, beside the images."""

OUTPUTS = ("images", *(f"images_{factor}" for factor in REDUCTIONS), "sparse", REPORT)
"""Names of the files and folders that :func:`process` writes."""


@dataclass(frozen=True)
class ProcessOptions:
    """How a capture is made.

    Attributes:
        frames: Number of frames to take from a video.
        matching: Which pairs to compare; None compares all photographs of a folder, and neighbouring frames of a video.
        camera_model: COLMAP's name of the camera model.
        camera_per_image: Whether every photograph has a camera of its own; else those of one size share one.
        max_size: Longest side in pixels to which larger photographs are shrunk.
        overwrite: Whether what is there already may be replaced.

    Raises:
        ValueError: A number makes no sense.
    """

    frames: int = 120
    matching: Matching | None = None
    camera_model: str = "OPENCV"
    camera_per_image: bool = False
    max_size: int = 1600
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, least in (("frames", 2), ("max_size", 64)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def process(source: Path, folder: Path, options: ProcessOptions) -> Report:
    """Makes a scene: images, reduced copies, a COLMAP model and a report of what was registered.

    Everything is made in a temporary folder inside of ``folder`` and moved to its place at the end, so a failure leaves
    what was there.

    Args:
        source: A folder of photographs, or a video.
        folder: Where the scene goes; it is created if need be.
        options: How.

    Returns:
        What was registered.

    Raises:
        MissingPackageError: pycolmap is not installed or too old, or imageio is not installed for a video.
        FileNotFoundError: There is no such source.
        FileExistsError: The folder holds something that would be replaced.
        ValueError: The source has fewer than two photographs, is unreadable, or no two photographs can be registered.
    """
    check_camera_model(options.camera_model)
    photographs = _photographs_of(source)
    present = [name for name in OUTPUTS if (folder / name).exists()]
    if any((folder / name).resolve() == source.resolve() for name in present):
        raise ValueError(f"the folder of the scene must not contain the source itself, {source.name}, got {folder}")
    if present and not options.overwrite:
        raise FileExistsError(f"{folder} already contains {', '.join(present)}: --overwrite replaces them")
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".process_", dir=folder))
    try:
        report = _make_scene(source, photographs, work, options)
        for name in OUTPUTS:
            _remove(folder / name)
            (work / name).rename(folder / name)
    finally:
        shutil.rmtree(work)
    return report


def _photographs_of(source: Path) -> list[Path] | None:
    """Returns the photographs of a folder, at least two; None for a video."""
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such folder of photographs or video")
    if source.is_file():
        if source.suffix.lower() in IMAGE_SUFFIXES:
            raise ValueError(f"the source must be a folder of photographs or a video, got the one photograph {source}")
        return None
    photographs = photographs_in(source)
    if len(photographs) < 2:
        known = ", ".join(IMAGE_SUFFIXES)
        raise ValueError(f"{source}: must hold at least 2 photographs ({known}), got {len(photographs)}")
    return photographs


def _make_scene(source: Path, photographs: list[Path] | None, work: Path, options: ProcessOptions) -> Report:
    images = work / "images"
    if photographs is None:
        logger.info("choosing frames of %s ...", source)
        extract_frames(source, images, options.frames, options.max_size)
        taken = len(photographs_in(images))
        if taken < 2:
            raise ValueError(f"{source}: must be a video with at least 2 frames, got {taken}")
    else:
        copy_photographs(photographs, images, options.max_size)
    colmap = work / "colmap"
    colmap.mkdir()
    report = reconstruct(
        images,
        colmap,
        work / "sparse" / "0",
        camera_model=options.camera_model,
        matching=options.matching or ("sequential" if photographs is None else "exhaustive"),
        camera_per_image=options.camera_per_image,
    )
    write_reductions(work)
    (work / REPORT).write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")
    return report


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
