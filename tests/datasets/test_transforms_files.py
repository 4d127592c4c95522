"""Keys of ``transforms*.json``: intrinsics, and keys that are refused or named in the log."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

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
        ({}, {"rolling_shutter": [0, 0, 1, 0]}, r"'rolling_shutter' must be absent, got \[0, 0, 1, 0\]: the rows"),
        (
            {"transform_matrix_end": POSE},
            {},
            "'transform_matrix_end' must be absent, .*: a camera is taken to stand",
        ),
        ({"shift_x": 0.1}, {}, "'shift_x' must be absent, got 0.1: give the principal point as cx and cy"),
        ({}, {"normal_mts_args": ["a"]}, "'normal_mts_args' must be absent, .*Mitsuba"),
        ({}, {"pixel_aspect_y": 1.5}, "'pixel_aspect_y' must be absent, got 1.5"),
    ],
)
def test_keys_that_would_change_the_geometry_are_refused(tmp_path, frame, meta, message):
    with pytest.raises(ValueError, match=rf"transforms\.json: {message}"):
        load_scene(write(tmp_path, frame, **FOCAL, **meta), holdout=0)


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
        (
            "WARNING",
            f"{file}: these keys have no effect: 'white_transparent' (True), 'ply_file_path' ('sparse_pc.ply'), "
            "'normal_path' ('a.png'), 'convention' ('opencv')",
        ),
    ]


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
