"""COLMAP's layout: where models, images and masks are found, and which of several models is read."""

from __future__ import annotations

import json
import math
import os
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import voxelfield
from voxelfield.captures.capture import read_capture
from voxelfield.datasets.colmap import find_model, is_colmap
from voxelfield.datasets.lenses import CAMERA_MODELS

pycolmap = pytest.importorskip("pycolmap")

NAMES = tuple(f"{index:03d}.png" for index in range(8))


def write_images(folder: Path, names: Sequence[str] = NAMES) -> None:
    """Writes an image for each name, the red of which is ten times its place."""
    for index, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (24, 18), (10 * index, 90, 200)).save(path)


def write_model(folder: Path, names: Sequence[str] = NAMES, binary: bool = False) -> None:
    """Writes a model whose cameras stand on a circle and look along its tangents."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index, name in enumerate(names):
        half = math.pi * index / len(names)
        lines += [f"{index + 1} {math.cos(half)} 0 {math.sin(half)} 0 0.5 0.25 3 1 {name}", ""]
    (folder / "cameras.txt").write_text("1 PINHOLE 24 18 25 25 12 9\n")
    (folder / "images.txt").write_text("# Image list\n" + "\n".join(lines) + "\n")
    (folder / "points3D.txt").write_text("".join(f"{k + 1} {k % 3} {k % 5} {k % 7} 9 8 7 0.5\n" for k in range(30)))
    if binary:
        pycolmap.Reconstruction(folder).write_binary(folder)
        for path in folder.glob("*.txt"):
            path.unlink()


def write_capture(folder: Path, names: Sequence[str] = NAMES, binary: bool = False) -> None:
    """Writes all images and a model of those with some names."""
    write_images(folder / "images")
    write_model(folder / "sparse" / "0", names, binary)


def reds(folder: Path, **options: object) -> list[int]:
    """Returns the red of each image that is loaded."""
    return voxelfield.load_scene(folder, holdout=0, splits=None, **options).train.images[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("binary", [False, True])
def test_the_model_with_the_most_images_is_read_unless_another_is_named(tmp_path, caplog, binary):
    write_images(tmp_path / "images")
    write_model(tmp_path / "sparse" / "0", NAMES[:2], binary)
    write_model(tmp_path / "sparse" / "1", NAMES[2:7], binary)
    write_model(tmp_path / "sparse" / "10", NAMES[7:], binary)
    assert reds(tmp_path) == [20, 30, 40, 50, 60]
    assert "sparse has several models, 0 with 2 images, 1 with 5 images, 10 with 1 images: 1 is read" in caplog.text
    assert "5 of 8 photographs in" in caplog.text
    assert "have a pose; the others are left out, the first is 000.png" in caplog.text
    caplog.clear()
    assert reds(tmp_path, model=10) == [70]
    assert "several models" not in caplog.text
    with pytest.raises(ValueError, match=r"model must be one of 0, 1, 10, as .*sparse has no other, got 2"):
        reds(tmp_path, model=2)
    with pytest.raises(ValueError, match="model must be a whole number of at least 0, got -1"):
        reds(tmp_path, model=-1)


def test_a_model_whose_images_cannot_be_counted_is_not_chosen(tmp_path):
    write_capture(tmp_path, NAMES[:1])
    write_model(tmp_path / "sparse" / "1", binary=True)
    (tmp_path / "sparse" / "1" / "images.bin").write_bytes(b"")
    assert reds(tmp_path) == [0]


def test_only_colmap_has_models(tmp_path):
    write_images(tmp_path / "images")
    write_model(tmp_path / "sparse")
    with pytest.raises(ValueError, match=r"model must be None, as .*sparse has no other, got 0"):
        reds(tmp_path, model=0)
    with pytest.raises(ValueError, match=r"model must be None for .*lego, which has no COLMAP models, got 1"):
        voxelfield.load_scene(Path(__file__).parents[1] / "fixtures" / "lego", model=1)


@pytest.mark.parametrize("transforms", ["{", '{"frames": []}', '{"frames": [{"file_path": "images/000.png"}]}'])
def test_a_model_beside_an_unusable_file_of_another_format_is_read(tmp_path, caplog, transforms):
    write_images(tmp_path / "images")
    write_model(tmp_path / "colmap" / "sparse" / "0")
    (tmp_path / "transforms.json").write_text(transforms)
    assert voxelfield.load_scene(tmp_path).format == "COLMAP"
    assert "transforms.json: " in caplog.text
    assert "; the folder is read as COLMAP instead" in caplog.text
    assert len(read_capture(tmp_path).points) == 30
    (tmp_path / "colmap" / "sparse" / "0" / "cameras.txt").unlink()
    with pytest.raises(ValueError, match=r"transforms\.json: "):
        voxelfield.load_scene(tmp_path)


def test_a_named_model_is_read_in_spite_of_other_formats(tmp_path):
    write_capture(tmp_path)
    frames = [{"file_path": "images/000.png", "transform_matrix": np.eye(4).tolist()}]
    (tmp_path / "transforms.json").write_text(json.dumps({"camera_angle_x": 0.8, "frames": frames}))
    scene = voxelfield.load_scene(tmp_path, holdout=0)
    assert (scene.format, len(scene.train)) == ("nerfstudio or instant-ngp", 1)
    scene = voxelfield.load_scene(tmp_path, holdout=0, model=0)
    assert (scene.format, len(scene.train)) == ("COLMAP", 8)


def test_a_capture_is_that_of_the_model_and_photographs_without_a_pose_are_named(tmp_path, caplog):
    write_capture(tmp_path, NAMES[:3])
    write_model(tmp_path / "sparse" / "1", NAMES[:2])
    capture = read_capture(tmp_path)
    assert (capture.format, len(capture), len(capture.points)) == ("COLMAP", 3, 30)
    assert "3 of 8 photographs" in caplog.text
    assert "the first is 003.png" in caplog.text
    assert len(read_capture(tmp_path, model=1)) == 2


@pytest.mark.parametrize(
    ("place", "images"),
    [
        ("sparse/0", "images"),
        ("sparse", "images"),
        ("colmap/sparse/0", "images"),
        ("colmap/sparse", "colmap/images"),
        ("colmap_sparse/0", "images"),
        ("colmap_text", "images"),
        ("undistorted/sparse", "undistorted/images"),
        ("dense/sparse", "dense/images"),
        ("dense/0/sparse", "dense/0/images"),
    ],
)
def test_models_are_found_where_programs_leave_them(tmp_path, place, images):
    assert not is_colmap(tmp_path)
    write_images(tmp_path / images)
    write_model(tmp_path / place)
    assert is_colmap(tmp_path)
    assert find_model(tmp_path, None) == (tmp_path / place, tmp_path / images)
    assert reds(tmp_path) == list(range(0, 80, 10))


def test_an_undistorted_model_is_read_where_only_its_images_are_there(tmp_path):
    write_model(tmp_path / "sparse" / "0")
    write_images(tmp_path / "dense" / "images")
    write_model(tmp_path / "dense" / "sparse")
    assert find_model(tmp_path, None)[0] == tmp_path / "dense" / "sparse"
    write_images(tmp_path / "images")
    assert find_model(tmp_path, None)[0] == tmp_path / "sparse" / "0"


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_camera_of_the_image_as_exif_rotates_it_is_refused_with_the_cause(tmp_path, orientation):
    """COLMAP finds poses of the pixels as they are stored, other programs of rotated ones."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    write_capture(tmp_path)
    for name in NAMES:
        Image.new("RGB", (18, 24)).save(tmp_path / "images" / name, exif=exif)
    with pytest.raises(ValueError, match=r"images/00\d\.png: size must be .*24x18.*, got 18x24") as error:
        reds(tmp_path)
    assert ("EXIF rotates the image, but pixels are read as they are stored" in str(error.value)) == (orientation == 6)


