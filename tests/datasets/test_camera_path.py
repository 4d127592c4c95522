"""Camera paths of nerfstudio's viewer, and what is said of files that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from voxelfield.datasets.camera_path import camera_path_file, read_camera_path
from voxelfield.rendering.cameras import Cameras

IDENTITY = [1.0, 0, 0, 2, 0, 1, 0, 3, 0, 0, 1, 4, 0, 0, 0, 1]


def content(**changes: Any) -> dict[str, Any]:
    frames = [{"camera_to_world": IDENTITY, "fov": 90.0, "aspect": 2.0}] * 2
    whole = {"camera_type": "perspective", "render_height": 40, "render_width": 80, "fps": 24, "camera_path": frames}
    return {key: value for key, value in (whole | changes).items() if value is not None}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "path.json"
    path.write_text(json.dumps(content(**changes)))
    return path


def test_poses_fields_of_view_and_sizes_are_read(tmp_path):
    path = read_camera_path(written(tmp_path))
    assert path.fps == 24
    cameras = path.cameras
    assert (len(cameras), cameras.width, cameras.height) == (2, 80, 40)
    assert cameras.c2w[0, :3, 3].tolist() == [2, 3, 4]
    # A right angle from top to bottom.
    assert cameras.intrinsics[0].tolist() == pytest.approx([20, 20, 40, 20])
    box = torch.tensor([[-9.0] * 3, [9.0] * 3])
    top = cameras.rays(torch.zeros(1, dtype=torch.int64), torch.tensor([[40.0, 0.0]]), box).directions[0]
    assert top.tolist() == pytest.approx([0, math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-6)


def test_what_is_written_is_read(tmp_path):
    c2w = torch.tensor(IDENTITY).view(1, 4, 4).repeat(2, 1, 1)
    c2w[1, :3, :3] = torch.tensor([[0.0, 0, 1], [1, 0, 0], [0, 1, 0]])
    cameras = Cameras(c2w, torch.tensor([[50.0, 50, 40, 20], [35, 35, 40, 20]]), 80, 40)
    (tmp_path / "path.json").write_bytes(camera_path_file(cameras, 24))
    path = read_camera_path(tmp_path / "path.json")
    assert path.fps == 24
    assert (path.cameras.width, path.cameras.height) == (80, 40)
    torch.testing.assert_close(path.cameras.c2w, cameras.c2w)
    torch.testing.assert_close(path.cameras.intrinsics, cameras.intrinsics)


@pytest.mark.parametrize(("focal", "degrees"), [(1e-9, 179), (1e9, 0.01)])
def test_fields_of_view_that_a_path_overshoots_to_are_written_as_valid_ones(tmp_path, focal, degrees):
    cameras = Cameras(torch.tensor(IDENTITY).view(1, 4, 4), torch.tensor([[focal, focal, 40, 20]]), 80, 40)
    (tmp_path / "path.json").write_bytes(camera_path_file(cameras, 1))
    (_, fy, _, _) = read_camera_path(tmp_path / "path.json").cameras.intrinsics[0].tolist()
    assert 2 * math.degrees(math.atan(20 / fy)) == pytest.approx(degrees, rel=1e-3)


def test_whole_spheres_are_read(tmp_path):
    frames = [{"camera_to_world": IDENTITY}]
    cameras = read_camera_path(written(tmp_path, camera_type="equirectangular", camera_path=frames)).cameras
    assert cameras.kinds == "equirectangular"
    directions = cameras.image_rays(0, torch.tensor([[-9.0] * 3, [9.0] * 3])).directions.view(40, 80, 3)
    left, ahead, below = directions[20, 20], directions[20, 40], directions[39, 3]
    assert left[0] < -0.99
    assert ahead[2] < -0.99
    assert below[1] < -0.99


def test_times_are_read(tmp_path):
    assert "time" not in read_camera_path(written(tmp_path, camera_path=2 * frame(render_time=None))).cameras.values
    path = written(tmp_path, camera_path=[*frame(render_time=0), *frame(render_time=0.25)])
    assert read_camera_path(path).cameras.values["time"].tolist() == [0, 0.25]


def frame(**changes: Any) -> list[dict[str, Any]]:
    return [{"camera_to_world": IDENTITY, "fov": 90.0} | changes]


POSE = "'camera_to_world' must "
RIGID = f"{POSE}be a rotation with a translation, "
# Keys of the only frame, and what is said of them.
FRAMES = [
    ({"render_time": 1e300}, r"'render_time' must be a number .*, got 1e\+300"),
    ({"fov": 180}, "'fov' must be a number from 0.01 to 179, got 180"),
    ({"fov": 1e-300}, "'fov' must be a number from 0.01 to 179, got 1e-300"),
    ({"fov": "wide"}, "'fov' must be a number from 0.01 to 179, got 'wide'"),
    ({"camera_to_world": [1, 2]}, POSE + r"be 16 finite numbers, row by row, got \[1, 2\]"),
    ({"camera_to_world": [math.nan] * 16}, f"{POSE}be 16 finite numbers"),
    ({"camera_to_world": [10**400] * 16}, f"{POSE}be 16 finite numbers"),
    ({"camera_to_world": [0.0] * 15 + [1.0]}, f"{RIGID}with orthonormal axes"),
    ({"camera_to_world": [*(2 * value for value in IDENTITY[:12]), 0, 0, 0, 1]}, f"{RIGID}with orthonormal axes"),
    ({"camera_to_world": [-1.0, *IDENTITY[1:]]}, f"{RIGID}not a mirror image"),
    ({"camera_to_world": [*IDENTITY[:12], 0, 0, 0, 2]}, POSE + r"have \(0, 0, 0, 1\) as its last row"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"camera_type": "fisheye"}, "'camera_type' must be perspective or equirectangular, got 'fisheye'"),
        ({"render_height": None}, "'render_height' must be a whole number from 1 to 16384, got None"),
        ({"render_width": 1.5}, "'render_width' must be a whole number from 1 to 16384, got 1.5"),
        ({"render_width": 1e29}, r"'render_width' must be a whole number from 1 to 16384, got 1e\+29"),
        ({"render_height": 16385}, "'render_height' must be a whole number from 1 to 16384, got 16385"),
        ({"render_height": math.inf}, "'render_height' must be a whole number from 1 to 16384, got inf"),
        ({"fps": 0}, "'fps' must be a number from 0.001 to 1000, got 0"),
        ({"fps": True}, "'fps' must be a number from 0.001 to 1000, got True"),
        ({"fps": 10**400}, "'fps' must be a number from 0.001 to 1000, got 1000"),
        ({"camera_path": None}, "'camera_path' must be a list of at least one frame, got None"),
        ({"camera_path": []}, r"'camera_path' must be a list of at least one frame, got \[\]"),
        ({"camera_path": [3]}, r"camera_path\[0\] must be an object, got 3"),
        (
            {"camera_path": [*frame(render_time=1), *frame()]},
            r"camera_path\[1\]: 'render_time' must be a number from .*, got None",
        ),
        *(({"camera_path": frame(**changes)}, rf"camera_path\[0\]: {message}") for changes, message in FRAMES),
    ],
)
def test_what_is_wrong_is_named(tmp_path, changes, message):
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        read_camera_path(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[]", "must hold a JSON object, got a list"), ("[" * 100_000, "not valid JSON")],
    ids=["half", "list", "deep"],
)
def test_a_file_that_is_no_json_or_not_there_is_named(tmp_path, text, message):
    (tmp_path / "path.json").write_text(text)
    with pytest.raises(ValueError, match=f"path.json: {message}"):
        read_camera_path(tmp_path / "path.json")
    with pytest.raises(FileNotFoundError, match=r"nothing\.json"):
        read_camera_path(tmp_path / "nothing.json")


def test_a_crop_is_named_because_it_is_ignored(tmp_path, caplog):
    read_camera_path(written(tmp_path, crop={"crop_center": [0, 0, 0]}))
    assert "path.json: 'crop' is ignored" in caplog.text
