"""``voxelfield inspect``: its messages and pictures for scenes of every format."""

from __future__ import annotations

import base64
import dataclasses
import html.parser
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from room_corner import corner_cameras, photograph, write_photographs, write_transforms

import voxelfield
from voxelfield.captures.capture import fingerprint, read_capture
from voxelfield.captures.checks import Finding, check_capture
from voxelfield.captures.inspection import (
    PAGE,
    PICTURE,
    SPLITS,
    draw,
    frustum_lines,
    inspect_scene,
    make_page,
    measures,
)
from voxelfield.cli.command import main
from voxelfield.datasets.measures import sharpness

LEGO = Path(__file__).parents[1] / "fixtures" / "lego"
CAMERAS = corner_cameras(24, width=96, height=72)


@pytest.fixture(scope="module")
def capture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of nerfstudio's kind, of the corner of a room."""
    folder = tmp_path_factory.mktemp("scenes") / "corner"
    write_photographs(folder / "images", CAMERAS)
    write_transforms(folder, CAMERAS)
    return folder


@pytest.fixture
def folder(capture_folder, tmp_path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(capture_folder, tmp_path / "corner"))


def test_a_picture_and_a_page_are_written(capture_folder, tmp_path, caplog):
    caplog.set_level("INFO")
    assert main(["inspect", str(capture_folder), "-o", str(tmp_path / "out")]) == 0
    assert "24: 21 train, 3 test" in caplog.text
    assert "96 x 72 pixels" in caplog.text
    assert "warning" not in caplog.text
    page = (tmp_path / "out" / PAGE).read_text()
    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(data) == (tmp_path / "out" / PICTURE).read_bytes()
    assert len(re.findall(r"<figcaption>view_\d\d \((train|test)\)", page)) == 24
    assert not re.search(r'(?:src|href)="(?!data:)', page), "the page must need no other file"
    assert "Nothing unusual was found." in page


def test_warnings_are_told_drawn_and_do_not_fail(folder, tmp_path, caplog):
    blurred = folder / "images" / "view_05.png"
    Image.open(blurred).filter(ImageFilter.GaussianBlur(4)).save(blurred)
    shutil.copy(folder / "images" / "view_10.png", folder / "images" / "view_20.png")
    (folder / "images" / "view_23.png").unlink()
    assert main(["inspect", str(folder), "-o", str(tmp_path)]) == 0
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 3
    assert "1 of 24 images are missing" in told[0]
    assert told[1].startswith("warning: blurred images: view_05 has less than 0.2 of the median sharpness: leave")
    assert told[2].startswith("warning: duplicate images: view_10 and view_20 are nearly identical")
    page = (tmp_path / PAGE).read_text()
    assert '<b class="warning">blurred images</b>: view_05 has' in page
    assert re.search(r'<figure class="warning">[^\n]*view_05 \(train\)<br>blurred images', page)


def test_cameras_are_named_with_their_shutters(folder, tmp_path, caplog):
    caplog.set_level("INFO")
    content = json.loads((folder / "transforms.json").read_text())
    for key in ("fl_x", "fl_y", "cx", "cy"):
        del content[key]
    content |= {"camera_model": "EQUIRECTANGULAR", "rolling_shutter_time": 0.1}
    for frame in content["frames"][:6]:
        frame |= {"camera_angular_velocity": [0, 1, 0], "camera_linear_velocity": [3, 0, 4]}
    (folder / "transforms.json").write_text(json.dumps(content))
    assert main(["inspect", str(folder), "-o", str(tmp_path)]) == 0
    assert "21 train views, 96 x 72, equirectangular, rolling shutter" in caplog.text
    assert re.search(r"cameras +equirectangular$", caplog.text, re.MULTILINE)
    assert re.search(r"field of view, horizontal +360 degrees$", caplog.text, re.MULTILINE)
    shutter = "6 of 24 images, during which cameras turn by 0 to 5.73, median 0 degrees and move by 0 to 0.5, median 0"
    assert shutter in caplog.text
    page = (tmp_path / PAGE).read_text()
    assert "equirectangular" in page
    assert shutter in page


