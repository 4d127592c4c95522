"""From photographs or a video to a scene: what comes out is what was photographed."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, JpegImagePlugin
from room_corner import corner_cameras, write_photographs

import voxelfield
from voxelfield.captures import processing
from voxelfield.captures.photographs import copy_photographs, extract_frames, photographs_in
from voxelfield.captures.processing import REPORT, process
from voxelfield.cli.command import main
from voxelfield.datasets.images import read_images
from voxelfield.installed import MissingPackageError
from voxelfield.media.video import write_video
from voxelfield.progress import Progress
from voxelfield.rendering.cameras import Cameras

pytestmark = pytest.mark.sweep

CAMERAS = corner_cameras(8)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corner") / "photographs"
    write_photographs(folder, CAMERAS)
    return folder


@pytest.fixture(scope="module")
def scene(photographs: Path) -> Path:
    """The processed photographs, of which one shows something else, and one nothing."""
    pytest.importorskip("pycolmap")
    source = photographs.with_name("with a stranger")
    shutil.copytree(photographs, source)
    noise = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((320, 240)).save(source / "view_99.png")
    Image.new("RGB", (320, 240), "grey").save(source / "view_98.png")
    folder = photographs.with_name("scene")
    process(source, folder, camera_model="SIMPLE_PINHOLE")
    return folder


def check_poses(found: Cameras, wanted: Cameras) -> None:
    """Compares poses after the best similarity, because structure from motion leaves the frame and the scale open."""
    origins, given = (cameras.c2w[:, :3, 3].double() for cameras in (wanted, found))
    wanted_mean, given_mean = origins.mean(dim=0), given.mean(dim=0)
    left, sizes, right = torch.linalg.svd((origins - wanted_mean).T @ (given - given_mean))
    sign = torch.diag(torch.tensor([1.0, 1.0, float(torch.linalg.det(left @ right).sign())], dtype=torch.float64))
    rotation = left @ sign @ right
    scale = (sizes @ sign.diagonal()) / (given - given_mean).square().sum()
    moved = scale * (given - given_mean) @ rotation.T + wanted_mean
    assert (moved - origins).norm(dim=-1).max() < 0.02, "the cameras are about 3 units from the corner"
    turned = rotation @ found.c2w[:, :3, :3].double()
    angles = torch.einsum("nij,nij->n", turned, wanted.c2w[:, :3, :3].double()).sub(1).div(2).clamp(-1, 1).acos()
    assert angles.rad2deg().max() < 0.5


def test_poses_are_those_the_photographs_were_taken_from(scene):
    found = voxelfield.load_scene(scene, holdout=0).train.cameras
    assert len(found) == len(CAMERAS)
    torch.testing.assert_close(found.intrinsics, CAMERAS.intrinsics, rtol=0.02, atol=0)
    check_poses(found, CAMERAS)


def degrees(value: float) -> tuple[int, int, float]:
    return int(value), int(value * 60 % 60), value * 3600 % 60


def test_a_rig_by_the_global_mapper_and_neighbours_by_gps(photographs, tmp_path):
    pycolmap = pytest.importorskip("pycolmap")
    right = CAMERAS.c2w.clone()
    right[:, :3, 3] += 0.2 * right[:, :3, 0]
    both = {"left": CAMERAS, "right": replace(CAMERAS, c2w=right)}
    for name, cameras in both.items():
        write_photographs(tmp_path / "given" / name, cameras)
        for path, (x, y, z) in zip(photographs_in(tmp_path / "given" / name), cameras.c2w[:, :3, 3], strict=True):
            exif = Image.Exif()
            north, east = degrees(47 + float(y) / 111e3), degrees(8 + float(x) / 76e3)
            exif.get_ifd(ExifTags.IFD.GPSInfo).update({1: "N", 2: north, 3: "E", 4: east, 6: 400 + float(z)})
            Image.open(path).save(path.with_suffix(".jpg"), exif=exif, quality=95)
            path.unlink()  # COLMAP reads no positions from PNG
    options = {"rig": True, "mapper": "global", "matching": "spatial", "camera_model": "SIMPLE_PINHOLE"}
    report = process(tmp_path / "given", tmp_path / "scene", **options)
    assert (report.registered, report.photographs, report.mapper) == (16, 16, "global")
    wanted = replace(CAMERAS, c2w=torch.cat((CAMERAS.c2w, right)), intrinsics=CAMERAS.intrinsics.repeat(2, 1))
    found = voxelfield.load_scene(tmp_path / "scene", holdout=0).train.cameras
    check_poses(found, wanted)
    torch.testing.assert_close(found.intrinsics, wanted.intrinsics, rtol=0.02, atol=0)
    (rig,) = pycolmap.Reconstruction(tmp_path / "scene" / "sparse" / "0").rigs.values()
    assert rig.num_sensors() == 2, "the cameras of all times share their places in the rig"


def test_up_in_the_photographs_is_z_and_they_look_along_y(scene):
    c2w = voxelfield.load_scene(scene, holdout=0).train.cameras.c2w
    up, look = c2w[:, :3, 1].mean(dim=0), -c2w[:, :3, 2].mean(dim=0)
    torch.testing.assert_close(up / up.norm(), torch.tensor([0.0, 0.0, 1.0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(look[:2] / look[:2].norm(), torch.tensor([0.0, 1.0]), atol=1e-4, rtol=0)


def test_the_report_tells_what_was_registered(scene):
    report = json.loads((scene / REPORT).read_text())
    assert {path.name for path in scene.iterdir()} == {"images", "sparse", REPORT}, "temporary files were left behind"
    assert report["matching"] == "exhaustive"
    assert report["mapper"] == "incremental"
    assert report["photographs"] == 10
    assert report["registered"] == 8
    assert report["unregistered"] == {
        "view_98.png": "only 0 features, as in a blurred, dark or even picture",
        "view_99.png": "no overlap with another photograph was found",
    }
    assert report["points"] > 300
    assert 0 < report["mean_reprojection_error"] < 0.5
    assert 3 < report["mean_track_length"] <= 8
    (camera,) = report["cameras"]
    assert camera["model"] == "SIMPLE_PINHOLE"
    assert camera["f"] == pytest.approx(300, rel=0.02)


def test_earlier_results_are_replaced_only_with_overwrite(scene, photographs, tmp_path, caplog):
    shutil.copytree(scene, tmp_path / "scene")
    (tmp_path / "scene" / "notes.txt").write_text("mine")
    command = ["process", str(photographs), "-o", str(tmp_path / "scene"), "--camera-model", "SIMPLE_PINHOLE"]
    assert main(command) == 2
    assert "already contains images, sparse, report.json: --overwrite" in caplog.text
    assert (tmp_path / "scene" / "images" / "view_99.png").exists()
    caplog.set_level("INFO")
    assert main([*command, "--overwrite", "--per-image-camera"]) == 0
    assert "registered 8 of 8 photographs" in caplog.text
    assert not (tmp_path / "scene" / "images" / "view_99.png").exists()
    assert (tmp_path / "scene" / "notes.txt").read_text() == "mine"
    assert len(json.loads((tmp_path / "scene" / REPORT).read_text())["cameras"]) == 8


def test_what_colmap_has_done_is_counted_and_the_next_commands_are_named(photographs, tmp_path, monkeypatch, caplog):
    pytest.importorskip("pycolmap")
    told, folder = [], tmp_path / "my scene"

    class Told(Progress):
        def __init__(self, name: str, total: int) -> None:
            super().__init__(name, total)
            self._about = (name, total)

        def update(self, done: int, **others) -> None:
            told.append((*self._about, done))
            super().update(done, **others)

    monkeypatch.setattr(processing, "_COUNT_EVERY", 0.01)
    monkeypatch.setattr(processing, "Progress", Told)
    caplog.set_level("INFO")
    assert main(["process", str(photographs), "-o", str(folder), "--camera-model", "SIMPLE_PINHOLE"]) == 0
    features, pairs, registered = (
        [done for name, total, done in told if (name, total) == about]
        for about in (("finding features", 8), ("matching pairs", 28), ("registering photographs", 8))
    )
    assert any(0 < done < 8 for done in features)
    assert any(0 < done <= 28 for done in pairs)
    assert registered[-7:] == [2, 3, 4, 5, 6, 7, 8]
    assert caplog.messages[-1] == f"next: `voxelfield inspect '{folder}'`, then `voxelfield train '{folder}'`"


def write_flat(folder: Path) -> Path:
    """Writes two photographs between which nothing can be matched."""
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        Image.new("RGB", (160, 120), "grey").save(folder / f"{name}.png")
    return folder


def files_below(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_a_failure_leaves_earlier_results(scene, tmp_path, caplog):
    shutil.copytree(scene, tmp_path / "scene")
    before = files_below(tmp_path / "scene")
    command = ["process", str(write_flat(tmp_path / "flat")), "-o", str(tmp_path / "scene"), "--overwrite"]
    assert main(command) == 2
    assert "photographs must overlap for poses to be found, got 2 of which no two" in caplog.text
    assert files_below(tmp_path / "scene") == before


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
@pytest.mark.parametrize("place", ["images/a/mine.png", "sparse/0/points3D.txt", "report.json"])
def test_files_of_others_are_never_replaced(scene, tmp_path, caplog, place, overwrite):
    for folder, results in (("without results", False), ("with results", True)):
        if results:
            shutil.copytree(scene, tmp_path / folder)
        mine = tmp_path / folder / place
        mine.parent.mkdir(parents=True, exist_ok=True)
        mine.write_text("mine")
        before = files_below(tmp_path / folder)
        source = tmp_path / f"source of {folder}"
        assert main(["process", str(write_flat(source)), "-o", str(tmp_path / folder), *overwrite]) == 2
        assert "--overwrite replaces" not in caplog.text
        assert "must not contain other files where results go" in caplog.records[-1].getMessage()
        assert files_below(tmp_path / folder) == before


def test_a_video_becomes_a_scene(photographs, tmp_path, caplog):
    pytest.importorskip("pycolmap")
    pytest.importorskip("av")
    frames = [torch.from_numpy(np.array(Image.open(path))) / 255 for path in photographs_in(photographs)]
    write_video(tmp_path / "walk.mp4", frames)
    caplog.set_level("INFO")
    command = ["process", str(tmp_path / "walk.mp4"), "-o", str(tmp_path / "scene"), "--camera-model", "SIMPLE_PINHOLE"]
    assert main([*command, "--frames", "8"]) == 0
    assert "sequential matching" in caplog.text
    assert "registered 8 of 8 photographs" in caplog.text
    assert len(voxelfield.load_scene(tmp_path / "scene", holdout=0).train) == 8


def test_photographs_of_each_size_share_a_camera(photographs, tmp_path):
    pytest.importorskip("pycolmap")
    shutil.copytree(photographs, tmp_path / "given")
    for path in photographs_in(tmp_path / "given")[:3]:
        Image.open(path).resize((240, 180)).save(path)
    report = process(tmp_path / "given", tmp_path / "scene", camera_model="SIMPLE_PINHOLE")
    assert report.registered == 8
    cameras = sorted(report.cameras, key=lambda camera: camera["width"])
    assert [camera["width"] for camera in cameras] == [240, 320]
    assert [camera["f"] for camera in cameras] == pytest.approx([225, 300], rel=0.03)


def test_the_sharpest_frame_of_each_part_of_a_video_is_taken(tmp_path):
    pytest.importorskip("av")
    bars = np.zeros((96, 128, 3), dtype=np.uint8)
    frames = []
    for index in range(12):
        frame = bars + 20 * index
        if index % 4 == 2:  # one frame of each four has an edge
            frame[:, 64:] = 255
        frames.append(torch.from_numpy(frame) / 255)
    write_video(tmp_path / "walk.mp4", frames)
    extract_frames(tmp_path / "walk.mp4", tmp_path / "frames", 3, 64)
    taken = photographs_in(tmp_path / "frames")
    assert [frame.name for frame in taken] == [f"frame_{index:05d}.jpg" for index in range(3)]
    for index, path in enumerate(taken):
        with Image.open(path) as frame:
            assert frame.size == (64, 48)
            assert frame.convert("L").getpixel((8, 24)) == pytest.approx(20 * (4 * index + 2), abs=6)
            assert frame.convert("L").getpixel((60, 24)) > 240
    extract_frames(tmp_path / "walk.mp4", tmp_path / "all", 500, 64)
    assert len(photographs_in(tmp_path / "all")) == 12


LISTS = {
    "concat": "ffconcat version 1.0\nfile walk.mp4\n",
    "playlist": "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nwalk.mp4\n",
    "endless": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1,\nlist.mp4\n",
    "session": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_list_of_videos_is_no_video(tmp_path, kind):
    """FFmpeg would read the files that it names, or wait for them without an end."""
    pytest.importorskip("av")
    write_video(tmp_path / "walk.mp4", [torch.full((48, 64, 3), index / 10) for index in range(5)])
    (tmp_path / "list.mp4").write_text(LISTS[kind])
    with pytest.raises(ValueError, match=r"list.mp4: must be a video that FFmpeg can read, and no list of others \("):
        extract_frames(tmp_path / "list.mp4", tmp_path / "frames", 3, 64)


def test_a_video_whose_name_is_like_an_address_is_read(tmp_path, monkeypatch):
    pytest.importorskip("av")
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "http:walk.mp4", [torch.full((48, 64, 3), index / 10) for index in range(5)])
    extract_frames(Path("http:walk.mp4"), tmp_path / "frames", 3, 64)
    assert len(photographs_in(tmp_path / "frames")) == 3


def test_masks_of_photographs_are_not_processed(photographs, tmp_path, caplog):
    pytest.importorskip("pycolmap")
    shutil.copytree(photographs, tmp_path / "given")
    names = [path.stem for path in photographs_in(photographs)]
    for name in names:
        Image.new("L", (320, 240), 255).save(tmp_path / "given" / f"{name}_mask.png")
    (tmp_path / "given" / "._view_00.png").write_bytes(b"Mac OS X")
    assert process(tmp_path / "given", tmp_path / "scene", camera_model="SIMPLE_PINHOLE").photographs == 8
    assert f"given: 8 masks are not used, the first is {names[0]}_mask.png" in caplog.text


def test_photographs_are_turned_upright_shrunk_and_else_left_alone(tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    small = Image.new("RGB", (60, 40), "red")
    small.save(given / "small.jpg")
    turned = Image.new("RGB", (60, 40), "red")
    turned.paste("blue", (0, 0, 30, 40))
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "Maker"  # to be turned clockwise by 90 degrees
    turned.save(given / "turned.jpg", exif=exif, quality=95)
    turned.save(given / "page.tif", exif=exif)
    small.save(given / "phone.jpeg", "MPO", save_all=True, append_images=[small])
    Image.new("RGBA", (400, 100), (10, 20, 30, 0)).save(given / "large.png")
    small.save(given / "other.webp")
    copy_photographs(photographs_in(given), tmp_path / "copies", 200)
    copies = {path.name: path for path in (tmp_path / "copies").iterdir()}
    assert sorted(copies) == ["large.png", "other.png", "page.png", "phone.jpeg", "small.jpg", "turned.jpg"]
    for name in ("small.jpg", "phone.jpeg"):
        assert copies[name].read_bytes() == (given / name).read_bytes()
    with Image.open(copies["large.png"]) as large:
        assert (large.size, large.mode) == ((200, 50), "RGBA")
    for name in ("turned.jpg", "page.png"):
        with Image.open(copies[name]) as upright:
            assert upright.getexif().get(0x0112, 1) == 1
            assert upright.getexif()[0x010F] == "Maker"
        (loaded,) = read_images([copies[name]])
        assert loaded.shape == (60, 40, 4)
        assert loaded[5, 20, 2] > 200, "blue was at the left and is now at the top"


class HeicOfATest(JpegImagePlugin.JpegImageFile):
    """What pillow-heif makes of a HEIC file, which here is a JPEG behind a header."""

    format = "HEIF"

    def __init__(self, file, name):
        super().__init__(io.BytesIO(file.read()[12:]), name)


def test_heic_becomes_jpeg_with_the_focal_length_from_which_colmap_starts(tmp_path, monkeypatch):
    (tmp_path / "given").mkdir()
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.FocalLengthIn35mmFilm] = 26
    jpeg = io.BytesIO()
    Image.new("RGB", (200, 150), (10, 200, 30)).save(jpeg, "JPEG", exif=exif)
    (tmp_path / "given" / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + jpeg.getvalue())
    found = photographs_in(tmp_path / "given")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(MissingPackageError, match=r'to read IMG_1.HEIC: pip install "voxelfield\[heic\]"'):
        copy_photographs(found, tmp_path / "refused", 100)
    monkeypatch.setattr(Image, "OPEN", dict(Image.OPEN))
    monkeypatch.setattr(Image, "ID", list(Image.ID))

    def register() -> None:
        Image.register_open("HEIF", HeicOfATest, lambda header: header[4:12] == b"ftypheic")

    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(register_heif_opener=register))
    copy_photographs(found, tmp_path / "copies", 100)
    with Image.open(tmp_path / "copies" / "IMG_1.jpg") as copy:
        assert (copy.format, copy.size) == ("JPEG", (100, 75))
        assert copy.getpixel((50, 40)) == pytest.approx((10, 200, 30), abs=4)
        assert copy.getexif().get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.FocalLengthIn35mmFilm] == 26


def test_photographs_whose_copies_would_replace_one_another_are_refused(tmp_path):
    for name in ("a.png", "a.webp"):
        Image.new("RGB", (60, 40)).save(tmp_path / name)
    with pytest.raises(ValueError, match=r"must have different names, got .*a\.png and .*a\.webp"):
        copy_photographs(photographs_in(tmp_path), tmp_path / "copies", 200)


def empty_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def one_photograph(folder: Path) -> Path:
    folder.mkdir(parents=True)
    Image.new("RGB", (60, 40)).save(folder / "a.png")
    return folder


def no_video(folder: Path) -> Path:
    folder.mkdir()
    (folder / "walk.mp4").write_text("no video")
    return folder / "walk.mp4"


def named_pipe(folder: Path) -> Path:
    folder.mkdir()
    os.mkfifo(folder / "walk.mp4")
    return folder / "walk.mp4"


def damaged_photograph(folder: Path) -> Path:
    one_photograph(folder)
    (folder / "b.jpg").write_bytes(b"\xff\xd8\xff")
    return folder


BAD = {
    "nothing there": (lambda folder: folder / "nowhere", (), "no such folder of photographs or video"),
    "an empty folder": (empty_folder, (), "must contain at least 2 photographs (.png, .jpg"),
    "one photograph": (one_photograph, (), ", .heif), got 1"),
    "a file that is a photograph": (lambda f: one_photograph(f) / "a.png", (), "got the one photograph"),
    "a file that is no video": (no_video, (), "must be a video that FFmpeg can read"),
    "a named pipe": (named_pipe, (), "walk.mp4 must be a file, got a named pipe)"),
    "a damaged photograph": (damaged_photograph, (), "b.jpg: unreadable image"),
    "an unknown camera": (empty_folder, ("--camera-model", "LOMO"), "OPENCV_FISHEYE, PINHOLE"),
    "a camera that cannot be loaded": (
        empty_folder,
        ("--camera-model", "EQUIRECTANGULAR"),
        "camera_model must be one of DIVISION, EUCM, ",
    ),
    "too few frames": (no_video, ("--frames", "1"), "frames must be at least 2, got 1"),
    "a rig one by one": (empty_folder, ("--rig",), "mapper must be global for a rig whose geometry is unknown"),
    "a rig of one camera": (
        lambda folder: one_photograph(folder / "left").parent,
        ("--rig", "--mapper", "global"),
        "must have a subfolder of photographs for each camera of a rig, and no others",
    ),
    "a video of a rig": (no_video, ("--rig", "--mapper", "global"), "must be a folder with a subfolder for each"),
    "no positions": (
        write_flat,
        ("--matching", "spatial"),
        "must be exhaustive or sequential without positions (GPS) in EXIF, got spatial: 2 of 2 photographs have none",
    ),
    "a size of nothing": (empty_folder, ("--max-size", "0"), "max_size must be at least 64, got 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(tmp_path, caplog, case):
    pytest.importorskip("pycolmap")
    make, flags, message = BAD[case]
    assert main(["process", str(make(tmp_path / "given")), "-o", str(tmp_path / "new" / "scene"), *flags]) == 2
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert message in record.getMessage()
    assert "\n" not in record.getMessage()
    assert not (tmp_path / "new").exists(), "a refused scene leaves its folder behind"


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
@pytest.mark.parametrize("place", ["images", "images/originals", "sparse"])
def test_a_scene_does_not_replace_the_photographs_it_is_made_of(photographs, tmp_path, caplog, place, overwrite):
    pytest.importorskip("pycolmap")
    shutil.copytree(photographs, tmp_path / place)
    assert main(["process", str(tmp_path / place), "-o", str(tmp_path), *overwrite]) == 2
    (message,) = caplog.messages
    assert f"must be outside of the results, got {tmp_path / place} in {place.partition('/')[0]} of" in message
    assert len(photographs_in(tmp_path / place)) == 8


def test_links_to_photographs_in_the_scene_count_as_the_photographs(photographs, tmp_path, caplog):
    pytest.importorskip("pycolmap")
    shutil.copytree(photographs, tmp_path / "scene" / "images")
    (tmp_path / "links").mkdir()
    for path in photographs_in(tmp_path / "scene" / "images"):
        (tmp_path / "links" / path.name).symlink_to(path)
    (tmp_path / "another name").symlink_to(tmp_path / "scene", target_is_directory=True)
    for source, folder, reason in (
        ("links", "scene", "must not contain other files"),
        ("scene/images", "another name", "must be outside of the results"),
    ):
        assert main(["process", str(tmp_path / source), "-o", str(tmp_path / folder), "--overwrite"]) == 2
        assert reason in caplog.messages[-1]
    assert len(photographs_in(tmp_path / "scene" / "images")) == 8


def test_a_name_that_is_not_utf_8_is_refused(photographs, tmp_path):
    pytest.importorskip("pycolmap")
    source = tmp_path / "source"
    shutil.copytree(photographs, source)
    (source / "view_00.png").rename(source / os.fsdecode(b"caf\xe9.png"))
    with pytest.raises(ValueError, match=r"source: names of photographs must be UTF-8, got caf\\xe9\.png: rename it"):
        process(source, tmp_path / "scene")


def test_a_missing_pycolmap_is_named(photographs, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pycolmap", None)
    assert main(["process", str(photographs), "-o", str(tmp_path / "scene")]) == 2
    assert 'pip install "voxelfield[colmap]"' in caplog.text


def test_a_pycolmap_that_would_take_another_camera_model_is_refused(photographs, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pytest.importorskip("pycolmap"), "__version__", "3.13.0")
    assert main(["process", str(photographs), "-o", str(tmp_path / "scene")]) == 2
    assert "pycolmap must be 4.0 or later to find poses, got 3.13.0" in caplog.text
