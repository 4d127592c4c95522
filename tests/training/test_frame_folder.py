"""Frames as numbered files: their content, and resuming an interrupted rendering."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.images import turbo
from voxelfield.rendering.render import View
from voxelfield.rendering.view_pictures import picture
from voxelfield.training.frame_folder import DESCRIPTION, FrameFolder, FrameKind, farthest


def cameras(count: int = 3, shift: float = 0.0) -> Cameras:
    c2w = torch.eye(4).repeat(count, 1, 1)
    c2w[:, 0, 3] = torch.arange(count) + shift
    return Cameras(c2w, torch.tensor([[8.0, 8, 4, 3]]).repeat(count, 1), 8, 6)


def view() -> View:
    generator = torch.Generator().manual_seed(0)
    rgb, opacity = torch.rand(6, 8, 3, generator=generator), torch.rand(6, 8, generator=generator)
    return View(rgb, opacity, 1 + torch.rand(6, 8, generator=generator))


PNG = FrameKind()


def open_folder(path, wanted=PNG, path_of=None, **options):
    return FrameFolder(path, path_of or cameras(), wanted, 4.0, {"run": "a", "steps": 7}, **options)


def test_a_depth_lies_beside_each_image_with_its_unit_noted(tmp_path):
    with open_folder(tmp_path, FrameKind(depth=True)) as folder:
        folder.save(1, view())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0001.png", "0001_depth.png", DESCRIPTION]
    unit = json.loads((tmp_path / DESCRIPTION).read_text())["depth_unit"]
    with Image.open(tmp_path / "0001_depth.png") as image:
        steps = np.asarray(image)
    assert steps.dtype == np.uint16
    solid = (view().opacity > 0.5).numpy()
    assert (steps[~solid] == 0).all()
    np.testing.assert_allclose(steps[solid] * unit, view().depth.numpy()[solid], atol=0.5 * unit + 1e-6)


def test_an_exr_holds_light_opacity_and_depth(tmp_path):
    exr = pytest.importorskip("OpenEXR")
    with open_folder(tmp_path, FrameKind("exr")) as folder:
        folder.save(0, view())
    with exr.File(str(tmp_path / "0000.exr"), separate_channels=True) as file:
        channels = {name: channel.pixels for name, channel in file.channels().items()}
    np.testing.assert_array_equal(channels["A"], view().opacity.numpy())
    np.testing.assert_array_equal(channels["Z"], view().depth.numpy())
    encoded = view().rgb.double().numpy()
    expected = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    for index, name in enumerate("RGB"):
        np.testing.assert_allclose(channels[name], expected[..., index], atol=1e-6)


def test_frames_that_are_there_are_kept(tmp_path):
    with open_folder(tmp_path) as folder:
        assert not folder.has(0)
        folder.save(0, view())
    with open_folder(tmp_path) as folder:
        assert folder.has(0)
        assert not folder.has(1)
    with open_folder(tmp_path / "deep", FrameKind(depth=True)) as folder:
        folder.save(0, view())
    (tmp_path / "deep" / "0000_depth.png").unlink()
    assert not open_folder(tmp_path / "deep", FrameKind(depth=True)).has(0), "both files make a frame"


@pytest.mark.parametrize(
    ("wanted", "path"),
    [(PNG, cameras(shift=0.5)), (PNG, cameras(4)), (FrameKind(depth=True), cameras())],
)
def test_frames_of_something_else_are_neither_kept_nor_lost(tmp_path, wanted, path):
    with open_folder(tmp_path) as folder:
        folder.save(0, view())
    with pytest.raises(ValueError, match=f"^{tmp_path} holds frames of another run, path or size"):
        open_folder(tmp_path, wanted, path)
    assert (tmp_path / "0000.png").is_file()
    with open_folder(tmp_path, wanted, path, overwrite=True) as folder:
        assert not folder.has(0)
    assert [path.name for path in tmp_path.iterdir()] == [DESCRIPTION]


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
