"""The formats of data sets that :func:`voxelfield.load_scene` reads, and which of them a folder is in.

A format is one file beside this one, with a function that recognises a folder and a function that loads it, and one
entry in ``FORMATS``.
"""

from __future__ import annotations

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
        FileNotFoundError: No format does; the message lists the files of each.
    """
    found = [known for known in FORMATS if known.recognises(folder)]
    if not found and folder.is_dir():
        raise FileNotFoundError(
            f"folder must be a scene with {wanted_files()} in it, got {folder}, which holds none of these"
        )
    if not found:
        raise FileNotFoundError(f"folder must be a scene, got {folder}, {why_no_folder(folder)}")
    return found


def why_no_folder(path: Path) -> str:
    """Says in a relative clause why a path is not that of a folder."""
    return "which is a file" if path.exists() else "which does not exist"


def wanted_files() -> str:
    """Returns the files by which each format is recognised, for messages."""
    return "; or ".join(f"{known.looks_for} ({known.name})" for known in FORMATS)
