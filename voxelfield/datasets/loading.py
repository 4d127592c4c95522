"""From a scene's name or folder to the scene: finds it, says where it was looked for if it is missing, and loads it."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from voxelfield.datasets import download as downloads
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.registry import Format, FoundScene, recognise, scene_in, wanted_files
from voxelfield.datasets.scene import Scene
from voxelfield.installed import BUNDLED_SCENE, MissingPackageError, bundled_scene, config_folder

logger = logging.getLogger(__name__)

# The variable that names another folder of scenes.
_DATA_VARIABLE = "VOXELFIELD_DATA"


class SceneNotFoundError(FileNotFoundError):
    """A scene is in none of the folders that are searched for it."""


def load_scene(
    scene: Path | str | FoundScene, *, root: Path | str = "data", download: bool = False, **options: Any
) -> Scene:
    """Loads a scene in one of the formats of :mod:`voxelfield.datasets.registry`; its files determine which.

    Args:
        scene: Its folder, the scene that :func:`find_scene` returned, or its name. As text, a name in
            ``configs/scene`` takes precedence over a folder of that name in the working directory.
        root: Folder of scenes, where a name is looked for.
        download: Fetch a scene that is not there but public.
        options: The loading options: the fields of :class:`voxelfield.datasets.options.LoadOptions`, such as
            ``splits``, ``image_size`` and ``aabb``.

    Returns:
        The scene, on the CPU.

    Raises:
        TypeError: There is no such option.
        FileNotFoundError: There is no such scene, its folder is of no known format, or a file of it is missing.
        ValueError: An argument, or a file of the scene, is not as it must be; the message is one line and names it.
        DownloadError: ``download`` is set and no archive gave the scene.
    """
    given = LoadOptions(**options)
    if isinstance(scene, str):
        found = scene_of(scene, root, download)
        if given.aabb is None:
            given.aabb = configured_box(scene)
    else:
        found = scene_in(scene) if isinstance(scene, Path) else scene
    loaded = _load_in_a_format(found, given)
    if given.depth and not any("depth" in split.extras for split in loaded.splits.values()):
        raise ValueError(
            f"depth (trainer.loss.depth) must be off for {found.folder}, which was read as {loaded.format} and has "
            "none: depths are the files of 'depth_file_path' in a transforms.json, or points of a COLMAP model with "
            "tracks, which scene.model=N selects beside another format"
        )
    for name, split in loaded.splits.items():
        ignored = [f"{100 * part:.2g} % ignored by {cause}" for cause, part in split.masked().items() if part > 0]
        logger.info("%s: %d %s views, %s", loaded.name, len(split), name, ", ".join([split.size_in_words, *ignored]))
    return loaded


def _load_in_a_format(found: FoundScene, options: LoadOptions) -> Scene:
    """Loads a folder in the first of its formats whose files can be used, with a warning about those that cannot.

    Captures often have several: nerfstudio leaves the COLMAP model from which it made the ``transforms.json``.
    """
    folder = found.folder
    known = [each for each in found.formats if options.model is None or each.has_models]
    if not known:
        raise ValueError(f"model must be None for {folder}, which has no COLMAP models, got {options.model}")
    try:
        return _loaded(known[0], folder, options)
    except (ValueError, FileNotFoundError) as error:
        for other in known[1:]:
            with contextlib.suppress(ValueError, OSError, MissingPackageError):
                loaded = _loaded(other, folder, options)
                logger.warning("%s; the folder is read as %s instead", error, other.name)
                return loaded
        raise


def _loaded(known: Format, folder: Path, options: LoadOptions) -> Scene:
    scene = known.load(folder, options)
    if not isinstance(scene, Scene):  # of another package
        raise ValueError(f"the format {known.name} must load a Scene, got a {type(scene).__name__}")
    return replace(scene, format=known.name)


def scene_of(scene: str, root: Path | str = "data", download: bool = False) -> FoundScene:
    """Returns the scene that a text means; the arguments, and the errors, are those of :func:`load_scene`."""
    folder, has_settings = Path(scene), scene in configured_scenes()
    if not has_settings and (found := recognise(folder)) is not None:
        return found
    try:
        return find_scene(scene, root, download=download)
    except SceneNotFoundError:
        # If the text can only mean this folder, the error should name its missing files instead of other folders.
        if is_path(scene) or (not has_settings and folder.exists()):
            return scene_in(folder)
        raise


def configured_scenes() -> tuple[str, ...]:
    """Lists the names of the scenes that have settings in ``configs/scene``."""
    return tuple(sorted(path.stem for path in (config_folder() / "scene").glob("*.yaml")))


def configured_box(scene: str) -> Sequence[Sequence[float]] | None:
    """Returns the box (2, 3) that ``configs/scene`` has for a name, in world units.

    Args:
        scene: A name or a path. A path never has a configured box, even if its folder has a configured name.
    """
    if scene not in configured_scenes():
        return None
    return OmegaConf.load(config_folder() / "scene" / f"{scene}.yaml").aabb


def is_path(scene: str) -> bool:
    """Returns whether a text that names a scene can only be a path: it has a folder in it, or begins like a path."""
    return len(Path(scene).parts) > 1 or "\\" in scene or scene.startswith((".", "~"))


def find_scene(name: str, root: Path | str = "data", *, download: bool = False) -> FoundScene:
    """Finds a scene by its name: first ``root/name``, then ``$VOXELFIELD_DATA/name``; ``bricks`` comes with voxelfield.

    A folder counts when a format of :mod:`voxelfield.datasets.registry` recognises it. Downloads write the files by
    which it does so last, so an interrupted download never counts. With ``download``, a scene that is nowhere and has
    a public archive is fetched into ``root``.

    Raises:
        SceneNotFoundError: The scene is nowhere; the message says where it was looked for and how to get it.
        DownloadError: ``download`` is set and no archive gave the scene.
    """
    root = Path(root)
    folders = [root / name]
    elsewhere = os.environ.get(_DATA_VARIABLE)
    if elsewhere:
        folders.append(Path(elsewhere) / name)
    if name == BUNDLED_SCENE:
        folders.append(bundled_scene())
    found = next(filter(None, map(recognise, folders)), None)
    if found is not None:
        return found
    if download and name in downloads.downloadable_scenes():
        return scene_in(downloads.download(name, root))
    looked = ", ".join(
        f"{folder.resolve()}" + (f" (exists, but holds no {wanted_files()})" if folder.is_dir() else "")
        for folder in folders
    )
    unset = "" if elsewhere else f" (${_DATA_VARIABLE} is not set)"
    raise SceneNotFoundError(
        f"scene must be in a folder of scenes, got {name!r}, looked for at {looked}{unset}: {_advice(name, root)}"
    )


def _advice(name: str, root: Path) -> str:
    if name in downloads.downloadable_scenes():
        command = f"voxelfield download {name} --root {shlex.quote(str(root))}"
        fetch = f"fetch it with `{command}`, or pass data.download=true to fetch it now"
    else:
        fetch = f"it has no download (those that have: {', '.join(downloads.downloadable_scenes())})"
    if recognise(Path(name)) is not None:
        # A name has settings and is not a path, so a folder of that name here was not looked at.
        fetch = f"scene=./{name} is the folder of that name here; {fetch}"
    return fetch if name == BUNDLED_SCENE else f"{fetch}; scene={BUNDLED_SCENE} needs no download"
