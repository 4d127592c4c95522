"""Captures whose photographs differ in size, from the files to the evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from quick_presets import preset
from small_sessions import fitted

import voxelfield
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.scene import Scene, Split
from voxelfield.evaluation.evaluation import evaluate_split
from voxelfield.evaluation.metrics import psnr
from voxelfield.rendering.pixels import composite_background
from voxelfield.rendering.render import View
from voxelfield.training.session import Session

LEGO = Path(__file__).parents[1] / "fixtures" / "lego"
# The part of each photograph that is kept: left, top, right and bottom in pixels.
CUTS = ((0, 0, 100, 100), (10, 0, 80, 100), (0, 20, 100, 75), (5, 5, 95, 94), (0, 0, 100, 99))


@pytest.fixture(scope="module")
def square() -> Split:
    """The fixture's training views, 100 x 100 pixels."""
    return load_blender(LEGO).train


@pytest.fixture(scope="module")
def folder(square, tmp_path_factory) -> Path:
    """A capture of parts of these views, as several cameras would take them."""
    folder = tmp_path_factory.mktemp("mixed") / "capture"
    (folder / "images").mkdir(parents=True)
    frames = []
    for index, image in enumerate(square.images):
        left, top, right, bottom = CUTS[index % len(CUTS)]
        name = f"images/{index:03d}.png"
        Image.fromarray(image[top:bottom, left:right].numpy()).save(folder / name)
        fx, fy, cx, cy = square.cameras.intrinsics[index].tolist()
        intrinsics = {"fl_x": fx, "fl_y": fy, "cx": cx - left, "cy": cy - top, "w": right - left, "h": bottom - top}
        frames.append({"file_path": name, "transform_matrix": square.cameras.c2w[index].tolist(), **intrinsics})
    (folder / "transforms.json").write_text(json.dumps({"frames": frames}))
    return folder


def load(folder: Path, **options: object) -> Scene:
    return voxelfield.load_scene(folder, aabb=((-1.5,) * 3, (1.5,) * 3), **options)


def test_each_image_has_its_own_size_and_camera(folder, square):
    split = load(folder, holdout=0, splits=["train"]).train
    assert (split.cameras.width, split.cameras.height) == (100, 100)
    box = torch.tensor([[-1.5] * 3, [1.5] * 3])
    for index in range(len(split)):
        left, top, right, bottom = CUTS[index % len(CUTS)]
        assert split.cameras.size(index) == (right - left, bottom - top)
        assert torch.equal(split.image(index), square.images[index, top:bottom, left:right])
        directions = square.cameras.image_rays(index, box).directions.view(100, 100, 3)[top:bottom, left:right]
        found = split.cameras.image_rays(index, box).directions
        torch.testing.assert_close(found, directions.reshape(-1, 3), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("options", "factor"), [({"downscale": 3}, 3), ({"image_size": 50}, 2)])
def test_each_image_is_shrunk_with_its_camera(folder, options, factor):
    whole, small = (load(folder, holdout=0, splits=["train"], **chosen).train for chosen in ({}, options))
    for index in range(len(whole)):
        width, height = whole.cameras.size(index)
        limit = max(1, max(width, height) * factor / 100) if "image_size" in options else factor
        size = (round(width / limit), round(height / limit))
        assert small.cameras.size(index) == size
        scale = torch.tensor(size) / torch.tensor((width, height))
        torch.testing.assert_close(small.cameras.intrinsics[index], whole.cameras.intrinsics[index] * scale.repeat(2))


def test_training_and_evaluation_read_images_alone(folder, device, tmp_path):
    scene = load(folder, holdout=4)
    changes = ("trainer.steps=6", "trainer.preview_every=3", "trainer.preview_views=2", "trainer.image_size=50")
    changes += ("trainer.exposure=affine", "trainer.loss.structure=0.1", "trainer.patches=2", "trainer.patch_size=8")
    settings = preset("model=dense", "trainer=smoke", *changes, device=str(device))
    states = []
    for filler in (0, 255):
        splits = {}
        for name, split in scene.splits.items():
            images = torch.full_like(split.images, filler)
            for index in range(len(split)):
                width, height = split.cameras.size(index)
                images[index, :height, :width] = split.image(index)
            splits[name] = replace(split, images=images)
        session = fitted(Session(Scene(scene.name, scene.aabb, splits), settings))
        found = session.evaluate(images=tmp_path / str(filler), progress=False)
        states.append(torch.tensor([*found.scores["psnr"], session.occupancy.fraction()]))
    # On CUDA sums have another order in every run.
    torch.testing.assert_close(states[1], states[0], atol=0 if device.type == "cpu" else 1e-2, rtol=0)
    sizes = [Image.open(tmp_path / "0" / f"{name}.png").size for name in scene.test.names]
    assert sizes == [scene.test.cameras.size(index) for index in range(len(scene.test))]


def test_cameras_are_refined_and_lost_ones_looked_for(folder, device):
    scene = load(folder, holdout=4)
    changes = ("trainer.steps=6", "trainer.preview_every=0", "camera=refine", "camera.search_poses=4")
    changes += ("camera.stages=[{start: 0, resolution: 12}, {start: 0.4, resolution: 16}]",)
    session = fitted(Session(scene, preset("model=dense", "trainer=smoke", *changes, device=str(device))))
    assert session.cameras.refined.sizes.tolist() == scene.train.cameras.sizes.tolist()


def test_metrics_compare_each_view_at_its_own_size(folder):
    split = load(folder, holdout=4).test
    white = torch.ones(3)
    truths = [composite_background(split.image(index), white) for index in range(len(split))]

    def rendered(cameras, index):
        width, height = cameras.size(index)
        return View(truths[index] * 0.9, torch.ones(height, width), torch.ones(height, width))

    found = evaluate_split(rendered, split, white, progress=False)
    expected = [float(psnr(truth * 0.9, truth)) for truth in truths]
    assert found.scores["psnr"] == pytest.approx(expected)


def test_images_that_would_mostly_be_empty_room_are_refused(folder, tmp_path):
    copy = tmp_path / "capture"
    (copy / "images").mkdir(parents=True)
    for path in folder.rglob("*.*"):
        (copy / path.relative_to(folder)).write_bytes(path.read_bytes())
    meta = json.loads((copy / "transforms.json").read_text())
    Image.new("RGBA", (1000, 1000), "red").save(copy / "images" / "000.png")
    meta["frames"][0] |= {"w": 1000, "h": 1000}
    (copy / "transforms.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"000\.png: size must be at most .* got 1000x1000: .*image_size"):
        load(copy, holdout=0, splits=["train"])
    assert load(copy, holdout=0, splits=["train"], image_size=100).train.cameras.size(0) == (100, 100)
