"""The formats of data sets that :func:`voxelfield.load_scene` reads, and which of them a folder is in.

A format is one file beside this one, with a function that recognises a folder and a function that loads it, and one
entry in ``FORMATS``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from voxelfield.datasets import blender, colmap, colmap_models, llff, nerfstudio, neus, nsvf
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene


class Loader(Protocol):
    """Loads a folder of one format."""

    def __call__(self, folder: Path, options: LoadOptions) -> Scene:
        """Loads a scene, on the CPU.

        Args:
            folder: The scene's folder, which the format has recognised; its name becomes the scene's.
            options: What to load, and how. Intrinsics refer to the returned images.

        Raises:
            FileNotFoundError: A file of the scene is missing.
            ValueError: An argument or a file does not match the format; the message is one line and names it.
        """
        ...


@dataclass(frozen=True)
class Format:
    """One format of data sets.

    Attributes:
        name: A short name, for messages.
        looks_for: The files by which a folder is recognised, for messages.
        recognises: Tells whether a folder, which need not exist, is in this format; it opens no image.
        load: Loads such a folder.
    """

    name: str
    looks_for: str
    recognises: Callable[[Path], bool]
    load: Loader


FORMATS: tuple[Format, ...] = (
    Format(
        "blender",
        "transforms_train.json, transforms_val.json or transforms_test.json",
        blender.is_blender,
        blender.load_blender,
    ),
    Format("nerfstudio or instant-ngp", nerfstudio.FILE, nerfstudio.is_nerfstudio, nerfstudio.load_nerfstudio),
    Format(colmap.FORMAT, "sparse/0/images.bin", colmap_models.is_colmap, colmap.load_colmap),
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
        FileNotFoundError: None does; see :func:`format_of`.
    """
    return [known for known in FORMATS if known.recognises(folder)] or [format_of(folder)]


def format_of(folder: Path) -> Format:
    """Returns the first format that recognises a folder.

    Raises:
        FileNotFoundError: None does; the message lists what each looks for, and names a scene close by.
    """
    found = recognised_format(folder)
    if found is not None:
        return found
    if folder.is_dir():
        raise FileNotFoundError(
            f"folder must be a scene with {wanted_files()} in it, got {folder}, which holds none of these"
            f"{_scene_around(folder)}"
        )
    raise FileNotFoundError(f"folder must be a scene, got {folder}, {why_no_folder(folder)}")


def why_no_folder(path: Path) -> str:
    """Says in a relative clause why a path is not that of a folder, and which scene may be meant."""
    if path.exists():
        scene = f"; its folder {path.parent} is a scene" if recognised_format(path.parent) is not None else ""
        return f"which is a file{scene}"
    known = next(parent for parent in (path.parent, *path.parents) if parent.is_dir() or parent == parent.parent)
    wanted = path.relative_to(known).parts[0]
    close = difflib.get_close_matches(wanted, [child.name for child in _folders_in(known)], n=1)
    if close:
        return f"which does not exist; did you mean {known.joinpath(close[0], *path.relative_to(known).parts[1:])}?"
    return "which does not exist" if known == path.parent else f"which does not exist, as {known / wanted} does not"


def _scene_around(folder: Path) -> str:
    """Names a scene among the folders in a folder, or the scene that the folder is a part of."""
    inside = next((child for child in _folders_in(folder) if recognised_format(child) is not None), None)
    if inside is not None:
        return f"; its folder {inside} is a scene"
    whole = folder.resolve()
    around = next((parent for parent in list(whole.parents)[:2] if recognised_format(parent) is not None), None)
    return "" if around is None else f"; it is a part of the scene {around}"


def _folders_in(folder: Path) -> list[Path]:
    """Returns the folders in a folder by name, without those that begin with a dot."""
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError:  # it only serves a message
        return []


def wanted_files() -> str:
    """Returns the files by which each format is recognised, for messages."""
    return "; or ".join(f"{known.looks_for} ({known.name})" for known in FORMATS)
