"""From a scene's name or folder to the scene."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from voxelfield.datasets import colmap
from voxelfield.datasets.locate import SceneNotFoundError, configured_box, configured_scenes, find_scene, is_path
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.registry import formats_of, recognised_format
from voxelfield.datasets.scene import Scene
from voxelfield.installed import MissingPackageError

logger = logging.getLogger(__name__)


def load_scene(scene: Path | str, *, root: Path | str = "data", download: bool = False, **options: Any) -> Scene:
    """Loads a scene in one of the formats of :mod:`voxelfield.datasets.registry`, which its files tell apart.

    Args:
        scene: Its folder, or its name. As text, a name in ``configs/scene`` takes precedence over a folder of that name
            in the working directory.
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
    folder = scene if isinstance(scene, Path) else folder_of(scene, root, download)
    if given.aabb is None and isinstance(scene, str):
        given.aabb = configured_box(scene)
    loaded = _load_in_a_format(folder, given)
    if given.depth and not any("depth" in split.extras for split in loaded.splits.values()):
        raise ValueError(
            f"depth (trainer.loss.depth) must be off for {folder}, which was read as {loaded.format} and has none: "
            "depths are the files of 'depth_file_path' in a transforms.json, or points of a COLMAP model with tracks, "
            "which scene.model=N selects beside another format"
        )
    for name, split in loaded.splits.items():
        logger.info("%s: %d %s views, %s", loaded.name, len(split), name, split.size_in_words)
    return loaded


def _load_in_a_format(folder: Path, options: LoadOptions) -> Scene:
    """Loads a folder in the first of its formats whose files can be used, with a warning about those that cannot.

    Captures often have several: nerfstudio leaves the COLMAP model from which it made the ``transforms.json``.
    """
    known = [each for each in formats_of(folder) if options.model is None or each.name == colmap.FORMAT]
    if not known:
        raise ValueError(f"model must be None for {folder}, which has no COLMAP models, got {options.model}")
    try:
        return replace(known[0].load(folder, options), format=known[0].name)
    except (ValueError, FileNotFoundError) as error:
        for other in known[1:]:
            with contextlib.suppress(ValueError, OSError, MissingPackageError):
                loaded = replace(other.load(folder, options), format=other.name)
                logger.warning("%s; the folder is read as %s instead", error, other.name)
                return loaded
        raise


def folder_of(scene: str, root: Path | str = "data", download: bool = False) -> Path:
    """Returns the folder that :func:`load_scene` takes a scene from; the arguments are its own.

    Raises:
        FileNotFoundError: There is no such scene.
        DownloadError: ``download`` is set and no archive gave the scene.
    """
    folder, has_settings = Path(scene), scene in configured_scenes()
    if not has_settings and recognised_format(folder) is not None:
        return folder
    try:
        return find_scene(scene, root, download=download)
    except SceneNotFoundError:
        # If the text can only mean this folder, the error should name its missing files instead of other folders.
        if is_path(scene) or (not has_settings and folder.exists()):
            return folder
        raise
