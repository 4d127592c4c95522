"""Keys of ``transforms*.json``: intrinsics, and keys that are refused or named in the log."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from plyfile import PlyData, PlyElement

from voxelfield.datasets.loading import load_scene

POSE = torch.eye(4).tolist()
FOCAL = {"fl_x": 50.0, "fl_y": 40.0, "cx": 23.0, "cy": 17.0}


def write(folder: Path, frame: dict[str, Any] | None = None, size: tuple[int, int] = (48, 36), **meta: Any) -> Path:
    """Writes a capture of one image of a size; ``frame`` holds further keys of its only frame."""
    (folder / "images").mkdir(exist_ok=True)
    Image.new("RGB", size).save(folder / "images" / "a.png")
    frames = [{"file_path": "images/a.png", "transform_matrix": POSE, **(frame or {})}]
    (folder / "transforms.json").write_text(json.dumps({**meta, "frames": frames}))
    return folder


def intrinsics_of(folder: Path) -> list[float]:
    return load_scene(folder, holdout=0).train.cameras.intrinsics[0].tolist()


def angle(side: float, focal: float) -> float:
    return 2 * math.atan(side / (2 * focal))


@pytest.mark.parametrize(
    ("frame", "meta", "expected"),
    [
        ({}, {"camera_angle_x": angle(48, 50), "camera_angle_y": angle(36, 40)}, [50, 40, 24, 18]),
        ({}, {"camera_angle_x": angle(48, 50)}, [50, 50, 24, 18]),
        ({}, {"camera_angle_y": angle(36, 40)}, [40, 40, 24, 18]),
        ({}, {"x_fov": math.degrees(angle(48, 50)), "y_fov": math.degrees(angle(36, 40))}, [50, 40, 24, 18]),
        ({}, {"fl_y": 40}, [40, 40, 24, 18]),
        ({}, {"fl_x": 50, "camera_angle_y": angle(36, 40), "cx": 20}, [50, 40, 20, 18]),
        ({"camera_angle_x": angle(48, 60)}, {"fl_x": 50, "fl_y": 40}, [60, 40, 24, 18]),
        ({"fl_y": 45, "cy": 10}, {"fl_x": 50, "fl_y": 40}, [50, 45, 24, 10]),
        ({"fl_x": None}, FOCAL | {"w": None, "h": None}, [50, 40, 23, 17]),
        # Images that were resized since: by a half, to twice the size, and with a pixel of rounding.
        ({}, FOCAL | {"w": 96, "h": 72}, [25, 20, 11.5, 8.5]),
        ({}, FOCAL | {"w": 24, "h": 18}, [100, 80, 46, 34]),
        ({}, FOCAL | {"w": 97, "h": 72}, [50 * 48 / 97, 20, 23 * 48 / 97, 8.5]),
        ({"w": 96, "h": 72}, FOCAL | {"w": 48, "h": 36}, [25, 20, 11.5, 8.5]),
        ({}, FOCAL | {"w": 96}, [25, 20, 11.5, 8.5]),
        ({}, {"camera_angle_x": angle(48, 50), "w": 480, "h": 360, "cx": 230}, [50, 50, 23, 18]),
    ],
)
def test_focal_lengths_and_principal_points(tmp_path, frame, meta, expected):
    assert intrinsics_of(write(tmp_path, frame, **meta)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("size", "meta", "message"),
    [
        ((36, 48), {"w": 48, "h": 36}, r"proportion to 48x36 \(from 'w' and 'h' in .*json\), got 36x48: rotated\?$"),
        ((18, 24), {"w": 48, "h": 36}, r"proportion to 48x36 .*, got 18x24: rotated\?$"),
        ((36, 36), {"w": 48, "h": 36}, "got 36x36: is it cropped, or not the image that the camera was computed for"),
        ((44, 36), {"w": 48, "h": 36}, "got 44x36: is it cropped"),
        ((20, 15), {}, r"the principal point \(23, 17\) belongs to, got 20x15: was the image resized\?$"),
    ],
)
def test_images_that_are_not_those_of_the_camera_are_refused(tmp_path, size, meta, message):
    with pytest.raises(ValueError, match=rf"images/a\.png: size must be .*{message}"):
        load_scene(write(tmp_path, size=size, **FOCAL, **meta), holdout=0)


@pytest.mark.parametrize(
    ("frame", "meta", "message"),
    [
        (
            {},
            {"rolling_shutter": [0, 0, 1, 0]},
            r"'rolling_shutter' must be absent, got \[0, 0, 1, 0\]: give motion .* as rolling_shutter_time, camera_lin",
        ),
        ({"transform_matrix_end": POSE}, {}, "'transform_matrix_end' must be absent, .*: give motion during"),
        ({}, {"equirectangular": True}, "'equirectangular' must be absent, got True: give 'camera_model' as EQUIR"),
        ({"shift_x": 0.1}, {}, "'shift_x' must be absent, got 0.1: give the principal point as cx and cy"),
        ({}, {"normal_mts_args": ["a"]}, "'normal_mts_args' must be absent, .*Mitsuba"),
        ({}, {"pixel_aspect_y": 1.5}, "'pixel_aspect_y' must be absent, got 1.5"),
    ],
)
def test_keys_that_would_change_the_geometry_are_refused(tmp_path, frame, meta, message):
    with pytest.raises(ValueError, match=rf"transforms\.json: {message}"):
        load_scene(write(tmp_path, frame, **FOCAL, **meta), holdout=0)


@pytest.mark.parametrize(
    ("size", "meta", "expected"),
    [
        # Pixels per half a turn in the file, pixels per radian in cameras.
        ((48, 24), {"fl_x": 24, "fl_y": 24, "cx": 24, "cy": 12, "w": 48, "h": 24}, [24, 24, 24, 12]),
        ((48, 24), {}, [24, 24, 24, 12]),
        ((48, 24), {"w": 480, "h": 240, "fl_x": 480, "cx": 560, "cy": 110}, [48, 24, 56, 11]),
    ],
)
def test_panoramas_and_crops_of_them(tmp_path, size, meta, expected):
    folder = write(tmp_path, size=size, camera_model="EQUIRECTANGULAR", **meta)
    cameras = load_scene(folder, holdout=0).train.cameras
    assert cameras.lens.models == ("equirectangular",)
    fx, fy, *middle = cameras.intrinsics[0].tolist()
    assert [math.pi * fx, math.pi * fy, *middle] == pytest.approx(expected, rel=1e-6)
    undistorted = load_scene(folder, holdout=0, lens_distortion=False).train.cameras
    assert undistorted.lens.models == ("equirectangular",)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (
            {"fl_x": 7.6},
            "'fl_x' must be at least 24 for an EQUIRECTANGULAR image of 48x24, .* per half a turn, got 7.6",
        ),
        ({"fl_y": 7.6}, "'fl_y' must be at least 24 for"),
        ({"camera_angle_x": 3.0}, "'camera_angle_x' must be absent for an EQUIRECTANGULAR image, got 3.0: give fl_x"),
        ({"k1": 0.1}, "'camera_model' must be OPENCV or .* for a lens with k1, got 'EQUIRECTANGULAR'"),
    ],
)
def test_panoramas_that_are_none_are_refused(tmp_path, meta, message):
    with pytest.raises(ValueError, match=message):
        load_scene(write(tmp_path, size=(48, 24), camera_model="EQUIRECTANGULAR", **meta), holdout=0)


def test_a_frame_may_be_a_panorama_among_photographs(tmp_path):
    folder = write(tmp_path, {"camera_model": "EQUIRECTANGULAR"}, size=(48, 24), fl_x=30.0, fl_y=30.0)
    # The focal length of the file is that of photographs, in another unit.
    assert math.pi * load_scene(folder, holdout=0).train.cameras.intrinsics[0, 0] == pytest.approx(24)


@pytest.mark.parametrize("camera_model", ["OPENCV", "EQUIRECTANGULAR"])
def test_images_without_a_size_are_refused(tmp_path, camera_model):
    with pytest.raises(ValueError, match="'w' must be above 0 pixels, got 0"):
        load_scene(write(tmp_path, size=(48, 24), camera_model=camera_model, w=0, h=24, fl_x=48), holdout=0)


@pytest.mark.parametrize("keys", [{"rolling_shutter_time": 0.02}, {"camera_linear_velocity": [0, 2, 0]}], ids=str)
def test_half_of_a_rolling_shutter_is_named(tmp_path, caplog, keys):
    assert load_scene(write(tmp_path, fl_x=30.0, **keys), holdout=0).train.cameras.rolling is None
    (key,) = keys
    assert f"these keys have no effect: '{key}'" in caplog.text


@pytest.mark.parametrize(("of_frame", "key"), [(True, "train_filenames"), (False, "mask_path")])
def test_keys_at_the_wrong_level_are_named(tmp_path, caplog, of_frame, key):
    holders = [{}, {}]
    holders[of_frame][key] = "masks/a.png"
    load_scene(write(tmp_path, holders[True], **FOCAL, **holders[False]), holdout=0)
    assert f"these keys have no effect: '{key}' ('masks/a.png')" in caplog.text


def test_velocities_of_a_rolling_shutter(tmp_path):
    velocity = {"camera_angular_velocity": [0.5, 0, -1], "camera_linear_velocity": [0, 2, 0]}
    folder = write(tmp_path, velocity, rolling_shutter_time=0.1, **FOCAL)
    cameras = load_scene(folder, holdout=0, image_size=24).train.cameras
    # 18 rows of the image as it is read.
    assert (18 * cameras.rolling[0, :6]).tolist() == pytest.approx([0.05, 0, -0.1, 0, 0.2, 0])
    assert cameras.rolling[0, 6] == 9
    assert cameras.kinds == "rolling shutter"
    still = write(tmp_path, velocity, **FOCAL)
    assert load_scene(still, holdout=0).train.cameras.rolling is None


@pytest.mark.parametrize(
    ("frame", "seconds", "message"),
    [
        (
            {"camera_linear_velocity": [1, 2]},
            0.1,
            r"'camera_linear_velocity' must be a list of 3 numbers, got \[1, 2\]",
        ),
        (
            {"camera_linear_velocity": [1, 2, "x"]},
            0.1,
            r"'camera_linear_velocity' must be a list of 3 numbers, got \[1, 2, 'x'\]",
        ),
        ({"camera_angular_velocity": [40, 0, 0]}, 0.1, "must turn a camera by at most half a turn and move it by"),
        ({}, -1, "'rolling_shutter_time' must be at least 0 seconds, got -1"),
    ],
)
def test_motions_that_are_none_are_refused(tmp_path, frame, seconds, message):
    with pytest.raises(ValueError, match=message):
        load_scene(write(tmp_path, frame, rolling_shutter_time=seconds, **FOCAL), holdout=0)


def test_keys_without_effect_are_named_once(tmp_path, caplog):
    wide = angle(48, 30)
    frame = {"time": 0.5, "depth_file_path": "depth/a.png", "normal_path": "a.png", "convention": "opencv"}
    meta = {"white_transparent": True, "ply_file_path": "sparse_pc.ply", "camera_angle_x": wide, "w": 48}
    with caplog.at_level(logging.INFO):
        load_scene(write(tmp_path, frame, **FOCAL, **meta), holdout=0)
    file = tmp_path / "transforms.json"
    records = [record for record in caplog.records if "transforms" in record.name]
    told = [(record.levelname, record.getMessage()) for record in records]
    assert sorted(told) == [
        ("WARNING", f"{file}: 'camera_angle_x' ({wide}) has no effect, because 'fl_x' (50.0) is another focal length"),
        ("WARNING", f"{file}: 1 files of depths are missing, the first is {tmp_path / 'depth' / 'a.png'}"),
        ("WARNING", f"{file}: the file of points, {tmp_path / 'sparse_pc.ply'}, is missing"),
        (
            "WARNING",
            f"{file}: these keys have no effect: 'white_transparent' (True), 'normal_path' ('a.png'), 'convention' "
            "('opencv')",
        ),
    ]


# Rows that nerfstudio's converter of COLMAP models writes.
APPLIED = [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, -1.0, 0.0, 0.5]]


def write_points(file: Path, points: np.ndarray, *, text: bool = False) -> None:
    vertices = np.array([tuple(point) for point in points], dtype=[(axis, "f4") for axis in "xyz"])
    PlyData([PlyElement.describe(vertices, "vertex")], text=text).write(str(file))


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("kind", ["moved", "as found", "without applied_transform"])
def test_points_of_nerfstudio_are_read_whichever_version_wrote_them(tmp_path, kind, text):
    # In front of the camera, which looks along -z.
    points = np.random.default_rng(0).uniform(-1, 1, (50, 3)) * (1.0, 1.0, 0.2) - (0.0, 0.0, 4.0)
    rotation, shift = (np.array(APPLIED)[:, part] for part in (slice(3), 3))
    stored = (points - shift) @ rotation if kind == "as found" else points
    write_points(tmp_path / "sparse_pc.ply", stored, text=text)
    meta = {"ply_file_path": "sparse_pc.ply", **({} if kind.startswith("without") else {"applied_transform": APPLIED})}
    scene = load_scene(write(tmp_path, **FOCAL, **meta), holdout=0)
    np.testing.assert_allclose(scene.points.numpy(), points, atol=1e-5)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"ply_file_path": 3}, "'ply_file_path' must be the path of a file, got 3"),
        ({"ply_file_path": "images/a.png"}, "a.png: not a PLY file of points"),
        ({"ply_file_path": "short.ply"}, "short.ply: not a PLY file of points"),
        ({"ply_file_path": "faces.ply"}, "faces.ply: not a PLY file of points"),
        ({"ply_file_path": "many.ply"}, r"many.ply: not a PLY file of points \(Unable to allocate"),
        ({"ply_file_path": "a.ply", "applied_transform": [[1, 0]]}, "'applied_transform' must be three rows of four"),
        ({"ply_file_path": "a.ply", "applied_transform": "x"}, "'applied_transform' must be three rows of four"),
    ],
    ids=str,
)
def test_points_that_cannot_be_read_are_refused_by_name(tmp_path, meta, message):
    write_points(tmp_path / "a.ply", np.ones((4, 3)))
    (tmp_path / "short.ply").write_bytes((tmp_path / "a.ply").read_bytes()[:-5])
    (tmp_path / "faces.ply").write_text("ply\nformat ascii 1.0\nelement face 0\nproperty float x\nend_header\n")
    element = "\n".join((f"element vertex {10**15}", *(f"property double {axis}" for axis in "xyz")))
    (tmp_path / "many.ply").write_text(f"ply\nformat binary_little_endian 1.0\n{element}\nend_header\n")
    with pytest.raises(ValueError, match=message):
        load_scene(write(tmp_path, **FOCAL, **meta), holdout=0)


def test_keys_of_other_programs_that_leave_the_poses_as_they_are_stay_quiet(tmp_path, caplog):
    meta = {
        **{"aabb_scale": 16, "scale": 0.5, "offset": [1, 2, 3], "applied_transform": POSE[:3], "applied_scale": 2},
        **{"orientation_override": "none", "rolling_shutter": [0, 0, 0, 0], "white_transparent": False, "shift_x": 0},
        **{"camera_angle_x": angle(48, 50), "camera_angle_y": angle(36, 40), "w": 48, "h": 36, "pixel_aspect_x": 1},
    }
    frame = {"sharpness": 31.7, "rotation": 0.01, "colmap_im_id": 3, "near": 0.1, "far": 500.0}
    load_scene(write(tmp_path, frame, **FOCAL, **meta), holdout=0)
    assert caplog.text == ""


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_byte_order_marks_are_understood(tmp_path, encoding):
    file = write(tmp_path, **FOCAL) / "transforms.json"
    file.write_text(file.read_text(), encoding=encoding)
    assert intrinsics_of(tmp_path) == [50, 40, 23, 17]


def test_text_in_another_encoding_is_named(tmp_path):
    file = write(tmp_path, **FOCAL) / "transforms.json"
    file.write_bytes(file.read_bytes() + b"\xfc")
    with pytest.raises(ValueError, match=r"transforms\.json: must be UTF-8 text, or UTF-16 with a byte order mark"):
        load_scene(tmp_path)
