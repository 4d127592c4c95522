"""Finds scenes on disk, and explains where one was looked for if it is missing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from voxelfield.datasets import download as downloads
from voxelfield.datasets.download import downloadable_scenes, manifest_path
from voxelfield.datasets.registry import recognised_format, wanted_files
from voxelfield.installed import BUNDLED_SCENE, bundled_scene, config_folder

DATA_VARIABLE = "VOXELFIELD_DATA"


class SceneNotFoundError(FileNotFoundError):
    """A scene is in none of the folders that are searched for it."""


def configured_scenes() -> tuple[str, ...]:
    """Lists the names of the scenes that have settings in ``configs/scene``."""
    return tuple(sorted(path.stem for path in (config_folder() / "scene").glob("*.yaml")))


def configured_box(scene: str) -> Sequence[Sequence[float]] | None:
    """Returns the box (2, 3) that ``configs/scene`` has for a name, in world units.

    Args:
        scene: A name or a path. A path never has a configured box, whatever its folder is called.
    """
    if scene not in configured_scenes():
        return None
    box: Sequence[Sequence[float]] | None = OmegaConf.load(config_folder() / "scene" / f"{scene}.yaml").aabb
    return box


def is_path(scene: str) -> bool:
    """Returns whether a text that names a scene can only be a path: it has a folder in it, or begins like a path."""
    return len(Path(scene).parts) > 1 or "\\" in scene or scene.startswith((".", "~"))


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
    if recognised_format(Path(name)) is not None:
        # A name has settings and is not a path, so a folder of that name here was not looked at.
        fetch = f"scene=./{name} is the folder of that name here; {fetch}"
    return fetch if name == BUNDLED_SCENE else f"{fetch}; scene={BUNDLED_SCENE} needs no download"
