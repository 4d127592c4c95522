"""The page without a browser: its first view and empty views."""

from __future__ import annotations

from argparse import ArgumentParser
from types import SimpleNamespace

import pytest
import torch
from free_ports import free_port
from viewer_scene import bricks, served_page, trained_run

from voxelfield.cli.trained import add_view_arguments, run_view
from voxelfield.datasets.camera_path import read_camera_path
from voxelfield.export import save_model
from voxelfield.viewer.page import first_view
from voxelfield.viewer.pictures import content_box, viewpoint_of
from voxelfield.warps.ndc_box import NdcBox

pytest.importorskip("viser")


def test_a_model_file_is_served_without_its_scene(tmp_path):
    path = tmp_path / "bricks.safetensors"
    save_model(path, trained_run())
    shown = []
    parser = ArgumentParser()
    add_view_arguments(parser)
    options = parser.parse_args([str(path), "--device", "cpu", "--port", str(free_port())])
    run_view(options, wait=lambda page: shown.append(page.box))
    low, high = trained_run().occupancy.bounds()
    torch.testing.assert_close(shown[0], torch.stack((low, high)))


def test_the_first_view_without_photographs():
    box, background = ((-1.0, -1.0, -3.0), (1.0, 1.0, -2.0)), torch.ones(3)
    rows = ((1.0, 0.0, 0.0, 0.5), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0))
    warp = NdcBox(box, rows, 1.0, ((-1.0, -1.0), (1.0, 1.0)), 1.0)
    facing = SimpleNamespace(model=SimpleNamespace(warp=warp, background=background))
    home, up = first_view(facing, {})
    assert torch.equal(home.matrix[:3], torch.tensor(rows))
    assert torch.equal(up, torch.tensor([0.0, 1.0, 0.0]))
    home, up = first_view(trained_run(), {})
    towards = content_box(trained_run()).mean(dim=0) - home.matrix[:3, 3]
    torch.testing.assert_close(towards / towards.norm(), -home.matrix[:3, 2])
    assert torch.equal(up, torch.tensor([0.0, 0.0, 1.0]))


def test_a_saved_path_leads_through_its_key_cameras(tmp_path):
    cameras, keys = bricks().train.cameras, (0, 5, 9)
    with served_page() as page:
        page.path.change([viewpoint_of(cameras, view) for view in keys])
        assert len(page.path._drawn) == 4, "three key cameras and a line"
        page.path.seconds.value, page.path.fps.value, page.path.size.value = 0.5, 10, (60, 40)
        client = SimpleNamespace(send_file_download=lambda name, content, **_: (tmp_path / name).write_bytes(content))
        page.path._save(client)
    path = read_camera_path(tmp_path / "camera_path.json")
    assert (len(path.cameras), path.fps, path.cameras.width, path.cameras.height) == (5, 10, 60, 40)
    torch.testing.assert_close(path.cameras.c2w[::2], cameras.c2w[list(keys)], atol=1e-5, rtol=0)
    fov = 2 * torch.atan(20 / path.cameras.intrinsics[::2, 1])
    torch.testing.assert_close(fov, torch.tensor([viewpoint_of(cameras, view).fov for view in keys]))


def test_an_empty_view_is_explained():
    with served_page() as page:
        pixels = torch.full((4, 6, 3), 255)
        page.view.show_status(pixels, sharp=True, seconds=0.1)
        assert page.view.status.content.startswith("6 x 4 in 100 ms (at rest)\n\n**Only the background is visible")
        pixels[0, 0, 0] = 0
        page.view.show_status(pixels, sharp=True, seconds=0.1)
        assert page.view.status.content == "6 x 4 in 100 ms (at rest)"
