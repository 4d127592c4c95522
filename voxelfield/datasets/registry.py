"""The formats of data sets that :func:`voxelfield.load_scene` reads, and which of them a folder is in.

A format is one file beside this one, with a function that recognises a folder and a function that loads it, and one
entry in ``FORMATS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from voxelfield.datasets import blender, colmap, llff, nerfstudio, nsvf
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
        photographs: Whether it usually holds photographs of real places, which show what is around the subject.
    """

    name: str
    looks_for: str
    recognises: Callable[[Path], bool]
    load: Loader
    photographs: bool = False


FORMATS: tuple[Format, ...] = (
    Format(
        "blender",
        "transforms_train.json, transforms_val.json or transforms_test.json",
        blender.is_blender,
        blender.load_blender,
    ),
    Format("nerfstudio or instant-ngp", nerfstudio.FILE, nerfstudio.is_nerfstudio, nerfstudio.load_nerfstudio, True),
    Format("COLMAP", "sparse/0/images.bin", colmap.is_colmap, colmap.load_colmap, True),
    Format("LLFF", llff.FILE, llff.is_llff, llff.load_llff, True),
    Format("NSVF", f"{nsvf.FILE} and pose", nsvf.is_nsvf, nsvf.load_nsvf),
)
"""All formats; the first that recognises a folder loads it."""


def recognised_format(folder: Path) -> Format | None:
    """Returns the first format that recognises a folder, or None."""
    return next((known for known in FORMATS if known.recognises(folder)), None)


def format_of(folder: Path) -> Format:
    """Returns the first format that recognises a folder.

    Raises:
        FileNotFoundError: None does; the message lists what each looks for.
    """
    found = recognised_format(folder)
    if found is None:
        lack = "holds none of these" if folder.is_dir() else "does not exist"
        raise FileNotFoundError(f"folder must be a scene with {wanted_files()} in it, got {folder}, which {lack}")
    return found


def wanted_files() -> str:
    """Returns the files by which each format is recognised, for messages."""
    return "; or ".join(f"{known.looks_for} ({known.name})" for known in FORMATS)
