"""The formats of data sets that :func:`voxelfield.load_scene` reads, and which of them a folder is in.

Formats are the objects of :class:`Format` in the modules of this package, and those that other packages declare as
entry points::

    [project.entry-points."voxelfield.datasets"]
    NAME = "package.module:FORMAT"
"""

from __future__ import annotations

import difflib
import functools
import logging
import mimetypes
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from voxelfield.datasets.images import image_files
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene
from voxelfield.foundation.extensions import announced_objects, foreign_code, own_objects

logger = logging.getLogger(__name__)

# Formats of other packages that could not tell whether a folder is theirs, each of which is warned about once.
_failed: set[str] = set()


@dataclass(frozen=True)
class Format:
    """One format of data sets.

    Attributes:
        name: A short name, for messages.
        looks_for: The files by which a folder is recognised, for messages.
        recognises: Returns whether a folder, which need not exist, is in this format; it opens no image.
        load: Loads such a folder as the options say, on the CPU. Raises FileNotFoundError if a file of the scene is
            missing, and ValueError, with a message of one line, if an argument or a file does not match the format.
        order: Formats are tried in the order of these numbers; those with distinctive files come first.
        has_models: Whether :attr:`voxelfield.datasets.options.LoadOptions.model` selects among several models.
    """

    name: str
    looks_for: str
    recognises: Callable[[Path], bool]
    load: Callable[[Path, LoadOptions], Scene]
    order: int = 100
    has_models: bool = False


def contains(*groups: Sequence[str]) -> Callable[[Path], bool]:
    """Returns a function that tells whether a folder has one of each group of files, or folders if without suffix."""

    def has(path: Path) -> bool:
        return path.is_file() if path.suffix else path.is_dir()

    return lambda folder: all(any(has(folder / name) for name in names) for names in groups)


@functools.cache
def _own_formats() -> tuple[Format, ...]:
    return tuple(own_objects(__package__, Format))


@functools.cache
def formats() -> tuple[Format, ...]:
    """Returns all formats; the first that recognises a folder and can use its files loads it."""
    found = (*_own_formats(), *announced_objects("voxelfield.datasets", Format))
    return tuple(sorted(found, key=lambda known: known.order))


@dataclass(frozen=True)
class FoundScene:
    """The folder of a scene, and the formats that recognise it, in the order in which they are tried."""

    folder: Path
    formats: tuple[Format, ...]


def recognise(folder: Path) -> FoundScene | None:
    """Returns the scene in a folder; None if no format recognises it."""
    found = tuple(known for known in formats() if _recognises(known, folder))
    return FoundScene(folder, found) if found else None


def _recognises(known: Format, folder: Path) -> bool:
    """Whether a format recognises a folder; one of another package that raises does not, with a warning."""
    if known in _own_formats():
        return known.recognises(folder)
    try:
        with foreign_code():
            return bool(known.recognises(folder))
    except ValueError as error:
        if known.name not in _failed:
            _failed.add(known.name)
            logger.warning(
                "scene format %s of another package does not recognise %s, because it failed: %s",
                *(known.name, folder, error),
            )
        return False


def scene_in(folder: Path) -> FoundScene:
    """Returns the scene in a folder.

    Raises:
        FileNotFoundError: No format recognises it; the message lists the files of each, and names a scene close by.
    """
    found = recognise(folder)
    if found is None and folder.is_dir():
        raise FileNotFoundError(
            f"folder must be a scene, got {folder}{_scene_around(folder)}; the files of a scene are {wanted_files()}"
        )
    if found is None:
        raise FileNotFoundError(f"folder must be a scene, got {folder}, {why_no_folder(folder)}")
    return found


def why_no_folder(path: Path) -> str:
    """Returns a relative clause that says why a path is no folder, and which scene may be meant."""
    if path.exists():
        return f"which is a file{_scene_around(path)}"
    known = next(parent for parent in path.parents if parent.is_dir() or parent == parent.parent)
    wanted, *rest = path.relative_to(known).parts
    close = difflib.get_close_matches(wanted, [child.name for child in _folders_in(known)], n=1)
    if close:
        return f"which does not exist; did you mean {known.joinpath(close[0], *rest)}?"
    return "which does not exist" if known == path.parent else f"which does not exist, as {known / wanted} does not"


def _scene_around(path: Path) -> str:
    """Names a scene among the folders in a folder, the scene that a path is a part of, or the commands to make one."""
    inside = next(filter(recognise, _folders_in(path)), None)
    if inside is not None:
        return f"; its folder {inside} is a scene"
    around = next(filter(recognise, path.resolve().parents[:2]), None)
    if around is not None:
        return f"; it is a part of the scene {around}"
    videos = [each for each in (path, *path.glob("*")) if (mimetypes.guess_type(each)[0] or "").startswith("video/")]
    photographs = next(filter(None, (image_files(path, pattern) for pattern in ("*", "*/*", "*/*/*"))), [])
    source = next(iter([each.parent for each in photographs] or videos), None)
    if source is None:
        return ""
    count = f"{len(image_files(source))} photographs" if photographs else "a video"
    named = path if path.name.strip(".") else path.resolve()
    scene = shlex.quote(str(named.with_name(f"{named.name if path.is_dir() else named.stem}_scene")))
    process = f"`voxelfield process {shlex.quote(str(source))} -o {scene}`"
    return f", {count} without poses: run {process}, then `voxelfield train {scene}`"


def _folders_in(folder: Path) -> list[Path]:
    """Returns the subfolders of a folder, sorted, without hidden ones; [] if unreadable."""
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError:  # the result only serves a message
        return []


def wanted_files() -> str:
    """Returns the files by which each format is recognised, for messages."""
    return "; or ".join(f"{known.looks_for} ({known.name})" for known in formats())
