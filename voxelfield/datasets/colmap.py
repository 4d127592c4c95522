"""Loader of COLMAP's layout: a model in ``sparse/0``, ``sparse`` or ``colmap/sparse/0``, and images in ``images``.

A folder ``masks``, if there is one, holds ``NAME.png`` for each image NAME, such as ``a.jpg.png``: black where pixels
must be ignored. COLMAP itself has masks named so.

pycolmap reads the model, binary or text, with or without rigs. Poses have OpenCV axes (y down, looking along z).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from voxelfield.datasets.bounds import box_of_cameras, box_of_points
from voxelfield.datasets.captures import load_capture
from voxelfield.datasets.colmap_layout import check_binary_model
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, photo_lens, scaled, with_shrunk_images
from voxelfield.datasets.poses import check_poses, turned_about
from voxelfield.datasets.scene import Scene
from voxelfield.installed import MissingPackageError
from voxelfield.ops._errors import shown
from voxelfield.rendering.lens import LensModel

MODELS = ("sparse/0", "sparse", "colmap/sparse/0")
"""Folders in which a model is looked for."""

# The lens of each camera model, and its terms in the order in which they follow the focal lengths and principal point.
_LENSES: dict[str, tuple[LensModel, tuple[str, ...]]] = {
    "SIMPLE_PINHOLE": ("perspective", ()),
    "PINHOLE": ("perspective", ()),
    "SIMPLE_RADIAL": ("perspective", ("k1",)),
    "RADIAL": ("perspective", ("k1", "k2")),
    "OPENCV": ("perspective", ("k1", "k2", "p1", "p2")),
    "SIMPLE_RADIAL_FISHEYE": ("fisheye", ("k1",)),
    "RADIAL_FISHEYE": ("fisheye", ("k1", "k2")),
    "OPENCV_FISHEYE": ("fisheye", ("k1", "k2", "k3", "k4")),
}


def is_colmap(folder: Path) -> bool:
    """Tells whether a folder holds a COLMAP model; see :class:`voxelfield.datasets.registry.Format`."""
    return _model_folder(folder) is not None


def load_colmap(folder: Path, options: LoadOptions) -> Scene:
    """Loads a capture; see :class:`voxelfield.datasets.registry.Loader`.

    Without a box, it is that of the model's points, or of the cameras if there are none.

    Raises:
        MissingPackageError: pycolmap is not installed.
    """
    source, model = _read_model(folder)
    images = [image for image in model.images.values() if image.has_pose]
    if not images:
        raise ValueError(f"{source}: the model must have images with poses, got none of {len(model.images)}")
    photos = [_photo(folder, source, image, model.cameras[image.camera_id]) for image in images]

    points = torch.from_numpy(np.array([point.xyz for point in model.points3D.values()]).reshape(-1, 3))

    def box() -> torch.Tensor:
        return box_of_points(points) if len(points) else box_of_cameras(torch.stack([photo.c2w for photo in photos]))

    photos = with_shrunk_images(photos, folder / "images", options.downscale)
    return load_capture(folder, source, photos, options, box, points=points)


def read_points(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads the sparse points of a capture.

    Args:
        folder: A folder that :func:`is_colmap` recognises.

    Returns:
        (M, 3) positions, float64, world frame, and (M, 3) colours, uint8.

    Raises:
        MissingPackageError: pycolmap is not installed.
        ValueError: The model is damaged.
    """
    _, model = _read_model(folder)
    points = list(model.points3D.values())
    positions = np.array([point.xyz for point in points], dtype=np.float64).reshape(-1, 3)
    colors = np.array([point.color for point in points], dtype=np.uint8).reshape(-1, 3)
    return torch.from_numpy(positions), torch.from_numpy(colors)


def _read_model(folder: Path) -> tuple[Path, Any]:
    """Returns the folder of a model, and the model."""
    if importlib.util.find_spec("pycolmap") is None:
        raise MissingPackageError('pycolmap must be installed to read a COLMAP model: pip install "voxelfield[colmap]"')
    import pycolmap

    source = _model_folder(folder)
    assert source is not None
    check_binary_model(source)
    try:
        return source, pycolmap.Reconstruction(source)
    except (ValueError, RuntimeError, OSError, IndexError) as error:
        raise ValueError(f"{source}: not a COLMAP model ({' '.join(str(error).split())[:200]})") from error


def _photo(folder: Path, source: Path, image: Any, camera: Any) -> Photo:
    kind = camera.model.name
    if kind not in _LENSES:
        raise ValueError(
            f"{source}: camera {camera.camera_id} must be one of {', '.join(_LENSES)}, got {kind}: undistort the "
            "images first (colmap image_undistorter)"
        )
    model, terms = _LENSES[kind]
    numbers = camera.params[-len(terms) :].tolist() if terms else []
    lens = photo_lens(f"{source}: camera {camera.camera_id}", model, dict(zip(terms, numbers, strict=True)))
    if min(camera.width, camera.height) < 1:
        raise ValueError(
            f"{source}: camera {camera.camera_id} must have a size of at least 1x1, got {camera.width}x{camera.height}"
        )
    try:
        name = image.name
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: names of images must be UTF-8, got {error.object!r}") from error
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{source}: names of images must be inside the folder images, got {shown(name)}")
    w2c = torch.eye(4, dtype=torch.float64)
    w2c[:3] = torch.from_numpy(np.array(image.cam_from_world().matrix()))
    if not bool(w2c.isfinite().all()):
        raise ValueError(f"{source}: pose of {name} must be finite, got {w2c.tolist()}")
    # A quaternion of zeros would become the identity; others that are not of unit length fail the checks below.
    if not np.any(image.cam_from_world().rotation.quat):
        raise ValueError(f"{source}: pose of {name} must have a unit quaternion, got zeros")
    c2w = turned_about(torch.linalg.inv(w2c))
    check_poses(lambda _: f"{source}: pose of {name}", c2w[None])
    intrinsics = (camera.focal_length_x, camera.focal_length_y, camera.principal_point_x, camera.principal_point_y)
    masks = folder / "masks"
    return Photo(
        folder / "images" / name,
        c2w,
        scaled(intrinsics, (camera.width, camera.height)),
        lens,
        mask=masks / f"{name}.png" if masks.is_dir() else None,
    )


def _model_folder(folder: Path) -> Path | None:
    """Returns the folder of the model, if there is one."""
    for name in MODELS:
        if any((folder / name / f"images.{suffix}").is_file() for suffix in ("bin", "txt")):
            return folder / name
    return None