@pytest.mark.skipif(sys.platform == "win32", reason="has no named pipes in folders")
@pytest.mark.parametrize("place", ["images", "masks"])
def test_a_named_pipe_in_place_of_an_image_is_neither_waited_for_nor_called_missing(tmp_path, place):
    write_capture(tmp_path)
    write_images(tmp_path / "masks")
    (tmp_path / place / NAMES[3]).unlink()
    os.mkfifo(tmp_path / place / NAMES[3])
    with pytest.raises(ValueError, match=rf"{place}/003\.png: unreadable image .* must be a file, got a named pipe"):
        reds(tmp_path)


def test_names_may_have_spaces_folders_and_backslashes(tmp_path, caplog):
    names = ["left side/my photo (1).png", "left side/ä b.png", "right/c.png"]
    write_images(tmp_path / "images", names)
    write_model(tmp_path / "sparse" / "0", [names[0], names[1], names[2].replace("/", "\\")])
    assert sorted(reds(tmp_path)) == [0, 10, 20]
    assert not caplog.records, "nothing is missing or without a pose"


def test_names_may_be_relative_to_the_folder_around_the_images(tmp_path, caplog):
    write_capture(tmp_path, [f"images/{name}" for name in NAMES[:7]])
    assert reds(tmp_path) == list(range(0, 70, 10))
    assert "7 of 8 photographs in" in caplog.text


