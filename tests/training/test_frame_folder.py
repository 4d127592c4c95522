"""Frames as numbered files: their content, and resuming an interrupted rendering."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from file_limits import files_at_most
from PIL import Image

from voxelfield.media.frame_folder import DESCRIPTION, FrameFolder, farthest
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.pixels import turbo
from voxelfield.rendering.render import View
from voxelfield.rendering.view_pictures import picture


def cameras(count: int = 3, shift: float = 0.0) -> Cameras:
    c2w = torch.eye(4).repeat(count, 1, 1)
    c2w[:, 0, 3] = torch.arange(count) + shift
    return Cameras(c2w, torch.tensor([[8.0, 8, 4, 3]]).repeat(count, 1), 8, 6)


def view() -> View:
    generator = torch.Generator().manual_seed(0)
    rgb, opacity = torch.rand(6, 8, 3, generator=generator), torch.rand(6, 8, generator=generator)
    return View(rgb, opacity, 1 + torch.rand(6, 8, generator=generator))


PNG, DEPTH, EXR = ("png", False), ("png", True), ("exr", False)


def open_folder(path, wanted=PNG, path_of=None, **options):
    return FrameFolder(path, path_of or cameras(), *wanted, 4.0, {"run": "a", "steps": 7}, **options)


def save(path, index, wanted=PNG):
    with open_folder(path, wanted) as folder:
        folder.save(index, view())


def test_a_depth_lies_beside_each_image_with_its_unit_noted(tmp_path):
    save(tmp_path, 1, DEPTH)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0001.png", "0001_depth.png", DESCRIPTION]
    unit = json.loads((tmp_path / DESCRIPTION).read_text())["depth_unit"]
    with Image.open(tmp_path / "0001_depth.png") as image:
        steps = np.asarray(image)
    assert steps.dtype == np.uint16
    solid = (view().opacity > 0.5).numpy()
    assert (steps[~solid] == 0).all()
    np.testing.assert_allclose(steps[solid] * unit, view().depth.numpy()[solid], atol=0.5 * unit + 1e-6)


def test_an_exr_contains_light_opacity_and_depth(tmp_path):
    exr = pytest.importorskip("OpenEXR")
    save(tmp_path, 0, EXR)
    with exr.File(str(tmp_path / "0000.exr"), separate_channels=True) as file:
        channels = {name: channel.pixels for name, channel in file.channels().items()}
    np.testing.assert_array_equal(channels["A"], view().opacity.numpy())
    np.testing.assert_array_equal(channels["Z"], view().depth.numpy())
    encoded = view().rgb.double().numpy()
    expected = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    for index, name in enumerate("RGB"):
        np.testing.assert_allclose(channels[name], expected[..., index], atol=1e-6)


def test_existing_frames_remain(tmp_path):
    with open_folder(tmp_path) as folder:
        assert not folder.has(0)
        folder.save(0, view())
    with open_folder(tmp_path) as folder:
        assert folder.has(0)
        assert not folder.has(1)
    save(tmp_path / "deep", 0, DEPTH)
    (tmp_path / "deep" / "0000_depth.png").unlink()
    assert not open_folder(tmp_path / "deep", DEPTH).has(0), "both files make a frame"


@pytest.mark.parametrize(
    ("wanted", "path"),
    [(PNG, cameras(shift=0.5)), (PNG, cameras(4)), (DEPTH, cameras())],
)
def test_frames_of_another_path_are_refused_and_deleted_only_on_demand(tmp_path, wanted, path):
    save(tmp_path, 0)
    with pytest.raises(ValueError, match=f"^{tmp_path} contains frames of another run, path or size"):
        open_folder(tmp_path, wanted, path)
    assert (tmp_path / "0000.png").is_file()
    with open_folder(tmp_path, wanted, path, overwrite=True) as folder:
        assert not folder.has(0)
    assert [path.name for path in tmp_path.iterdir()] == [DESCRIPTION]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["0001.png", "notes.txt", "0001/mine.png"])
def test_a_folder_of_something_else_is_refused(tmp_path, name, overwrite):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    (tmp_path / ".DS_Store").touch()
    expected = f"must be empty or have a frames.json, got {tmp_path}, which contains {name.partition('/')[0]}: choose"
    with pytest.raises(FileExistsError, match=expected):
        open_folder(tmp_path, overwrite=overwrite)
    (tmp_path / name).unlink()
    if "/" not in name:
        with open_folder(tmp_path, overwrite=overwrite) as folder:
            folder.save(1, view())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must hold a JSON object, got a list"),
        ("{}", "choose another folder"),
        ('{"frames": [1]}', "choose another folder"),
        ('{"frames": "2", "width": 8, "height": 6, "kind": "png"}', "choose another folder"),
    ],
)
def test_a_description_of_something_else_is_refused(tmp_path, content, message):
    (tmp_path / DESCRIPTION).write_text(content)
    with pytest.raises((FileExistsError, ValueError), match=message):
        open_folder(tmp_path, overwrite=True)
    assert (tmp_path / DESCRIPTION).read_text() == content


def test_only_frames_are_deleted(tmp_path):
    with open_folder(tmp_path, DEPTH) as folder:
        folder.save(0, view())
        folder.save(2, view())
    mine = ["2024.txt", "0000_notes.png", "12.jpg", "7", "0003.png", "00001.png", "0000.exr", "frames.mp4"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    open_folder(tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([DESCRIPTION, *mine])
    with pytest.raises(FileExistsError, match=rf"^{tmp_path}/0003\.png has the name of a frame"):
        open_folder(tmp_path, path_of=cameras(4), overwrite=True)
    for name in mine:
        assert (tmp_path / name).read_text() == "mine"


def test_a_foreign_picture_with_the_name_of_a_frame_is_refused(tmp_path):
    save(tmp_path, 0)
    Image.new("RGB", (8, 6)).save(tmp_path / "0001.png")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=r"0001\.png has the name of a frame"):
            open_folder(tmp_path, DEPTH, overwrite=overwrite)
        with pytest.raises(FileExistsError, match=r"0001\.png has the name of a frame"):
            open_folder(tmp_path)
    assert (tmp_path / "0000.png").is_file()


def test_lenses_belong_to_a_path(tmp_path):
    lens = Lens("perspective", torch.full((3, 6), 0.1))
    with open_folder(tmp_path, path_of=dataclasses.replace(cameras(), lens=lens)):
        pass
    with pytest.raises(ValueError, match="contains frames of another run, path or size"):
        open_folder(tmp_path)


@pytest.mark.parametrize("wanted", [EXR, DEPTH])
def test_a_full_disk_is_told_and_leaves_whole_frames(tmp_path, wanted):
    pytest.importorskip("OpenEXR")

    save(tmp_path, 0, wanted)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    size = (tmp_path / f"0000.{wanted[0]}").stat().st_size
    for limit in (100, size // 2, size - 1):
        with files_at_most(limit), pytest.raises(OSError, match=r"0001\S*\.(exr|png)"):
            save(tmp_path, 1, wanted)
        assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.name != "0001_depth.png"} == before
        (tmp_path / "0001_depth.png").unlink(missing_ok=True)  # of which there was room for the whole


def test_a_frame_that_cannot_be_made_leaves_no_file(tmp_path):
    def render() -> None:
        with open_folder(tmp_path) as folder:
            folder.save(0, view())
            raise RuntimeError("out of light")

    with pytest.raises(RuntimeError, match="out of light"):
        render()
    assert {path.name for path in tmp_path.iterdir()} <= {"0000.png", DESCRIPTION}


def test_nothing_lies_beyond_the_farthest_corner():
    box = torch.tensor([[-1.0, -2, -3], [1, 2, 3]])
    assert farthest(cameras(), box) == pytest.approx((3**2 + 2**2 + 3**2) ** 0.5)


def test_pictures_show_what_they_say():
    shown = view()
    assert picture(shown, "rgb", (0.2, 4.0)) is shown.rgb
    opacity = picture(shown, "opacity", (0.2, 4.0))
    assert torch.equal(opacity[..., 1], shown.opacity)
    depth = picture(shown, "depth", (0.2, 4.0))
    assert (depth[shown.opacity <= 0.5] == 1).all()
    near, far = shown.depth.clone().fill_(0.2), shown.depth.clone().fill_(4.0)
    solid = torch.ones_like(shown.opacity)
    ends = torch.stack([picture(View(shown.rgb, solid, depth), "depth", (0.2, 4.0))[0, 0] for depth in (near, far)])
    torch.testing.assert_close(ends, turbo(torch.tensor([0.0, 1.0])))
