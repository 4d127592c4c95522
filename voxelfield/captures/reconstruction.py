"""Structure from motion: the poses of photographs, and sparse points, by COLMAP through pycolmap."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from voxelfield.captures.photographs import photographs_in
from voxelfield.datasets.images import Size, image_size
from voxelfield.datasets.lenses import CAMERA_MODELS
from voxelfield.installed import MissingPackageError

logger = logging.getLogger(__name__)

_OLDEST_MAJOR = 4
_NO_DIRECTION = 0.3  # length of a mean direction below which photographs disagree too much to have one

Matching = Literal["exhaustive", "sequential"]
"""Which pairs of photographs are compared: all, or those near one another in the order of their names."""


@dataclass(frozen=True)
class Report:
    """Results of structure from motion.

    Attributes:
        matching: Which pairs were compared.
        photographs: Number of photographs given.
        registered: Number of photographs with a pose.
        unregistered: Names of the others.
        points: Number of sparse points.
        mean_reprojection_error: Mean distance, in pixels, between the projection of a point and its detection.
        mean_track_length: Mean number of photographs in which a point was found.
        other_models: Numbers of photographs of the smaller models that overlap too little with this one to join it.
        cameras: Model, width, height and parameters, as COLMAP names them, of each camera.
    """

    matching: Matching
    photographs: int
    registered: int
    unregistered: tuple[str, ...]
    points: int
    mean_reprojection_error: float
    mean_track_length: float
    other_models: tuple[int, ...]
    cameras: tuple[dict[str, Any], ...]


def check_camera_model(name: str) -> None:
    """Raises unless pycolmap is installed and recent enough, and the loaders support a camera model.

    Args:
        name: COLMAP's name, such as OPENCV.

    Raises:
        MissingPackageError: pycolmap is not installed, or too old.
        ValueError: There is no such camera model, or the loaders do not support its lens.
    """
    if importlib.util.find_spec("pycolmap") is None:
        raise MissingPackageError('pycolmap must be installed to find poses: pip install "voxelfield[colmap]"')
    import pycolmap

    # Older versions would find poses with a camera model other than the requested one.
    if int(pycolmap.__version__.partition(".")[0]) < _OLDEST_MAJOR:
        raise MissingPackageError(
            f"pycolmap must be {_OLDEST_MAJOR}.0 or later to find poses, got {pycolmap.__version__}: "
            'pip install -U "voxelfield[colmap]"'
        )
    known = sorted(CAMERA_MODELS.keys() & pycolmap.CameraModelId.__members__.keys())
    if name not in known:
        raise ValueError(f"camera_model must be one of {', '.join(known)}, got {name!r}")


def reconstruct(images: Path, folder: Path, *, camera_model: str, matching: Matching, camera_per_image: bool) -> Report:
    """Finds the poses of photographs and writes them as a COLMAP model, with the images' mean up direction along z.

    Args:
        images: Folder of the photographs.
        folder: Existing folder for COLMAP's database and all models (``colmap``), and the largest one (``sparse/0``).
        camera_model: A name that :func:`check_camera_model` accepts.
        matching: Which pairs to compare.
        camera_per_image: Give every photograph a camera of its own; otherwise, photographs of one size share one.

    Raises:
        ValueError: There are fewer than two photographs, or no two could be registered.
    """
    import pycolmap

    names = [path.name for path in photographs_in(images)]
    if len(names) < 2:
        raise ValueError(f"at least 2 photographs or frames are needed to find poses, got {len(names)}")
    sizes: dict[Size, list[str]] = {}
    for name in names:
        sizes.setdefault(image_size(images / name), []).append(name)
    work, model = folder / "colmap", folder / "sparse" / "0"
    database = work / "database.db"
    work.mkdir()
    model.mkdir(parents=True)
    mode = pycolmap.CameraMode.PER_IMAGE if camera_per_image else pycolmap.CameraMode.SINGLE
    reader = pycolmap.ImageReaderOptions()
    reader.camera_model = camera_model
    pycolmap.set_random_seed(0)
    # Otherwise, COLMAP logs a line for every photograph and pair.
    pycolmap.logging.minloglevel = pycolmap.logging.ERROR.value
    logger.info("finding features of %d photographs ...", len(names))
    for group in sizes.values():
        pycolmap.extract_features(database, images, group, mode, reader_options=reader)
    logger.info("%s matching ...", matching)
    (pycolmap.match_exhaustive if matching == "exhaustive" else pycolmap.match_sequential)(database)
    logger.info("finding poses and points ...")
    found = pycolmap.incremental_mapping(database, images, work)
    models = sorted(found.values(), key=lambda each: each.num_reg_images(), reverse=True)
    if not models:
        raise ValueError(
            f"photographs must overlap for poses to be found, got {len(names)} of which no two could be registered: "
            "take more, closer together, sharp and of textured surfaces"
        )
    best = models[0]
    _stand_upright(best)
    best.write(model)
    registered = {best.image(index).name for index in best.reg_image_ids()}
    return Report(
        matching=matching,
        photographs=len(names),
        registered=len(registered),
        unregistered=tuple(name for name in names if name not in registered),
        points=best.num_points3D(),
        mean_reprojection_error=best.compute_mean_reprojection_error(),
        mean_track_length=best.compute_mean_track_length(),
        other_models=tuple(each.num_reg_images() for each in models[1:]),
        cameras=tuple(
            {
                "model": camera.model.name,
                "width": camera.width,
                "height": camera.height,
                **dict(zip(camera.params_info.replace(" ", "").split(","), camera.params.tolist(), strict=True)),
            }
            for camera in best.cameras.values()
        ),
    )


def _stand_upright(model: Any) -> None:
    """Rotates a model so that the images' mean up direction is z, and their horizontal direction of view is y.

    Orbits go round z, and axis-aligned boxes contain less empty space where a capture is of one side.
    """
    import pycolmap

    # Rows of a rotation from world to camera are the camera's axes; COLMAP's y points down and its z forwards.
    rotations = [model.image(index).cam_from_world().rotation.matrix() for index in model.reg_image_ids()]
    _, down, forward = np.mean(rotations, axis=0)
    if np.linalg.norm(down) < _NO_DIRECTION:
        return
    up = -down / np.linalg.norm(down)
    if np.linalg.norm(np.cross(forward, up)) < _NO_DIRECTION:
        forward = np.eye(3)[np.abs(up).argmin()]
    right = np.cross(forward, up) / np.linalg.norm(np.cross(forward, up))
    turn = pycolmap.Rotation3d(np.stack((right, np.cross(up, right), up)))
    model.transform(pycolmap.Sim3d(1.0, turn, np.zeros(3)))
