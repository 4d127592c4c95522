"""The page without a browser: what is said of an empty field, and how far crop box and slice go."""

from __future__ import annotations

import copy
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch
from free_ports import free_port
from viewer_scene import nested_run, trained_run

from voxelfield.cli import view
from voxelfield.export import save_model
from voxelfield.grids.boxes import parse_box
from voxelfield.training.trained_model import TrainedModel
from voxelfield.viewer.curves import Curves
from voxelfield.viewer.drawing.look import Slice
from voxelfield.viewer.drawing.painter import content_boxes
from voxelfield.viewer.drawing.photographs import Photographs
from voxelfield.viewer.page.address import Address
from voxelfield.viewer.scheduling.source import FinishedRun

pytest.importorskip("viser")


def served(run: TrainedModel, path: Path) -> None:
    """Does what ``voxelfield view`` does with a model file, and ends."""
    save_model(path, run)
    parser = ArgumentParser()
    view.add_arguments(parser)
    options = parser.parse_args([str(path), "--device", "cpu", "--port", str(free_port())])
    view.run(options, wait=lambda _: None)


def test_an_empty_field_is_told_before_anybody_looks(tmp_path, caplog):
    empty = copy.deepcopy(trained_run())
    empty.occupancy.occupied.fill_(False)
    served(empty, tmp_path / "empty.safetensors")
    said = f"first view of {tmp_path / 'empty.safetensors'}: the field is empty, so every picture shows only"
    assert [message for message in caplog.messages if message.startswith(said)] != []
    caplog.clear()
    served(trained_run(), tmp_path / "bricks.safetensors")
    assert "first view" not in caplog.text


@pytest.fixture
def page():
    from voxelfield.viewer.page.viewer_page import ViewerPage

    run = nested_run()
    address = Address("127.0.0.1", free_port())
    opened = ViewerPage(
        address, "bricks", "RUN", FinishedRun(run), Photographs({}), content_boxes(run), torch.ones(3), Curves()
    )
    yield opened
    opened.close()


def test_crop_box_and_slice_reach_as_far_as_the_chosen_box(page):
    region, worker = page.region, page.worker
    small, _, large = map(parse_box, content_boxes(nested_run()))
    region.crop.value = region.cut.value = True
    torch.testing.assert_close(worker.look.crop, small)
    assert worker.look.cut == Slice(2, (small[0][2] + small[1][2]) / 2, small)
    region.reach.value = "3"
    assert [side.max for side in region.sides] == pytest.approx(large[1])
    torch.testing.assert_close(worker.look.crop, large)
    assert worker.look.cut.within == large
    region.position.value = large[1][2]
    assert worker.look.cut.position == large[1][2]
    region.reach.value = "1"
    torch.testing.assert_close(worker.look.crop, small)
    assert (region.position.min, region.position.max) == (small[0][2], small[1][2])
    assert small[0][2] < worker.look.cut.position < small[1][2]
