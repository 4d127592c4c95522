"""Finds scenes on disk, and explains where one was looked for if it is missing."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from voxelfield.datasets import download as downloads
from voxelfield.datasets.catalogue import downloadable_scenes, manifest_path
from voxelfield.datasets.registry import recognised_format, wanted_files
from voxelfield.installed import BUNDLED_SCENE, bundled_scene

DATA_VARIABLE = "VOXELFIELD_DATA"


class SceneNotFoundError(FileNotFoundError):
    """A scene is in none of the places where scenes are looked for."""


def find_scene(name: str, root: Path | str = "data", *, download: bool = False) -> Path:
    """Finds a scene's folder: first ``root/name``, then ``$VOXELFIELD_DATA/name``; ``bricks`` comes with voxelfield.

    A folder counts when a format of :mod:`voxelfield.datasets.registry` recognises it. Downloads write the files by
    which it does so last, so an interrupted download never counts.

    Args:
        name: The scene's name.
        root: Folder of scenes (``data.root``), relative to the working directory or absolute.
        download: If the scene is nowhere and has a public archive, fetch it into ``root``.

    Returns:
        The scene's folder.

    Raises:
        SceneNotFoundError: The scene is nowhere; the message says where it was looked for and how to get it.
        DownloadError: ``download`` is set and no archive gave the scene.
    """
    root = Path(root)
    folders = [root / name]
    elsewhere = os.environ.get(DATA_VARIABLE)
    if elsewhere:
        folders.append(Path(elsewhere) / name)
    if name == BUNDLED_SCENE:
        folders.append(bundled_scene())
    for folder in folders:
        if recognised_format(folder) is not None:
            return folder
    if download and manifest_path(name).is_file():
        return downloads.download(name, root)
    looked = ", ".join(
        f"{folder.resolve()}" + (f" (exists, but holds no {wanted_files()})" if folder.is_dir() else "")
        for folder in folders
    )
    unset = "" if elsewhere else f" (${DATA_VARIABLE} is not set)"
    raise SceneNotFoundError(
        f"scene must be in a folder of scenes, got {name!r}, looked for at {looked}{unset}: {_advice(name, root)}"
    )


def _advice(name: str, root: Path) -> str:
    if manifest_path(name).is_file():
        command = f"voxelfield download {name} --root {shlex.quote(str(root))}"
        fetch = f"fetch it with `{command}`, or pass data.download=true to fetch it now"
    else:
        fetch = f"it has no download (those that have: {', '.join(downloadable_scenes())})"
    return fetch if name == BUNDLED_SCENE else f"{fetch}; scene={BUNDLED_SCENE} needs no download"
