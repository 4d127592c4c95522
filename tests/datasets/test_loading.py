"""From a name or a folder to a scene."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import voxelfield
from voxelfield.datasets.loading import SceneNotFoundError
from voxelfield.runs.train import load_configured_scene
from voxelfield.settings import preset

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("VOXELFIELD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def box(low: float, high: float) -> torch.Tensor:
    return torch.tensor([[low] * 3, [high] * 3])


def test_a_name_has_the_box_of_its_settings():
    scene = voxelfield.load_scene("bricks", splits=("test",))
    assert scene.name == "bricks"
    assert torch.equal(scene.aabb, box(-1.2, 1.2))
    assert list(scene.splits) == ["test"]


@pytest.mark.parametrize("as_text", [True, False])
def test_a_folder_is_loaded_from_where_it_lies(tmp_path, as_text):
    folder = tmp_path / "captures" / "mine"
    shutil.copytree(FIXTURES / "lego", folder)
    scene = voxelfield.load_scene(str(folder) if as_text else folder, image_size=30)
    assert scene.name == "mine"
    assert (scene.aabb[0] > -1.5).all()
    assert (scene.aabb[1] < 1.5).all(), "the box is that of the silhouettes"
    assert tuple(scene.train.images.shape[1:3]) == (30, 30)
    given = voxelfield.load_scene(folder, splits=("test",), aabb=box(-1, 2))
    assert torch.equal(given.aabb, box(-1, 2))


def test_a_name_is_looked_for_in_the_root(tmp_path):
    shutil.copytree(FIXTURES / "lego", tmp_path / "scenes" / "mine")
    assert voxelfield.load_scene("mine", root=tmp_path / "scenes", splits=("train",)).name == "mine"


def test_a_known_name_is_not_taken_for_a_folder(tmp_path):
    shutil.copytree(FIXTURES / "lego", tmp_path / "bricks")
    assert tuple(voxelfield.load_scene("bricks", splits=("test",)).test.images.shape[1:3]) == (200, 200)
    assert tuple(voxelfield.load_scene(tmp_path / "bricks", splits=("test",)).test.images.shape[1:3]) == (100, 100)


@pytest.mark.parametrize("name", ["lego", "bricks", "folder"])
def test_a_folder_has_no_box_because_of_its_name(tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(FIXTURES / "lego", folder)
    (folder / "transforms_train.json").rename(folder / "transforms.json")
    (folder / "transforms_test.json").unlink()
    folder.rename(tmp_path / "mine")
    expected = voxelfield.load_scene(tmp_path / "mine", image_size=10)
    (tmp_path / "mine").rename(folder)
    for scene in (folder, str(folder), f"./{name}"):
        assert torch.equal(voxelfield.load_scene(scene, image_size=10).aabb, expected.aabb)
    changes = (f"scene.name={name}", f"data.root={tmp_path}", "trainer.image_size=10")
    composed = preset("scene=folder", *changes, device="cpu")
    assert torch.equal(load_configured_scene(composed, tmp_path).aabb, expected.aabb)


def test_a_configured_scene_is_not_another_folder_of_its_name(tmp_path):
    shutil.copytree(FIXTURES / "lego", tmp_path / "elsewhere" / "mine")
    shutil.copytree(FIXTURES / "lego", tmp_path / "mine")
    (tmp_path / "mine" / "transforms_train.json").write_text("damaged")
    composed = preset("scene=folder", "scene.name=mine", "data.root=elsewhere", device="cpu")
    assert load_configured_scene(composed, tmp_path).name == "mine"


def test_a_single_name_is_no_list_of_splits():
    with pytest.raises(ValueError, match=r"splits must be a sequence of names or None, got 'train': use \['train'\]"):
        voxelfield.load_scene("bricks", splits="train")


def test_what_is_nowhere_is_named(tmp_path):
    with pytest.raises(SceneNotFoundError, match="scene must be in a folder of scenes, got 'nowhere'"):
        voxelfield.load_scene("nowhere")
    with pytest.raises(FileNotFoundError, match="folder must be a scene"):
        voxelfield.load_scene(tmp_path / "nowhere")
    shutil.copytree(FIXTURES / "lego", tmp_path / "lego")
    with pytest.raises(SceneNotFoundError, match=r"scene=\./lego is the folder of that name here"):
        voxelfield.load_scene("lego")
    with pytest.raises(FileNotFoundError, match=r"legs, which does not exist; did you mean .*/lego\?"):
        voxelfield.load_scene(str(tmp_path / "legs"))


def test_all_splits_of_a_scene_with_the_files_of_their_images(tmp_path):
    shutil.copytree(FIXTURES / "lego", tmp_path / "lego")
    shutil.copy(tmp_path / "lego" / "transforms_test.json", tmp_path / "lego" / "transforms_val.json")
    scene = voxelfield.load_scene(tmp_path / "lego", splits=None)
    assert list(scene.splits) == ["train", "val", "test"]
    assert scene.train.paths == tuple(tmp_path / "lego" / "train" / f"{name}.png" for name in scene.train.names)
    with pytest.raises(ValueError, match=r"Split.paths must be \d+ files, one for each name, got 1"):
        replace(scene.train, paths=scene.train.paths[:1])
