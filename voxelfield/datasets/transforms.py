"""Files of frames with their poses, ``transforms*.json``, and loader of captures with one ``transforms.json``.

nerfstudio and instant-ngp write such captures. Poses have OpenGL axes. ``train_filenames``, ``val_filenames`` and
``test_filenames`` may list splits (nerfstudio).

A file lists ``frames`` (``file_path``, ``transform_matrix``) and, for the whole file or for a frame, focal lengths
(``fl_x``, ``fl_y`` in pixels) or fields of view (``camera_angle_x``, ``camera_angle_y`` in radians, or ``x_fov``,
``y_fov`` in degrees). Pixels are square if one axis has neither, and the principal point (``cx``, ``cy``) is in the
middle by default. Lengths in pixels belong to images of the size ``w``, ``h``; for images of other sizes they are
scaled. A lens that distorts has its coefficients, such as ``k1`` or ``p2``, and a ``camera_model`` (nerfstudio), or
``is_fisheye`` (instant-ngp).

data/README.md describes the keys of panoramas (EQUIRECTANGULAR), rolling shutters, masks, times and depths.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from plyfile import PlyData, PlyParseError
from torch import Tensor

from voxelfield.datasets.assembly import SPLITS, load_capture
from voxelfield.datasets.image_paths import find_images
from voxelfield.datasets.lenses import CAMERA_MODELS, TRANSFORMS_MODELS, VELOCITY_KEYS, photo_lens
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Intrinsics, Photo, centred, points_near, scaled, with_shrunk_images
from voxelfield.datasets.poses import FARTHEST
from voxelfield.datasets.registry import Format, contains
from voxelfield.datasets.scene import Scene
from voxelfield.datasets.text_files import json_numbers
from voxelfield.files import json_number, read_json_object, read_regular
from voxelfield.foundation.errors import shown
from voxelfield.messages import clipped, reason_of
from voxelfield.rendering.lens import LENS_TERMS, Lens, LensModel

logger = logging.getLogger(__name__)

_T = TypeVar("_T", float, None)

# The first key that is present counts.
_FOCAL_KEYS = {"x": ("fl_x", "camera_angle_x", "x_fov"), "y": ("fl_y", "camera_angle_y", "y_fov")}
_INTRINSICS = {*_FOCAL_KEYS["x"], *_FOCAL_KEYS["y"], "cx", "cy", "w", "h", "camera_model"}
_OPTIONAL_PATHS = ("mask_path", "depth_file_path")
# Relative difference of two values of one focal length that are considered equal.
_SAME = 0.01
_LARGEST = 1e30  # so that depths and times are finite in float32
_NARROWEST = 1e-9  # field of view in radians or degrees
# COLMAP's names of two coefficients differ from OpenCV's.
_ALIASES = {"sx1": "s1", "sy1": "s3"}
# The coefficients that have their own keys. For fisheye624, nerfstudio has a list, because other programs name them
# differently.
_KEYS: dict[LensModel, tuple[str, ...]] = LENS_TERMS | {"fisheye624": ()}

_MOST_NAMED = 10
# Points, and cameras, by which it is decided where the points lie.
_MOST_COMPARED = 500

FILE = "transforms.json"

_SHUTTER = ("rolling_shutter_time", *VELOCITY_KEYS)
# Keys that are read here, besides the coefficients of lenses: of the whole file only, of a frame only, and of both.
_OF_FILE = {"frames", "train_filenames", "val_filenames", "test_filenames", "ply_file_path"}
_OF_FRAME = {"file_path", "transform_matrix", *_OPTIONAL_PATHS}
_READ = {"is_fisheye", "distortion_params", "time", "depth_unit_scale_factor", *_INTRINSICS, *_SHUTTER}
# The keys of coefficients of lenses.
_LENS_KEY = re.compile(r"[kps]\d|s[xy]1|omega|k|alpha|beta")

# These change rays in ways that are not modelled. Zeros change nothing.
_REFUSED = {
    **dict.fromkeys(
        ("rolling_shutter", "transform_matrix_start", "transform_matrix_end"),
        "give motion during the exposure as rolling_shutter_time, camera_linear_velocity and camera_angular_velocity",
    ),
    **dict.fromkeys(("shift_x", "shift_y"), "give the principal point as cx and cy"),
    "skew": "pixels are taken to have rows and columns at right angles",
    **dict.fromkeys(("pixel_aspect_x", "pixel_aspect_y"), "give the focal lengths as fl_x and fl_y"),
    "from_na": "poses are taken to have OpenGL's axes",
    "normal_mts_args": "poses are taken to have OpenGL's axes, not Mitsuba's",
    **dict.fromkeys(("latlong", "equirectangular"), "give 'camera_model' as EQUIRECTANGULAR"),
    **dict.fromkeys(("orthographic", *(f"ftheta_p{power}" for power in range(10))), "undistort the images first"),
}

# Provenance, and the normalisation of other programs, which leaves the poses in the file as they are.
_HARMLESS = {
    *("aabb_scale", "scale", "offset", "aabb", "render_aabb", "up", "applied_transform", "applied_scale"),
    *("orientation_override", "auto_scale_poses_override", "near", "far", "z_near", "z_far", "importance_sampling"),
    *("n_extra_learnable_dims", "sharpness", "rotation", "derived_from", "timestamp", "id", "name", "n_frames"),
    *("colmap_im_id", "colmap_image_id", "colmap_camera_id", "camera_id", "cam_id", "image_id", "frame_id"),
}


def load_nerfstudio(folder: Path, options: LoadOptions) -> Scene:
    """Loads a capture; see :class:`voxelfield.datasets.registry.Format`."""
    file = folder / FILE
    photos, meta = read_transforms(file)
    photos = with_shrunk_images(photos, folder / "images", options.downscale)
    return load_capture(folder, file, photos, options, _listed_splits(file, meta, photos), _points(file, meta, photos))


def _points(file: Path, meta: Mapping[str, Any], photos: Sequence[Photo]) -> Tensor | None:
    """Returns the points (N, 3) of structure from motion, if a file names theirs; None without any.

    Some versions of nerfstudio move them as ``applied_transform`` says, as they do with the poses, and others do not.
    The points lie where more of them are in front of the cameras.
    """
    path = meta.get("ply_file_path")
    if path is None:
        return None
    if not isinstance(path, str):
        raise ValueError(f"{file}: 'ply_file_path' must be the path of a file, got {shown(path)}")
    source = file.parent / path
    try:
        vertices = PlyData.read(io.BytesIO(read_regular(source)))["vertex"]
        given = np.stack([vertices[axis] for axis in "xyz"], axis=-1).astype(np.float64)
    except FileNotFoundError:
        logger.warning("%s: the file of points, %s, is missing", file, source)
        return None
    except (PlyParseError, KeyError, TypeError, ValueError, MemoryError) as error:
        raise ValueError(f"{source}: not a PLY file of points ({reason_of(error)})") from error
    points = [torch.from_numpy(given)]
    applied = meta.get("applied_transform")
    if applied is not None:
        try:
            rotation, shift = torch.tensor(applied, dtype=torch.float64)[:3].split((3, 1), dim=1)
            points.append(points[0] @ rotation.mT + shift[:, 0])
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}: 'applied_transform' must be three rows of four numbers, got {shown(applied)}"
            ) from error
    in_view = [_count_in_view(each, photos) for each in points]
    return points_near(source, points[in_view.index(max(in_view))], photos)


def _count_in_view(points: Tensor, photos: Sequence[Photo]) -> int:
    """Returns how often some of the points are at most 60 degrees from a camera's optical axis."""
    some = points[:: max(1, len(points) // _MOST_COMPARED)]
    cameras = photos[:: max(1, len(photos) // _MOST_COMPARED)]
    offset = some[:, None] - torch.stack([photo.c2w[:3, 3] for photo in cameras])
    depth = (offset * -torch.stack([photo.c2w[:3, 2] for photo in cameras])).sum(dim=-1)
    return int((depth > 0.5 * offset.norm(dim=-1)).sum())


def _listed_splits(file: Path, meta: dict[str, Any], photos: list[Photo]) -> dict[str, set[Path]] | None:
    """Returns the paths of the images of each split, if a file lists them."""
    known = {photo.path for photo in photos}
    splits = {}
    for name in SPLITS:
        key = f"{name}_filenames"
        if key not in meta:
            continue
        paths = meta[key]
        if not (isinstance(paths, list) and all(isinstance(path, str) for path in paths)):
            raise ValueError(f"{file}: '{key}' must be a list of paths, got {shown(paths)}")
        found = find_images(file, paths, key)
        unknown = [path for path in paths if found[path] not in known]
        if unknown:
            raise ValueError(f"{file}: '{key}' must name images of 'frames', got {shown(unknown[0])}")
        splits[name] = set(found.values())
    return splits or None


def read_transforms(file: Path, *, may_be_empty: bool = False) -> tuple[list[Photo], dict[str, Any]]:
    """Reads such a file, which lies in the folder that paths of images start from; it may have no frames if so said.

    Returns:
        The photographs that it lists, whether their files exist or not, and the whole content of the file.

    Raises:
        ValueError: It is not as described above, or a lens is of another model.
    """
    meta = read_json_object(file)
    if may_be_empty and meta.get("frames") == []:
        return [], meta
    frames = _frames(file, meta)
    _check_keys(file, meta, frames)
    _warn_of_two_focal_lengths(file, meta, frames)
    images, masks, depths = (
        find_images(file, (frame[key] for frame in frames if frame.get(key) is not None), key)
        for key in ("file_path", *_OPTIONAL_PATHS)
    )
    known_depths = {name: path for name, path in depths.items() if path.is_file()}
    missing = [path for name, path in depths.items() if name not in known_depths]
    if missing:
        logger.warning("%s: %d files of depths are missing, the first is %s", file, len(missing), missing[0])
    whole = _Entries(file, meta)
    photos = []
    for frame in frames:
        known = _Entries(file, frame, meta)
        pose_name = f"{file}: 'transform_matrix' of {clipped(frame['file_path'])}"
        photos.append(
            Photo(
                images[frame["file_path"]],
                _pose(pose_name, frame),
                _intrinsics(_Entries(file, frame), whole),
                _lens(known),
                pose_name=pose_name,
                mask=masks.get(frame.get("mask_path") or ""),
                time=known.number("time", None),
                depth=known_depths.get(frame.get("depth_file_path") or ""),
                depth_unit=known.number("depth_unit_scale_factor", 1e-3, above=0),
                motion=_motion(known),
            )
        )
    return photos, meta


class _Entries(ChainMap[str, Any]):
    """Entries of a frame, or of the whole file for keys that it lacks; a null, also in a frame, gives the default."""

    def __init__(self, file: Path, *holders: MutableMapping[str, Any]) -> None:
        super().__init__(*holders)
        self.file = file

    def number(self, key: str, default: _T, *, above: float = -math.inf, unit: str = "") -> float | _T:
        """Returns a finite number above a bound, which the message gives in a unit; the default if it is absent."""
        if self.get(key) is None:
            return default
        number = json_number(self.get(key))
        if not math.isfinite(number):
            raise self.refusal(key, "be a finite number")
        if key in ("time", "depth_unit_scale_factor") and abs(number) > _LARGEST:
            raise self.refusal(key, f"be a number up to {_LARGEST:g}")
        if number <= above:
            raise self.refusal(key, f"be above {above:g}{unit}")
        return number

    def refusal(self, key: str, wanted: str, remedy: str | None = None) -> ValueError:
        """Returns an error about a value, which must do as ``wanted`` says."""
        advice = "" if remedy is None else f": {remedy}"
        return ValueError(f"{self.file}: '{key}' must {wanted}, {_found(self, key)}{advice}")


def _check_keys(file: Path, meta: Mapping[str, Any], frames: Sequence[Mapping[str, Any]]) -> None:
    """Refuses keys that change the geometry and are not modelled; the log names the others that have no effect."""
    unused: dict[str, object] = {}  # the first value of each key that no loader reads
    for holder in (meta, *frames):
        known = _READ | _HARMLESS | (_OF_FILE if holder is meta else _OF_FRAME)
        for key, value in holder.items():
            # Zeros change nothing, but any coefficient of an f-theta lens says that the lens is one.
            is_nothing = value is None if key.startswith("ftheta") else _is_nothing(value)
            if key in known or is_nothing or _LENS_KEY.fullmatch(key):
                continue
            if key in _REFUSED and not (key.startswith("pixel_aspect") and value == 1):
                raise ValueError(f"{file}: {key!r} must be absent, got {shown(value)}: {_REFUSED[key]}")
            if key not in _REFUSED:
                unused.setdefault(key, value)
    shutter = {key: value for holder in (meta, *frames) for key, value in holder.items() if key in _SHUTTER}
    if len(shutter) == 1 or _SHUTTER[0] not in shutter:
        unused |= shutter  # a time without velocities, or velocities without a time
    if unused:
        named = [f"{shown(key)} ({shown(value)})" for key, value in unused.items()]
        logger.warning("%s: these keys have no effect: %s", file, ", ".join(named[:_MOST_NAMED]))


def _is_nothing(value: object) -> bool:
    """Returns whether a value is null, false, empty, or zeros."""
    return all(map(_is_nothing, value)) if isinstance(value, list) else value in (None, False, "", {})


def _frames(file: Path, meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    frames = meta.get("frames")
    if not isinstance(frames, list) or not frames:
        raise ValueError(f"{file}: 'frames' must be a list with entries, {_found(meta, 'frames')}")
    for index, frame in enumerate(frames):
        if not isinstance(frame, dict):
            raise ValueError(f"{file}: frame {index} must be an object, got {type(frame).__name__}")
        for key in ("file_path", *_OPTIONAL_PATHS):
            path = frame.get(key)
            if not (isinstance(path, str) and path) and (key == "file_path" or path is not None):
                raise ValueError(f"{file}: '{key}' of frame {index} must be a path, {_found(frame, key)}")
    different = list({json.dumps(frame, sort_keys=True): frame for frame in frames}.values())
    if repeated := len(frames) - len(different):
        logger.warning("%s: %d of %d frames are repetitions, which are left out", file, repeated, len(frames))
    return different


def _pose(name: str, frame: Mapping[str, Any]) -> Tensor:
    try:
        pose = torch.tensor(frame.get("transform_matrix"), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pose = torch.empty(0)
    if pose.shape != (4, 4):
        raise ValueError(f"{name} must be a 4x4 matrix of numbers, {_found(frame, 'transform_matrix')}")
    return pose


def _found(holder: Mapping[str, Any], key: str) -> str:
    return f"got {shown(holder[key])}" if key in holder else "but it is missing"


def _intrinsics(frame: _Entries, meta: _Entries) -> Callable[[int, int], Intrinsics]:
    """Returns a function that computes the intrinsics of a frame for an image of a width and a height."""
    file, sphere = meta.file, TRANSFORMS_MODELS["equirectangular"]
    usual = meta.get("camera_model")
    if usual != frame.get("camera_model", usual) and sphere in (usual, frame.get("camera_model")):
        meta = _Entries(file)  # focal lengths of panoramas have another unit
    known = _Entries(file, *frame.maps, *meta.maps)
    w, h = (known.number(key, None, above=0, unit=" pixels") for key in ("w", "h"))
    if known.get("camera_model") == sphere:
        return _sphere_intrinsics(known)

    def focal(axis: str, side: float) -> float | None:
        return _focal(frame, axis, side) or _focal(meta, axis, side)

    if [focal(axis, 1.0) for axis in _FOCAL_KEYS] == [None, None]:
        raise ValueError(f"{file}: key 'camera_angle_x' is missing, and so is 'fl_x'")
    cx, cy = known.number("cx", None), known.number("cy", None)

    def of_image(width: int, height: int) -> Intrinsics:
        # Of the two sizes, one follows from the other, and none means that the image has its original size.
        size = w or (h * width / height if h else width), h or (w * height / width if w else height)
        across, along = focal("x", size[0]), focal("y", size[1])
        centre = size[0] / 2 if cx is None else cx, size[1] / 2 if cy is None else cy
        whole = across or along or math.nan, along or across or math.nan, *centre
        if w is None and h is None:
            return centred(whole, width, height)
        return scaled(whole, size, f"'w' and 'h' in {file}")(width, height)

    return of_image


def _sphere_intrinsics(known: _Entries) -> Callable[[int, int], Intrinsics]:
    """Returns the same function for an equirectangular image; in :class:`voxelfield.Lens`, it has pixels per radian."""
    for key in (*_FOCAL_KEYS["x"][1:], *_FOCAL_KEYS["y"][1:]):
        if known.get(key) is not None:
            wanted, remedy = "be absent for an EQUIRECTANGULAR image", "give fl_x and fl_y, in pixels per half a turn"
            raise known.refusal(key, wanted, remedy)

    def of_image(width: int, height: int) -> Intrinsics:
        w, h = known.number("w", width), known.number("h", height)
        fl_x, fl_y = known.number("fl_x", w / 2), known.number("fl_y", h)
        # With pixels per radian in their place, an image would show the whole circle three times.
        for key, focal, least in (("fl_x", fl_x, w / 2), ("fl_y", fl_y, h)):
            if focal < (1 - _SAME) * least:
                size = f"an EQUIRECTANGULAR image of {w:g}x{h:g}"
                raise known.refusal(key, f"be at least {least:g} for {size}, in pixels per half a turn")
        whole = fl_x / math.pi, fl_y / math.pi, known.number("cx", w / 2), known.number("cy", h / 2)
        return scaled(whole, (w, h), f"'w' and 'h' in {known.file}")(width, height)

    return of_image


def _motion(known: _Entries) -> Tensor | None:
    """Returns how a camera turns and moves while all rows are exposed, (6,) float64; None if it stands still."""
    seconds = known.number("rolling_shutter_time", 0.0)
    if seconds < 0:
        raise known.refusal("rolling_shutter_time", "be at least 0 seconds")
    velocities = [
        [0.0] * 3 if known.get(key) is None else json_numbers(known.file, key, known[key], 3) for key in VELOCITY_KEYS
    ]
    turn, move = motion = seconds * torch.tensor(velocities, dtype=torch.float64)
    if not (float(turn.norm()) <= math.pi and float(move.norm()) <= FARTHEST):
        raise ValueError(
            f"{known.file}: '{VELOCITY_KEYS[0]}' and '{VELOCITY_KEYS[1]}' must turn a camera by at most half a turn "
            f"and move it by at most {FARTHEST:g} units while 'rolling_shutter_time' passes, got {motion.tolist()}"
        )
    return motion.flatten() if bool(motion.any()) else None


def _focal(entries: _Entries, axis: str, side: float) -> float | None:
    """Returns the focal length along an axis for an image with a side of so many pixels; None if none is stated."""
    key = next((key for key in _FOCAL_KEYS[axis] if entries.get(key) is not None), None)
    if key is None:
        return None
    if key.startswith("fl"):
        return entries.number(key, math.nan, above=0, unit=" pixels")
    in_degrees = key.endswith("fov")
    value = entries.number(key, math.nan)
    if not _NARROWEST <= value < (180.0 if in_degrees else math.pi):
        raise entries.refusal(key, "be degrees between 0 and 180" if in_degrees else "be radians between 0 and pi")
    return side / (2 * math.tan(0.5 * (math.radians(value) if in_degrees else value)))


def _warn_of_two_focal_lengths(file: Path, meta: Mapping[str, Any], frames: Iterable[Mapping[str, Any]]) -> None:
    """Warns of a field of view that contradicts the focal length beside it, which counts."""
    for holder in (meta, *frames):
        for (axis, keys), side in zip(_FOCAL_KEYS.items(), ("w", "h"), strict=True):
            given = [key for key in keys if holder.get(key) is not None]
            length = _Entries(file, {side: holder.get(side, meta.get(side))}).number(side, None)
            if len(given) < 2 or length is None:
                continue
            counts, other = (_focal(_Entries(file, {key: holder[key]}), axis, length) or 0.0 for key in given[:2])
            if not math.isclose(counts, other, rel_tol=_SAME):
                logger.warning(
                    "%s: %r (%s) has no effect, because %r (%s) is another focal length",
                    *(file, given[1], shown(holder[given[1]]), given[0], shown(holder[given[0]])),
                )
                return


def _lens(known: _Entries) -> Lens | None:
    keys = [key for key in known if _LENS_KEY.fullmatch(key) and known.get(key) is not None]
    fisheye = known.get("is_fisheye")
    if not (fisheye is None or isinstance(fisheye, bool)):
        raise known.refusal("is_fisheye", "be true or false")
    name = known.get("camera_model")
    name = ("OPENCV_FISHEYE" if fisheye else "OPENCV") if name is None else name
    models = CAMERA_MODELS | {"FISHEYE624": CAMERA_MODELS["RAD_TAN_THIN_PRISM_FISHEYE"]}
    if not isinstance(name, str) or name not in models:
        raise known.refusal("camera_model", f"be one of {', '.join(models)}", "undistort the images first")
    model, order = models[name]
    if fisheye is not None and fisheye != ("fisheye" in model):
        raise known.refusal("is_fisheye", f"be {not fisheye} for 'camera_model' {name!r}")
    terms = {_ALIASES.get(key, key): value for key in keys if (value := known.number(key, 0.0)) != 0}
    listed = "distortion_params"
    if known.get(listed) is not None:
        if terms:
            raise known.refusal(listed, f"be absent beside {', '.join(terms)}")
        names = order if model == "fisheye624" else ("k1", "k2", "k3", "k4", "p1", "p2")
        terms = dict(zip(names, json_numbers(known.file, listed, known[listed], len(names)), strict=True))
        if not {name for name in names if terms[name] != 0} <= set(LENS_TERMS[model]):
            raise known.refusal(listed, f"be absent or zeros for a {model} lens")
    elif not terms.keys() <= set(_KEYS[model]):
        fitting = [TRANSFORMS_MODELS[each] for each, names in _KEYS.items() if terms.keys() <= set(names)]
        raise ValueError(
            f"{known.file}: 'camera_model' must be {' or '.join(fitting) or 'that of one lens'} for a lens with "
            f"{', '.join(sorted(terms))}, got {name!r}"
        )
    return photo_lens(str(known.file), model, terms)


FORMAT = Format("nerfstudio or instant-ngp", FILE, contains([FILE]), load_nerfstudio, order=20)
