"""Loader of COLMAP's layout: a model, such as ``sparse/0``, and a folder of images.

A folder ``masks`` beside the folder of images, if there is one, contains a mask for each image, such as
``a.jpg.png`` or ``a.png`` for ``a.jpg``: black where pixels must be ignored. COLMAP itself uses the first name.

pycolmap reads the model, binary or text, with or without rigs. Poses have OpenCV axes (y down, looking along z).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from voxelfield.datasets.assembly import load_capture
from voxelfield.datasets.colmap_files import (
    check_binary_model,
    find_model,
    image_paths,
    is_binary,
    is_colmap,
    names_in_text,
)
from voxelfield.datasets.image_paths import mask_path
from voxelfield.datasets.images import image_files
from voxelfield.datasets.lenses import READ_MODELS, photo_lens
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, scaled, with_shrunk_images
from voxelfield.datasets.poses import FARTHEST, turned_about
from voxelfield.datasets.registry import Format
from voxelfield.datasets.scene import Scene
from voxelfield.foundation.errors import shown
from voxelfield.installed import import_optional
from voxelfield.messages import reason_of

logger = logging.getLogger(__name__)


def load_colmap(folder: Path, options: LoadOptions) -> Scene:
    """Loads a capture; see :class:`voxelfield.datasets.registry.Format`.

    Raises:
        MissingPackageError: pycolmap is not installed.
    """
    source, images, counts = find_model(folder, options.model)
    if counts:
        sizes = ", ".join(f"{name} with {count} images" for name, count in counts.items())
        logger.warning(
            "%s has several models, %s: %s is read, and scene.model=N selects another",
            *(source.parent, sizes, source.name),
        )
    model = _read_model(source)
    posed = [image for image in model.images.values() if image.has_pose]
    if not posed:
        raise ValueError(f"{source}: the model must have images with poses, got none of {len(model.images)}")
    paths = image_paths(images, [_name(source, image) for image in posed])
    known = set(paths)
    without_pose = [path for path in image_files(images, "**/*") if path not in known]
    if without_pose:
        there = sum(path.is_file() for path in paths)
        logger.warning(
            "%s: %d of %d photographs in %s have a pose; the others are left out, the first is %s",
            *(source, there, there + len(without_pose), images, without_pose[0].name),
        )
    masks = images.with_name("masks")
    photos = []
    for path, image in zip(paths, posed, strict=True):
        relative = path.relative_to(images if path.is_relative_to(images) else images.parent)
        mask = mask_path(masks, relative) if masks.is_dir() else None
        photos.append(_photo(source, path, mask, image, model.cameras[image.camera_id]))
    if options.depth:
        photos = _with_observations(source, photos, posed, model)
    points = _points(source, list(model.points3D.values()))
    return load_capture(folder, source, with_shrunk_images(photos, images, options.downscale), options, points=points)


def _with_observations(source: Path, photos: list[Photo], posed: list[Any], model: Any) -> list[Photo]:
    """Returns photographs with the points that their images observe.

    A point's weight is exp(-(e / m)^2), where e is its reprojection error and m the mean over all points, as in the
    published code of DS-NeRF (Deng et al. 2022).
    """
    errors = {number: point.error for number, point in model.points3D.items() if point.has_error()}
    mean = max(sum(errors.values()) / max(len(errors), 1), 1e-6)
    found = []
    for photo, image in zip(photos, posed, strict=True):
        seen = image.get_observation_points2D()
        camera = model.cameras[image.camera_id]
        pixels = np.array([point.xy for point in seen], dtype=np.float64).reshape(-1, 2)
        numbers = [point.point3D_id for point in seen]
        positions = np.array([model.points3D[number].xyz for number in numbers], dtype=np.float64).reshape(-1, 3)
        c2w = photo.c2w.numpy()
        depths = (c2w[:3, 3] - positions) @ c2w[:3, 2]
        weights = np.exp(-((np.array([errors.get(number, 0.0) for number in numbers]) / mean) ** 2))
        shares = pixels / (camera.width, camera.height)
        usable = (shares >= 0).all(axis=1) & (shares < 1).all(axis=1) & (depths > 0) & (depths <= FARTHEST)
        observed = np.column_stack((shares, depths, weights))[usable]
        found.append(replace(photo, observed=torch.from_numpy(observed)))
    if not any(len(photo.observed) for photo in found if photo.observed is not None):
        raise ValueError(
            f"{source}: images must observe points where depth is asked for (trainer.loss.depth), got "
            f"{len(model.points3D)} points without tracks: keep COLMAP's own model, which has them"
        )
    return found


def _points(source: Path, points: Sequence[Any]) -> torch.Tensor:
    """Returns the positions of those points that can lie in a scene, with a warning about the others."""
    positions = np.array([point.xyz for point in points], dtype=np.float64).reshape(-1, 3)
    usable = (np.abs(positions) <= FARTHEST).all(axis=1)  # False for NaN
    if not usable.all():
        first = int(np.flatnonzero(~usable)[0])
        logger.warning(
            "%s: %d of %d points are left out, because they are not within %g world units of the origin, the first at "
            "%s",
            *(source, int((~usable).sum()), len(points), FARTHEST, positions[first].tolist()),
        )
    return torch.from_numpy(positions[usable])


def _read_model(source: Path) -> Any:
    pycolmap = import_optional("pycolmap", "read a COLMAP model", "colmap")
    check_binary_model(source)
    try:
        model: Any = pycolmap.Reconstruction(source)
    except (ValueError, RuntimeError, OSError, IndexError) as error:
        raise ValueError(f"{source}: not a COLMAP model ({reason_of(error)})") from error
    if not is_binary(source):
        for number, name in names_in_text(source).items():
            if b" " in name and number in model.images:
                model.images[number].name = name
    return model


def _name(source: Path, image: Any) -> str:
    try:
        name = str(image.name)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: names of images must be UTF-8, got {error.object!r}") from error
    if not Path(name).name or Path(name).is_absolute() or ".." in name.replace("\\", "/").split("/"):
        raise ValueError(f"{source}: names of images must be files inside the folder images, got {shown(name)}")
    return name


def _photo(source: Path, path: Path, mask: Path | None, image: Any, camera: Any) -> Photo:
    kind = camera.model.name
    if kind not in READ_MODELS:
        raise ValueError(
            f"{source}: camera {camera.camera_id} must be one of {', '.join(READ_MODELS)}, got {kind}: undistort the "
            "images first (colmap image_undistorter)"
        )
    model, terms = READ_MODELS[kind]
    numbers = camera.params[-len(terms) :].tolist() if terms else []
    lens = photo_lens(f"{source}: camera {camera.camera_id}", model, dict(zip(terms, numbers, strict=True)))
    if min(camera.width, camera.height) < 1:
        raise ValueError(
            f"{source}: camera {camera.camera_id} must have a size of at least 1x1, got {camera.width}x{camera.height}"
        )
    w2c = torch.eye(4, dtype=torch.float64)
    w2c[:3] = torch.from_numpy(np.array(image.cam_from_world().matrix()))
    name = f"{source}: pose of {image.name}"
    # It would become the identity. Others that are not of unit length give no rotation, which load_capture refuses.
    if not np.any(image.cam_from_world().rotation.quat):
        raise ValueError(f"{name} must have a unit quaternion, got zeros")
    c2w = turned_about(torch.linalg.inv(w2c))
    size = width, height = camera.width, camera.height
    if model == "equirectangular":
        # pycolmap crashes where it is asked for a focal length that the model does not have.
        intrinsics = (width / (2 * math.pi), height / math.pi, width / 2, height / 2)
    else:
        intrinsics = (camera.focal_length_x, camera.focal_length_y, camera.principal_point_x, camera.principal_point_y)
    return Photo(path, c2w, scaled(intrinsics, size), lens, mask=mask, pose_name=name)


FORMAT = Format("COLMAP", "sparse/0/images.bin", is_colmap, load_colmap, order=30, has_models=True)
