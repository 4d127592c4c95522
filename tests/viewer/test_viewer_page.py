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
from voxelfield.rendering.viewpoints import viewpoint_of
from voxelfield.viewer.page import first_view
from voxelfield.viewer.pictures import Painter
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
    towards = trained_run().model.content_box.mean(dim=0) - home.matrix[:3, 3]
    torch.testing.assert_close(towards / towards.norm(), -home.matrix[:3, 2])
    assert torch.equal(up, torch.tensor([0.0, 0.0, 1.0]))


def test_a_saved_path_leads_through_its_key_cameras(tmp_path):
    cameras, keys = bricks().train.cameras, (0, 5, 9)
    with served_page() as page:
        page.path.change([viewpoint_of(cameras, view) for view in keys])
        assert len(page.path.frusta) == 3
        assert page.path.key.options == ("1: 0.00 s", "2: 3.00 s", "3: 6.00 s")
        page.path.seconds.value, page.path.fps.value, page.path.size.value = 0.5, 10, (60, 40)
        client = SimpleNamespace(send_file_download=lambda name, content, **_: (tmp_path / name).write_bytes(content))
        page.path._save(client)
    path = read_camera_path(tmp_path / "camera_path.json")
    assert (len(path.cameras), path.fps, path.cameras.width, path.cameras.height) == (5, 10, 60, 40)
    torch.testing.assert_close(path.cameras.c2w[::2], cameras.c2w[list(keys)], atol=1e-5, rtol=0)
    fov = 2 * torch.atan(20 / path.cameras.intrinsics[::2, 1])
    torch.testing.assert_close(fov, torch.tensor([viewpoint_of(cameras, view).fov for view in keys]))


def client_at(view: int) -> SimpleNamespace:
    """A browser's camera at a photograph; files that it is sent are in ``files``."""
    viewpoint = viewpoint_of(bricks().train.cameras, view)
    c2w, files = viewpoint.matrix.double(), {}
    camera = SimpleNamespace(wxyz=viewpoint.wxyz, position=c2w[:3, 3].numpy(), fov=viewpoint.fov, aspect=1.5)
    camera.look_at = (c2w[:3, 3] - 3 * c2w[:3, 2]).numpy()
    send = lambda name, content, **_: files.update({name: content})  # noqa: E731
    return SimpleNamespace(client_id=7, camera=camera, files=files, send_file_download=send)


def test_an_orbit_turns_about_what_the_camera_looks_at_and_closes():
    with served_page() as page:
        client = client_at(4)
        with page._lock:  # as in a callback
            page.path._orbit(client)
        page.path.fps.value = 8
        path = page.path.stations()
        assert (len(path), len(page.path.keys)) == (48, 12)
    arms = path.c2w[:, :3, 3].double() - torch.from_numpy(client.camera.look_at)
    torch.testing.assert_close(arms.norm(dim=1), torch.full((48,), 3.0, dtype=torch.float64), atol=0.01, rtol=0)
    assert float(arms[:, 2].std()) < 1e-3, "at one height"
    steps = (arms - arms.roll(1, 0)).norm(dim=1)
    assert float(steps.max() / steps.min()) < 1.05, "also from the last frame to the first"


def test_key_cameras_are_replaced_and_removed():
    keys = [viewpoint_of(bricks().train.cameras, view) for view in (0, 5, 9)]
    with served_page() as page:
        page.path.change(keys, 1)
        page.path.edit._impl.value = "Replace"  # without a callback
        page.path._edit(client_at(4))
        assert page.path.keys[0::2] == keys[0::2]
        torch.testing.assert_close(page.path.keys[1].matrix, bricks().train.cameras.c2w[4])
        page.path.edit._impl.value = "Remove"
        page.path._edit(None)
        assert page.path.keys == keys[0::2]


def test_a_video_of_the_path_is_sent_and_can_be_stopped(monkeypatch):
    pytest.importorskip("av")
    import imageio.v3

    with served_page() as page:
        page.path.change([viewpoint_of(bricks().train.cameras, view) for view in (0, 5)])
        page.path.seconds.value, page.path.fps.value, page.path.size.value = 0.5, 8, (32, 16)
        monkeypatch.setattr(page, "serves", lambda client: client.camera is not None)
        client = client_at(0)
        page.worker.painter = Painter(trained_run())
        page.path._render(client)
        frames = imageio.v3.imread(client.files["camera_path.mp4"], extension=".mp4")
        assert frames.shape == (4, 16, 32, 3)
        assert not page.path.progress.visible
        client.camera = None
        with pytest.raises(ValueError, match="the video was stopped"):
            page.path._render(client)


def test_an_empty_view_is_explained():
    with served_page() as page:
        pixels = torch.full((4, 6, 3), 255)
        page.view.show_status(pixels, sharp=True, seconds=0.1)
        assert page.view.status.content.startswith("6 x 4 in 100 ms (at rest)\n\n**Only the background is visible")
        pixels[0, 0, 0] = 0
        page.view.show_status(pixels, sharp=True, seconds=0.1)
        assert page.view.status.content == "6 x 4 in 100 ms (at rest)"
