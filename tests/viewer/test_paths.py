"""Camera paths through key frames, and their files."""

from __future__ import annotations

import json
import math

import pytest
import torch

from voxelfield.rendering.cameras import Cameras, orbit
from voxelfield.viewer.camera_path import PathSettings, interpolate, read_path, write_path
from voxelfield.viewer.display import Viewpoint


def around(count: int) -> list[Viewpoint]:
    c2w = torch.eye(4)[None]
    c2w[0, 2, 3] = 3.0
    circle = orbit(Cameras(c2w, torch.tensor([[10.0, 10, 5, 5]]), 10, 10), torch.zeros(3), count)
    return [Viewpoint.of(pose, 0.5 + 0.1 * index) for index, pose in enumerate(circle.c2w)]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_path_passes_its_key_frames(count, closed):
    keys = around(count)
    frames = 10 * count if closed else 10 * (count - 1) + 1
    path = interpolate(keys, frames, closed=closed)
    assert len(path) == frames
    for index, key in enumerate(keys):
        torch.testing.assert_close(path[10 * index].matrix, key.matrix, atol=1e-5, rtol=0)
        assert path[10 * index].fov == pytest.approx(key.fov)


def test_poses_between_are_rigid_and_smooth():
    path = interpolate(around(8), 400, closed=True)
    poses = torch.stack([station.matrix for station in path]).double()
    identity = torch.eye(3, dtype=torch.float64).expand(400, 3, 3)
    torch.testing.assert_close(poses[:, :3, :3] @ poses[:, :3, :3].mT, identity, atol=1e-5, rtol=0)
    assert (poses[:, :3, :3].det() - 1).abs().max() < 1e-5
    steps = (poses - poses.roll(1, 0)).flatten(1).norm(dim=1)
    assert steps.max() < 2 * steps.median()


def test_opposite_directions_are_no_special_case():
    first, second = around(2)
    middle = interpolate([first, second], 3)[1].matrix
    assert torch.isfinite(middle).all()
    torch.testing.assert_close(middle[:3, :3] @ middle[:3, :3].mT, torch.eye(3), atol=1e-5, rtol=0)


def test_the_file_is_laid_out_as_nerfstudios():
    keys, settings = around(3), PathSettings(2.0, 24, 540, 960, closed=True)
    content = json.loads(write_path(keys, settings))
    assert content["fps"] == 24
    assert content["seconds"] == 2.0
    assert (content["render_height"], content["render_width"]) == (540, 960)
    assert content["camera_type"] == "perspective"
    assert len(content["camera_path"]) == 48
    first = content["camera_path"][0]
    assert first["camera_to_world"] == pytest.approx(keys[0].c2w, abs=1e-6)
    assert first["camera_to_world"][3::4][:3] == pytest.approx(keys[0].matrix[:3, 3].tolist(), abs=1e-6)
    assert first["fov"] == pytest.approx(math.degrees(0.5))
    assert first["aspect"] == pytest.approx(960 / 540)
    assert [frame["matrix"] for frame in content["keyframes"]] == [pytest.approx(key.c2w) for key in keys]
    assert content["is_cycle"] is True


def test_a_file_gives_back_its_key_frames():
    keys, settings = around(3), PathSettings(2.0, 24, 540, 960, closed=True)
    again, how = read_path(write_path(keys, settings), "path.json")
    assert how == settings
    for mine, given in zip(again, keys, strict=True):
        torch.testing.assert_close(mine.matrix, given.matrix)
        assert mine.fov == pytest.approx(given.fov)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keyframes": []}, r"'keyframes' must be a list of at least one frame, got \[\]"),
        ({"keyframes": [1]}, r"keyframes\[0\] must be an object, got 1"),
        ({"seconds": None}, r"'seconds' must be a number from 0\.1 to 3600, got None"),
        ({"seconds": 1e12}, r"'seconds' must be a number from 0\.1 to 3600, got 1000000000000\.0"),
        ({"fps": math.inf}, r"'fps' must be a number from 1 to 240, got inf"),
        ({"render_width": 1e29}, r"'render_width' must be a whole number from 16 to 8192, got 1e\+29"),
        ({"render_height": 8.5}, r"'render_height' must be a whole number from 16 to 8192, got 8\.5"),
        ({"is_cycle": "no"}, r"'is_cycle' must be true or false, got 'no'"),
        ({"matrix": [0.0] * 16}, r"keyframes\[0\]: 'matrix' must be a rotation with a translation"),
        ({"matrix": "[1, 2]"}, r"keyframes\[0\]: 'matrix' must be 16 finite numbers, row by row, got '\[1, 2\]'"),
        ({"fov": 180}, r"keyframes\[0\]: 'fov' must be a number from 0\.01 to 179, got 180"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(changes, message):
    content = json.loads(write_path(around(2), PathSettings()))
    for key, value in changes.items():
        (content["keyframes"][0] if key in ("matrix", "fov") else content)[key] = value
    with pytest.raises(ValueError, match=rf"^notes\.json: {message}"):
        read_path(json.dumps(content).encode(), "notes.json")


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff\xfe\x00"])
def test_other_files_are_refused_by_name(content):
    with pytest.raises(ValueError, match=r"^notes\.json: (not valid JSON|must hold a JSON object|must be UTF-8 text)"):
        read_path(content, "notes.json")


def test_a_path_needs_a_key_frame():
    with pytest.raises(ValueError, match="keys must be at least one key frame, got none"):
        interpolate([], 10)
