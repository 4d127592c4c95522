"""Loader of Metashape's cameras, as ``File > Export > Export Cameras`` writes them ("Agisoft XML"), with photographs.

Of a chunk, the file has sensors with their calibrations, and cameras: photographs by their labels, with poses, camera
to chunk, whose axes are OpenCV's (x right, y down, looking along z). The transform of a component, or of the chunk,
takes these to world coordinates: where the chunk is georeferenced by latitude and longitude, to metres from the centre
of the Earth, which become metres east, north and up of the cameras.

Calibrations: Agisoft Metashape User Manual, Professional Edition, appendix "Camera models". A principal point is given
relative to the middle of the image, in pixels. Of frame and fisheye cameras the tangential coefficients are those of
OpenCV in the other order.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.datasets.assembly import load_capture
from voxelfield.datasets.image_paths import find_images
from voxelfield.datasets.lenses import photo_lens
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Intrinsics, Photo, scaled, with_shrunk_images
from voxelfield.datasets.poses import turned_about
from voxelfield.datasets.registry import Format
from voxelfield.datasets.scene import Scene
from voxelfield.datasets.text_files import files_with, numbers_in, read_xml, warn_of_unused
from voxelfield.foundation.errors import shown
from voxelfield.rendering.lens import Lens, LensModel
from voxelfield.rendering.rigid import pose_matrices

logger = logging.getLogger(__name__)

_MODELS: dict[str, LensModel] = {"frame": "perspective", "fisheye": "fisheye", "equidistant_fisheye": "fisheye"}
_LENGTHS = ("f", "cx", "cy", "b1", "b2")
# Names in a calibration, and those of the lens.
_TERMS = {"k1": "k1", "k2": "k2", "k3": "k3", "k4": "k4", "p1": "p2", "p2": "p1"}
# Entries of a camera that are read, and estimates of how exact it is.
_OF_CAMERA = ("transform", "rotation_covariance", "location_covariance", "orientation", "reference", "meta")
_LARGEST_SKEW = 0.5  # pixels by which the skew may move the upper edge of an image, and is then left out
_EARTH = 6.3e6, 6.4e6  # metres from the centre of the Earth, between which positions are geocentric
_WGS84 = 6378137.0, 6378137.0, 6356752.314245  # semi-axes of the ellipsoid, metres


def load_metashape(folder: Path, options: LoadOptions) -> Scene:
    """Loads a capture; see :class:`voxelfield.datasets.registry.Format`.

    Cameras without a pose and disabled ones are left out. Of several components, which Metashape could not join, the
    one with the most cameras is read.
    """
    file, *others = _files(folder)
    chunks = read_xml(file).findall("chunk")
    if others or len(chunks) != 1:
        raise ValueError(f"{folder}: must have one XML file of cameras, with one chunk, got more: export each alone")
    (chunk,) = chunks
    posed = [each for each in chunk.iterfind("cameras//camera") if each.find("transform") is not None]
    posed = [each for each in posed if each.get("enabled") not in ("0", "false")]
    components = Counter(camera.get("component_id") for camera in posed).most_common()
    if not components:
        raise ValueError(f"{file}: cameras must have a transform, got none: align the photographs")
    if len(components) > 1:
        counts = ", ".join(str(count) for _, count in components)
        logger.warning("%s has components of %s cameras, which are apart: the first is read", file, counts)
    component = components[0][0]
    posed = [camera for camera in posed if camera.get("component_id") == component]
    sensors = {sensor.get("id"): sensor for sensor in chunk.iterfind("sensors/sensor")}
    used = {camera.get("sensor_id") for camera in posed}
    if unknown := used - sensors.keys():
        raise ValueError(f"{file}: sensor_id of a camera must be among the sensors, got {shown(unknown.pop())}")
    cameras = {number: _camera(f"{file}: sensor {number}", sensors[number]) for number in used}
    names = [f"{file}: transform of {shown(camera.get('label'))}" for camera in posed]
    poses = [
        numbers_in(name, camera.findtext("transform"), (16,), "a 4x4 matrix")
        for name, camera in zip(names, posed, strict=True)
    ]
    holders = (chunk.find(f"components/component[@id='{component}']"), chunk)
    found = (each.find("transform") for each in holders if each is not None)
    transform = next((each for each in found if each is not None and len(each)), None)
    c2w = turned_about(_in_world(file, transform, torch.tensor(poses, dtype=torch.float64).view(-1, 4, 4)))
    labels = [camera.get("label", "") for camera in posed]
    if len({*labels}) < len(labels):
        raise ValueError(f"{file}: labels of cameras must differ: name the photographs differently before alignment")
    warn_of_unused(file, (child.tag for camera in posed for child in camera), _OF_CAMERA)
    images = folder / "images"
    paths = find_images(file, labels, "label", images if images.is_dir() else folder)
    photos = [
        Photo(paths[label], pose, *cameras[camera.get("sensor_id")], pose_name=name)
        for label, pose, camera, name in zip(labels, c2w, posed, names, strict=True)
    ]
    return load_capture(folder, file, with_shrunk_images(photos, images, options.downscale), options)


def _files(folder: Path) -> list[Path]:
    return files_with(folder, "*.xml", (b"<document", b"<chunk"))


def _camera(name: str, sensor: ElementTree.Element) -> tuple[Callable[[int, int], Intrinsics], Lens | None]:
    """Returns the intrinsics of a sensor, for any size of the image, and its lens."""
    # The initial calibration stands beside the adjusted one. A sphere needs none.
    found = [*sensor.findall("calibration[@class='adjusted']"), *sensor.findall("calibration"), sensor]
    size = found[0].find("resolution")
    sides = "" if size is None else f"{size.get('width')} {size.get('height')}"
    w, h = numbers_in(f"{name}: resolution", sides, (2,), "a width and a height")
    kind = found[0].get("type", "frame")
    if kind == "spherical":
        sphere = (w / (2 * math.pi), h / math.pi, w / 2, h / 2)
        return scaled(sphere, (w, h), name), photo_lens(name, "equirectangular", {})
    if found[0] is sensor:
        raise ValueError(f"{name} must have a calibration, got none")
    if kind not in _MODELS:
        raise ValueError(f"{name}: type must be one of {', '.join(_MODELS)} or spherical, got {shown(kind)}")
    given = {each.tag: numbers_in(f"{name}: {each.tag}", each.text, (0, 1), "a number") for each in found[0]}
    values = {key: numbers[0] for key, numbers in given.items() if numbers}
    f, cx, cy, b1, b2 = (values.pop(key, 0.0) for key in _LENGTHS)
    terms = {_TERMS.get(key, key): value for key, value in values.items() if value != 0}
    if unknown := terms.keys() - _TERMS.keys():
        raise ValueError(f"{name}: {min(unknown)} must be absent or 0 in a calibration: undistort the images first")
    if (skew := abs(b2) * h / 2 / max(f, 1e-9)) > _LARGEST_SKEW:
        raise ValueError(f"{name}: b2 must move pixels by at most {_LARGEST_SKEW}, got {skew:.3g}: fix it at 0")
    if b2:
        logger.info("%s: b2 (%g) has no effect; it moves pixels by at most %.2g", name, b2, skew)
    return scaled((f + b1, f, cx + w / 2, cy + h / 2), (w, h), name), photo_lens(name, _MODELS[kind], terms)


def _in_world(file: Path, transform: ElementTree.Element | None, poses: Tensor) -> Tensor:
    """Returns poses (N, 4, 4) of a chunk in world coordinates; without a transform, those of the chunk."""
    if transform is None:
        return poses
    defaults = {"rotation": "1 0 0 0 1 0 0 0 1", "translation": "0 0 0", "scale": "1"}
    rotation, shift, (scale,) = (
        numbers_in(f"{file}: {key}", transform.findtext(key, default), (len(default.split()),), f"numbers as {default}")
        for key, default in defaults.items()
    )
    world = poses.clone()
    world[:, :3, 3] *= scale
    # Positions on Earth need the digits of float64.
    axes = torch.tensor(rotation, dtype=torch.float64).view(3, 3)
    world = pose_matrices(axes, torch.tensor(shift, dtype=torch.float64)) @ world
    middle = world[:, :3, 3].median(dim=0).values
    if not _EARTH[0] < float(middle.norm()) < _EARTH[1]:
        return world
    # The normal of the ellipsoid, and the axes of the plane that it is normal to.
    up = F.normalize(middle / torch.tensor(_WGS84, dtype=torch.float64).square(), dim=0)
    east = F.normalize(torch.stack((-up[1], up[0], 0 * up[2])), dim=0)
    latitude, longitude = math.degrees(math.asin(up[2])), math.degrees(math.atan2(up[1], up[0]))
    logger.info("%s: positions are metres east, north and up of %.6f, %.6f degrees", file, latitude, longitude)
    world[:, :3, 3] -= middle
    return pose_matrices(torch.stack((east, torch.linalg.cross(up, east), up)), torch.zeros_like(up)) @ world


FORMAT = Format("Metashape", "cameras.xml, of any name", lambda folder: bool(_files(folder)), load_metashape, order=70)
