"""From a folder of photographs, or a video, to a scene with poses, which COLMAP finds through pycolmap."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from voxelfield.captures.photographs import copy_photographs, extract_frames, photographs_in
from voxelfield.datasets.images import Size, image_files, image_size
from voxelfield.datasets.lenses import CAMERA_MODELS
from voxelfield.files import IMAGE_SUFFIXES, read_json_object, write_json
from voxelfield.installed import MissingPackageError, import_optional
from voxelfield.messages import printable
from voxelfield.progress import Progress

logger = logging.getLogger(__name__)

REPORT = "report.json"
"""Name of the file with the :class:`Report` and a list of the scene's files; a later call replaces only those."""

OUTPUTS = ("images", "sparse", REPORT)
"""Names of the files and folders that :func:`process` writes."""

_OLDEST_MAJOR = 4
_COUNT_EVERY = 0.5  # seconds
# How far apart photographs of a sequence are that COLMAP compares by default.
_SEQUENTIAL = (*range(1, 11), *(2**power for power in range(4, 10)))
_NO_DIRECTION = 0.3  # length of a mean direction below which photographs disagree too much to have one

_NEIGHBOURS = 50  # with which COLMAP compares a photograph at most by positions
_FEW_FEATURES = 100  # in a photograph, below which it likely shows nothing that can be recognised
_FEWEST_MATCHES = 15  # of a pair that COLMAP's mappers use

Matching = Literal["exhaustive", "sequential", "spatial"]
"""Which pairs of photographs are compared: all, those near one another in the order of their names, or those near one
another by the positions (GPS) in their EXIF."""

Mapper = Literal["incremental", "global"]
"""How poses are found: photograph after photograph, or all at once, as GLOMAP does (Pan et al. 2024)."""


@dataclass(frozen=True)
class Report:
    """Results of structure from motion.

    Attributes:
        matching: Which pairs were compared.
        mapper: How poses were found.
        photographs: Number of photographs given.
        registered: Number of photographs with a pose.
        unregistered: The probable cause for each of the others, by its name.
        points: Number of sparse points.
        mean_reprojection_error: Mean distance, in pixels, between the projection of a point and its detection.
        mean_track_length: Mean number of photographs in which a point was found.
        other_models: Numbers of photographs of the smaller models that overlap too little with this one to join it.
        cameras: Model, width, height and parameters, as COLMAP names them, of each camera.
    """

    matching: Matching
    mapper: Mapper
    photographs: int
    registered: int
    unregistered: dict[str, str]
    points: int
    mean_reprojection_error: float
    mean_track_length: float
    other_models: tuple[int, ...]
    cameras: tuple[dict[str, Any], ...]


