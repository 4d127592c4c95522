"""Finding a scene's folder, and the message when it is nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from voxelfield import installed
from voxelfield.datasets import download
from voxelfield.datasets.loading import SceneNotFoundError, find_scene
from voxelfield.installed import bundled_scene

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv("VOXELFIELD_DATA", raising=False)


def make_scene(root, name="toy"):
    (root / name).mkdir(parents=True)
    (root / name / "transforms_train.json").write_text("{}")
    return root / name


def test_root_comes_before_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXELFIELD_DATA", str(tmp_path / "shared"))
    elsewhere = make_scene(tmp_path / "shared")
    assert find_scene("toy", tmp_path / "data").folder == elsewhere
    here = make_scene(tmp_path / "data")
    assert find_scene("toy", tmp_path / "data").folder == here


def test_root_defaults_to_data_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_scene(tmp_path / "data")
    assert find_scene("toy").folder == Path("data/toy")


def test_message_for_a_scene_with_a_download(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXELFIELD_DATA", str(tmp_path / "shared"))
    root = tmp_path / "my data"
    with pytest.raises(SceneNotFoundError) as error:
        find_scene("lego", root)
    message = str(error.value)
    assert message.startswith("scene must be in a folder of scenes, got 'lego'")
    assert len(message.splitlines()) == 1
    assert str(root / "lego") in message
    assert str(tmp_path / "shared" / "lego") in message
    assert f"`voxelfield download lego --root '{root}'`" in message
    assert "data.download=true" in message
    assert "scene=bricks needs no download" in message
    assert isinstance(error.value, FileNotFoundError)


def test_message_for_a_scene_without_a_download(tmp_path):
    with pytest.raises(SceneNotFoundError) as error:
        find_scene("toy", tmp_path, download=True)
    message = str(error.value)
    assert "($VOXELFIELD_DATA is not set)" in message
    assert "no download (those that have: lego)" in message
    assert "voxelfield download" not in message
    assert "data.download" not in message
    assert "scene=bricks needs no download" in message


def test_message_for_a_folder_that_holds_no_scene(tmp_path):
    (tmp_path / "lego" / "train").mkdir(parents=True)
    with pytest.raises(SceneNotFoundError, match=r"lego \(exists, but holds no transforms_train\.json.*\(Record3D\)\)"):
        find_scene("lego", tmp_path)


def test_download_is_called_only_for_a_scene_that_is_nowhere(tmp_path, monkeypatch):
    calls = []

    def fake(name, root):
        calls.append((name, root))
        return make_scene(root, name)

    monkeypatch.setattr(download, "download", fake)
    assert find_scene("lego", tmp_path, download=True).folder == tmp_path / "lego"
    assert find_scene("lego", tmp_path, download=True).folder == tmp_path / "lego"
    assert calls == [("lego", tmp_path)]


def test_only_the_bundled_scene_is_found_without_a_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_scene("bricks").folder == bundled_scene()
    own = make_scene(tmp_path / "data", "bricks")
    assert find_scene("bricks").folder.resolve() == own
    monkeypatch.setattr(installed, "_PACKAGE", tmp_path / "voxelfield")
    make_scene(tmp_path / "data")
    with pytest.raises(SceneNotFoundError, match="scene must be in a folder of scenes, got 'toy'"):
        find_scene("toy", tmp_path / "elsewhere")
