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
from make_bricks.geometry.outlines import rectangle
from make_bricks.geometry.rings import level, loft
from make_bricks.harbour.assembly import build_harbour
from make_bricks.materials import MATERIALS
from make_bricks.rendering.encoding import encode_rgba
from make_bricks.rendering.renderer import Renderer

BRICKS = Path(__file__).parents[2] / "data" / "bricks"


@pytest.mark.parametrize(("split", "cameras"), [("train", hemisphere_cameras(100)), ("test", orbit_cameras(25))])
def test_the_committed_cameras_are_reproduced(tmp_path, split, cameras):
    name = f"transforms_{split}.json"
    dataset.write_transforms(tmp_path, split, cameras)
    assert (tmp_path / name).read_text() == (BRICKS / name).read_text()


def test_the_harbour_is_the_same_each_time():
    def arrays(model: Model) -> list[np.ndarray]:
        solids = [array for solids in model.parts.values() for solid in solids for array in solid]
        return solids + [array for panel in model.panels for array in (panel.image, panel.corners)]

    first, again = build_harbour(), build_harbour()
    assert list(first.parts) == list(again.parts)
    assert set(first.parts) == set(MATERIALS)
    assert len(first.panels) == 5
    assert all(np.array_equal(a, b) for a, b in zip(arrays(first), arrays(again), strict=True))


@pytest.mark.parametrize("heights", [(-1.0, 0.5, 2.0), (2.0, 0.5, -1.0)])
def test_a_solid_is_closed_and_its_normals_point_outwards(heights):
    vertices, triangles = loft([level(rectangle(2.0, 3.0, 0.5), z) for z in heights])
    edges = [(a, b) for triangle in triangles.tolist() for a, b in zip(triangle, np.roll(triangle, -1), strict=True)]
    assert len(set(edges)) == len(edges)
    assert {(b, a) for a, b in edges} == set(edges)
    # By the divergence theorem, normals that point inwards make the volume negative.
    a, b, c = vertices[triangles].transpose(1, 0, 2)
    assert np.sum(a * np.cross(b, c)) / 6 == pytest.approx(3.0 * (2.0 * 3.0 - 4 * 0.5**2 / 2))


def test_pixels_are_srgb_not_multiplied_by_alpha():
    film = np.array([[(0.5, 0.0, 2.0, 1.0), (0.25, 0.0, 0.001, 0.5), (0.3, 0.2, 0.1, 0.0)]], np.float32)
    assert encode_rgba(film).tolist() == [[[188, 0, 255, 255], [188, 0, 7, 128], [0, 0, 0, 0]]]


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
