"""The page without a browser: its first view, crop box and empty views."""

from __future__ import annotations

from argparse import ArgumentParser
from types import SimpleNamespace

import pytest
import torch
from free_ports import free_port
from viewer_scene import served_page, trained_run

from voxelfield.cli import view
from voxelfield.export import save_model
from voxelfield.viewer.state import ViewerState
from voxelfield.warps.ndc_box import NdcBox

pytest.importorskip("viser")


def test_a_model_file_is_served_without_its_scene(tmp_path):
    path = tmp_path / "bricks.safetensors"
    save_model(path, trained_run())
    shown = []
    parser = ArgumentParser()
    view.add_arguments(parser)
    options = parser.parse_args([str(path), "--device", "cpu", "--port", str(free_port())])
    view.run(options, wait=lambda page: shown.append(page.state.box))
    low, high = trained_run().occupancy.bounds()
    torch.testing.assert_close(shown[0], torch.stack((low, high)))


def test_the_first_view_without_photographs():
    box, background = ((-1.0, -1.0, -3.0), (1.0, 1.0, -2.0)), torch.ones(3)
    rows = ((1.0, 0.0, 0.0, 0.5), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0))
    warp = NdcBox(box, rows, 1.0, ((-1.0, -1.0), (1.0, 1.0)), 1.0)
    facing = SimpleNamespace(model=SimpleNamespace(warp=warp, background=background), parts=(None,))
    state = ViewerState(None, None, facing, ())
    assert torch.equal(state.home.matrix[:3], torch.tensor(rows))
    assert torch.equal(state.up, torch.tensor([0.0, 1.0, 0.0]))
    state = ViewerState(None, None, trained_run(), ())
    towards = state.box.mean(dim=0) - state.home.matrix[:3, 3]
    torch.testing.assert_close(towards / towards.norm(), -state.home.matrix[:3, 2])
    assert torch.equal(state.up, torch.tensor([0.0, 0.0, 1.0]))


def test_the_crop_box_follows_its_sliders():
    with served_page() as page:
        region, worker = page.region, page.worker
        low, high = page.state.crop_limits
        region.crop.value = True
        assert worker.display.crop == (low, high)
        region.sides[0].value = (0.0, 0.0)
        cropped = worker.display.crop
        assert cropped[0][0] == 0.0
        assert 0.0 < cropped[1][0] < 0.01
        assert cropped[1][1:] == high[1:]
        region.crop.value = False
        assert worker.display.crop is None


def test_an_empty_view_is_explained():
    with served_page() as page:
        empty = SimpleNamespace(pixels=torch.full((4, 6, 3), 255), sharp=True, seconds=0.1)
        page.view.show_status(empty)
        assert page.view.status.content.startswith("6 x 4 in 100 ms (at rest)\n\n**Only the background is visible")
        empty.pixels[0, 0, 0] = 0
        page.view.show_status(empty)
        assert page.view.status.content == "6 x 4 in 100 ms (at rest)"
