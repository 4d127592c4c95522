"""The Blender loader, on the bundled Lego views and on scenes written here."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from voxelfield.datasets.blender import available_splits, load_blender
from voxelfield.datasets.loading import load_scene
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene, Split
from voxelfield.rendering.cameras import Cameras

LEGO = Path(__file__).parents[1] / "fixtures" / "lego"
POSE = np.eye(4).tolist()


def write_split(folder, split="train", images=2, size=(6, 4), mode="RGBA", suffix=".png", **meta):
    """Writes a random split of ``size`` (width, height); returns what its images hold, as RGBA."""
    generator = np.random.default_rng(len(split))
    content = {"camera_angle_x": 0.8, "frames": [], **meta}
    truth = []
    (folder / split).mkdir(parents=True, exist_ok=True)
    for index in range(images):
        pixels = generator.integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
        image = Image.fromarray(pixels).convert(mode)
        image.save(folder / split / f"r_{index}{suffix}")
        truth.append(np.asarray(image.convert("RGBA")))
        content["frames"].append({"file_path": f"./{split}/r_{index}", "transform_matrix": POSE})
    (folder / f"transforms_{split}.json").write_text(json.dumps(content))
    return torch.from_numpy(np.stack(truth))


def edit(folder, change, split="train"):
    file = folder / f"transforms_{split}.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.fixture
def scene(tmp_path):
    folder = tmp_path / "toy"
    write_split(folder, "train")
    write_split(folder, "test", images=1)
    return folder


def refusal(folder, error=ValueError, **options):
    """Returns the message with which a scene is refused, which is one line."""
    with pytest.raises(error, match=r"^[^\n]*$") as caught:
        load_blender(folder, LoadOptions(**options))
    return str(caught.value)


def test_lego_as_bundled():
    scene = load_blender(LEGO)
    assert scene.name == "lego"
    assert list(scene.splits) == ["train", "test"]
    assert scene.train.images.shape == (24, 100, 100, 4)
    assert scene.test.images.shape == (4, 100, 100, 4)
    assert scene.train.names[:2] == ("r_0", "r_4")
    low, high = scene.aabb
    assert ((torch.tensor([-0.9, -1.4, -1.1]) < low) & (low < torch.tensor([-0.6, -1.1, -0.6]))).all()
    assert ((torch.tensor([0.6, 1.1, 1.0]) < high) & (high < torch.tensor([0.9, 1.4, 1.2]))).all()
    focal = 50 / math.tan(0.6911112070083618 / 2)
    torch.testing.assert_close(scene.train.cameras.intrinsics[5], torch.tensor([focal, focal, 50.0, 50.0]))
    # NeRF-synthetic puts every camera at this distance.
    torch.testing.assert_close(
        scene.train.cameras.c2w[:, :3, 3].norm(dim=-1), torch.full((24,), 4.0311), rtol=1e-4, atol=0
    )


def test_lego_is_where_its_cameras_look():
    """Pixels that show the bulldozer belong to rays that pass near the origin, in every view."""
    for split in load_blender(LEGO).splits.values():
        box = torch.tensor([[-0.7, -1.3, -0.6], [0.7, 1.3, 1.2]])
        for index in range(len(split)):
            rays = split.cameras.image_rays(index, box)
            opaque = split.images[index, ..., 3].flatten() > 128
            assert 0.05 < opaque.float().mean() < 0.6
            assert (rays.far > rays.near)[opaque].float().mean() > 0.99


def test_fixture_stays_small():
    assert sum(file.stat().st_size for file in LEGO.rglob("*") if file.is_file()) < 400_000


def test_pixels_and_poses_are_read_as_they_are(tmp_path):
    truth = write_split(tmp_path, images=3, size=(7, 5))
    pose = np.array([[0.0, -1, 0, 3], [0.6, 0, -0.8, 7], [0.8, 0, 0.6, 11], [0, 0, 0, 1]])
    edit(tmp_path, lambda content: content["frames"][1].update(transform_matrix=pose.tolist()))
    scene = load_blender(tmp_path, LoadOptions(splits=["train"], holdout=0))
    assert torch.equal(scene.train.images, truth)
    assert (scene.train.cameras.width, scene.train.cameras.height) == (7, 5)
    assert torch.equal(scene.train.cameras.c2w[1], torch.from_numpy(pose).float())
    focal = 3.5 / math.tan(0.4)
    torch.testing.assert_close(scene.train.cameras.intrinsics[0], torch.tensor([focal, focal, 3.5, 2.5]))


@pytest.mark.parametrize(("mode", "suffix"), [("RGB", ".png"), ("L", ".png"), ("RGB", ".jpg")])
def test_images_without_alpha_are_opaque(tmp_path, mode, suffix):
    write_split(tmp_path, mode=mode, suffix=suffix)
    for index in range(2):
        edit(tmp_path, lambda content, i=index: content["frames"][i].update(file_path=f"train/r_{i}{suffix}"))
    images = load_blender(tmp_path, LoadOptions(splits=["train"], holdout=0)).train.images
    assert (images[..., 3] == 255).all()
    with Image.open(tmp_path / "train" / f"r_1{suffix}") as image:
        assert torch.equal(images[1, ..., :3], torch.from_numpy(np.array(image.convert("RGB"))))


def test_a_dot_in_a_name_is_no_suffix(scene):
    (scene / "train" / "r_0.png").rename(scene / "train" / "view_0.5.png")
    edit(scene, lambda content: content["frames"][0].update(file_path="train/view_0.5"))
    assert load_blender(scene).train.names == ("view_0.5", "r_1")


@pytest.mark.parametrize("second", ["other/r_0", "train/r_0"])
def test_views_of_one_name_are_numbered(scene, second):
    # Pictures are named after views: one must not replace another.
    (scene / "other").mkdir()
    (scene / "train" / "r_1.png").rename(scene / "other" / "r_0.png")
    edit(scene, lambda content: content["frames"][1].update(file_path=second))
    assert load_blender(scene).train.names == ("0_r_0", "1_r_0")


def test_only_the_images_of_the_splits_asked_for_are_read(scene):
    (scene / "test" / "r_0.png").write_text("no image")
    assert list(load_blender(scene, LoadOptions(splits=["train"])).splits) == ["train"]
    with pytest.raises(ValueError, match=r"r_0\.png: unreadable image"):
        load_blender(scene, LoadOptions(splits=["test"]))
    (scene / "transforms_val.json").write_text("not JSON")
    with pytest.raises(ValueError, match=r"transforms_val\.json: not valid JSON"):
        load_blender(scene)


def test_available_splits_are_those_with_a_json(scene, tmp_path):
    assert available_splits(scene) == ("train", "test")
    write_split(scene, "val")
    assert available_splits(scene) == ("train", "val", "test")
    assert available_splits(tmp_path / "nowhere") == ()


def test_a_split_that_was_not_loaded(scene):
    loaded = load_blender(scene)
    assert loaded.split("test") is loaded.test
    with pytest.raises(ValueError, match=r"splits of scene 'toy' that were loaded \(train, test\), got 'val'"):
        loaded.split("val")


def test_aabb_is_taken(scene):
    assert load_blender(scene, LoadOptions(aabb=[[-1, -2, -3], [1, 2, 3]])).aabb.tolist() == [[-1, -2, -3], [1, 2, 3]]
    assert (
        load_blender(scene, LoadOptions(aabb=torch.zeros(2, 3).double() + torch.arange(2)[:, None])).aabb.dtype
        == torch.float32
    )


def test_folder_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^[^\n]*nowhere, which does not exist[^\n]*$"):
        load_scene(tmp_path / "nowhere")


def test_split_json_missing(scene):
    message = refusal(scene, FileNotFoundError, splits=["train", "val"])
    assert "transforms_val.json: no such file (splits of this scene: train, test)" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"frames": [', r"not valid JSON \(Expecting value: line 1 column 13"),
        ("[]", "must hold a JSON object, got a list"),
        ("{}", r"'frames' must be a list with entries, but it is missing"),
        ('{"frames": []}', r"'frames' must be a list with entries, got \[\]"),
        ('{"frames": 3}', r"'frames' must be a list with entries, got 3"),
        ('{"frames": [3]}', r"frame 0 must be an object, got int"),
        ('{"frames": [{"transform_matrix": []}]}', r"'file_path' of frame 0 must be a path, but it is missing"),
        (
            '{"frames": [{"file_path": "a"}]}',
            r"'transform_matrix' of a must be a 4x4 matrix of numbers, but it is missing",
        ),
        ('{"frames": [{"file_path": 1, "transform_matrix": []}]}', r"'file_path' of frame 0 must be a path, got 1"),
        ("\xff", r"must be UTF-8 text, or UTF-16 with a byte order mark \("),
    ],
)
def test_bad_json(scene, text, message):
    (scene / "transforms_train.json").write_text(text, encoding="latin-1")
    assert re.search(r"transforms_train\.json: " + message, refusal(scene))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (POSE[:3], "must be a 4x4 matrix of numbers"),
        ([*POSE[:3], [0.0, 0.0, float("nan"), 1.0]], "must be finite"),
        ([*POSE[:3], [0.0, 1.0]], "must be a 4x4 matrix of numbers"),
        ("eye", "must be a 4x4 matrix of numbers"),
        (None, "must be a 4x4 matrix of numbers"),
    ],
)
def test_bad_matrix(scene, matrix, message):
    edit(scene, lambda content: content["frames"][1].update(transform_matrix=matrix))
    assert f"transforms_train.json: 'transform_matrix' of ./train/r_1 {message}" in refusal(scene)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"camera_angle_x": None}, "key 'camera_angle_x' is missing"),
        ({"camera_angle_x": "wide"}, "'camera_angle_x' must be a finite number, got 'wide'"),
        ({"camera_angle_x": float("nan")}, "'camera_angle_x' must be a finite number, got nan"),
        ({"camera_angle_x": 40.0}, "'camera_angle_x' must be radians between 0 and pi, got 40.0"),
        ({"camera_angle_y": -1}, "'camera_angle_y' must be radians between 0 and pi, got -1"),
        ({"x_fov": 180, "camera_angle_x": None}, "'x_fov' must be degrees between 0 and 180, got 180"),
        ({"fl_x": -3.0}, "'fl_x' must be above 0 pixels, got -3.0"),
        ({"w": 0}, "'w' must be above 0 pixels, got 0"),
        ({"w": 12, "h": 12}, r"r_0.png: size must be in proportion to 12x12 \(from 'w' and 'h' in .*\), got 6x4: is"),
        ({"k1": "strong"}, "'k1' must be a finite number, got 'strong'"),
        ({"camera_model": "ORTHOPHOTO"}, "'camera_model' must be one of .*PINHOLE, .*, got 'ORTHOPHOTO'"),
    ],
)
def test_bad_intrinsics(scene, change, message):
    edit(scene, lambda content: content.update(change))
    assert re.search(message, refusal(scene))
    assert "transforms_train.json" in refusal(scene)


def test_missing_image(scene, caplog):
    (scene / "train" / "r_0.png").unlink()
    lack = f"1 of 2 images are missing, the first is {scene / 'train' / 'r_0.png'}"
    assert lack in refusal(scene, FileNotFoundError)
    with caplog.at_level(logging.WARNING):
        train = load_blender(scene, LoadOptions(missing_images="skip")).train
    assert train.names == ("r_1",)
    assert "1 of 2 images are missing" in caplog.text


def test_images_of_several_sizes(scene):
    Image.new("RGBA", (5, 4)).save(scene / "train" / "r_1.png")
    cameras = load_blender(scene).train.cameras
    assert cameras.sizes.tolist() == [[6, 4], [5, 4]]
    # One angle of view means another focal length in pixels for an image of another width.
    assert float(cameras.intrinsics[1, 0] / cameras.intrinsics[0, 0]) == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"downscale": 0}, "downscale must be a whole number of at least 1, got 0"),
        ({"holdout": 1}, "holdout must be 0, or a whole number of at least 2, got 1"),
        ({"image_size": 0}, "image_size must be a whole number of at least 1, got 0"),
        ({"missing_images": "ignore"}, "missing_images must be 'error' or 'skip', got 'ignore'"),
        ({"aabb": [[0, 0, 0]]}, r"aabb must be two corners of three numbers each, shape \(2, 3\), got \[\[0, 0, 0\]\]"),
        ({"aabb": [[0, 0, 0], [1, 1, 0]]}, "with low < high along every axis"),
    ],
)
def test_bad_arguments(scene, arguments, message):
    assert re.search(message, refusal(scene, **arguments))


def test_split_and_scene_refuse_what_does_not_fit():
    cameras, pair = (Cameras(torch.eye(4).repeat(n, 1, 1), torch.ones(n, 4), 3, 2) for n in (1, 2))
    images = torch.zeros(1, 2, 3, 4, dtype=torch.uint8)
    assert len(Split(images, cameras, ("a",))) == 1
    with pytest.raises(TypeError, match=r"images must be uint8, got float32"):
        Split(images.float(), cameras, ("a",))
    with pytest.raises(
        ValueError, match=r"images must have shape \(1, 2, 3, 4\), as the cameras say, got \(1, 3, 2, 4\)"
    ):
        Split(images.transpose(1, 2), cameras, ("a",))
    with pytest.raises(ValueError, match=r"names must be 1 names, one for each camera, got 2"):
        Split(images, cameras, ("a", "b"))
    with pytest.raises(ValueError, match=r"names must differ, got 'a' 2 times"):
        Split(images.repeat(2, 1, 1, 1), pair, ("a", "a"))
    seen = torch.ones(1, 2, 3, dtype=torch.bool)
    assert Split(images, cameras, ("a",), seen).mask(0).all()
    with pytest.raises(TypeError, match=r"masks must be bool, got uint8"):
        Split(images, cameras, ("a",), seen.byte())
    with pytest.raises(ValueError, match=r"masks must have shape \(1, 2, 3\), got \(1, 3, 2\)"):
        Split(images, cameras, ("a",), seen.mT)
    with pytest.raises(ValueError, match=r"masks must leave some pixels of each view, got none of 'a'"):
        Split(images, cameras, ("a",), ~seen)
    with pytest.raises(TypeError, match=r"aabb must be float32, got float64"):
        Scene("s", torch.zeros(2, 3).double(), {})
    with pytest.raises(ValueError, match=r"aabb must have shape .*, got \(3, 2\)"):
        Scene("s", torch.zeros(3, 2), {})
    with pytest.raises(ValueError, match=r"loaded \(none\), got 'train'"):
        _ = Scene("s", torch.zeros(2, 3), {}).train


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        ((800, 800), {"image_size": 200}, (200, 200)),
        ((6, 4), {"image_size": 6}, (6, 4)),
        ((6, 4), {"image_size": 3}, (3, 2)),
        ((7, 5), {"image_size": 4}, (4, 3)),
        ((1002, 1336), {"image_size": 200}, (150, 200)),
        ((211, 211), {"image_size": 200}, (200, 200)),
        ((7, 5), {"downscale": 2}, (4, 2)),
        ((800, 600), {"downscale": 2, "image_size": 300}, (300, 225)),
        ((1000, 1), {"downscale": 4}, (250, 1)),
    ],
)
def test_sizes_that_images_are_resized_to(size, options, expected):
    assert LoadOptions(**options).size_of(size) == expected


def test_intrinsics_follow_images_of_any_size(tmp_path):
    write_split(tmp_path, size=(7, 5), images=1)
    whole = load_blender(tmp_path, LoadOptions(splits=["train"], holdout=0)).train.cameras
    small = load_blender(tmp_path, LoadOptions(splits=["train"], holdout=0, image_size=4)).train.cameras
    assert (small.width, small.height) == (4, 3)
    scale = torch.tensor([4 / 7, 3 / 5, 4 / 7, 3 / 5])
    torch.testing.assert_close(small.intrinsics, whole.intrinsics * scale)