def test_names_may_have_another_suffix_or_case(tmp_path, caplog):
    write_images(tmp_path / "images", [f"{name[:3]}.PNG" for name in NAMES])
    write_model(tmp_path / "sparse" / "0", [f"{name[:3]}.jpg" for name in NAMES])
    assert reds(tmp_path) == [10 * index for index in range(8)]
    assert "missing" not in caplog.text


def test_points_are_near_cameras_that_are_far_from_the_origin(tmp_path, caplog):
    write_capture(tmp_path, binary=True)
    model = pycolmap.Reconstruction(tmp_path / "sparse" / "0")
    model.transform(pycolmap.Sim3d(1.0, pycolmap.Rotation3d(), np.array([530000.0, 5400000.0, 40.0])))
    model.write_binary(tmp_path / "sparse" / "0")
    points = voxelfield.load_scene(tmp_path, holdout=0).points
    assert len(points) == 30
    assert float(points.abs().max()) < 100


def test_names_that_leave_the_folder_are_refused(tmp_path):
    write_images(tmp_path / "images")
    for name in ("../a.png", "..\\a.png", "/etc/a.png"):
        write_model(tmp_path / "sparse" / "0", [name])
        with pytest.raises(ValueError, match="names of images must be files inside the folder images, got"):
            reds(tmp_path)


@pytest.mark.parametrize("name", [b"", b"."])
def test_names_that_name_no_file_are_refused(tmp_path, name):
    write_capture(tmp_path, binary=True)
    path = tmp_path / "sparse" / "0" / "images.bin"
    path.write_bytes(path.read_bytes().replace(NAMES[0].encode() + b"\0", name + b"\0"))
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/sparse/0: names of images must be files inside the folder images, got '\.?'$"
    ):
        voxelfield.load_scene(tmp_path)


def test_points_that_cannot_lie_in_a_scene_are_left_out(tmp_path, caplog):
    write_capture(tmp_path, binary=True)
    model = pycolmap.Reconstruction(tmp_path / "sparse" / "0")
    for place in ((0.1, 0.2, 0.3), (math.nan, 0, 0), (0, -math.inf, 0), (0, 0, 1e30), (0.4, 0.5, 0.6)):
        model.add_point3D(np.array(place), pycolmap.Track(), np.array([1, 2, 3], dtype=np.uint8))
    model.write_binary(tmp_path / "sparse" / "0")
    scene = voxelfield.load_scene(tmp_path, holdout=0)
    before = len(scene.points)
    assert before == len(model.points3D) - 3
    expected = f"{tmp_path}/sparse/0: 3 of {before + 3} points are left out, because they are not within 1e+06 world"
    assert expected in caplog.text
    assert bool(scene.aabb.isfinite().all())


