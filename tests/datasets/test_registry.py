"""Formats of data sets: which one a folder is in, and who loads it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

import voxelfield
from voxelfield.datasets import registry
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.images import read_images
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.registry import Format, scene_in
from voxelfield.datasets.scene import Scene, Split

LEGO = Path(__file__).parents[1] / "fixtures" / "lego"


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("VOXELFIELD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pictures(monkeypatch) -> list[LoadOptions]:
    """Registers a second format, a folder with ``pictures.txt``; returns what its loader is called with."""
    calls = []

    def load(folder: Path, options: LoadOptions) -> Scene:
        calls.append(options)
        box = torch.tensor([[-3.0] * 3, [3.0] * 3])
        if options.aabb is not None:
            box = torch.as_tensor(options.aabb, dtype=torch.float32)
        cameras = load_blender(LEGO, LoadOptions(splits=("train",))).train.cameras[:1]
        images = read_images([folder / (folder / "pictures.txt").read_text()])
        return Scene(folder.name, box, {"train": Split(images, cameras, ("first",))})

    added = Format("pictures", "pictures.txt", lambda folder: (folder / "pictures.txt").is_file(), load)
    formats = (*registry.formats(), added)
    monkeypatch.setattr(registry, "formats", lambda: formats)
    return calls


def make_pictures(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "pictures.txt").write_text("r_0.png")
    first = sorted((LEGO / "train").glob("*.png"))[0]
    (folder / "r_0.png").write_bytes(first.read_bytes())
    return folder


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_any_split_of_the_blender_layout_is_recognised(tmp_path, split):
    (tmp_path / f"transforms_{split}.json").touch()
    assert registry.scene_in(tmp_path).formats[0].name == "blender"


def test_a_single_transforms_file_is_another_format(tmp_path):
    (tmp_path / "transforms.json").touch()
    assert registry.scene_in(tmp_path).formats[0].name == "nerfstudio or instant-ngp"


def test_a_folder_is_loaded_by_the_format_that_recognises_it(tmp_path, pictures):
    folder = make_pictures(tmp_path / "captures" / "mine")
    for given in (folder, str(folder), "captures/mine"):
        scene = voxelfield.load_scene(given, splits=("train",), image_size=50, missing_images="skip")
        assert scene.name == "mine"
        assert torch.equal(scene.aabb, torch.tensor([[-3.0] * 3, [3.0] * 3])), "the format's own box must be kept"
    expected = LoadOptions(splits=("train",), image_size=50, missing_images="skip")
    assert pictures == [expected] * 3
    assert voxelfield.load_scene(LEGO, splits=("train",)).train.names != ("first",)
    assert len(pictures) == 3


def test_a_format_that_loads_no_scene_is_named(tmp_path, monkeypatch):
    empty = Format("empty", "pictures.txt", registry.contains(["pictures.txt"]), lambda folder, options: None)
    monkeypatch.setattr(registry, "formats", lambda: (empty,))
    with pytest.raises(ValueError, match=r"^the format empty must load a Scene, got a NoneType$"):
        voxelfield.load_scene(make_pictures(tmp_path / "mine"))


def test_the_first_format_that_recognises_a_folder_has_it(tmp_path, pictures):
    folder = make_pictures(tmp_path / "both")
    (folder / "transforms_train.json").touch()
    assert registry.scene_in(folder).formats[0].name == "blender"


@pytest.mark.parametrize("as_text", [True, False])
def test_an_unknown_folder_is_refused_in_one_line_that_lists_the_formats(tmp_path, pictures, as_text):
    folder = tmp_path / "captures" / "odd"
    folder.mkdir(parents=True)
    with pytest.raises(FileNotFoundError) as caught:
        voxelfield.load_scene(str(folder) if as_text else folder)
    message = str(caught.value)
    assert message.startswith(
        f"folder must be a scene, got {folder}; the files of a scene are transforms_train.json, transforms_val.json or "
        "transforms_test.json (blender); or transforms.json (nerfstudio or instant-ngp); or "
    )
    assert all(f"{known.looks_for} ({known.name})" in message for known in registry.formats())
    assert message.endswith("; or pictures.txt (pictures)")
    assert "\n" not in message
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        voxelfield.load_scene(tmp_path / "nowhere")


def test_photographs_and_videos_without_poses_are_sent_to_the_commands_that_make_a_scene(tmp_path, monkeypatch):
    photographs, video = tmp_path / "my photos" / "input", tmp_path / "walk.MP4"
    photographs.mkdir(parents=True)
    video.touch()

    def message(folder: Path) -> str:
        with pytest.raises(FileNotFoundError) as caught:
            scene_in(folder)
        return str(caught.value)

    def commands(source: Path, scene: Path) -> str:
        source, scene = (shlex.quote(str(path)) for path in (source, scene))
        return f" without poses: run `voxelfield process {source} -o {scene}`, then `voxelfield train {scene}`"

    assert "process" not in message(photographs.parent)
    above, beside, inside = (
        path.with_name(f"{path.name}_scene") for path in (tmp_path, photographs.parent, photographs)
    )
    assert message(tmp_path).startswith(f"folder must be a scene, got {tmp_path}, a video{commands(video, above)};")
    assert message(video).endswith(f"which is a file, a video{commands(video, tmp_path / 'walk_scene')}")
    Image.new("RGB", (8, 8)).save(photographs / "a.jpg")
    (photographs / "IMG_2.HEIC").touch()  # counted without pillow-heif
    for folder, scene in ((photographs, inside), (photographs.parent, beside), (tmp_path, above)):
        assert f"got {folder}, 2 photographs{commands(photographs, scene)}; the files of a scene" in message(folder)
    monkeypatch.chdir(photographs)
    assert f"got ., 2 photographs{commands(Path(), inside)};" in message(Path())
