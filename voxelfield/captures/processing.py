"""From a folder of photographs, or a video, to a scene that ``load_scene`` reads."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from voxelfield.captures.photographs import copy_photographs, extract_frames, photographs_in
from voxelfield.captures.reconstruction import Matching, Report, check_camera_model, reconstruct
from voxelfield.datasets.images import IMAGE_SUFFIXES

logger = logging.getLogger(__name__)

REPORT = "report.json"
"""Name of the file with the :class:`Report` and a list of the scene's files; a later call replaces only those."""

OUTPUTS = ("images", "sparse", REPORT)
"""Names of the files and folders that :func:`process` writes."""


def process(
    source: Path,
    folder: Path,
    *,
    frames: int = 120,
    matching: Matching | None = None,
    camera_model: str = "OPENCV",
    camera_per_image: bool = False,
    max_size: int = 1600,
    overwrite: bool = False,
) -> Report:
    """Makes a scene: images, a COLMAP model and a report of the registration.

    All files are made in a temporary folder inside of ``folder`` and moved in the end, so a failure leaves earlier
    results unchanged.

    Args:
        source: A folder of photographs, or a video.
        folder: Folder of the scene; created if needed.
        frames: Number of frames to take from a video.
        matching: Which pairs to compare; None compares all photographs of a folder, and neighbouring frames of a video.
        camera_model: COLMAP's name of the camera model.
        camera_per_image: Give every photograph a camera of its own; otherwise, photographs of one size share one.
        max_size: Longest side in pixels to which larger photographs are reduced.
        overwrite: Replace the results of an earlier call.

    Returns:
        The report.

    Raises:
        MissingPackageError: pycolmap is not installed or too old, or PyAV is not installed for a video.
        FileNotFoundError: There is no such source.
        FileExistsError: The folder contains results of an earlier call, or other files with their names, which are
            never replaced.
        ValueError: A number is out of range, the source has fewer than two photographs or is unreadable, or no two
            photographs can be registered.
    """
    for name, value, least in (("frames", frames, 2), ("max_size", max_size, 64)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    check_camera_model(camera_model)
    photographs = _photographs_of(source)
    for name in OUTPUTS:
        if source.resolve().is_relative_to((folder / name).resolve()):
            raise ValueError(f"the source must be outside of the results, got {source} in {name} of the scene {folder}")
    _check_replaceable(folder, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".process_", dir=folder) as temporary:
        work = Path(temporary)
        images = work / "images"
        if photographs is None:
            logger.info("choosing frames of %s ...", source)
            extract_frames(source, images, frames, max_size)
        else:
            copy_photographs(photographs, images, max_size)
        report = reconstruct(
            images,
            work,
            camera_model=camera_model,
            matching=matching or ("sequential" if photographs is None else "exhaustive"),
            camera_per_image=camera_per_image,
        )
        files = sorted(path.relative_to(work).as_posix() for path in _files_in(work, OUTPUTS))
        content = dataclasses.asdict(report) | {"files": files}
        (work / REPORT).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        # Again, because files may have been added in the meantime.
        _check_replaceable(folder, overwrite)
        for name in OUTPUTS:
            if (folder / name).is_dir() and not (folder / name).is_symlink():
                shutil.rmtree(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
            (work / name).rename(folder / name)
    return report


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    """Raises FileExistsError if results would replace other files than those of an earlier call."""
    present = [name for name in OUTPUTS if (folder / name).exists() or (folder / name).is_symlink()]
    listed = {REPORT}
    try:
        listed.update(json.loads((folder / REPORT).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        listed = set()
    others = sorted({path.relative_to(folder).as_posix() for path in _files_in(folder, present)} - listed)
    if others:
        raise FileExistsError(
            f"the folder of the scene must not contain other files where results go, got {folder}: voxelfield has not "
            f"written {others[0]}{f' and {len(others) - 1} more' if len(others) > 1 else ''}; choose another folder"
        )
    if present and not overwrite:
        raise FileExistsError(f"{folder} already contains {', '.join(present)}: --overwrite replaces them")


def _files_in(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yields the files of some names in a folder, and those within its subfolders of these names."""
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            yield from (inner for inner in path.rglob("*") if inner.is_symlink() or not inner.is_dir())
        elif path.exists() or path.is_symlink():
            yield path


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
        raise ValueError(f"{source}: must contain at least 2 photographs ({known}), got {len(photographs)}")
    return photographs