@pytest.mark.parametrize("naming", ["{name}.png", "{stem}.png", "{name}", "{stem}_mask.png", "{stem}.mask.PNG"])
@pytest.mark.parametrize("around", ["", "dense/"])
def test_masks_are_named_after_their_images(tmp_path, naming, around):
    names = [f"left/{index}.jpg" for index in range(3)]
    write_images(tmp_path / f"{around}images", names)
    write_model(tmp_path / f"{around}sparse", names)
    for index, name in enumerate(names):
        mask = np.full((18, 24), 255, dtype=np.uint8)
        mask[:, :index] = 0
        path = tmp_path / f"{around}masks" / naming.format(name=name, stem=name.removesuffix(".jpg"))
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(path, format="PNG")
    split = voxelfield.load_scene(tmp_path, holdout=0, splits=None).train
    assert split.masks.sum(dim=(1, 2)).tolist() == [18 * 24, 18 * 23, 18 * 22]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"masks/left/2.jpg.png: no such mask"):
        voxelfield.load_scene(tmp_path, holdout=0, splits=None)


@pytest.mark.parametrize("lacks", ["images", "cameras", "points3D"])
@pytest.mark.parametrize("suffix", ["bin", "txt"])
def test_the_files_that_a_model_lacks_are_named(tmp_path, lacks, suffix):
    write_capture(tmp_path, binary=suffix == "bin")
    (tmp_path / "sparse" / "0" / f"{lacks}.{suffix}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"sparse/0: must have cameras, .*, got no {lacks}\.{suffix}$"):
        voxelfield.load_scene(tmp_path)


@pytest.mark.parametrize("place", ["sparse/1", "sparse", "colmap/sparse/0"])
def test_a_model_without_images_stands_in_the_way_of_no_other(tmp_path, place):
    write_capture(tmp_path)
    (tmp_path / "sparse" / "0" / "images.txt").unlink()
    write_model(tmp_path / place, NAMES[:5])
    assert len(reds(tmp_path)) == 5


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_that_differ_in_the_form_of_unicode_only_are_those_of_the_same_file(tmp_path, forms, caplog):
    names = [f"café/Zoë {index}.png" for index in range(4)]
    listed, there = ([unicodedata.normalize(form, name) for name in names] for form in forms)
    write_images(tmp_path / "images", there)
    write_images(tmp_path / "masks", [f"{name}.png" for name in listed])
    for name in listed:
        Image.new("L", (24, 18), 255).save(tmp_path / "masks" / f"{name}.png")
    write_model(tmp_path / "sparse" / "0", listed)
    assert reds(tmp_path) == [0, 10, 20, 30]
    poses = [(np.eye(4) + index * np.eye(4, k=3)).tolist() for index in range(4)]
    frames = [
        {"file_path": f"images/{name}", "transform_matrix": pose} for name, pose in zip(listed, poses, strict=True)
    ]
    content = {"camera_angle_x": 0.8, "frames": frames, "train_filenames": [f"images/{name}" for name in there]}
    (tmp_path / "transforms.json").write_text(json.dumps(content))
    scene = voxelfield.load_scene(tmp_path, holdout=0)
    assert (scene.format, len(scene.train)) == ("nerfstudio or instant-ngp", 4)
    assert "missing" not in caplog.text
    assert "have a pose" not in caplog.text


def test_cameras_of_other_models_are_refused(tmp_path, monkeypatch):
    """As those of a later COLMAP would be."""
    write_capture(tmp_path)
    monkeypatch.delitem(CAMERA_MODELS, "PINHOLE")
    with pytest.raises(
        ValueError, match=r"camera 1 must be one of .*, got PINHOLE: undistort the images first \(colmap"
    ):
        voxelfield.load_scene(tmp_path)


def test_panoramas_are_those_of_colmap(tmp_path):
    write_capture(tmp_path)
    for name in NAMES:
        Image.new("RGB", (24, 12), "gray").save(tmp_path / "images" / name)
    (tmp_path / "sparse" / "0" / "cameras.txt").write_text("1 EQUIRECTANGULAR 24 12 24 12\n")
    model = pycolmap.Reconstruction(tmp_path / "sparse" / "0")
    cameras = voxelfield.load_scene(tmp_path, holdout=0).train.cameras
    assert cameras.lens.models == len(NAMES) * ("equirectangular",)
    images = {image.name: image for image in model.images.values()}
    for index, name in enumerate(sorted(NAMES)):
        directions = cameras.image_rays(index, torch.tensor([[-9.0] * 3, [9.0] * 3])).directions.view(12, 24, 3)
        for row, column in ((0, 0), (4, 20), (11, 9)):
            ray = model.cameras[1].cam_ray_from_img(np.array([column + 0.5, row + 0.5]))
            expected = images[name].cam_from_world().rotation.inverse() * ray
            np.testing.assert_allclose(directions[row, column], expected, atol=1e-6)


def write_tracks(folder: Path, size: tuple[int, int] = (24, 18)) -> dict[str, np.ndarray]:
    """Gives each image of a model the points that it sees, and returns these by its name.

    Rows are columns and rows of pixels, depths and reprojection errors.
    """
    model = pycolmap.Reconstruction(folder)
    errors = {number: 0.2 + 0.05 * (number % 9) for number in model.points3D}
    seen, tracks, lines = {}, {number: [] for number in errors}, []
    for image in model.images.values():
        pose, rows, listed = image.cam_from_world(), [], []
        for number, point in model.points3D.items():
            x, y, z = pose * point.xyz
            column, row = (25 * x / z + 12, 25 * y / z + 9) if z > 0 else (-1, -1)
            if 0 <= column < size[0] and 0 <= row < size[1]:
                tracks[number] += [image.image_id, len(listed)]
                listed.append(f"{column} {row} {number}")
                rows.append([column, row, z, errors[number]])
        seen[image.name] = np.array(rows)
        x, y, z, w = pose.rotation.quat
        lines += [f"{image.image_id} {w} {x} {y} {z} {' '.join(map(str, pose.translation))} 1 {image.name}"]
        lines += [" ".join(["3.5 4.5 -1", *listed])]  # a keypoint without a point comes first
    for track in tracks.values():
        track[1::2] = [index + 1 for index in track[1::2]]
    points = [
        f"{number} {' '.join(map(str, point.xyz))} 9 8 7 {errors[number]} {' '.join(map(str, tracks[number]))}"
        for number, point in model.points3D.items()
    ]
    (folder / "images.txt").write_text("\n".join(lines) + "\n")
    (folder / "points3D.txt").write_text("\n".join(points) + "\n")
    return seen


@pytest.mark.parametrize("downscale", [1, 3])
def test_images_have_the_depths_of_the_points_that_they_observe(tmp_path, downscale):
    write_capture(tmp_path)
    seen = write_tracks(tmp_path / "sparse" / "0")
    split = voxelfield.load_scene(tmp_path, holdout=0, downscale=downscale, depth=True).train
    assert not voxelfield.load_scene(tmp_path, holdout=0).train.extras, "unless asked for"
    mean = np.mean([0.2 + 0.05 * (number % 9) for number in range(1, 31)])
    several = 0
    for name, depth, weight in zip(split.names, split.extras["depth"], split.extras["depth_weight"], strict=True):
        rows = seen[f"{name}.png"]
        pixels = [tuple(pixel) for pixel in np.floor(rows[:, 1::-1] / downscale).astype(int)]
        assert int((depth > 0).sum()) == int((weight > 0).sum()) == len(set(pixels))
        for pixel in set(pixels):
            there = rows[[other == pixel for other in pixels]]
            several += len(there) > 1
            best = there[there[:, 3] == there[:, 3].min()]  # the most reliable of several points counts
            assert np.isclose(best[:, 2], float(depth[pixel]), rtol=1e-5).any()
            assert math.isclose(weight[pixel], math.exp(-((best[0, 3] / mean) ** 2)), rel_tol=1e-3)
    assert several > 0


def test_points_without_tracks_have_no_depths(tmp_path):
    write_capture(tmp_path)
    with pytest.raises(ValueError, match=r"0: images must observe points where depth .*, got 30 points without tracks"):
        voxelfield.load_scene(tmp_path, holdout=0, depth=True)
