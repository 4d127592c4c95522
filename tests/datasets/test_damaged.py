"""Files of scenes that fuzzing found: they were accepted, crashed a reader, or kept it busy for ever."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from fuzz_scenes import SCENES, write_files

from voxelfield.datasets.colmap import check_binary_model
from voxelfield.datasets.loading import load_scene


def write(folder: Path, scene: str, changed: str, content: bytes) -> Path:
    write_files(folder, SCENES[scene][1]() | {changed: content})
    return folder


def edited(scene: str, path: str, **values: object) -> bytes:
    meta = json.loads(SCENES[scene][1]()[path])
    for key, value in values.items():
        if key in ("file_path", "transform_matrix"):
            meta["frames"][0][key] = value
        else:
            meta[key] = value
    return json.dumps(meta).encode()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"camera_angle_x": 10**400}, "'camera_angle_x' must be a finite number, got 1000"),
        ({"transform_matrix": 10**400}, "must be a 4x4 matrix of numbers, got 1000"),
        ({"camera_angle_x": 1e-300}, "'camera_angle_x' must be radians between 0 and pi, got 1e-300$"),
    ],
)
def test_numbers_beyond_floats_are_refused(tmp_path, values, message):
    listing = "transforms_train.json"
    write(tmp_path, "blender", listing, edited("blender", listing, **values))
    with pytest.raises(ValueError, match=message) as caught:
        load_scene(tmp_path, splits=None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values", [{"fl_x": 1e-300}, {"fl_x": 1e39}, {"cy": -1e30}], ids=lambda values: next(iter(values))
)
def test_intrinsics_of_no_camera_are_refused(tmp_path, values):
    listing = "transforms.json"
    write(tmp_path, "nerfstudio", listing, edited("nerfstudio", listing, **values))
    with pytest.raises(ValueError, match=r"\.png: focal lengths must be finite and at least 0\.001 pixels") as caught:
        load_scene(tmp_path, splits=None)
    assert "\n" not in str(caught.value)


def test_a_numpy_header_that_is_no_python_is_refused(tmp_path):
    name = "poses_bounds.npy"
    content = SCENES["llff"][1]()[name]
    write(tmp_path, "llff", name, content.replace(b"(4, 17), }", b"(4, (17), "))
    with pytest.raises(ValueError, match=f"{name}: not a NumPy array of numbers"):
        load_scene(tmp_path, splits=None)


def test_a_quaternion_that_is_no_rotation_is_refused(tmp_path):
    name = "sparse/0/images.txt"
    lines = SCENES["colmap_text"][1]()[name].split(b"\n")
    words = lines[0].split(b" ")
    words[1:5] = [b"1.3", b"0.5", b"0.6", b"-0.4"]
    write(tmp_path, "colmap_text", name, b"\n".join([b" ".join(words), *lines[1:]]))
    with pytest.raises(ValueError, match=r"pose of v0\.png must be a rotation"):
        load_scene(tmp_path, splits=None)


def test_a_camera_of_more_pixels_than_there_can_be_is_refused(tmp_path):
    """No image that is there can have been resized from it."""
    name = "sparse/0/cameras.bin"
    content = bytearray(SCENES["colmap_binary"][1]()[name])
    struct.pack_into("<Q", content, 16, 2**64 - 1)
    write(tmp_path, "colmap_binary", name, bytes(content))
    with pytest.raises(ValueError, match=r"\.png: size must be in proportion to 1\.84467e\+19x4"):
        load_scene(tmp_path, splits=None)


def test_a_camera_without_pixels_is_refused(tmp_path):
    name = "sparse/0/cameras.bin"
    content = bytearray(SCENES["colmap_binary"][1]()[name])
    struct.pack_into("<QQ", content, 16, 0, 4)
    write(tmp_path, "colmap_binary", name, bytes(content))
    with pytest.raises(ValueError, match="camera 1 must have a size of at least 1x1, got 0x4"):
        load_scene(tmp_path, splits=None)


@pytest.mark.parametrize("name", ["cameras", "images", "points3D", "rigs", "frames"])
def test_binary_files_must_be_as_long_as_they_say(tmp_path, name):
    """pycolmap would read on for hours, or fill the memory."""
    path = f"sparse/0/{name}.bin"
    content = SCENES["colmap_binary"][1]()[path]
    write_files(tmp_path, SCENES["colmap_binary"][1]())
    check_binary_model(tmp_path / "sparse" / "0")
    for damaged in (struct.pack("<Q", 1 << 60) + content[8:], content[:-1], content[:5], b""):
        (tmp_path / path).write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name}\.bin: must ") as caught:
            load_scene(tmp_path, splits=None)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [b"0", b"1e-200", b"0.01"])
def test_a_short_quaternion_is_not_the_identity(tmp_path, size):
    lines = SCENES["colmap_text"][1]()["sparse/0/images.txt"].split(b"\n")
    number, *_, x, y, z, camera, name = lines[0].split(b" ")
    lines[0] = b" ".join([number, *[size] * 4, x, y, z, camera, name])
    write(tmp_path, "colmap_text", "sparse/0/images.txt", b"\n".join(lines))
    with pytest.raises(ValueError, match=r"sparse.0: pose of v0\.png must have a unit quaternion, got \["):
        load_scene(tmp_path)


def test_a_camera_model_that_colmap_does_not_know_is_refused(tmp_path):
    content = bytearray(SCENES["colmap_binary"][1]()["sparse/0/cameras.bin"])
    struct.pack_into("<i", content, 12, 99)
    write(tmp_path, "colmap_binary", "sparse/0/cameras.bin", bytes(content))
    with pytest.raises(ValueError, match="the model of a camera must be one that COLMAP knows, got 99"):
        load_scene(tmp_path, splits=None)