def process(
    source: Path,
    folder: Path,
    *,
    frames: int = 120,
    matching: Matching | None = None,
    mapper: Mapper = "incremental",
    rig: bool = False,
    camera_model: str = "OPENCV",
    camera_per_image: bool = False,
    max_size: int = 1600,
    overwrite: bool = False,
) -> Report:
    """Makes a scene: images, a COLMAP model and a report of the registration.

    All files are made in a temporary folder, inside of ``folder`` if that exists, and moved in the end, so a failure
    leaves earlier results unchanged and no folder behind.

    Args:
        source: A folder of photographs, or a video.
        folder: Folder of the scene; created if needed.
        frames: Number of frames to take from a video.
        matching: Which pairs to compare; None compares all photographs of a folder, and neighbouring frames of a video.
        mapper: How to find poses.
        rig: The source has a subfolder for each camera of a rig, and photographs of one name were taken at the same
            time. The global mapper then finds how the cameras are mounted.
        camera_model: COLMAP's name of the camera model.
        camera_per_image: Give every photograph its own camera; otherwise, photographs of one size share one.
        max_size: Longest side in pixels to which larger photographs are reduced.
        overwrite: Replace the results of an earlier call.

    Raises:
        MissingPackageError: pycolmap is not installed or too old, or PyAV is not installed for a video.
        FileNotFoundError: There is no such source.
        FileExistsError: The folder contains results of an earlier call, or other files with their names, which are
            never replaced.
        ValueError: A number is out of range, the source has fewer than two photographs or is unreadable, or no two
            photographs can be registered, or photographs lack the position that spatial matching needs.
    """
    for name, value, least in (("frames", frames, 2), ("max_size", max_size, 64)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    _check_camera_model(camera_model)
    if rig and mapper != "global":
        raise ValueError(f"mapper must be global for a rig whose geometry is unknown, got {mapper}")
    photographs = _photographs_of(source, rig)
    for name in OUTPUTS:
        if source.resolve().is_relative_to((folder / name).resolve()):
            raise ValueError(f"the source must be outside of the results, got {source} in {name} of the scene {folder}")
    _check_replaceable(folder, overwrite)
    place = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    with tempfile.TemporaryDirectory(prefix=".process_", dir=place) as temporary:
        work = Path(temporary)
        images = work / "images"
        if photographs is None:
            logger.info("choosing frames of %s ...", source)
            extract_frames(source, images, frames, max_size)
        else:
            for camera, paths in photographs.items():
                copy_photographs(paths, images / camera, max_size)
        default: Matching = "sequential" if photographs is None else "exhaustive"
        report = _reconstruct(work, camera_model, matching or default, mapper, rig, camera_per_image)
        files = sorted(path.relative_to(work).as_posix() for path in _files_in(work, OUTPUTS))
        write_json(work / REPORT, dataclasses.asdict(report) | {"files": files})
        # Again, because files may have been added in the meantime.
        _check_replaceable(folder, overwrite)
        folder.mkdir(parents=True, exist_ok=True)
        for name in OUTPUTS:
            if (folder / name).is_dir() and not (folder / name).is_symlink():
                shutil.rmtree(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
            (work / name).rename(folder / name)
    return report


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    """Raises FileExistsError if results would replace files that no earlier call has written."""
    present = [name for name in OUTPUTS if (folder / name).exists() or (folder / name).is_symlink()]
    try:
        listed = {REPORT, *read_json_object(folder / REPORT)["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        listed = set()
    others = sorted({path.relative_to(folder).as_posix() for path in _files_in(folder, present)} - listed)
    if others:
        raise FileExistsError(
            f"the folder of the scene must not contain other files where results go, got {folder}: voxelfield has not "
            f"written {others[0]}{f' and {len(others) - 1} more' if len(others) > 1 else ''}; choose another folder"
        )
    if present and not overwrite:
        raise FileExistsError(f"{folder} already contains {', '.join(present)}: --overwrite replaces them")


def _files_in(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yields the files of some names in a folder, and those within its subfolders of these names."""
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            yield from (inner for inner in path.rglob("*") if inner.is_symlink() or not inner.is_dir())
        elif path.exists() or path.is_symlink():
            yield path


def _photographs_of(source: Path, rig: bool) -> dict[str, list[Path]] | None:
    """Returns the photographs of a folder, at least two, by the cameras of a rig, or else by ""; None for a video."""
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such folder of photographs or video")
    if not source.is_dir():
        if source.suffix.lower() in IMAGE_SUFFIXES:
            raise ValueError(f"the source must be a folder of photographs or a video, got the one photograph {source}")
        if rig:
            raise ValueError(f"the source must be a folder with a subfolder for each camera of a rig, got {source}")
        return None
    folders = [path for path in sorted(source.iterdir()) if path.is_dir()] if rig else [source]
    cameras = {folder.name if rig else "": photographs_in(folder) for folder in folders}
    if rig and (len(folders) < 2 or not all(cameras.values())):
        raise ValueError(f"{source}: must have a subfolder of photographs for each camera of a rig, and no others")
    photographs = [path for paths in cameras.values() for path in paths]
    for name in (path.relative_to(source).as_posix() for path in photographs):
        if name != printable(name):
            raise ValueError(f"{source}: names of photographs must be UTF-8, got {printable(name)}: rename it")
    pattern = "*/*" if rig else "*"
    if masks := sorted({*image_files(source, pattern, masks=True)} - {*image_files(source, pattern)}):
        logger.warning("%s: %d masks are not used, the first is %s", source, len(masks), masks[0].name)
    if len(photographs) < 2:
        known = ", ".join(IMAGE_SUFFIXES)
        raise ValueError(f"{source}: must contain at least 2 photographs ({known}), got {len(photographs)}")
    return cameras


def _check_camera_model(name: str) -> None:
    """Raises unless pycolmap is installed and recent enough, and the loaders support a camera model."""
    pycolmap = import_optional("pycolmap", "find poses", "colmap")
    # Older versions would find poses with a camera model other than the requested one.
    if int(pycolmap.__version__.partition(".")[0]) < _OLDEST_MAJOR:
        raise MissingPackageError(
            f"pycolmap must be {_OLDEST_MAJOR}.0 or later to find poses, got {pycolmap.__version__}: "
            'pip install -U "voxelfield[colmap]"'
        )
    known = sorted((CAMERA_MODELS.keys() & pycolmap.CameraModelId.__members__.keys()) - {"EQUIRECTANGULAR"})
    if name not in known:
        raise ValueError(f"camera_model must be one of {', '.join(known)}, got {name!r}")


def _reconstruct(
    folder: Path, camera_model: str, matching: Matching, mapper: Mapper, rig: bool, per_image: bool
) -> Report:
    """Finds the poses of ``images`` in a folder and writes the largest COLMAP model to ``sparse/0``, z up."""
    import pycolmap

    images, work, model = folder / "images", folder / "colmap", folder / "sparse" / "0"
    names = [path.relative_to(images).as_posix() for path in image_files(images, "*/*" if rig else "*")]
    if len(names) < 2:
        raise ValueError(f"at least 2 photographs or frames are needed to find poses, got {len(names)}")
    # Photographs of a folder and of a size share a camera, unless each has its own.
    groups: dict[tuple[str, Size], list[str]] = {}
    for name in names:
        groups.setdefault((name.rpartition("/")[0], image_size(images / name)), []).append(name)
    database = work / "database.db"
    work.mkdir()
    model.mkdir(parents=True)
    mode = pycolmap.CameraMode.PER_IMAGE if per_image else pycolmap.CameraMode.SINGLE
    reader = pycolmap.ImageReaderOptions()
    reader.camera_model = camera_model
    pycolmap.set_random_seed(0)
    # Otherwise, COLMAP logs a line for every photograph and pair.
    pycolmap.logging.minloglevel = pycolmap.logging.ERROR.value
    with pycolmap.Database.open(database) as rows:
        logger.info("finding features of %d photographs ...", len(names))
        with _counting(rows.num_images, "finding features", len(names)):
            for group in groups.values():
                pycolmap.extract_features(database, images, group, mode, reader)
        if rig:
            cameras = sorted({folder for folder, _ in groups})
            sensors = [{"image_prefix": f"{camera}/", "ref_sensor": camera == cameras[0]} for camera in cameras]
            pycolmap.apply_rig_config([pycolmap.RigConfig(cameras=sensors)], rows)
        _match(rows, database, len(names), matching)
        logger.info("finding poses and points with the %s mapper ...", mapper)
        models = _map(database, images, work, len(names), mapper)
        if not models:
            raise ValueError(
                f"photographs must overlap for poses to be found, got {len(names)} of which no two could be "
                "registered: take more, closer together, sharp and of textured surfaces"
            )
        unregistered = dict(_causes(rows, models))
    best = models[0]
    _stand_upright(best)
    best.write(model)
    return Report(
        matching=matching,
        mapper=mapper,
        photographs=len(names),
        registered=best.num_reg_images(),
        unregistered=unregistered,
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


def _match(rows: Any, database: Path, count: int, matching: Matching) -> None:
    """Compares pairs of photographs. Raises ValueError if one lacks the position that spatial matching needs."""
    import pycolmap

    if matching == "spatial" and (lacking := count - rows.num_pose_priors()):
        raise ValueError(
            f"matching must be exhaustive or sequential without positions (GPS) in EXIF, got spatial: {lacking} of "
            f"{count} photographs have none"
        )
    apart = {"exhaustive": range(1, count), "sequential": _SEQUENTIAL, "spatial": range(1, min(count, _NEIGHBOURS))}
    pairs = sum(max(0, count - distance) for distance in apart[matching])
    logger.info("%s matching, with %.0f features per photograph ...", matching, rows.num_keypoints() / count)
    with _counting(rows.num_matched_image_pairs, "matching pairs", pairs):
        getattr(pycolmap, f"match_{matching}")(database)


def _map(database: Path, images: Path, work: Path, count: int, mapper: Mapper) -> list[Any]:
    """Returns COLMAP's reconstructions, the largest first."""
    import pycolmap

    if mapper == "global":
        # It takes focal lengths as they are, unless they are estimated from pairs of photographs first.
        if not pycolmap.calibrate_view_graph(database):
            logger.warning("focal lengths could not be estimated from pairs of photographs: use --mapper incremental")
        found = pycolmap.global_mapping(database, images, work)
    else:
        with contextlib.closing(Progress("registering photographs", count)) as progress:
            registered_so_far = 0

            def register(number: int) -> None:
                nonlocal registered_so_far
                progress.update(registered_so_far := number)

            found = pycolmap.incremental_mapping(
                database,
                images,
                work,
                initial_image_pair_callback=lambda: register(2),  # of each model
                next_image_callback=lambda: register(registered_so_far + 1),
            )
    return sorted(found.values(), key=lambda each: each.num_reg_images(), reverse=True)


def _causes(rows: Any, models: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yields name and probable cause for each photograph without a pose in the first of some models."""
    import pycolmap

    registered, *others = ({*each.reg_image_ids()} for each in models)
    alike: dict[int, set[int]] = {}
    for pair, inliers in zip(*rows.read_two_view_geometry_num_inliers(), strict=True):
        first, second = pycolmap.pair_id_to_image_pair(pair)
        if inliers >= _FEWEST_MATCHES:
            alike.setdefault(first, set()).add(second)
            alike.setdefault(second, set()).add(first)
    for number, name in sorted((image.image_id, image.name) for image in rows.read_all_images()):
        seen = alike.get(number, set())
        if number in registered:
            continue
        if (count := rows.num_keypoints_for_image(number)) < _FEW_FEATURES:
            yield name, f"only {count} features, as in a blurred, dark or even picture"
        elif number in set().union(*others):
            yield name, "part of a smaller model, which overlaps too little with this one"
        elif not seen:
            yield name, "no overlap with another photograph was found"
        else:
            yield name, f"overlap with {len(seen & registered)} registered photographs, but too few points in common"


@contextlib.contextmanager
def _counting(count: Callable[[], int], name: str, total: int) -> Iterator[None]:
    """Displays the progress of a block that runs in COLMAP: what it has written to its database so far."""
    ended = threading.Event()

    def follow() -> None:
        with contextlib.suppress(Exception):  # the count is not worth an error
            while not ended.wait(_COUNT_EVERY):
                progress.update(count())

    with contextlib.closing(Progress(name, total)) as progress:
        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()


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
