"""The package that makes the bundled scene."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from make_bricks import dataset
from make_bricks.cameras import hemisphere_cameras, orbit_cameras
from make_bricks.geometry.model import Model
from make_bricks.rendering.renderer import Renderer

BRICKS = Path(__file__).parents[2] / "data" / "bricks"


@pytest.mark.parametrize(("split", "cameras"), [("train", hemisphere_cameras(100)), ("test", orbit_cameras(25))])
def test_the_committed_cameras_are_reproduced(tmp_path, split, cameras):
    name = f"transforms_{split}.json"
    dataset.write_transforms(tmp_path, split, cameras)
    assert (tmp_path / name).read_text() == (BRICKS / name).read_text()


@pytest.fixture
def box():
    """A red box that fills the middle pixel of a view of 5 x 5, and reaches no corner of it."""
    pytest.importorskip("mitsuba")
    model = Model()
    model.box("red", (-4.0, -4.0, 3.0), (4.0, 4.0, 12.0))
    return model


def test_every_split_is_written(box, tmp_path, monkeypatch):
    # A thread and a small model in place of a new process and the harbour, which take seconds.
    monkeypatch.setattr(dataset, "ProcessPoolExecutor", lambda processes, context: ThreadPoolExecutor(processes))
    monkeypatch.setattr(dataset, "harbour_renderer", cache(lambda size, spp: Renderer(box, size, spp)))
    splits = {"train": hemisphere_cameras(2), "test": orbit_cameras(1)}
    dataset.write_dataset(tmp_path, splits, size=5, spp=4, processes=1)
    views = [(split, k, c2w) for split, cameras in splits.items() for k, c2w in enumerate(cameras)]
    renderer = Renderer(box, size=5, spp=4)
    for seed, (split, k, c2w) in enumerate(views):
        frames = json.loads((tmp_path / f"transforms_{split}.json").read_text())["frames"]
        assert len(frames) == len(splits[split])
        assert np.allclose(frames[k]["transform_matrix"], c2w, atol=1e-9)
        with Image.open(tmp_path / f"{frames[k]['file_path']}.png") as image:
            assert image.mode == "RGBA"
            assert np.array_equal(np.array(image), renderer.render(c2w, seed))
