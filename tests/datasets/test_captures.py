"""Captures: the same photographs and cameras, written in each format, are the same scene."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pycolmap
import pytest
import torch
from PIL import Image

import voxelfield
from voxelfield.cli.errors import in_one_line
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.bounds import box_of_cameras, box_of_frusta, box_of_points
from voxelfield.datasets.registry import format_of
from voxelfield.datasets.scene import Split
from voxelfield.rendering.cameras import orbit

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


# The terms of COLMAP's camera models, behind the focal lengths and the principal point.
COLMAP_TERMS = {
    "SIMPLE_PINHOLE": {},
    "PINHOLE": {},
    "SIMPLE_RADIAL": {"k1": -0.1},
    "RADIAL": {"k1": 0.1, "k2": -0.05},
    "OPENCV": {"k1": -0.2, "k2": 0.05, "p1": 0.01, "p2": -0.02},
    "SIMPLE_RADIAL_FISHEYE": {"k1": -0.1},
    "RADIAL_FISHEYE": {"k1": 0.1, "k2": -0.05},
    "OPENCV_FISHEYE": {"k1": 0.1, "k2": -0.05, "k3": 0.02, "k4": -0.01},
    "FULL_OPENCV": dict.fromkeys(("k1", "k2", "p1", "p2", "k3", "k4", "k5", "k6"), 0.01),
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


FORMATS: dict[str, Callable[[Path, Split], None]] = {
    "nerfstudio or instant-ngp": write_nerfstudio,
    "LLFF": write_llff,
    "COLMAP": write_colmap,
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_views_in_any_format_are_the_same_scene(tmp_path, split, name):
    FORMATS[name](tmp_path / "mine", split)
    assert format_of(tmp_path / "mine").name == name
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


@pytest.mark.parametrize("model", [model for model in COLMAP_TERMS if model != "FULL_OPENCV"])
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
        ({"k1": 0.1, "p2": 0.02}, "perspective", [0.1, 0, 0, 0, 0, 0.02]),
        ({"camera_model": "OPENCV", "k1": 0.1, "k4": 0.2, "p1": -0.3}, "perspective", [0.1, 0, 0, 0.2, -0.3, 0]),
        ({"camera_model": "OPENCV_FISHEYE", "k2": 0.1, "k3": 0.2}, "fisheye", [0, 0.1, 0.2, 0, 0, 0]),
        ({"camera_model": "OPENCV_FISHEYE"}, "fisheye", [0.0] * 6),
        ({"is_fisheye": True, "k1": 0.1}, "fisheye", [0.1, 0, 0, 0, 0, 0]),
        ({"camera_model": "PINHOLE"}, None, None),
        ({"camera_model": "SIMPLE_PINHOLE", "is_fisheye": False}, None, None),
        ({"camera_model": "OPENCV"}, None, None),
    ],
)
def test_lenses_of_nerfstudio_and_instant_ngp(tmp_path, split, meta, model, expected):
    write_nerfstudio(tmp_path / "mine", split, **meta)
    lens = voxelfield.load_scene(tmp_path / "mine", downscale=2).train.cameras.lens
    assert (lens and lens.model) == model
    if lens is not None:
        torch.testing.assert_close(lens.coefficients, torch.tensor([expected]).expand(8, 6))


def test_each_frame_may_have_a_lens_of_its_own(tmp_path, split):
    write_nerfstudio(tmp_path / "mine", split, k1=0.5)
    spoil_json(
        tmp_path / "mine",
        lambda c: [frame.update(k1=index / 10, k2=0.01) for index, frame in enumerate(reversed(c["frames"])) if index],
    )
    train = voxelfield.load_scene(tmp_path / "mine", holdout=0).train
    assert train.names[3] == "view_03"
    torch.testing.assert_close(train.cameras.lens.coefficients[3], torch.tensor([0.3, 0.01, 0, 0, 0, 0]))
    torch.testing.assert_close(train.cameras.lens.coefficients[0], torch.tensor([0.5, 0, 0, 0, 0, 0]))


def test_pinholes_among_distorting_lenses_distort_nothing(tmp_path, split):
    write_nerfstudio(tmp_path / "mine", split, k1=0.5)
    spoil_json(tmp_path / "mine", lambda c: c["frames"][-1].update(k1=0))
    lens = voxelfield.load_scene(tmp_path / "mine", holdout=0).train.cameras.lens
    assert lens.coefficients[:2, 0].tolist() == [0, 0.5]


@pytest.mark.parametrize(("camera_model", "model"), [("OPENCV", None), ("OPENCV_FISHEYE", "fisheye")])
def test_lens_distortion_can_be_ignored(tmp_path, split, camera_model, model):
    write_nerfstudio(tmp_path / "mine", split, camera_model=camera_model, k1=0.1)
    lens = voxelfield.load_scene(tmp_path / "mine", lens_distortion=False).train.cameras.lens
    assert (lens and lens.model) == model
    assert lens is None or not lens.coefficients.any()


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


def test_a_file_may_list_its_splits(tmp_path, split):
    lists = {"train_filenames": ["images/view_03.png", "images/view_01.png"], "val_filenames": ["images/view_02.png"]}
    write_nerfstudio(tmp_path / "mine", split, **lists, test_filenames=["images/view_00.png"])
    scene = voxelfield.load_scene(tmp_path / "mine", splits=("train", "val", "test"))
    assert [set(scene.split(name).names) for name in ("train", "val", "test")] == [
        {"view_01", "view_03"},
        {"view_02"},
        {"view_00"},
    ]


def test_without_a_holdout_there_is_no_test_split(tmp_path, split):
    write_nerfstudio(tmp_path / "mine", split)
    scene = voxelfield.load_scene(tmp_path / "mine", holdout=0)
    assert list(scene.splits) == ["train"]
    assert len(scene.train) == 10


def test_missing_images_are_left_out_before_views_are_held_out(tmp_path, split, caplog):
    write_nerfstudio(tmp_path / "mine", split)
    for name in ("view_00", "view_01"):
        (tmp_path / "mine" / "images" / f"{name}.png").unlink()
    scene = voxelfield.load_scene(tmp_path / "mine", holdout=4)
    assert scene.test.names == ("view_02", "view_06")
    assert "2 of 10 images are missing, the first is" in caplog.text
    with pytest.raises(FileNotFoundError, match="2 of 10 images are missing"):
        voxelfield.load_scene(tmp_path / "mine", missing_images="error")


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


def test_the_box_of_frusta_holds_what_is_seen():
    low, high = box_of_frusta(torch.eye(4)[None], torch.tensor([[0.5, 0.25]]), torch.tensor([1.0]), torch.tensor([4.0]))
    assert low.tolist() == [-2, -1, -4]
    assert high.tolist() == [2, 1, -1]


def spoil_json(folder: Path, change: Callable[[dict], object]) -> None:
    file = folder / "transforms.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


BAD = {
    "truncated JSON": (
        write_nerfstudio,
        lambda f: (f / "transforms.json").write_text('{"frames": ['),
        "not valid JSON",
    ),
    "no frames": (write_nerfstudio, lambda f: spoil_json(f, lambda c: c.update(frames=[])), "'frames' must be a list"),
    "unknown camera model": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c.update(camera_model="EQUIRECTANGULAR")),
        "'camera_model' must be one of PINHOLE, .*, got 'EQUIRECTANGULAR': undistort the images first",
    ),
    "term of a lens that is no number": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c.update(k2=math.nan)),
        "'k2' must be a finite number, got nan",
    ),
    "term of a lens too large for float32": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c.update(k2=1e300)),
        "terms of a lens must be finite numbers, got .*1e[+]300",
    ),
    "pinhole that distorts": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c.update(camera_model="PINHOLE", k1=0.1, p2=0.1)),
        "'camera_model' must be OPENCV for a lens with k1, p2, got 'PINHOLE'",
    ),
    "lenses of two models": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c["frames"][3].update(camera_model="OPENCV_FISHEYE")),
        "view_06.png: lens must be perspective, as others of the split are, got a fisheye",
    ),
    "zero focal length": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c.update(fl_x=0)),
        "focal lengths must be above 0 pixels, got 0.0",
    ),
    "no number": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c.update(cx=math.nan)),
        "'cx' must be a finite number",
    ),
    "pose of another shape": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c["frames"][0].update(transform_matrix=[[1]])),
        r"must have shape \(4, 4\)",
    ),
    "scaled pose": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c["frames"][0].update(transform_matrix=(2 * np.eye(4)).tolist())),
        "must be a rotation with a translation, got axes that are 3 from orthonormal",
    ),
    "mirrored pose": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c["frames"][0].update(transform_matrix=np.diag([1, 1, -1, 1]).tolist())),
        "got a mirror image",
    ),
    "path that leaves the folder": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c["frames"][0].update(file_path="../../etc/image.png")),
        "'file_path' must be inside of the scene's folder",
    ),
    "unknown image in a split": (
        write_nerfstudio,
        lambda f: spoil_json(f, lambda c: c.update(train_filenames=["images/none.png"])),
        "'train_filenames' must name images of 'frames', got 'images/none.png'",
    ),
    "zero-byte image": (
        write_nerfstudio,
        lambda f: (f / "images" / "view_03.png").write_bytes(b""),
        "view_03.png: unreadable image",
    ),
    "mixed sizes": (
        write_nerfstudio,
        lambda f: Image.new("RGB", (50, 50)).save(f / "images" / "view_03.png"),
        "view_03.png: size must be 100x100",
    ),
    "no NumPy array": (
        write_llff,
        lambda f: (f / "poses_bounds.npy").write_bytes(b"\x93NUMPY"),
        "poses_bounds.npy: not a NumPy array",
    ),
    "array of objects": (
        write_llff,
        lambda f: np.save(f / "poses_bounds.npy", np.array([{}]), allow_pickle=True),
        "poses_bounds.npy: not a NumPy array",
    ),
    "array of another shape": (
        write_llff,
        lambda f: np.save(f / "poses_bounds.npy", np.zeros((10, 15))),
        r"must be an array of numbers of shape \(N, 17\), got \(10, 15\)",
    ),
    "fewer images than rows": (
        write_llff,
        lambda f: (f / "images" / "view_03.png").unlink(),
        "must have a row for each image, got 10 rows and 9 images",
    ),
    "depths in the wrong order": (
        lambda f, split: write_llff(f, split, near=7.0),
        lambda f: None,
        "the farthest beyond the nearest",
    ),
    "damaged model": (
        write_colmap,
        lambda f: (f / "sparse" / "0" / "cameras.bin").write_bytes(b"\1\2"),
        "not a COLMAP model",
    ),
    "camera of another model": (
        lambda f, split: write_colmap(f, split, model="FULL_OPENCV"),
        lambda f: None,
        "camera 1 must be one of SIMPLE_PINHOLE, .*, got FULL_OPENCV: undistort the images first",
    ),
    "camera with a term too large for float32": (
        lambda f, split: write_colmap(f, split, model="RADIAL", k2=1e300),
        lambda f: None,
        "camera 1: terms of a lens must be finite numbers, got .*1e[+]300",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_capture_is_one_line_that_names_it(tmp_path, split, case):
    write, spoil, message = BAD[case]
    write(tmp_path / "mine", split)
    spoil(tmp_path / "mine")
    with pytest.raises(ValueError, match=message) as caught:
        voxelfield.load_scene(tmp_path / "mine")
    assert "\n" not in str(caught.value)
    assert "mine" in str(caught.value), "the message must name the file"


def test_a_colmap_model_without_pycolmap_says_what_to_install(tmp_path, split, monkeypatch, caplog):
    write_colmap(tmp_path / "mine", split)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert in_one_line(lambda: voxelfield.load_scene(tmp_path / "mine")) == 2
    assert 'pip install "voxelfield[colmap]"' in caplog.text


def test_images_that_are_nowhere_are_named(tmp_path, split):
    write_llff(tmp_path / "mine", split)
    shutil.rmtree(tmp_path / "mine" / "images")
    with pytest.raises(FileNotFoundError, match="images must lie in a folder images or images_N, got none"):
        voxelfield.load_scene(tmp_path / "mine")
    write_nerfstudio(tmp_path / "other", split)
    shutil.rmtree(tmp_path / "other" / "images")
    with pytest.raises(FileNotFoundError, match="10 of 10 images are missing"):
        voxelfield.load_scene(tmp_path / "other")
