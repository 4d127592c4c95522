"""Data of a scene beside its images: tensors of one value per image or per pixel, such as times and depths."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from voxelfield.datasets.loading import load_scene
from voxelfield.datasets.scene import Split
from voxelfield.rendering.cameras import Cameras

SIZE = (8, 6)


def write(folder: Path, frames: list[dict[str, Any]], file: str = "transforms.json", **meta: Any) -> Path:
    """Writes a capture of one opaque image for each dict of further keys of its frames."""
    (folder / "images").mkdir(exist_ok=True)
    listed = []
    for index, keys in enumerate(frames):
        Image.new("RGB", SIZE).save(folder / "images" / f"{index}.png")
        pose = torch.eye(4)
        pose[0, 3], pose[2, 3] = index, 4
        listed.append({"file_path": f"images/{index}.png", "transform_matrix": pose.tolist()} | keys)
    (folder / file).write_text(json.dumps({"camera_angle_x": 0.8, **meta, "frames": listed}))
    return folder


def write_depth(path: Path, values: np.ndarray, dtype: type = np.uint16) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(values.astype(dtype)).save(path)


def ramp(width: int = SIZE[0], height: int = SIZE[1]) -> np.ndarray:
    return 1000 + 7000 * np.arange(height)[:, None] + np.arange(width)


def test_times_of_every_split_are_read(tmp_path):
    write(tmp_path, [{"time": 0.0}, {"time": 0.25}, {"time": 1}], "transforms_train.json")
    write(tmp_path, [{"time": 0.5}], "transforms_test.json")
    scene = load_scene(tmp_path)
    assert scene.train.extras["time"].tolist() == [0, 0.25, 1]
    assert scene.train.extras["time"].dtype == torch.float32
    assert scene.test.extras["time"].tolist() == [0.5]


def test_times_follow_their_views_when_some_are_held_out(tmp_path):
    scene = load_scene(write(tmp_path, [{"time": index / 8} for index in range(6)]), holdout=3)
    assert scene.train.names == ("1", "2", "4", "5")
    assert scene.train.extras["time"].tolist() == [1 / 8, 2 / 8, 4 / 8, 5 / 8]
    assert scene.test.extras["time"].tolist() == [0, 3 / 8]


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([{"time": 0.5}, {}], r"images/1\.png: must have a time, as 1 of 2 images of its split have, got none$"),
        ([{"time": "noon"}], r"transforms\.json: 'time' must be a finite number, got 'noon'$"),
        ([{"depth_file_path": 3}], r"transforms\.json: 'depth_file_path' of frame 0 must be a path, got 3$"),
        ([{"depth_unit_scale_factor": 0}], r"transforms\.json: 'depth_unit_scale_factor' must be above 0, got 0$"),
    ],
)
def test_wrong_values_are_named(tmp_path, frames, message):
    with pytest.raises(ValueError, match=message):
        load_scene(write(tmp_path, frames), holdout=0)


@pytest.mark.parametrize(("start", "merged"), [(0.0, 0), (1.7e9, 1)])
def test_times_that_float32_cannot_tell_apart_are_named(tmp_path, caplog, start, merged):
    load_scene(write(tmp_path, [{"time": start}, {"time": start + 1}]), holdout=0)
    assert caplog.text.count("1 different times are equal to others in float32, as 1.7e+09 is so large") == merged


@pytest.mark.parametrize("meta", [{}, {"depth_unit_scale_factor": 0.01}], ids=["millimetres", "given"])
def test_depths_are_read_in_their_units(tmp_path, meta):
    write_depth(tmp_path / "depth" / "0.png", ramp())
    write_depth(tmp_path / "depth" / "1.png", ramp()[::2, ::2])
    frames = [{"depth_file_path": "depth/0.png"}, {"depth_file_path": "depth/1.png"}, {}]
    depth = load_scene(write(tmp_path, frames, **meta), holdout=0, depth=True).train.extras["depth"]
    assert "depth" not in load_scene(tmp_path, holdout=0).train.extras, "unless asked for"
    unit = meta.get("depth_unit_scale_factor", 0.001)
    assert depth.shape == (3, 6, 8)
    assert depth.dtype == torch.float32
    torch.testing.assert_close(depth[0], torch.from_numpy(ramp()).float() * unit)
    half = torch.from_numpy(ramp()[::2, ::2].copy()).float().repeat_interleave(2, 0).repeat_interleave(2, 1)
    torch.testing.assert_close(depth[1], half * unit)
    assert not depth[2].any()


def test_depths_are_shrunk_without_blending(tmp_path):
    write_depth(tmp_path / "depth" / "0.png", ramp())
    scene = load_scene(write(tmp_path, [{"depth_file_path": "depth/0.png"}]), holdout=0, downscale=2, depth=True)
    depth = (scene.train.extras["depth"][0] * 1000).round().long()
    assert depth.shape == (3, 4)
    assert set(depth.flatten().tolist()) <= set(ramp().flatten().tolist())
    assert (depth.diff(dim=0) == 14_000).all()
    assert (depth.diff(dim=1) == 2).all()


@pytest.mark.parametrize("shape", [(6, 8), (3, 4, 1)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_depths_may_be_arrays_of_floating_point(tmp_path, shape, dtype):
    values = np.linspace(0.5, 40, 6 * 8).reshape(6, 8)[:: 6 // shape[0], :: 6 // shape[0]].astype(dtype)
    values[0, 0], values[1, 1], values[-1, -1] = np.nan, np.inf, -1
    np.save(tmp_path / "0.npy", values.reshape(shape))
    frames = [{"depth_file_path": "0.npy", "depth_unit_scale_factor": 2.0}]
    depth = load_scene(write(tmp_path, frames), holdout=0, depth=True).train.extras["depth"][0]
    values[0, 0] = values[1, 1] = values[-1, -1] = 0
    repeated = values.astype(np.float32).repeat(6 // shape[0], axis=0).repeat(6 // shape[0], axis=1)
    assert torch.equal(depth, 2 * torch.from_numpy(repeated))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((6, 8), dtype=np.int32), r" must be an array \(H, W\) of floating point, got \(6, 8\) of int32"),
        (np.ones((6, 8, 3)), r" must be an array \(H, W\) of floating point, got \(6, 8, 3\) of float64"),
        (np.ones((8, 8)), " size must be in proportion to its image's, 8x6, got 8x8"),
        (np.array([{}]), r" not a NumPy array of numbers \(Object arrays cannot be loaded when allow_pickle=False"),
    ],
)
def test_arrays_of_another_kind_are_refused(tmp_path, array, message):
    np.save(tmp_path / "0.npy", array)
    with pytest.raises(ValueError, match=rf"0\.npy:{message}"):
        load_scene(write(tmp_path, [{"depth_file_path": "0.npy"}]), holdout=0, depth=True)


def test_a_capture_without_depths_is_refused_where_they_are_asked_for(tmp_path):
    with pytest.raises(
        ValueError, match=r"^depth \(trainer\.loss\.depth\) must be off for .*, which was read as nerfst"
    ):
        load_scene(write(tmp_path, [{}, {}]), holdout=0, depth=True)


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        (ramp(8, 8), np.uint16, "size must be in proportion to its image's, 8x6, got 8x8"),
        (ramp() / 256, np.uint8, r"unreadable image \(must be grey with 16 bits, as depths are, got Pillow's mode L"),
    ],
)
def test_depth_images_of_another_kind_are_refused(tmp_path, values, dtype, message):
    write_depth(tmp_path / "depth" / "0.png", values, dtype)
    with pytest.raises(ValueError, match=rf"depth/0\.png: {message}"):
        load_scene(write(tmp_path, [{"depth_file_path": "depth/0.png"}]), holdout=0, depth=True)


# --- the split


def make(**extras: Any) -> Split:
    cameras = Cameras(torch.eye(4).expand(3, 4, 4), torch.ones(3, 4), *SIZE)
    images = torch.arange(3 * 6 * 8 * 4).view(3, 6, 8, 4).to(torch.uint8)
    masks = torch.rand(3, 6, 8) < 0.9
    return Split(images, cameras, ("a", "b", "c"), masks, tuple(map(Path, "abc")), extras)


def test_a_subset_keeps_what_belongs_to_its_views():
    extras = {"time": torch.rand(3), "code": torch.rand(3, 5), "normal": torch.rand(3, 6, 8, 3), "id": torch.arange(3)}
    split = make(**extras)
    for index, numbers in ((slice(1, None), [1, 2]), ([2, 0], [2, 0]), (torch.tensor([True, False, True]), [0, 2])):
        some = split[index]
        assert some.names == tuple("abc"[number] for number in numbers)
        assert some.paths == tuple(Path("abc"[number]) for number in numbers)
        assert len(some.cameras) == len(numbers)
        for actual, whole in ((some.images, split.images), (some.masks, split.masks)):
            assert torch.equal(actual, whole[numbers])
        for name, values in extras.items():
            assert torch.equal(some.extras[name], values[numbers])
    with pytest.raises(TypeError, match="index must be a slice, a sequence or a tensor, got the int 1"):
        split[1]


def test_a_subset_of_images_that_differ_in_size():
    cameras = Cameras.of_sizes(torch.eye(4).expand(2, 4, 4), torch.ones(2, 4), torch.tensor([[8, 6], [4, 5]]))
    depth = torch.rand(2, 6, 8)
    small = Split(torch.zeros(2, 6, 8, 4, dtype=torch.uint8), cameras, ("a", "b"), extras={"depth": depth})[[1]]
    assert small.images.shape == (1, 5, 4, 4)
    assert torch.equal(small.extras["depth"], depth[1:, :5, :4])


def test_a_share_of_the_images_is_read_by_the_numbers_of_all_views():
    depth = torch.rand(3, 6, 8)
    whole = make(depth=depth, time=torch.rand(3))
    parts = {"images": whole.images[1:], "masks": whole.masks[1:], "extras": {**whole.extras, "depth": depth[1:]}}
    split = dataclasses.replace(whole, **parts, local_slice=slice(1, 3))
    for index in (1, 2, -1):
        assert torch.equal(split.image(index), whole.image(index))
        assert torch.equal(split.mask(index), whole.mask(index))
    with pytest.raises(IndexError, match="local views, got 0 for a split that has views 1 to 2 of 3"):
        split.image(0)
    with pytest.raises(ValueError, match="all images where views are selected, got one that has views 1 to 2"):
        split[1:]
    with pytest.raises(ValueError, match=r"Split\.images must have shape \(2, 6, 8, 4\)"):
        dataclasses.replace(split, images=whole.images)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.rand(2), ValueError, r"must have shape \(3\), got \(2,\)"),
        (torch.rand(()), ValueError, r"must have shape \(3\), got \(\)"),
        (torch.rand(2, 5), ValueError, r"must have shape \(3, K\), got \(2, 5\)"),
        (torch.rand(3, 8, 6), ValueError, r"must have shape \(3, 6, 8\), got \(3, 8, 6\)"),
        (torch.rand(3, 3, 4, 3), ValueError, r"must have shape \(3, 6, 8, 3\), got \(3, 3, 4, 3\)"),
        ([0.0, 0.5, 1.0], TypeError, r"must be a torch\.Tensor, got list"),
        (torch.rand(3, device="meta"), ValueError, "must be on the CPU, got a tensor on meta"),
    ],
)
def test_shapes_are_checked_when_the_split_is_made(value, error, message):
    with pytest.raises(error, match=rf"^Split\.extras\['depth'\] {message}"):
        make(depth=value)
