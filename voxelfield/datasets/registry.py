"""The formats of data sets that :func:`voxelfield.load_scene` reads, and which of them a folder is in.

A format is one file beside this one, with a function that recognises a folder and a function that loads it, and one
entry in ``FORMATS``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from voxelfield.datasets import blender, colmap, colmap_files, llff, nerfstudio, neus, nsvf
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene


@dataclass(frozen=True)
class Format:
    """One format of data sets.

    Attributes:
        name: A short name, for messages.
        looks_for: The files by which a folder is recognised, for messages.
        recognises: Returns whether a folder, which need not exist, is in this format; it opens no image.
        load: Loads such a folder as the options say, on the CPU. Raises FileNotFoundError if a file of the scene is
            missing, and ValueError, with a message of one line, if an argument or a file does not match the format.
    """

    name: str
    looks_for: str
    recognises: Callable[[Path], bool]
    load: Callable[[Path, LoadOptions], Scene]


FORMATS: tuple[Format, ...] = (
    Format(
        "blender",
        "transforms_train.json, transforms_val.json or transforms_test.json",
        blender.is_blender,
        blender.load_blender,
    ),
    Format("nerfstudio or instant-ngp", nerfstudio.FILE, nerfstudio.is_nerfstudio, nerfstudio.load_nerfstudio),
    Format(colmap.FORMAT, "sparse/0/images.bin", colmap_files.is_colmap, colmap.load_colmap),
    Format("LLFF", llff.FILE, llff.is_llff, llff.load_llff),
    Format("IDR or NeuS", f"{' or '.join(neus.FILES)} and image", neus.is_neus, neus.load_neus),
    Format("NSVF", f"{nsvf.FILE} and pose", nsvf.is_nsvf, nsvf.load_nsvf),
)
"""All formats; the first that recognises a folder and can use its files loads it."""


def recognised_format(folder: Path) -> Format | None:
    """Returns the first format that recognises a folder, or None."""
    return next((known for known in FORMATS if known.recognises(folder)), None)


def formats_of(folder: Path) -> list[Format]:
    """Returns all formats that recognise a folder, at least one, in the order in which they are tried.

    Raises:
        FileNotFoundError: No format does; the message lists the files of each, and names a scene close by.
    """
    found = [known for known in FORMATS if known.recognises(folder)]
    if not found and folder.is_dir():
        raise FileNotFoundError(
            f"folder must be a scene with {wanted_files()} in it, got {folder}, which holds none of these"
            f"{_scene_around(folder)}"
        )
    if not found:
        raise FileNotFoundError(f"folder must be a scene, got {folder}, {why_no_folder(folder)}")
    return found


def why_no_folder(path: Path) -> str:
    """Says in a relative clause why a path is not that of a folder, and which scene may be meant."""
    if path.exists():
        return f"which is a file{_scene_around(path)}"
    known = next(parent for parent in path.parents if parent.is_dir() or parent == parent.parent)
    wanted, *rest = path.relative_to(known).parts
    close = difflib.get_close_matches(wanted, [child.name for child in _folders_in(known)], n=1)
    if close:
        return f"which does not exist; did you mean {known.joinpath(close[0], *rest)}?"
    return "which does not exist" if known == path.parent else f"which does not exist, as {known / wanted} does not"


def _scene_around(path: Path) -> str:
    """Names a scene among the folders in a folder, or the scene that a path is a part of."""
    inside = next((child for child in _folders_in(path) if recognised_format(child) is not None), None)
    if inside is not None:
        return f"; its folder {inside} is a scene"
    around = next((parent for parent in path.resolve().parents[:2] if recognised_format(parent) is not None), None)
    return "" if around is None else f"; it is a part of the scene {around}"


def _folders_in(folder: Path) -> list[Path]:
    """Returns the folders in a folder by name, without those that begin with a dot; none of what cannot be listed."""
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError:  # the result only serves a message
        return []


def wanted_files() -> str:
    """Returns the files by which each format is recognised, for messages."""
    return "; or ".join(f"{known.looks_for} ({known.name})" for known in FORMATS)