def test_masks_times_and_made_points_are_told(folder):
    content = json.loads((folder / "transforms.json").read_text())
    (folder / "masks").mkdir()
    Image.fromarray(np.repeat(np.array([[0], [255]], np.uint8), 36, axis=0).repeat(96, axis=1)).save(
        folder / "masks" / "half.png"
    )
    for index, frame in enumerate(content["frames"]):
        frame |= {"time": index // 2} | ({"mask_path": "masks/half.png"} if index < 12 else {})
    (folder / "transforms.json").write_text(json.dumps(content))
    capture = read_capture(folder)
    rows = dict(measures(capture))
    assert rows["masks"] == "25 % of all pixels are left out, in 12 of 24 images"
    assert rows["times"] == "0 to 11, median 5, 12 different"
    made = dict(measures(dataclasses.replace(capture, format="LLFF", points=torch.zeros(3, 3).double())))
    assert "points between the stated depths" in made
    assert "sparse points" not in made


def test_warnings_of_the_loader_are_on_the_page(folder, tmp_path, caplog):
    picture = folder / "images" / "view_05.png"
    image = Image.open(picture).convert("RGBA")
    image.putpixel((3, 4), (0, 0, 0, 0))
    image.save(picture)
    assert main(["inspect", str(folder), "-o", str(tmp_path)]) == 0
    assert caplog.text.count("of all pixels are transparent, in 1 of") == 1
    assert re.search(r"loading</b>: .* of all pixels are transparent, in 1 of", (tmp_path / PAGE).read_text())


def test_a_box_that_cuts_images_is_reported(tmp_path):
    capture = read_capture(LEGO, aabb=[[-0.5] * 3, [0.5] * 3])
    assert 0.1 < np.mean(capture.beyond_box) < 0.6
    assert "box cuts images" in [finding.title for finding in check_capture(capture)]
    assert max(read_capture(LEGO).beyond_box) == 0
    assert dict(measures(capture))["transparent pixels"].endswith("% of all, in 28 of 28 images")


def test_names_that_the_locale_cannot_decode_are_drawn(capture_folder, tmp_path):
    folder = tmp_path / os.fsdecode(b"gr\xfcn")
    shutil.copytree(capture_folder, folder)
    inspect_scene(folder, tmp_path / "out")
    assert r"<h1>gr\xfcn</h1>" in (tmp_path / "out" / PAGE).read_text()


def test_a_folder_without_a_scene_is_named_in_one_line(tmp_path, caplog):
    assert main(["inspect", str(tmp_path), "-o", str(tmp_path)]) == 2
    (record,) = caplog.records
    assert "transforms.json" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_capture_agrees_with_the_files(capture_folder):
    capture = read_capture(capture_folder)
    order = [int(name.removeprefix("view_")) for name in capture.names]
    assert sorted(order) == list(range(24))
    torch.testing.assert_close(capture.c2w, CAMERAS.c2w[order].double())
    torch.testing.assert_close(capture.intrinsics, CAMERAS.intrinsics[order].double())
    assert capture.splits == ("train",) * 21 + ("test",) * 3
    assert set(capture.sizes) == {(96, 72)}


def test_measures_are_those_of_the_image_files_and_not_of_the_loaded_copies(tmp_path):
    shutil.copytree(LEGO, tmp_path / "lego")
    for path in (tmp_path / "lego").rglob("*.png"):
        with Image.open(path) as image:
            image.resize((600, 600)).save(path)
    capture = read_capture(tmp_path / "lego", aabb=[[-1.5] * 3, [1.5] * 3])
    small = voxelfield.load_scene(LEGO).train.cameras
    assert set(capture.sizes) == {(600, 600)}
    torch.testing.assert_close(capture.intrinsics[0], small.intrinsics[0].double() * 600 / small.width)
    rows = dict(measures(capture))
    assert rows["image size"] == "600 x 600 pixels"
    assert rows["field of view, horizontal"] == "39.6 degrees"
    assert rows["distance to the box's centre"] == "4.031 units"
    assert rows["up direction, mean of the images"].endswith("degrees from z")
    assert max(max(thumbnail.size) for thumbnail in capture.thumbnails) == 192


def test_names_that_two_splits_have_are_told_apart():
    names = read_capture(LEGO).names
    assert len(set(names)) == len(names)
    assert {name.partition("/")[0] for name in names} == {"train", "test"}


def test_sparse_points_are_those_of_the_model(capture_folder, tmp_path):
    pycolmap = pytest.importorskip("pycolmap")
    folder = tmp_path / "colmap"
    shutil.copytree(capture_folder / "images", folder / "images")
    model = folder / "sparse" / "0"
    model.mkdir(parents=True)
    (model / "cameras.txt").write_text("1 PINHOLE 96 72 300 300 48 36\n")
    lines = []
    for index, c2w in enumerate(CAMERAS.c2w.double()):
        w2c = torch.linalg.inv(c2w @ torch.diag(torch.tensor([1.0, -1, -1, 1]).double())).numpy()
        x, y, z, w = pycolmap.Rotation3d(w2c[:3, :3]).quat
        lines += [f"{index + 1} {w} {x} {y} {z} {' '.join(map(str, w2c[:3, 3]))} 1 view_{index:02d}.png", ""]
    (model / "images.txt").write_text("\n".join(lines) + "\n")
    points = np.random.default_rng(0).uniform(0, 1, (200, 3))
    (model / "points3D.txt").write_text(
        "".join(f"{index + 1} {x} {y} {z} 10 20 30 0.5\n" for index, (x, y, z) in enumerate(points))
    )
    capture = read_capture(folder)
    found = capture.points.numpy()
    np.testing.assert_allclose(found[np.lexsort(found.T)], points[np.lexsort(points.T)], atol=1e-12)
    rows = dict(measures(capture))
    assert re.fullmatch(r"200, of which \d+ % in the box", rows["sparse points"])
    draw(capture)


def test_frusta_go_through_the_corners_of_the_images():
    sizes = torch.tensor([[96.0, 72.0]]).repeat(24, 1)
    lines = frustum_lines(CAMERAS.c2w, CAMERAS.intrinsics, sizes, 0.5)
    corners = torch.tensor([[0.0, 0.0], [96.0, 0.0], [96.0, 72.0], [0.0, 72.0]])
    for view in (0, 13):
        rays = CAMERAS.rays(torch.full((4,), view), corners, torch.tensor([[-9.0, -9, -9], [9, 9, 9]]))
        ends = lines[view, :4]
        torch.testing.assert_close(ends[:, 0], rays.origins)
        away = ends[:, 1] - rays.origins
        torch.testing.assert_close(away / away.norm(dim=-1, keepdim=True), rays.directions, atol=1e-5, rtol=1e-5)
        depth = away @ -CAMERAS.c2w[view, :3, 2]
        torch.testing.assert_close(depth, torch.full((4,), 0.5))
        above = lines[view, 8, 1] - lines[view, 4].mean(dim=0)
        assert float(above @ CAMERAS.c2w[view, :3, 1]) > 0


def test_frusta_of_cameras_with_a_focal_length_of_zero_stay_small():
    lines = frustum_lines(CAMERAS.c2w, torch.zeros(24, 4), torch.tensor([[96.0, 72.0]]).repeat(24, 1), 0.5)
    assert (lines - CAMERAS.c2w[:, None, None, :3, 3]).norm(dim=-1).max() < 4


def test_the_picture_shows_cameras_of_both_splits(capture_folder):
    picture = np.asarray(Image.open(io.BytesIO(draw(read_capture(capture_folder)))).convert("RGB")).astype(int)

    def pixels_of(color: str) -> int:
        wanted = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
        return int((np.abs(picture - wanted).max(axis=-1) < 8).sum())

    assert pixels_of(SPLITS["train"]) > 2 * pixels_of(SPLITS["test"]) > 200


def test_a_page_is_html_whatever_the_names_are(capture_folder):
    class Reader(html.parser.HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.text = ""

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "img", "br"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

        def handle_data(self, data: str) -> None:
            self.text += data

    capture = read_capture(capture_folder)
    capture = dataclasses.replace(capture, name="<b> & co", names=("<i>", *capture.names[1:]))
    reader = Reader()
    reader.feed(make_page(capture, [("size", "1 < 2")], [Finding("<u>", "</li>", (0,))], b"png"))
    assert reader.open == []
    for text in ("<b> & co", "<i>", "<u>", "</li>", "1 < 2"):
        assert text in reader.text


def test_sharpness_falls_with_blur_and_a_fingerprint_hardly_changes():
    image = photograph(corner_cameras(2))[0]
    blurred = image.filter(ImageFilter.GaussianBlur(3))
    assert sharpness(blurred) < 0.05 * sharpness(image)
    assert sharpness(Image.new("RGB", (50, 50))) == 0
    assert sharpness(Image.new("RGB", (2, 2))) == 0
    assert np.abs(fingerprint(blurred) - fingerprint(image))[2:-2, 2:-2].mean() < 12
    # What is transparent counts as white, whatever its colour.
    hidden = Image.new("RGBA", (40, 40), (200, 0, 0, 0))
    assert fingerprint(hidden).min() == 255
    with io.BytesIO() as file:
        image.save(file, "JPEG", quality=70)
        assert np.abs(fingerprint(Image.open(file)) - fingerprint(image)).max() < 3
