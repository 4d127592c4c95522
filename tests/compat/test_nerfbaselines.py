"""The adapter to nerfbaselines. Without that package, its cameras and datasets are replaced by equivalents."""

from __future__ import annotations

import dataclasses
import importlib.util
import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from voxelfield.compat.nerfbaselines import VoxelfieldMethod, _cameras, _scene

ROOT = Path(__file__).parents[2]
INSTALLED = importlib.util.find_spec("nerfbaselines") is not None


@dataclasses.dataclass(frozen=True)
class Cameras:
    """nerfbaselines.Cameras, as far as methods read it."""

    poses: np.ndarray
    intrinsics: np.ndarray
    camera_models: np.ndarray
    image_sizes: np.ndarray
    distortion_parameters: np.ndarray

    def __getitem__(self, index):
        return Cameras(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))


def new_cameras(*, distortion_parameters=None, **arrays):
    if distortion_parameters is None:
        distortion_parameters = np.zeros((*arrays["intrinsics"].shape[:-1], 0), np.float32)
    return Cameras(**arrays, distortion_parameters=distortion_parameters)


def new_dataset(**entries):
    return {"masks": None, "points3D_xyz": None, **entries}


@pytest.fixture
def example(monkeypatch):
    if not INSTALLED:
        package = types.ModuleType("nerfbaselines")
        package.new_cameras, package.new_dataset = new_cameras, new_dataset
        monkeypatch.setitem(sys.modules, "nerfbaselines", package)
    return types.SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "nerfbaselines_method.py")))


SETTINGS = {"model": "dense", "trainer": "smoke", "trainer.steps": 12, "trainer.finest_resolution": 16}


@pytest.fixture
def dataset(example):
    return example.dataset_of(example.load_scene("bricks", image_size=25), "train")


@pytest.mark.slow
def test_the_example_learns(example):
    assert example.main(["--steps", "40", "--image-size", "25"]) > 12


def test_a_run_that_is_saved_and_loaded_continues_as_if_it_had_not_been(dataset, tmp_path):
    whole = VoxelfieldMethod(train_dataset=dataset, config_overrides=SETTINGS)
    for step in range(12):
        assert whole.train_iteration(step)["num_rays"] > 0
        if step == 5:
            whole.save(str(tmp_path / "six"))
    resumed = VoxelfieldMethod(checkpoint=str(tmp_path / "six"), train_dataset=dataset)
    assert (resumed.get_info()["loaded_step"], resumed.get_info()["num_iterations"]) == (6, 12)
    for step in range(6, 12):
        resumed.train_iteration(step)
    camera = dataset["cameras"][3]
    expected, found = whole.render(camera), resumed.render(camera)
    assert {name: image.shape for name, image in found.items()} == {
        "color": (25, 25, 3),
        "accumulation": (25, 25),
        "depth": (25, 25),
    }
    assert found["color"].dtype == np.uint8
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    exact = resumed.render(camera, options={"output_type_dtypes": {"color": "float32"}})["color"]
    assert np.abs(found["color"] / 255 - exact).max() <= 0.501 / 255, "rounded, not truncated"
    resumed.save(str(tmp_path / "end"))
    loaded = VoxelfieldMethod(checkpoint=str(tmp_path / "end"))
    assert all(np.array_equal(loaded.render(camera)[name], expected[name]) for name in expected)
    loaded.save(str(tmp_path / "again"))
    assert [path.read_bytes() for path in (tmp_path / "again").iterdir()] == [
        path.read_bytes() for path in (tmp_path / "end").iterdir()
    ]
    with pytest.raises(RuntimeError, match="train_dataset must be given to train"):
        loaded.train_iteration(12)


def test_neither_a_checkpoint_nor_a_dataset_is_refused():
    with pytest.raises(ValueError, match="train_dataset must be given if there is no checkpoint"):
        VoxelfieldMethod()


def some_cameras(count: int, new=new_cameras):
    generator = np.random.default_rng(0)
    poses = np.concatenate((np.linalg.qr(generator.normal(size=(count, 3, 3)))[0], np.ones((count, 3, 1))), axis=2)
    poses[:, :, :3] *= np.linalg.det(poses[:, :, :3])[:, None, None]
    return new(
        poses=poses.astype(np.float32),
        intrinsics=np.tile(np.array([[30.0, 31.0, 14.0, 9.0]], np.float32), (count, 1)),
        camera_models=np.arange(count, dtype=np.int32) % 4,
        distortion_parameters=generator.uniform(-0.02, 0.02, (count, 8)).astype(np.float32)
        * (np.arange(count) % 4 > 0)[:, None],
        image_sizes=np.tile(np.array([[28, 18]]), (count, 1)),
    )


def test_images_of_different_sizes_masks_and_points_are_converted():
    cameras = some_cameras(2)
    cameras.image_sizes[1] = (20, 18)
    images = [np.full((18, 28, 3), 7, np.uint8), np.full((18, 20, 3), 9, np.uint8)]
    masks = [np.ones(image.shape[:2], np.uint8) for image in images]
    masks[0][:5] = 0
    dataset = new_dataset(cameras=cameras, images=images, masks=masks, image_paths=["a.png", "b.png"], metadata={})
    dataset["points3D_xyz"] = np.random.default_rng(1).normal(size=(50, 3))
    train = _scene(dataset).train
    assert train.image(1).shape == (18, 20, 4)
    assert train.image(1)[0, 0].tolist() == [9, 9, 9, 255]
    assert int(train.mask(0).sum()) == 13 * 28


@pytest.mark.skipif(not INSTALLED, reason="needs nerfbaselines")
def test_rays_are_those_of_nerfbaselines():
    import nerfbaselines
    from nerfbaselines.cameras import get_rays

    cameras = some_cameras(4, nerfbaselines.new_cameras)
    pixels = np.stack(np.meshgrid(np.arange(28), np.arange(18)), -1).reshape(-1, 2)
    converted, box = _cameras(cameras), torch.tensor([[-100.0] * 3, [100.0] * 3])
    for index in range(4):
        origins, directions = get_rays(cameras[np.full(len(pixels), index)], pixels)
        rays = converted.rays(torch.full((len(pixels),), index), torch.from_numpy(pixels).float() + 0.5, box)
        expected = directions / np.linalg.norm(directions, axis=-1, keepdims=True)
        assert np.abs(rays.directions.numpy() - expected).max() < 1e-4
        assert np.abs(rays.origins.numpy() - origins).max() < 1e-6


@pytest.mark.skipif(not INSTALLED, reason="needs nerfbaselines")
def test_the_method_has_the_protocol_of_nerfbaselines():
    import nerfbaselines

    assert issubclass(VoxelfieldMethod, nerfbaselines.Method)
    assert nerfbaselines.get_method_spec("voxelfield")["method_class"] == (
        "voxelfield.compat.nerfbaselines:VoxelfieldMethod"
    )
