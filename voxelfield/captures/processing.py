"""From a folder of photographs, or a video, to a scene that ``load_scene`` reads."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
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
"""File of the :class:`Report`, beside the images; it lists the scene's files, which alone a later call replaces."""

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
        overwrite: Whether to replace the results of an earlier call.

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
        MissingPackageError: pycolmap is not installed or too old, or PyAV is not installed for a video.
        FileNotFoundError: There is no such source.
        FileExistsError: The folder contains results of an earlier call, or files of others where results go, which are
            never replaced.
        ValueError: The source has fewer than two photographs, is unreadable, or no two photographs can be registered.
    """
    check_camera_model(options.camera_model)
    photographs = _photographs_of(source)
    _check_apart(source, photographs or [source], folder)
    _check_replaceable(folder, options.overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".process_", dir=folder))
    try:
        report = _make_scene(source, photographs, work, options)
        files = sorted(path.relative_to(work).as_posix() for path in _files_in(work, OUTPUTS))
        content = dataclasses.asdict(report) | {"files": files}
        (work / REPORT).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        # Again, because much may have been put there in the meantime.
        _check_replaceable(folder, options.overwrite)
        for name in OUTPUTS:
            _remove(folder / name)
            (work / name).rename(folder / name)
    finally:
        shutil.rmtree(work)
    return report


def _check_apart(source: Path, photographs: Sequence[Path], folder: Path) -> None:
    """Raises ValueError if a photograph, or the source, lies where results go, followed through links."""
    outputs = [(name, (folder / name).resolve()) for name in OUTPUTS]
    for path in (source, *photographs):
        whole = path.resolve()
        for name, output in outputs:
            if whole.is_relative_to(output):
                raise ValueError(
                    f"the folder of the scene must not contain the source where its {name} goes, got {folder} for "
                    f"{path}: choose another folder"
                )


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    """Raises FileExistsError if results would replace something other than those of an earlier call."""
    present = [name for name in OUTPUTS if (folder / name).exists() or (folder / name).is_symlink()]
    if not present:
        return
    others = sorted({path.relative_to(folder).as_posix() for path in _files_in(folder, present)} - _listed(folder))
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise FileExistsError(
            f"the folder of the scene must not contain files of others where results go, got {folder}: voxelfield has "
            f"not written {others[0]}{more}; choose another folder"
        )
    if not overwrite:
        raise FileExistsError(f"{folder} already contains {', '.join(present)}: --overwrite replaces them")


def _files_in(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yields the files of some names in a folder, and those within its subfolders of these names."""
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            yield from (inner for inner in path.rglob("*") if inner.is_symlink() or not inner.is_dir())
        elif path.exists() or path.is_symlink():
            yield path


def _listed(folder: Path) -> set[str]:
    """Returns the files that an earlier call has written to a folder; none if there is no list of them."""
    path = folder / REPORT
    try:
        return {REPORT, *json.loads(path.read_text(encoding="utf-8"))["files"]} if path.is_file() else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


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
    return report


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
