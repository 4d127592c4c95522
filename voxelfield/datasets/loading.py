"""From a scene's name or folder to the scene."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from voxelfield.datasets import colmap
from voxelfield.datasets.locate import SceneNotFoundError, configured_box, configured_scenes, find_scene, is_path
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.registry import formats_of, recognised_format
from voxelfield.datasets.scene import Scene
from voxelfield.grids.boxes import parse_box
from voxelfield.installed import MissingPackageError
from voxelfield.warps.ndc_box import NdcBox
from voxelfield.warps.nested_boxes import NestedBoxes

logger = logging.getLogger(__name__)


def load_scene(
    scene: Path | str,
    *,
    splits: Sequence[str] | None = ("train", "test"),
    image_size: int | None = None,
    downscale: int = 1,
    holdout: int = 8,
    missing_images: Literal["error", "skip"] | None = None,
    lens_distortion: bool = True,
    aabb: Tensor | Sequence[Sequence[float]] | None = None,
    boxes: int | None = None,
    near: float | None = None,
    ndc: bool | None = None,
    model: int | None = None,
    root: Path | str = "data",
    download: bool = False,
) -> Scene:
    """Loads a scene in one of the formats of :mod:`voxelfield.datasets.registry`, which its files tell apart.

    Args:
        scene: Its folder, or its name. As text, a name in ``configs/scene`` takes precedence over a folder of that name
            in the working directory.
        splits: Which of train, val and test to load; None: all that the scene has. Without views for the test, those of
            val stand in; without either, some are held out (``holdout``), or there is no test split.
        image_size: Images with a side longer than this, in pixels, are shrunk until none is; None keeps them.
        downscale: Images are shrunk by this factor N first, or taken from the folder ``images_N`` of a capture if that
            holds the same images.
        holdout: Every ``holdout``-th training view, sorted by path, is held out for the test in a scene without test
            or validation views; 0 holds none out.
        missing_images: ``error`` refuses a scene that lacks a listed image, ``skip`` leaves such views out and warns;
            None does what is usual for the format.
        lens_distortion: Whether to apply lens distortion; False treats photographs as undistorted, for comparison.
        aabb: (2, 3) box that holds what matters, world units. None: that of ``configs/scene`` if ``scene`` is a name in
            it, never for a path; otherwise as :func:`voxelfield.datasets.frames.make_scene` chooses.
        boxes: Number of nested boxes, the smallest of which is ``aabb``, for a scene that reaches beyond it
            (:class:`voxelfield.warps.nested_boxes.NestedBoxes`); 1: nothing is outside. None: several for
            photographs of a place, of which less than a tenth is transparent, where no box is given; else 1.
        near: Distance from a camera before which nothing is sampled, world units, with nested boxes; with ``ndc``, the
            depth of the near plane. None: as the cameras suggest, or 0.
        ndc: Whether the grid lies in normalised device coordinates
            (:class:`voxelfield.warps.ndc_box.NdcBox`), for photographs that all look the same way; None:
            where they do and points of the scene are known, unless ``aabb`` or ``boxes`` is given.
        model: Number N of the COLMAP model ``sparse/N``, if a capture has several; None: the one with the most images.
        root: Folder of scenes, where a name is looked for.
        download: Fetch a scene that is not there but public.

    Returns:
        The scene, on the CPU.

    Raises:
        FileNotFoundError: There is no such scene, its folder is of no known format, or a file of it is missing.
        ValueError: An argument, or a file of the scene, is not as it must be; the message is one line and names it.
        DownloadError: ``download`` is set and no archive gave the scene.
    """
    if isinstance(splits, str):
        raise ValueError(f"splits must be a sequence of names or None, got {splits!r}: use [{splits!r}]")
    folder = scene if isinstance(scene, Path) else folder_of(scene, root, download)
    box = configured_box(scene) if aabb is None and isinstance(scene, str) else aabb
    options = LoadOptions(
        splits and tuple(splits),
        image_size,
        downscale,
        holdout,
        missing_images,
        lens_distortion,
        box,
        boxes,
        near,
        ndc,
        model,
    )
    loaded = _load_in_a_format(folder, options)
    if ndc and not isinstance(loaded.frame, NdcBox):
        raise ValueError(f"ndc must be False or None for {folder}, whose format gives its scenes a box, got True")
    if boxes is not None and boxes > 1 and loaded.frame is None:
        loaded = replace(loaded, frame=NestedBoxes(parse_box(loaded.aabb), boxes, near=near or 0.0))
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
        # If the text can only mean this folder, the message is about what it lacks, not about where else it might be.
        if is_path(scene) or (not has_settings and folder.exists()):
            return folder
        raise
