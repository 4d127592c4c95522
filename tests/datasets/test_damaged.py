"""Files of scenes that fuzzing found: they were accepted, crashed a reader, or kept it busy for ever."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from fuzz_scenes import SCENES, write_files

from voxelfield.datasets.colmap import check_binary_model
from voxelfield.datasets.loading import load_scene

INTRINSICS = r"\.png: focal lengths must be finite and at least 0\.001 pixels"


def write(folder: Path, scene: str, changed: str, content: bytes) -> None:
    write_files(folder, SCENES[scene][1]() | {changed: content})


def one_line(folder: Path) -> str:
    """Returns the refusal of a folder, which must be one line."""
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        load_scene(folder, splits=None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("scene", "values", "message"),
    [
        ("blender", {"camera_angle_x": 10**400}, "'camera_angle_x' must be a finite number, got 1000"),
        ("blender", {"transform_matrix": 10**400}, "must be a 4x4 matrix of numbers, got 1000"),
        ("blender", {"camera_angle_x": 1e-300}, "'camera_angle_x' must be radians between 0 and pi, got 1e-300$"),
        ("nerfstudio", {"fl_x": 1e-300}, INTRINSICS),
        ("nerfstudio", {"fl_x": 1e39}, INTRINSICS),
        ("nerfstudio", {"cy": -1e30}, INTRINSICS),
    ],
)
def test_numbers_beyond_floats_and_intrinsics_of_no_camera_are_refused(tmp_path, scene, values, message):
    (listing,) = (path for path in SCENES[scene][1]() if path.endswith(".json"))
    meta = json.loads(SCENES[scene][1]()[listing])
    for key, value in values.items():
        (meta["frames"][0] if key == "transform_matrix" else meta)[key] = value
    write(tmp_path, scene, listing, json.dumps(meta).encode())
    assert re.search(message, one_line(tmp_path))


def test_a_numpy_header_that_is_no_python_is_refused(tmp_path):
    name = "poses_bounds.npy"
    content = SCENES["llff"][1]()[name]
    write(tmp_path, "llff", name, content.replace(b"(4, 17), }", b"(4, (17), "))
    assert f"{name}: not a NumPy array of numbers" in one_line(tmp_path)


@pytest.mark.parametrize(
    ("quaternion", "message"),
    [
        (b"1.3 0.5 0.6 -0.4", "pose of v0.png must be a rotation"),
        *(
            (b" ".join(4 * [size]), "sparse/0: pose of v0.png must have a unit quaternion, got [")
            for size in (b"0", b"1e-200", b"0.01")
        ),
    ],
)
def test_a_quaternion_that_is_no_rotation_is_refused(tmp_path, quaternion, message):
    """Nor is a short one the identity."""
    name = "sparse/0/images.txt"
    number, *_, x, y, z, camera, image = SCENES["colmap_text"][1]()[name].split(b"\n")[0].split(b" ")
    rest = SCENES["colmap_text"][1]()[name].partition(b"\n")[2]
    line = b" ".join([number, quaternion, x, y, z, camera, image])
    write(tmp_path, "colmap_text", name, line + b"\n" + rest)
    assert message in one_line(tmp_path)


@pytest.mark.parametrize(
    ("form", "offset", "values", "message"),
    [
        # No image that is there can have been resized from it.
        ("<Q", 16, (2**64 - 1,), r"\.png: size must be in proportion to 1\.84467e\+19x4"),
        ("<QQ", 16, (0, 4), "camera 1 must have a size of at least 1x1, got 0x4"),
        ("<i", 12, (99,), "the model of a camera must be one that COLMAP knows, got 99"),
    ],
    ids=["too many pixels", "no pixels", "unknown model"],
)
def test_a_camera_that_there_cannot_be_is_refused(tmp_path, form, offset, values, message):
    name = "sparse/0/cameras.bin"
    content = bytearray(SCENES["colmap_binary"][1]()[name])
    struct.pack_into(form, content, offset, *values)
    write(tmp_path, "colmap_binary", name, bytes(content))
    assert re.search(message, one_line(tmp_path))


@pytest.mark.parametrize("name", ["cameras", "images", "points3D", "rigs", "frames"])
def test_binary_files_must_be_as_long_as_they_say(tmp_path, name):
    """pycolmap would read on for hours, or fill the memory."""
    path = f"sparse/0/{name}.bin"
    content = SCENES["colmap_binary"][1]()[path]
    write_files(tmp_path, SCENES["colmap_binary"][1]())
    check_binary_model(tmp_path / "sparse" / "0")
    for damaged in (struct.pack("<Q", 1 << 60) + content[8:], content[:-1], content[:5], b""):
        (tmp_path / path).write_bytes(damaged)
        assert f"{name}.bin: must " in one_line(tmp_path)
