"""Captures: the same photographs and cameras, written in each format, are the same scene."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import shutil
import sys
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pycolmap
import pytest
import torch
from PIL import Image
from raw_png import raw_png

import voxelfield
from voxelfield import progress
from voxelfield.captures.capture import read_capture
from voxelfield.datasets import images
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.lenses import CAMERA_MODELS
from voxelfield.datasets.registry import scene_in
from voxelfield.datasets.scene import Split
from voxelfield.installed import MissingPackageError
from voxelfield.rendering.paths import orbit
from voxelfield.warps.choice import box_of_cameras, box_of_points

LEGO = Path(__file__).parents[1] / "fixtures" / "lego"
FLIP = np.diag([1.0, -1.0, -1.0, 1.0])


@pytest.fixture(scope="module")
def split() -> Split:
    """Ten views of 100 x 100 with a principal point off the centre."""
    train = load_blender(LEGO).train
    cameras = train.cameras[list(range(10))]
    cameras.intrinsics[:] = torch.tensor([140.0, 138.0, 52.0, 47.5])
    return Split(train.images[:10], cameras, tuple(f"view_{index:02d}" for index in range(10)))


def write_images(folder: Path, split: Split) -> list[str]:
    folder.mkdir(parents=True)
    for name, image in zip(split.names, split.images, strict=True):
        Image.fromarray(image.numpy()).save(folder / f"{name}.png")
    return [f"{name}.png" for name in split.names]


def write_nerfstudio(folder: Path, split: Split, **meta: object) -> None:
    names = write_images(folder / "images", split)
    fx, fy, cx, cy = split.cameras.intrinsics[0].tolist()
    frames = [
        {"file_path": f"images/{name}", "transform_matrix": pose.tolist()}
        for name, pose in zip(names, split.cameras.c2w, strict=True)
    ]
    frames.reverse()  # the order of a file means nothing
    known = {"w": 100, "h": 100, "fl_x": fx, "fl_y": fy, "cx": cx, "cy": cy, "k1": 0.0, "frames": frames}
    (folder / "transforms.json").write_text(json.dumps(known | meta))


def write_llff(folder: Path, split: Split, images: str = "images", near: float = 1.0, far: float = 6.0) -> None:
    write_images(folder / images, split)
    rows = []
    for pose in split.cameras.c2w.double().numpy():
        right, up, backwards, position = pose[:3].T
        matrix = np.stack((-up, right, backwards, position, [100, 100, 140]), axis=-1)
        rows.append([*matrix.reshape(-1), near, far])
    np.save(folder / "poses_bounds.npy", np.array(rows))


@pytest.fixture
def mine(tmp_path, split) -> Path:
    """A capture of nerfstudio."""
    write_nerfstudio(tmp_path / "mine", split)
    return tmp_path / "mine"


# The parameters of COLMAP's camera models after the focal lengths and the principal point.
COLMAP_TERMS = {
    "SIMPLE_PINHOLE": {},
    "PINHOLE": {},
    "SIMPLE_RADIAL": {"k1": -0.1},
    "RADIAL": {"k1": 0.1, "k2": -0.05},
    "OPENCV": {"k1": -0.2, "k2": 0.05, "p1": 0.01, "p2": -0.02},
    "SIMPLE_RADIAL_FISHEYE": {"k1": -0.1},
    "RADIAL_FISHEYE": {"k1": 0.1, "k2": -0.05},
    "OPENCV_FISHEYE": {"k1": 0.1, "k2": -0.05, "k3": 0.02, "k4": -0.01},
    "FULL_OPENCV": {"k1": 0.3, "k2": -0.1, "p1": 0.01, "p2": -0.02, "k3": 0.05, "k4": 0.4, "k5": 0.1, "k6": 0.02},
    "SIMPLE_FISHEYE": {},
    "FISHEYE": {},
    "THIN_PRISM_FISHEYE": {
        **{"k1": 0.05, "k2": -0.02, "p1": 0.01, "p2": -0.02, "k3": 0.01, "k4": -0.003},
        **{"sx1": 0.02, "sy1": -0.01},
    },
    "RAD_TAN_THIN_PRISM_FISHEYE": {
        **{"k0": 0.05, "k1": -0.02, "k2": 0.01, "k3": -0.004, "k4": 0.002, "k5": -0.001},
        **{"p0": 0.01, "p1": -0.02, "s0": 0.02, "s1": -0.01, "s2": 0.015, "s3": 0.005},
    },
    "FOV": {"omega": 0.9},
    "SIMPLE_DIVISION": {"k": -0.2},
    "DIVISION": {"k": 0.15},
    "EUCM": {"alpha": 0.6, "beta": 1.1},
}


def write_colmap(folder: Path, split: Split, binary: bool = True, model: str = "PINHOLE", **terms: float) -> None:
    names = write_images(folder / "images", split)
    fx, fy, cx, cy = split.cameras.intrinsics[0].tolist()
    focal = [fx] if "SIMPLE" in model or model.startswith("RADIAL") else [fx, fy]
    params = [*focal, cx, cy, *(COLMAP_TERMS[model] | terms).values()]
    lines = {"cameras": [f"1 {model} 100 100 {' '.join(map(str, params))}"], "images": [], "points3D": []}
    for index, (name, c2w) in enumerate(zip(names, split.cameras.c2w.double().numpy(), strict=True), start=1):
        w2c = np.linalg.inv(c2w @ FLIP)
        x, y, z, w = pycolmap.Rotation3d(w2c[:3, :3]).quat
        lines["images"] += [f"{index} {w} {x} {y} {z} {' '.join(map(str, w2c[:3, 3]))} 1 {name}", ""]
    for index, point in enumerate(np.random.default_rng(0).uniform(-1, 2, (500, 3)), start=1):
        lines["points3D"].append(f"{index} {' '.join(map(str, point))} 255 255 255 0.5")
    text = folder / "sparse" / "0"
    text.mkdir(parents=True)
    for name, content in lines.items():
        (text / f"{name}.txt").write_text("\n".join(content) + "\n")
    if binary:
        model_read = pycolmap.Reconstruction(text)
        shutil.rmtree(text)
        text.mkdir()
        model_read.write_binary(text)


def write_nsvf(folder: Path, split: Split, prefixes: str = "2000200020", srn: bool = False) -> None:
    write_images(folder / "rgb", split)
    (folder / "pose").mkdir()
    for prefix, name, c2w in zip(prefixes, split.names, split.cameras.c2w.double().numpy(), strict=True):
        (folder / "rgb" / f"{name}.png").rename(folder / "rgb" / f"{prefix}_{name}.png")
        np.savetxt(folder / "pose" / f"{prefix}_{name}.txt", c2w @ FLIP)
    fx, fy, cx, cy = split.cameras.intrinsics[0].tolist()
    matrix = f"{fx} 0 {cx} 0\n0 {fy} {cy} 0\n0 0 1 0\n0 0 0 1\n"
    (folder / "intrinsics.txt").write_text(f"{fx} {cx} {cy} 0.\n0. 0. 0.\n0.\n1.\n100 100\n" if srn else matrix)
    (folder / "bbox.txt").write_text("-1 -1.25 -1.5 2 2.25 2.5 0.4\n")


def write_neus(folder: Path, split: Split, masks: bool = False, name: str = "cameras_sphere", **changed: Any) -> None:
    """Writes images with their alpha, or without it and with masks of it; the object's sphere lies somewhere else."""
    write_images(folder / "image", split)
    if masks:
        (folder / "mask").mkdir()
        for index, path in enumerate(sorted((folder / "image").iterdir())):
            with Image.open(path) as image:
                image.getchannel("A").convert("RGB").save(folder / "mask" / f"{index:03d}.png")
                opaque = image.convert("RGB")
            opaque.save(path)
    fx, fy, cx, cy = split.cameras.intrinsics[0].tolist()
    pixels = np.array([[fx, 0, cx - 0.5, 0], [0, fy, cy - 0.5, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    sphere = np.diag([250.0, 250.0, 250.0, 1.0])
    sphere[:3, 3] = 30, -40, 600
    matrices: dict[str, Any] = {}
    for index, c2w in enumerate(split.cameras.c2w.double().numpy()):
        matrices[f"world_mat_{index}"] = -2 * pixels @ np.linalg.inv(c2w @ FLIP) @ np.linalg.inv(sphere)
        matrices[f"scale_mat_{index}"] = sphere
    np.savez(folder / f"{name}.npz", **{key: value for key, value in (matrices | changed).items() if value is not None})


FORMATS: dict[str, Callable[[Path, Split], None]] = {
    "nerfstudio or instant-ngp": write_nerfstudio,
    "LLFF": write_llff,
    "COLMAP": write_colmap,
    "IDR or NeuS": write_neus,
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_views_in_any_format_are_the_same_scene(tmp_path, split, name):
    FORMATS[name](tmp_path / "mine", split)
    assert scene_in(tmp_path / "mine").formats[0].name == name
    scene = voxelfield.load_scene(tmp_path / "mine", holdout=4)
    assert scene.name == "mine"
    assert scene.test.names == ("view_00", "view_04", "view_08")
    assert len(scene.train) == 7
    for part, chosen in ((scene.test, [0, 4, 8]), (scene.train, [1, 2, 3, 5, 6, 7, 9])):
        assert torch.equal(part.images, split.images[chosen])
        torch.testing.assert_close(part.cameras.c2w, split.cameras.c2w[chosen], atol=2e-6, rtol=0)
        # LLFF has one focal length, and the principal point in the middle.
        known = torch.tensor([140.0, 140, 50, 50] if name == "LLFF" else [140.0, 138, 52, 47.5])
        torch.testing.assert_close(part.cameras.intrinsics, known.expand(len(chosen), 4))


@pytest.mark.parametrize("srn", [False, True])
def test_nsvf_lists_splits_and_a_box(tmp_path, split, srn):
    write_nsvf(tmp_path / "mine", split, prefixes="2010200020", srn=srn)
    assert scene_in(tmp_path / "mine").formats[0].name == "NSVF"
    scene = voxelfield.load_scene(tmp_path / "mine", splits=("train", "val", "test"))
    assert scene.aabb.tolist() == [[-1, -1.25, -1.5], [2, 2.25, 2.5]]
    known = torch.tensor([140.0, 140 if srn else 138, 52, 47.5])
    for name, prefix, chosen in (("test", 2, [0, 4, 8]), ("val", 1, [2]), ("train", 0, [1, 3, 5, 6, 7, 9])):
        part = scene.split(name)
        assert part.names == tuple(f"{prefix}_view_{index:02d}" for index in chosen)
        assert torch.equal(part.images, split.images[chosen])
        torch.testing.assert_close(part.cameras.c2w, split.cameras.c2w[chosen], atol=2e-6, rtol=0)
        torch.testing.assert_close(part.cameras.intrinsics, known.expand(len(chosen), 4))
    half = voxelfield.load_scene(tmp_path / "mine", downscale=2, aabb=[[-2] * 3, [2] * 3])
    torch.testing.assert_close(half.train.cameras.intrinsics[0], known / 2)
    assert half.aabb.tolist() == [[-2] * 3, [2] * 3]


def test_nsvf_has_two_splits_at_least(tmp_path, split):
    write_nsvf(tmp_path / "mine", split, prefixes="1000100010")
    assert voxelfield.load_scene(tmp_path / "mine").test.names == ("1_view_00", "1_view_04", "1_view_08")


def test_masks_of_an_object_are_the_alpha_of_its_images(tmp_path, split):
    write_neus(tmp_path / "mine", split, masks=True)
    for downscale in (1, 2):
        scene = voxelfield.load_scene(tmp_path / "mine", holdout=4, downscale=downscale)
        assert scene.bounded
        assert scene.aabb.tolist() == [[-1, -1, -1], [1, 1, 1]]
        expected = np.stack(
            [images.area_resized(Image.fromarray(image.numpy()), (100 // downscale,) * 2) for image in split.images]
        )
        found, expected = scene.test.images.numpy(), expected[[0, 4, 8]]
        assert np.array_equal(found[..., 3], expected[..., 3])
        assert np.array_equal(found[found[..., 3] == 255], expected[expected[..., 3] == 255])


def test_images_without_masks_of_an_object_show_its_surroundings(tmp_path, split):
    write_neus(tmp_path / "mine", split, masks=True)
    shutil.rmtree(tmp_path / "mine" / "mask")
    assert not voxelfield.load_scene(tmp_path / "mine").bounded


def test_matrices_belong_to_images_by_the_numbers_in_their_names(tmp_path, split):
    write_neus(tmp_path / "mine", split, name="cameras")
    folder = tmp_path / "mine" / "image"
    for index, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder / f"{index}.png")
    (folder / "3.png").unlink()
    train = voxelfield.load_scene(tmp_path / "mine", holdout=0).train
    assert train.names == ("0", "1", "2", "4", "5", "6", "7", "8", "9")
    torch.testing.assert_close(train.cameras.c2w, split.cameras.c2w[[0, 1, 2, *range(4, 10)]], atol=2e-6, rtol=0)


def test_a_colmap_model_may_be_text(tmp_path, split):
    write_colmap(tmp_path / "text", split, binary=False)
    write_colmap(tmp_path / "binary", split)
    text, binary = (voxelfield.load_scene(tmp_path / name) for name in ("text", "binary"))
    assert torch.equal(text.train.cameras.c2w, binary.train.cameras.c2w)
    assert torch.equal(text.aabb, binary.aabb)


def test_points_of_a_model_are_seen_where_its_cameras_say(tmp_path, split):
    write_colmap(tmp_path / "mine", split)
    scene = voxelfield.load_scene(tmp_path / "mine", holdout=0)
    model = pycolmap.Reconstruction(tmp_path / "mine" / "sparse" / "0")
    points = torch.tensor(np.array([point.xyz for point in model.points3D.values()]), dtype=torch.float32)
    images = sorted(model.images.values(), key=lambda image: image.name)
    for index, image in enumerate(images):
        pixels = [image.project_point(point.numpy()) for point in points]
        seen = [number for number, pixel in enumerate(pixels) if pixel is not None]
        at = torch.tensor(np.array([pixels[number] for number in seen]), dtype=torch.float32)
        rays = scene.train.cameras.rays(torch.full((len(seen),), index), at, scene.aabb)
        towards = points[seen] - rays.origins
        closest = towards - (towards * rays.directions).sum(dim=-1, keepdim=True) * rays.directions
        assert closest.norm(dim=-1).max() < 1e-4


def test_every_camera_model_is_compared_with_colmap():
    assert COLMAP_TERMS.keys() == CAMERA_MODELS.keys() - {"EQUIRECTANGULAR"}


@pytest.mark.parametrize("model", COLMAP_TERMS)
def test_colmap_sees_the_rays_of_its_lenses_at_their_pixels(tmp_path, split, model):
    write_colmap(tmp_path / "mine", split, model=model)
    scene = voxelfield.load_scene(tmp_path / "mine", holdout=0)
    cameras = scene.train.cameras
    assert (cameras.lens is None) == ("PINHOLE" in model)
    known = next(iter(pycolmap.Reconstruction(tmp_path / "mine" / "sparse" / "0").cameras.values()))
    pixels = 100 * torch.rand(200, 2)
    rays = cameras.rays(torch.zeros(200, dtype=torch.int64), pixels, scene.aabb)
    x, y, z = (rays.directions @ cameras.c2w[0, :3, :3]).double().unbind(-1)
    seen = known.img_from_cam(torch.stack((x, -y, -z), dim=-1).numpy())
    torch.testing.assert_close(torch.from_numpy(np.array(seen)), pixels.double(), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("meta", "model", "expected"),
    [
        ({"k1": 0.1, "p2": 0.02}, "perspective", {"k1": 0.1, "p2": 0.02}),
        (
            {"camera_model": "OPENCV", "k1": 0.1, "k4": 0.2, "p1": -0.3},
            "perspective",
            {"k1": 0.1, "k4": 0.2, "p1": -0.3},
        ),
        ({"camera_model": "OPENCV_FISHEYE", "k2": 0.1, "k3": 0.2}, "fisheye", {"k2": 0.1, "k3": 0.2}),
        ({"camera_model": "OPENCV_FISHEYE"}, "fisheye", {}),
        ({"is_fisheye": True, "k1": 0.1}, "fisheye", {"k1": 0.1}),
        ({"camera_model": "PINHOLE", "distortion_params": [0.0] * 6}, None, None),
        ({"camera_model": "SIMPLE_PINHOLE", "is_fisheye": False}, None, None),
        ({"camera_model": "OPENCV"}, None, None),
        ({"camera_model": "OPENCV", "s2": 0.1, "latlong": False}, "perspective", {"s2": 0.1}),
        ({"camera_model": "FULL_OPENCV", "k1": 0.1, "k6": 0.2}, "rational", {"k1": 0.1, "k6": 0.2}),
        ({"camera_model": "THIN_PRISM_FISHEYE", "sx1": 0.1, "sy1": 0.2}, "fisheye", {"s1": 0.1, "s3": 0.2}),
        ({"camera_model": "FOV", "omega": 0.5}, "field_of_view", {"omega": 0.5}),
        ({"camera_model": "EUCM", "alpha": 0.5, "beta": 1.5}, "extended_unified", {"alpha": 0.5, "beta": 1.5}),
        (
            {"camera_model": "OPENCV_FISHEYE", "distortion_params": [0.1, 0, 0, 0, 0, 0.2]},
            "fisheye",
            {"k1": 0.1, "p2": 0.2},
        ),
        (
            {"camera_model": "FISHEYE624", "distortion_params": [0.1, 0, 0, 0, 0, 0.2, 0.3, 0, 0, 0, 0, 0.4]},
            "fisheye624",
            {"k1": 0.1, "k6": 0.2, "p2": 0.3, "s4": 0.4},
        ),
    ],
)
def test_lenses_of_nerfstudio_and_instant_ngp(tmp_path, split, meta, model, expected):
    write_nerfstudio(tmp_path / "mine", split, **meta)
    lens = voxelfield.load_scene(tmp_path / "mine", downscale=2).train.cameras.lens
    if model is None:
        assert lens is None
    else:
        assert lens.models == (model,) * 8
        assert lens.described(7) == (model, pytest.approx(expected))


def test_each_frame_may_have_a_lens_of_its_own(tmp_path, split):
    write_nerfstudio(tmp_path / "mine", split, k1=0.5)
    spoil_json(
        tmp_path / "mine",
        lambda c: [frame.update(k1=index / 10, k2=0.01) for index, frame in enumerate(reversed(c["frames"])) if index],
    )
    train = voxelfield.load_scene(tmp_path / "mine", holdout=0).train
    assert train.names[3] == "view_03"
    assert train.cameras.lens.described(3) == ("perspective", pytest.approx({"k1": 0.3, "k2": 0.01}))
    assert train.cameras.lens.described(0) == ("perspective", {"k1": 0.5})


def test_a_capture_may_mix_lenses(tmp_path, split):
    write_nerfstudio(tmp_path / "mine", split, k1=0.5)
    others = ({"k1": 0}, {"camera_model": "OPENCV_FISHEYE", "k1": 0.1}, {"camera_model": "PINHOLE", "k1": 0})
    spoil_json(
        tmp_path / "mine", lambda c: [frame.update(own) for frame, own in zip(c["frames"], others, strict=False)]
    )
    mixed, plain = (
        voxelfield.load_scene(tmp_path / "mine", holdout=0, lens_distortion=distortion).train.cameras
        for distortion in (True, False)
    )
    assert mixed.lens.models == (*("perspective",) * 7, "pinhole", "fisheye", "pinhole")
    assert plain.lens.models == (*("pinhole",) * 8, "fisheye", "pinhole")
    aabb = torch.tensor([[-1.0] * 3, [1.0] * 3])
    for index in range(len(mixed)):
        alone = replace(mixed[[index]], lens=mixed.lens[index : index + 1])
        assert torch.equal(mixed.image_rays(index, aabb).directions, alone.image_rays(0, aabb).directions)
    pinhole = replace(mixed, lens=None)
    assert torch.equal(mixed.image_rays(9, aabb).directions, pinhole.image_rays(9, aabb).directions)
    assert not torch.equal(mixed.image_rays(0, aabb).directions, pinhole.image_rays(0, aabb).directions)


@pytest.mark.parametrize(("camera_model", "model"), [("OPENCV", None), ("OPENCV_FISHEYE", "fisheye"), ("FOV", None)])
def test_lens_distortion_can_be_ignored(tmp_path, split, camera_model, model):
    write_nerfstudio(
        tmp_path / "mine", split, camera_model=camera_model, **{"omega" if camera_model == "FOV" else "k1": 0.1}
    )
    lens = voxelfield.load_scene(tmp_path / "mine", lens_distortion=False).train.cameras.lens
    if model is None:
        assert lens is None
    else:
        assert lens.described(0) == (model, {})


@pytest.mark.parametrize("name", FORMATS)
def test_images_are_shrunk_with_their_cameras(tmp_path, split, name):
    FORMATS[name](tmp_path / "mine", split)
    whole = voxelfield.load_scene(tmp_path / "mine", splits=("train",))
    half = voxelfield.load_scene(tmp_path / "mine", splits=("train",), downscale=2, image_size=80)
    assert half.train.images.shape[1:3] == (50, 50)
    torch.testing.assert_close(half.train.cameras.intrinsics, whole.train.cameras.intrinsics / 2)


def test_llff_finds_images_that_were_shrunk(tmp_path, split):
    write_llff(tmp_path / "mine", split, images="images_4")
    rows = np.load(tmp_path / "mine" / "poses_bounds.npy")
    rows[:, [4, 9, 14]] *= 4  # height, width and focal length are those of the originals
    np.save(tmp_path / "mine" / "poses_bounds.npy", rows)
    cameras = voxelfield.load_scene(tmp_path / "mine").train.cameras
    torch.testing.assert_close(cameras.intrinsics[0], torch.tensor([140.0, 140, 50, 50]))


def write_shrunk(folder: Path, downscale: int, suffix: str = ".png", size: tuple[int, int] = (33, 34)) -> None:
    """Writes images that only the folder can have, as each has one even colour."""
    (images,) = (path for path in (folder / "images", folder / "image") if path.is_dir())
    shrunk = images.with_name(f"{images.name}_{downscale}")
    shrunk.mkdir()
    for index, path in enumerate(sorted(images.iterdir())):
        Image.new("RGB", size, (10 * index, 0, 200)).save(shrunk / f"{path.stem}{suffix}")


@pytest.mark.parametrize("suffix", [".png", ".JPG"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_of_shrunk_images_is_used_with_the_ratio_of_its_sizes(tmp_path, split, name, suffix):
    FORMATS[name](tmp_path / "mine", split)
    whole = voxelfield.load_scene(tmp_path / "mine", holdout=4)
    write_shrunk(tmp_path / "mine", 3, suffix)
    third = voxelfield.load_scene(tmp_path / "mine", holdout=4, downscale=3)
    assert third.test.names == whole.test.names
    assert third.test.images.shape == (3, 34, 33, 4)
    assert third.test.images[:, 17, 17, 0].tolist() == pytest.approx([0, 40, 80], abs=2)
    ratio = torch.tensor([0.33, 0.34, 0.33, 0.34])
    torch.testing.assert_close(third.test.cameras.intrinsics, whole.test.cameras.intrinsics * ratio)
    smaller = voxelfield.load_scene(tmp_path / "mine", holdout=4, downscale=3, image_size=17)
    assert smaller.test.images.shape == (3, 17, 16, 4)
    assert smaller.test.images[:, 8, 8, 0].tolist() == pytest.approx([0, 40, 80], abs=2)
    assert torch.equal(voxelfield.load_scene(tmp_path / "mine", holdout=4).test.images, whole.test.images)


@pytest.mark.parametrize("name", FORMATS)
def test_images_are_averaged_where_a_shrunk_one_is_lacking(tmp_path, split, name):
    FORMATS[name](tmp_path / "mine", split)
    expected = voxelfield.load_scene(tmp_path / "mine", holdout=4, downscale=3)
    write_shrunk(tmp_path / "mine", 3)
    next((tmp_path / "mine").glob("*_3/view_05.png")).unlink()
    found = voxelfield.load_scene(tmp_path / "mine", holdout=4, downscale=3)
    for part in ("train", "test"):
        assert torch.equal(found.split(part).images, expected.split(part).images)


def test_shrunk_images_of_llff_belong_to_the_others_by_their_order(tmp_path, split):
    write_llff(tmp_path / "mine", split)
    write_shrunk(tmp_path / "mine", 3)
    for index, path in enumerate(sorted((tmp_path / "mine" / "images_3").iterdir())):
        path.rename(path.with_name(f"image{index:03d}.png"))
    scene = voxelfield.load_scene(tmp_path / "mine", holdout=4, downscale=3)
    assert scene.test.names == ("view_00", "view_04", "view_08")
    assert scene.test.images[:, 17, 17, 0].tolist() == [0, 40, 80]


def test_shrunk_images_of_llff_may_stand_alone(tmp_path, split):
    write_llff(tmp_path / "mine", split, images="images_4")
    assert voxelfield.load_scene(tmp_path / "mine", downscale=4).train.images.shape[1:3] == (100, 100)
    assert voxelfield.load_scene(tmp_path / "mine", downscale=2).train.images.shape[1:3] == (50, 50)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [(33, 35), (32, 33), (50, 50)])
def test_shrunk_images_of_another_size_are_named(tmp_path, split, name, size):
    FORMATS[name](tmp_path / "mine", split)
    write_shrunk(tmp_path / "mine", 3, size=size)
    message = rf"images?_3/view_0\d\.png: size must be 33.3333x33.3333, rounded, .*, got {size[0]}x{size[1]}$"
    with pytest.raises(ValueError, match=message):
        voxelfield.load_scene(tmp_path / "mine", downscale=3)


def mask_nerfstudio(folder: Path, masks: dict[str, np.ndarray]) -> None:
    write_masks(folder / "masks", {f"{name}.png": mask for name, mask in masks.items()})

    def add(content: dict) -> None:
        for frame in content["frames"]:
            if (name := Path(frame["file_path"]).stem) in masks:
                frame["mask_path"] = f"masks/{name}.png"

    spoil_json(folder, add)


def mask_colmap(folder: Path, masks: dict[str, np.ndarray]) -> None:
    white = np.full((100, 100), 255, dtype=np.uint8)
    every = {path.stem: masks.get(path.stem, white) for path in (folder / "images").iterdir()}
    write_masks(folder / "masks", {f"{name}.png.png": mask for name, mask in every.items()})


def write_masks(folder: Path, masks: dict[str, np.ndarray]) -> None:
    folder.mkdir()
    for name, mask in masks.items():
        Image.fromarray(mask).save(folder / name)


def some_masks() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {f"view_{index:02d}": generator.integers(0, 4, (100, 100), dtype=np.uint8) for index in (0, 1, 4)}


MASKED = {
    "nerfstudio": (write_nerfstudio, mask_nerfstudio),
    "COLMAP": (write_colmap, mask_colmap),
    "LLFF": (write_llff, mask_colmap),
}


@pytest.mark.parametrize("name", MASKED)
def test_black_pixels_of_a_mask_do_not_count(tmp_path, split, name):
    write, mask = MASKED[name]
    write(tmp_path / "mine", split)
    assert voxelfield.load_scene(tmp_path / "mine").train.masks is None
    masks = some_masks()
    mask(tmp_path / "mine", masks)
    scene = voxelfield.load_scene(tmp_path / "mine", holdout=4)
    for part in (scene.train, scene.test):
        for view, found in zip(part.names, part.masks, strict=True):
            expected = masks[view] > 0 if view in masks else np.ones((100, 100), dtype=bool)
            assert np.array_equal(found.numpy(), expected)
    half = voxelfield.load_scene(tmp_path / "mine", holdout=4, downscale=2)
    expected = (masks["view_04"] > 0).reshape(50, 2, 50, 2).all(axis=(1, 3))
    assert np.array_equal(half.test.masks[1].numpy(), expected), "a pixel counts if all that it is averaged from do"


def test_masks_are_inverted_and_weigh_pixels_by_settings(mine, caplog):
    masks = {name: 85 * mask for name, mask in some_masks().items()}
    mask_nerfstudio(mine, masks)
    grey = masks["view_01"]
    for inverted, soft, weights in (
        (True, False, np.where(grey > 0, 0, 255)),
        (False, True, grey),
        (True, True, 255 - grey),
    ):
        scene = voxelfield.load_scene(mine, holdout=4, invert_masks=inverted, soft_masks=soft)
        index = scene.train.names.index("view_01")
        assert np.array_equal(scene.train.masks[index], weights > 0)
        if soft:
            assert np.array_equal(scene.train.extras["mask_weight"][index], weights)
            assert scene.train.extras["mask_weight"][scene.train.names.index("view_02")].eq(255).all(), "without a mask"
        else:
            assert "mask_weight" not in scene.train.extras
    half = voxelfield.load_scene(mine, holdout=4, downscale=2, soft_masks=True).train
    blocks = grey.reshape(50, 2, 50, 2)
    expected = np.where((blocks > 0).all(axis=(1, 3)), blocks.mean(axis=(1, 3)), 0)
    found = half.extras["mask_weight"][half.names.index("view_01")].numpy()
    assert np.abs(found - expected).max() <= 0.5, "the mean weight of the pixels that are averaged, if all count"


def test_masks_and_transparency_are_told_apart(tmp_path, split, caplog):
    caplog.set_level("INFO")
    images = split.images.clone()
    images[..., 3] = 255
    images[:, :5, :, 3] = 0
    write_nerfstudio(tmp_path / "mine", replace(split, images=images))
    masks = np.full((100, 100), 255, dtype=np.uint8)
    masks[:, :20] = 0
    mask_nerfstudio(tmp_path / "mine", dict.fromkeys(split.names, masks))
    scene = voxelfield.load_scene(tmp_path / "mine", holdout=0)
    assert scene.train.masked() == pytest.approx({"masks": 0.2, "transparency": 0.04})
    assert "20 % ignored by masks, 4 % ignored by transparency" in caplog.text


def test_masks_of_shrunk_images_that_stand_alone_have_their_size(tmp_path, split):
    write_llff(tmp_path / "mine", split, images="images_4")
    write_masks(tmp_path / "mine" / "masks_4", {f"{name}.png": some_masks()["view_04"] for name in split.names})
    scene = voxelfield.load_scene(tmp_path / "mine", downscale=4)
    assert np.array_equal(scene.train.mask(0).numpy(), some_masks()["view_04"] > 0)


@pytest.mark.parametrize("write", [write_nerfstudio, write_nsvf])
@pytest.mark.parametrize("folder", ["masks", "Images_Mask"])
def test_masks_that_nothing_names_are_named(tmp_path, split, caplog, write, folder):
    write(tmp_path / "mine", split)
    write_masks(tmp_path / "mine" / folder, {"a.png": some_masks()["view_04"]})
    assert voxelfield.load_scene(tmp_path / "mine").train.masks is None
    assert f"{folder}: masks in this folder are not used, because " in caplog.text


def test_masks_have_the_size_of_the_whole_images(mine):
    mask_nerfstudio(mine, some_masks())
    averaged = voxelfield.load_scene(mine, holdout=4, downscale=3).test.masks
    write_shrunk(mine, 3, size=(33, 33))
    assert torch.equal(voxelfield.load_scene(mine, holdout=4, downscale=3).test.masks, averaged)


def write_blender(folder: Path, split: Split) -> None:
    write_nerfstudio(folder, split)
    (folder / "transforms.json").rename(folder / "transforms_train.json")


BESIDE = {"nerfstudio": write_nerfstudio, "blender": write_blender, "COLMAP": write_colmap, "LLFF": write_llff}


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("naming", ["{}_mask.png", "{}.png_mask.png", "dynamic_mask_{}.png"])
def test_masks_beside_images_are_used_and_are_no_photographs(tmp_path, split, name, naming, caplog):
    """Those of instant-ngp, whose names begin with dynamic, are white where pixels are ignored."""
    BESIDE[name](tmp_path / "mine", split)
    for stem, mask in some_masks().items():
        image = next((tmp_path / "mine").rglob(f"{stem}.png"))
        shown = np.where(mask > 0, 0, 255).astype(np.uint8) if naming.startswith("dynamic") else mask
        Image.fromarray(shown).save(image.with_name(naming.format(stem)))
    scene = voxelfield.load_scene(tmp_path / "mine", splits=None, holdout=0)
    assert "have a pose" not in caplog.text
    assert f"of {len(scene.train)} photographs, {len(some_masks())} have a mask beside them" in caplog.text
    for view, found in zip(scene.train.names, scene.train.masks, strict=True):
        assert torch.equal(found, torch.from_numpy(some_masks().get(view, np.full(found.shape, 255)) > 0))


def with_alpha(color: str, mask: Image.Image) -> Image.Image:
    clear = Image.new("RGBA", mask.size, color)
    clear.putalpha(mask)
    return clear


MASKS = {
    "white with alpha": lambda mask: with_alpha("white", mask),
    "black with alpha": lambda mask: with_alpha("black", mask),
    "16 bits": lambda mask: Image.fromarray(np.asarray(mask).astype(np.uint16)),
    "dark blue": lambda mask: Image.merge(
        "RGB", [Image.new("L", mask.size)] * 2 + [mask.point(lambda value: value and 3)]
    ),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_may_be_in_any_channel(tmp_path, split, kind):
    """Where no colour is black, or all are, the mask is the alpha channel."""
    write, mask = MASKED["nerfstudio"]
    for folder in ("grey", "other"):
        write(tmp_path / folder, split)
        mask(tmp_path / folder, some_masks())
    for path in (tmp_path / "other" / "masks").iterdir():
        MASKS[kind](Image.open(path).convert("L")).save(path)
    grey, other = (voxelfield.load_scene(tmp_path / folder).train.masks for folder in ("grey", "other"))
    assert not grey.all()
    assert torch.equal(grey, other)


def test_masks_and_shrunk_images_may_have_names_in_the_other_form_of_unicode(mine):
    (mine / "images_2").mkdir()
    composed, parted = (unicodedata.normalize(form, "\u00e9") for form in ("NFC", "NFD"))
    for path in list((mine / "images").iterdir()):
        renamed = path.rename(path.with_stem(path.stem + composed))
        Image.new("L", Image.open(renamed).size, 255).save(path.with_stem(f"{path.stem}{parted}_mask"))
        shrunk = Image.new("RGB", (50, 50), "red")
        shrunk.save(mine / "images_2" / f"{path.stem}{parted}.png")
    spoil_json(mine, lambda c: [f.update(file_path=f["file_path"][:-4] + composed) for f in c["frames"]])
    train = voxelfield.load_scene(mine, downscale=2).train
    assert train.masks is not None
    assert bool((train.images[..., 0] == 255).all())


@pytest.mark.skipif(sys.platform != "linux", reason="has no names that are not UTF-8")
def test_names_that_are_not_utf_8_become_text(tmp_path, split):
    """Results are named after the views, and are written after training."""
    write_llff(tmp_path / "mine", split)
    images = tmp_path / "mine" / "images"
    next(images.iterdir()).rename(images / os.fsdecode(b"caf\xe9.png"))
    scene = voxelfield.load_scene(tmp_path / "mine", splits=None)
    assert r"caf\xe9" in [name for each in scene.splits.values() for name in each.names]


def test_cameras_may_be_far_from_the_origin_but_not_from_one_another(tmp_path, split):
    """A northing in metres is above a million, and so are coordinates from the middle of the earth."""
    northing = torch.tensor([530000.0, 5400000.0, 40.0], dtype=torch.float64)

    def shift(content: dict) -> None:
        for frame in content["frames"]:
            for row, offset in zip(frame["transform_matrix"], northing.tolist(), strict=False):
                row[3] += offset

    write_nerfstudio(tmp_path / "near", split)
    write_nerfstudio(tmp_path / "far", split)
    spoil_json(tmp_path / "far", shift)
    near, far = (voxelfield.load_scene(tmp_path / name) for name in ("near", "far"))
    moved = far.train.cameras.c2w[:, :3, 3] + torch.tensor(far.origin, dtype=torch.float64) - northing
    torch.testing.assert_close(moved, near.train.cameras.c2w[:, :3, 3].double(), rtol=0, atol=1e-5)


def test_panoramas_are_read_without_a_warning_of_pillow(mine, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 6000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        voxelfield.load_scene(mine)
        read_capture(mine)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    with pytest.raises(ValueError, match="exceeds limit of 8000 pixels: shrink the file itself"):
        voxelfield.load_scene(mine)


@pytest.mark.parametrize("write", [write_nerfstudio, write_nsvf])
def test_photographs_without_a_pose_are_counted(tmp_path, split, write, caplog):
    write(tmp_path / "mine", split)
    images = next((tmp_path / "mine").rglob("*.png")).parent
    Image.new("RGB", (8, 8)).save(images / "more.png")
    count = len(list(images.iterdir()))
    voxelfield.load_scene(tmp_path / "mine", splits=None)
    expected = f"{count - 1} of {count} photographs in {images} have a pose; the others are left out, the first is more"
    assert caplog.text.count(expected) == 1


@pytest.mark.parametrize("name", MASKED)
def test_a_missing_mask_is_named(tmp_path, split, name):
    write, mask = MASKED[name]
    write(tmp_path / "mine", split)
    mask(tmp_path / "mine", some_masks())
    next((tmp_path / "mine" / "masks").glob("view_01*")).unlink()
    with pytest.raises(FileNotFoundError, match=r"masks/view_01[.png]+: no such mask$") as caught:
        voxelfield.load_scene(tmp_path / "mine")
    assert "\n" not in str(caught.value)


def test_a_file_may_list_its_splits(tmp_path, split):
    lists = {"train_filenames": ["images/view_03.png", "images/view_01.png"], "val_filenames": ["images/view_02.png"]}
    write_nerfstudio(tmp_path / "mine", split, **lists, test_filenames=["images/view_00.png"])
    scene = voxelfield.load_scene(tmp_path / "mine", splits=("train", "val", "test"))
    assert [set(scene.split(name).names) for name in ("train", "val", "test")] == [
        {"view_01", "view_03"},
        {"view_02"},
        {"view_00"},
    ]


def test_without_a_holdout_there_is_no_test_split(mine):
    scene = voxelfield.load_scene(mine, holdout=0)
    assert list(scene.splits) == ["train"]
    assert len(scene.train) == 10


def test_missing_images_are_left_out_before_views_are_held_out(mine, caplog):
    for name in ("view_00", "view_01"):
        (mine / "images" / f"{name}.png").unlink()
    scene = voxelfield.load_scene(mine, holdout=4)
    assert scene.test.names == ("view_02", "view_06")
    assert "2 of 10 images are missing, the first is" in caplog.text
    with pytest.raises(FileNotFoundError, match="2 of 10 images are missing"):
        voxelfield.load_scene(mine, missing_images="error")


def test_the_box_is_about_what_cameras_look_at():
    circle = orbit(load_blender(LEGO).train.cameras, torch.tensor([1.0, 2.0, 3.0]), 12).c2w
    distance = (circle[0, :3, 3] - torch.tensor([1.0, 2.0, 3.0])).norm().double()
    expected = torch.tensor([1.0, 2.0, 3.0]).double() + torch.tensor([[-1.0], [1.0]]) * distance
    torch.testing.assert_close(box_of_cameras(circle), expected, atol=1e-3, rtol=0)
    outwards = circle.clone()
    outwards[:, :3, [0, 2]] *= -1
    low, high = box_of_cameras(outwards)
    origins = circle[:, :3, 3].double()
    torch.testing.assert_close((low + high) / 2, origins.mean(dim=0), atol=1e-4, rtol=0)
    assert bool(((origins > low) & (origins < high)).all())


@pytest.mark.parametrize("count", [1, 4])
def test_parallel_cameras_have_a_box(count):
    c2w = torch.eye(4).repeat(count, 1, 1)
    c2w[:, 0, 3] = torch.arange(count)
    low, high = box_of_cameras(c2w)
    assert bool((high > low).all())


def test_the_box_of_points_leaves_outliers_out():
    points = torch.rand(10_000, 3, generator=torch.Generator().manual_seed(0)).double()
    points[:20] = 1000
    low, high = box_of_points(points)
    assert bool(((low > -0.1) & (low < 0) & (high > 1) & (high < 1.1)).all())


def spoil_json(folder: Path, change: Callable[[dict], object]) -> None:
    file = folder / "transforms.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


# Captures with a fault: what writes them, what damages them then, and what is said of them.


def in_json(change: Callable[[dict], object], message: str) -> tuple:
    """A capture of nerfstudio with a change in its file."""
    return write_nerfstudio, lambda folder: spoil_json(folder, change), message


def keys(message: str, **changed: object) -> tuple:
    """The same with other keys of the whole file."""
    return in_json(lambda content: content.update(changed), message)


def first(message: str, **changed: object) -> tuple:
    """The same with other keys of the first frame."""
    return in_json(lambda content: content["frames"][0].update(changed), message)


def cell(row: int, column: int, value: float, message: str) -> tuple:
    """The same with another number in the first pose."""
    return in_json(lambda content: content["frames"][0]["transform_matrix"][row].__setitem__(column, value), message)


def file_of(write: Callable[..., None], name: str, content: bytes | str, message: str) -> tuple:
    """A capture in which a file has another content."""
    as_bytes = content.encode() if isinstance(content, str) else content
    return write, lambda folder: (folder / name).write_bytes(as_bytes), message


def picture(content: bytes | str, message: str) -> tuple:
    """A capture of nerfstudio with another file in place of an image."""
    return file_of(write_nerfstudio, "images/view_03.png", content, f"view_03.png: unreadable image{message}")


def picture_of(mode: str, message: str, suffix: str = ".png") -> tuple:
    """The same with an image of another mode of Pillow, in a file that is still called *.png."""
    file = io.BytesIO()
    Image.new(mode, (100, 100)).save(file, Image.registered_extensions()[suffix])
    return file_of(write_nerfstudio, "images/view_03.png", file.getvalue(), f"view_03.png: {message}")


def rows(array: np.ndarray, message: str) -> tuple:
    """A capture of LLFF with another array."""
    return write_llff, lambda folder: np.save(folder / "poses_bounds.npy", array, allow_pickle=True), message


def masked(mask: np.ndarray, message: str, content: bytes | None = None) -> tuple:
    """A capture of nerfstudio with a mask of view_03, whose file may have another content."""

    def add(folder: Path) -> None:
        mask_nerfstudio(folder, {"view_03": mask})
        if content is not None:
            (folder / "masks" / "view_03.png").write_bytes(content)

    return write_nerfstudio, add, f"masks/view_03.png: {message}"


def written(write: Callable[..., None], message: str, **options: object) -> tuple:
    """A capture that is written with other options."""
    return partial(write, **options), lambda _: None, message


NO_IMAGE = r" \(not a PNG, JPEG, WebP, TIFF or BMP image\)"
BOMB = raw_png(60_000, 60_000, 8, b"")
SCALED = "must be a rotation with a translation, with orthonormal axes"
BAD = {
    "term of a lens that is no number": keys("'k2' must be a finite number, got nan", k2=math.nan),
    "term of a lens too large for float32": keys("Lens.coefficients must be finite, got .*1e[+]300", k2=1e300),
    "pinhole that distorts": keys(
        "'camera_model' must be OPENCV or FULL_OPENCV or OPENCV_FISHEYE for a lens with k1, p2, got 'PINHOLE'",
        **{"camera_model": "PINHOLE", "k1": 0.1, "p2": 0.1},
    ),
    "a term of another lens": first("'camera_model' must be FULL_OPENCV for a lens with k5, got 'OPENCV'", k5=0.1),
    "terms of no lens": keys(
        "'camera_model' must be that of one lens for a lens with k7, omega, got 'OPENCV'", omega=0.1, k7=0.1
    ),
    "a lens of instant-ngp that is not modelled": keys(
        "'ftheta_p0' must be absent, got 0.0: undistort the images first", ftheta_p0=0.0
    ),
    "a fisheye of instant-ngp with another model": keys(
        "'is_fisheye' must be False for 'camera_model' 'OPENCV', got True", is_fisheye=True, camera_model="OPENCV"
    ),
    "a fisheye that is no truth value": keys("'is_fisheye' must be true or false, got 1", is_fisheye=1),
    "too few listed terms": keys("'distortion_params' must be a list of 6 numbers, got ", distortion_params=[0.1, 0.2]),
    "listed terms of a lens that has none": keys(
        "'distortion_params' must be absent or zeros for a field_of_view lens, got ",
        **{"camera_model": "FOV", "distortion_params": [0.1] * 6},
    ),
    "terms listed and named": keys(
        "'distortion_params' must be absent beside k1, got ", k1=0.1, distortion_params=[0.1] * 6
    ),
    "angle of a lens that is too large": keys(
        "transforms.json: Lens.coefficients: omega must be between -pi and pi, got 3.5", camera_model="FOV", omega=3.5
    ),
    "pose of another shape": first("must be a 4x4 matrix of numbers", transform_matrix=[[1]]),
    "time beyond float32": in_json(
        lambda c: [frame.update(time=1e300) for frame in c["frames"]],
        "'time' must be a number up to 1e[+]30, got 1e[+]300",
    ),
    "huge unit of depths": keys(
        "'depth_unit_scale_factor' must be a number up to 1e[+]30, got 1e[+]38", depth_unit_scale_factor=1e38
    ),
    "name that ends in a line break": first(
        r"'file_path' must be a valid file path, got 'images/view_03.png\\n'", file_path="images/view_03.png\n"
    ),
    "scaled pose": first(SCALED, transform_matrix=(2 * np.eye(4)).tolist()),
    "mirrored pose": first("not a mirror image", transform_matrix=np.diag([1, 1, -1, 1]).tolist()),
    "unknown image in a split": keys(
        "'train_filenames' must name images of 'frames', got 'images/none.png'", train_filenames=["images/none.png"]
    ),
    "zero-byte image": picture(b"", ""),
    "truncated image": (
        write_nerfstudio,
        lambda f: (f / "images" / "view_03.png").write_bytes((f / "images" / "view_02.png").read_bytes()[:2000]),
        r"view_03.png: unreadable image \(.*truncated",
    ),
    "text called an image": picture("not a picture", NO_IMAGE),
    "image bomb": picture(BOMB, r" \(Image size \(3600000000 pixels\) exceeds limit"),
    "first image is a bomb": (
        write_nerfstudio,
        lambda f: [path.write_bytes(BOMB) for path in (f / "images").iterdir()],
        r"unreadable image \(Image size \(3600000000 pixels\) exceeds limit",
    ),
    "16-bit grey image": picture_of(
        "I;16", r"unreadable image \(must be RGB with 8 or 16 bits .* got grey with 16 bits: convert"
    ),
    "CMYK image": picture_of(
        "CMYK", r"unreadable image \(must be RGB with 8 or 16 bits .* got Pillow's mode CMYK: convert", ".jpg"
    ),
    "one opaque image among transparent ones": picture_of(
        "RGB", "must have an alpha channel, as others have that show an object .*, got none: cut"
    ),
    "pose of zeros": first(SCALED, transform_matrix=np.zeros((4, 4)).tolist()),
    "pose of 1e30": first(SCALED, transform_matrix=(1e30 * np.eye(4)).tolist()),
    "camera at 1e30": cell(
        *(1, 3, 1e30), r"must lie within 1e[+]06 world units of the other cameras \(shift and scale the scene\)"
    ),
    "pose with another last row": cell(3, 3, 2, r"must have \(0, 0, 0, 1\) as its last row, got "),
    "number of 400 digits": keys(r"'fl_x' must be a finite number, got 10+\.\.\.0+$", fl_x=10**400),
    "number of 400 digits in a pose": cell(0, 0, 10**400, r"must be a 4x4 matrix of numbers, got \[\[10+\.\.\."),
    "focal length too large for float32": keys(
        "focal lengths must be finite and at least 0.001 pixels, and the principal point within", fl_x=1e200
    ),
    "focal length near zero": keys(
        r"focal lengths must be finite and at least 0.001 pixels, .* got \[1e-09, .*\] as fl_x, fl_y, cx, cy$",
        fl_x=1e-9,
    ),
    "field of view near zero": keys(
        "'camera_angle_x' must be radians between 0 and pi, got 1e-320$", fl_x=None, camera_angle_x=1e-320
    ),
    "deep JSON": file_of(write_nerfstudio, "transforms.json", 100_000 * "[", "not valid JSON"),
    "deep pose": first("must be a 4x4 matrix of numbers, got", transform_matrix=json.loads(200 * "[" + 200 * "]")),
    "path of 10,000 characters": first(
        r"'file_path' must be a valid file path, got 'x+\.\.\.x+'$", file_path=10_000 * "x"
    ),
    "path with a zero": first(r"'file_path' must be a valid file path, got 'a\\x00b'$", file_path="a\0b"),
    "camera model that is no name": keys(r"'camera_model' must be one of .*, got \[\]", camera_model=[]),
    "mask of another size": masked(
        np.ones((50, 60), dtype=np.uint8), "size must be 100x100, like that of its image, got 60x50"
    ),
    "black mask": masked(
        np.zeros((100, 100), dtype=np.uint8), "must leave some pixels of the image, got a mask that leaves none"
    ),
    "mask that is no image": masked(np.zeros((100, 100), dtype=np.uint8), f"unreadable image{NO_IMAGE}", b"no mask"),
    "mask that is no path": first("'mask_path' of frame 0 must be a path, got 3", mask_path=3),
    "an image of another shape than its camera's": (
        write_nerfstudio,
        lambda f: Image.new("RGB", (50, 60)).save(f / "images" / "view_03.png"),
        r"view_03.png: size must be in proportion to 100x100 \(from 'w' and 'h' in .*\), got 50x60: is it cropped",
    ),
    "no NumPy array": file_of(write_llff, "poses_bounds.npy", b"\x93NUMPY", "poses_bounds.npy: not a NumPy array"),
    "array of objects": rows(np.array([{}]), "poses_bounds.npy: not a NumPy array"),
    "array of another shape": rows(
        np.zeros((10, 15)), r"must be an array of numbers of shape \(N, 17\), got \(10, 15\)"
    ),
    "fewer images than rows": (
        write_llff,
        lambda f: (f / "images" / "view_03.png").unlink(),
        "must have a row for each image, got 10 rows and 9 images",
    ),
    "depths in the wrong order": written(write_llff, "the farthest beyond the nearest", near=7.0),
    "damaged model": file_of(
        write_colmap, "sparse/0/cameras.bin", b"\1\2", "cameras.bin: must be complete, got a truncated file"
    ),
    "name of an image that is not UTF-8": (
        partial(write_colmap, binary=False),
        lambda f: (f / "sparse" / "0" / "images.txt").write_bytes(
            (f / "sparse" / "0" / "images.txt").read_bytes().replace(b"view_03", b"view_\xff3")
        ),
        "names of images must be UTF-8, got b'view_",
    ),
    "singular matrix": written(
        write_neus, "world_mat_3 must project space to an image, got a singular matrix", world_mat_3=np.ones((4, 4))
    ),
    "matrix with a skew": written(
        write_neus,
        "world_mat_3 must be that of a camera without skew, got 1 beside a focal length of 9",
        world_mat_3=np.array([[9, 1, 3, 0], [0, 9, 2, 0], [0, 0, 1, 600.0]]),
    ),
    "matrix that is not finite": written(
        write_neus,
        r"cameras_sphere.npz: must be a NumPy archive of matrices world_mat_0, ... \(world_mat_3 must be finite\)",
        world_mat_3=np.full((4, 4), np.nan),
    ),
    "matrix of objects": written(
        write_neus, "cameras_sphere.npz: must be a NumPy archive of matrices .*allow_pickle", world_mat_3=np.array([{}])
    ),
    "matrix of another shape": written(
        write_neus, r"world_mat_3 must be 3x4 or 4x4 numbers, got \(12,\)", world_mat_3=np.ones(12)
    ),
    "no matrices": (
        write_neus,
        lambda f: np.savez(f / "cameras_sphere.npz", a=np.eye(4)),
        "must hold a matrix world_mat_0, ... for each image, got none",
    ),
    "no archive": file_of(
        write_neus, "cameras_sphere.npz", b"PK", "cameras_sphere.npz: must be a NumPy archive of matrices"
    ),
    "two spheres": written(
        write_neus, "scale_mat_3 must be the same as that of the other images", scale_mat_3=np.eye(4)
    ),
    "no sphere": written(write_neus, "must have a scale_mat for each world_mat, got none for 3", scale_mat_3=None),
    "ellipsoid": written(
        write_neus,
        "scale_mat must scale all axes alike",
        **{f"scale_mat_{index}": np.diag([1, 2, 1, 1.0]) for index in range(10)},
    ),
    "fewer images than matrices": (
        write_neus,
        lambda f: (f / "image" / "view_03.png").unlink(),
        "image: must hold an image for each of 10 cameras in cameras_sphere.npz, got 9 images, whose names are not",
    ),
    "mask of another size than its image": (
        partial(write_neus, masks=True),
        lambda f: Image.new("L", (50, 60)).save(f / "mask" / "003.png"),
        "mask/003.png: size must be 100x100, like that of its image, got 50x60",
    ),
    "images of another size than the matrices": (
        write_neus,
        lambda f: [Image.new("RGB", (50, 40)).save(path) for path in (f / "image").iterdir()],
        r"the principal point \(52, 47.5\) belongs to, got 50x40: was the image resized\?",
    ),
    "pose that is no matrix": file_of(
        write_nsvf, "pose/0_view_03.txt", "1 2 3", "0_view_03.txt: must hold a 4x4 matrix, got 3 numbers"
    ),
    "pose that is no rotation": file_of(
        *(write_nsvf, "pose/0_view_03.txt", 4 * "0 0 0 0\n"),
        r"/pose/0_view_03\.txt: pose with OpenGL's axes must be a rotation",
    ),
    "pose of no split": (
        write_nsvf,
        lambda f: (f / "pose" / "0_view_03.txt").rename(f / "pose" / "view_03.txt"),
        "must begin with 0, 1 or 2, got 'view_03.txt'",
    ),
    "words among numbers": file_of(write_nsvf, "intrinsics.txt", "focal 3", "intrinsics.txt: must hold numbers only"),
    "intrinsics of another count": file_of(
        write_nsvf, "intrinsics.txt", "1 2 3", "must hold a 4x4 matrix, or the 11 numbers of SRN's format, got 3"
    ),
    "focal length below 0": file_of(
        *(write_nsvf, "intrinsics.txt", "-1 2 3 0 0 0 0 0 1 100 100"), "focal lengths and sizes must be above 0 pixels"
    ),
    "box that is not finite": file_of(
        write_nsvf, "bbox.txt", "nan 0 0 1 1 1", "bbox.txt: must hold finite numbers only"
    ),
    "box of four numbers": file_of(
        *(write_nsvf, "bbox.txt", "0 0 1 1"),
        "bbox.txt: must hold the two corners of a box, and optionally a voxel size, got 4",
    ),
    "box without a height": file_of(
        *(write_nsvf, "bbox.txt", "0 0 0 1 1 0"),
        r"bbox\.txt: must hold the low and the high corner of a box, at least 1e-06 apart .*, got \[\[0",
    ),
    "box whose corners are swapped": file_of(
        *(write_nsvf, "bbox.txt", "1 1 1 -1 -1 -1"), r"bbox\.txt: must hold the low and the high corner of a box"
    ),
    "box beyond float32": file_of(
        *(write_nsvf, "bbox.txt", "0 0 0 1e300 1 1"),
        r"bbox\.txt: must hold .* within 1e\+06 world units of the origin, got",
    ),
    "camera with a term too large for float32": written(
        write_colmap, "camera 1: Lens.coefficients must be finite, got .*1e[+]300", model="RADIAL", k2=1e300
    ),
}


def test_an_image_without_alpha_may_stand_among_opaque_ones(mine):
    for index, path in enumerate(sorted((mine / "images").iterdir())):
        with Image.open(path) as image:
            flat = image.convert("RGB")
        (flat if index == 3 else flat.convert("RGBA")).save(path)
    assert (voxelfield.load_scene(mine, holdout=0).train.images[..., 3] == 255).all()


@pytest.mark.parametrize("before", ["{folder}/", "./images/../"])
def test_paths_inside_of_the_folder_are_read(tmp_path, split, before):
    folder = tmp_path / "mine"
    write_nerfstudio(folder, split)

    def change(content: dict) -> None:
        frame = content["frames"][3]
        frame["file_path"] = before.format(folder=folder) + frame["file_path"]

    spoil_json(folder, change)
    assert torch.equal(voxelfield.load_scene(folder, holdout=0).train.images, split.images)


def test_poses_within_a_thousandth_of_orthonormal_are_read(mine, split):
    scale = np.array([[1 + 4e-4] * 3 + [1]] * 3 + [[1] * 4])
    spoil_json(
        mine, lambda c: c["frames"][3].update(transform_matrix=(scale * c["frames"][3]["transform_matrix"]).tolist())
    )
    assert len(voxelfield.load_scene(mine, holdout=0).train) == len(split)


def test_rotations_that_one_factor_scales_are_divided_by_it(mine, caplog):
    wanted = voxelfield.load_scene(mine, holdout=0).train.cameras.c2w

    def scale(content: dict) -> None:
        for frame in content["frames"]:
            scaled = np.array(frame["transform_matrix"])
            scaled[:3, :3] *= 0.21
            frame["transform_matrix"] = scaled.tolist()

    spoil_json(mine, scale)
    found = voxelfield.load_scene(mine, holdout=0).train.cameras.c2w
    assert torch.allclose(found, wanted, atol=1e-6)
    (record,) = caplog.records
    assert "all rotations are scaled by 0.21 and are divided by it" in record.getMessage()


def test_test_views_that_are_training_views_are_left_out(mine, split, caplog):
    names = [f"images/{name}.png" for name in split.names]
    spoil_json(mine, lambda c: c.update(train_filenames=names[2:], test_filenames=names[:2]))
    images = mine / "images"
    (images / f"{split.names[1]}.png").write_bytes((images / f"{split.names[4]}.png").read_bytes())
    for splits in (None, ["test"]):
        caplog.clear()
        assert voxelfield.load_scene(mine, splits=splits).test.names == split.names[:1]
        (told,) = (message for message in caplog.messages if "byte for byte" in message)
        assert "1 of 2 test views are byte for byte training views" in told
        assert f"the first {split.names[1]}.png like {split.names[4]}.png: they are left out" in told
    spoil_json(mine, lambda c: [frame.update(time=index) for index, frame in enumerate(c["frames"])])
    assert len(voxelfield.load_scene(mine).test) == 2, "nothing moved between two times"


def test_frames_that_are_repeated_are_read_once(mine, split, caplog):
    spoil_json(mine, lambda c: c.update(frames=c["frames"] + 1000 * c["frames"][:1]))
    assert voxelfield.load_scene(mine, holdout=0).train.names == split.names
    (record,) = caplog.records
    assert f"1000 of {1000 + len(split)} frames are repetitions, which are left out" in record.getMessage()


def test_a_huge_image_is_refused_before_its_pixels_are_read(tmp_path, split, monkeypatch):
    write_llff(tmp_path / "mine", split)
    (tmp_path / "mine" / "images" / "view_03.png").write_bytes(raw_png(9000, 9000, 8, b""))
    monkeypatch.setattr(images, "_decode", lambda *_: pytest.fail("pixels were read"))
    with pytest.raises(ValueError, match=r"view_03\.png: size must be at most a few times .*, got 9000x9000: "):
        voxelfield.load_scene(tmp_path / "mine")


def test_intrinsics_are_checked_before_pixels_are_read(mine, monkeypatch):
    spoil_json(mine, lambda c: [c.pop(key) for key in ("fl_x", "fl_y")])
    monkeypatch.setattr(images, "_decode", lambda *_: pytest.fail("pixels were read"))
    with pytest.raises(ValueError, match="key 'camera_angle_x' is missing"):
        voxelfield.load_scene(mine)


def test_long_reading_is_told(mine, split, monkeypatch, caplog):
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    with caplog.at_level(logging.INFO):
        voxelfield.load_scene(mine, holdout=0)
    assert f"reading images 5/{len(split)} (" in caplog.text


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_capture_is_one_line_that_names_it(tmp_path, split, case):
    write, spoil, message = BAD[case]
    write(tmp_path / "mine", split)
    spoil(tmp_path / "mine")
    with pytest.raises(ValueError, match=message) as caught:
        voxelfield.load_scene(tmp_path / "mine")
    assert "\n" not in str(caught.value)
    assert "mine" in str(caught.value), "the message must name the file"


def test_a_colmap_model_without_pycolmap_says_what_to_install(tmp_path, split, monkeypatch):
    write_colmap(tmp_path / "mine", split)
    monkeypatch.setitem(sys.modules, "pycolmap", None)
    with pytest.raises(MissingPackageError, match=r'pip install "voxelfield\[colmap\]"'):
        voxelfield.load_scene(tmp_path / "mine")


def test_images_that_are_nowhere_are_named(tmp_path, split):
    write_llff(tmp_path / "mine", split)
    shutil.rmtree(tmp_path / "mine" / "images")
    with pytest.raises(FileNotFoundError, match="images must lie in a folder images or images_N, got none"):
        voxelfield.load_scene(tmp_path / "mine")
    write_nsvf(tmp_path / "empty", split)
    shutil.rmtree(tmp_path / "empty" / "pose")
    (tmp_path / "empty" / "pose").mkdir()
    with pytest.raises(FileNotFoundError, match=r"pose: must hold a file NAME\.txt for each image, got none"):
        voxelfield.load_scene(tmp_path / "empty")
    write_nerfstudio(tmp_path / "other", split)
    shutil.rmtree(tmp_path / "other" / "images")
    with pytest.raises(FileNotFoundError, match="10 of 10 images are missing"):
        voxelfield.load_scene(tmp_path / "other")
