"""Which photographs are trained on and which are evaluated, in every format."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from voxelfield.datasets.assembly import choose_splits
from voxelfield.datasets.loading import load_scene
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo
from voxelfield.runs.train import load_configured_scene
from voxelfield.settings import preset

POSE = torch.eye(4)
NAMES = [f"images/{index:02d}.png" for index in range(16)]
SOURCE = Path("list.json")


def photos(*stems: str) -> list[Photo]:
    return [Photo(Path("images", f"{stem}.png"), POSE, lambda width, height: (1, 1, 1, 1)) for stem in stems]


def chosen(
    listed: dict[str, str], splits: Sequence[str] | None = ("train", "test"), holdout: int = 4
) -> dict[str, str]:
    """Returns the one-letter stems of the photographs of each split."""
    found = choose_splits(
        SOURCE, {name: photos(*stems) for name, stems in listed.items()}, LoadOptions(splits, holdout=holdout)
    )
    return {name: "".join(photo.path.stem for photo in some) for name, some in found.items()}


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ({"train": "cd", "val": "b", "test": "a"}, {"train": "cd", "test": "a"}),
        ({"train": "cd", "val": "b", "test": ""}, {"train": "cd", "test": "b"}),
        ({"train": "hgfedcba"}, {"train": "bcdfgh", "test": "ae"}),
        ({"train": "ab", "val": "", "test": ""}, {"train": "b", "test": "a"}),
    ],
)
def test_views_stand_in_where_none_are_listed_for_the_test(listed, expected):
    assert chosen(listed) == expected
    assert chosen(listed, ("train",)) == {"train": expected["train"]}, "the same views are trained on"
    assert chosen(listed, ("test",)) == {"test": expected["test"]}


def test_without_a_holdout_training_views_are_evaluated(caplog):
    with caplog.at_level(logging.INFO):
        assert chosen({"train": "ab"}, holdout=0) == {"train": "ab"}
        assert chosen({"train": "ab"}, ("test",), holdout=0) == {}
    assert caplog.messages == ["list.json: there are no test views, so training views are evaluated"]
    assert chosen({"train": "ab", "val": "c"}, holdout=0) == {"train": "ab", "test": "c"}


def test_all_splits_hold_each_view_once():
    assert chosen({"train": "cd", "val": "b"}, None) == {"train": "cd", "val": "b"}
    assert chosen({"train": "cd"}, None) == {"train": "d", "test": "c"}


@pytest.mark.parametrize(
    ("listed", "splits", "message"),
    [
        (
            {"train": "a"},
            ("train", "test"),
            "at least two photographs .*, got 1: set data.holdout=0, or add photographs",
        ),
        ({"train": "a"}, None, "at least two photographs"),
        ({"test": "ab"}, ("train",), r"splits must be among those of list\.json \(test\), got train"),
        ({"train": "ab"}, ("val",), r"splits must be among those of list\.json \(train, test\), got val"),
    ],
)
def test_a_split_without_photographs_is_refused(listed, splits, message):
    with pytest.raises(ValueError, match=message):
        chosen(listed, splits)


def write_capture(folder: Path, names: Sequence[str] = NAMES, **lists: Sequence[str]) -> Path:
    """Writes a capture of nerfstudio's kind. Each image has a colour of its own."""
    for index, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 4), (index, 0, 0)).save(folder / name)
    frames = [{"file_path": name, "transform_matrix": POSE.tolist()} for name in names]
    (folder / "transforms.json").write_text(json.dumps({"fl_x": 5.0, "frames": frames, **lists}))
    return folder


def stems(folder: Path, **options: Any) -> dict[str, list[str]]:
    scene = load_scene(folder, **options)
    return {name: [path.stem for path in split.paths or ()] for name, split in scene.splits.items()}


@pytest.mark.parametrize(
    ("lists", "train", "test"),
    [
        ({"train_filenames": NAMES[:14], "val_filenames": NAMES[14:]}, range(14), [14, 15]),
        ({"train_filenames": NAMES}, [*range(1, 8), *range(9, 16)], [0, 8]),
        ({"train_filenames": NAMES[:14], "val_filenames": NAMES[14:], "test_filenames": []}, range(14), [14, 15]),
        ({"test_filenames": NAMES[:2]}, range(2, 16), [0, 1]),
        ({"val_filenames": NAMES[:2], "test_filenames": NAMES[2:3]}, range(3, 16), [2]),
        ({"train_filenames": NAMES[:4], "test_filenames": NAMES[4:5]}, range(4), [4]),
        ({"train_filenames": [], "test_filenames": []}, [*range(1, 8), *range(9, 16)], [0, 8]),
    ],
)
def test_a_capture_that_lists_some_splits_is_divided(tmp_path, lists, train, test):
    folder = write_capture(tmp_path, **lists)
    expected = {name: [f"{index:02d}" for index in some] for name, some in (("train", train), ("test", test))}
    assert stems(folder) == expected
    settings = preset("scene=folder", f"scene.name={tmp_path.name}", f"data.root={tmp_path.parent}", "data.holdout=0")
    assert load_configured_scene(settings, tmp_path).train is not None


def test_photographs_in_no_split_are_named(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        load_scene(write_capture(tmp_path, train_filenames=NAMES[:4], test_filenames=NAMES[4:5]))
    assert "transforms.json: 11 photographs are in no split and are not used" in caplog.text


def test_splits_do_not_depend_on_the_order_of_a_file(tmp_path):
    names = [f"images/{side}/{index:03d}.png" for side in ("left", "right") for index in range(16)]
    write_capture(tmp_path / "a", names)
    write_capture(tmp_path / "b", names[::-1])
    for options in ({}, {"holdout": 0}):
        found = [load_scene(tmp_path / name, **options) for name in "ab"]
        for name in found[0].splits:
            one, other = (
                [path.relative_to(tmp_path / part) for path in scene.split(name).paths]
                for part, scene in zip("ab", found, strict=True)
            )
            assert one == other
    assert [path.parent.name for path in found[0].train.paths] == 16 * ["left"] + 16 * ["right"]
    test = load_scene(tmp_path / "a").test.paths
    assert [path.relative_to(tmp_path / "a").as_posix() for path in test] == sorted(names)[::8]


def write_blender(folder: Path, **counts: int) -> Path:
    """Writes a scene in Blender's layout with a number of views in each of its splits."""
    for split, count in counts.items():
        (folder / split).mkdir(parents=True)
        frames = []
        for index in range(count):
            Image.new("RGBA", (6, 4)).save(folder / split / f"{split}_{index}.png")
            frames.append({"file_path": f"./{split}/{split}_{index}", "transform_matrix": POSE.tolist()})
        meta = {"camera_angle_x": 0.8, "frames": frames}
        (folder / f"transforms_{split}.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize("counts", [{"train": 3, "val": 2}, {"train": 3, "val": 2, "test": 0}])
def test_views_for_validation_stand_in_in_blenders_layout(tmp_path, counts):
    assert stems(write_blender(tmp_path, **counts))["test"] == ["val_0", "val_1"]
    assert list(stems(tmp_path, splits=None)) == ["train", "val"]


@pytest.mark.parametrize("counts", [{"train": 3}, {"train": 3, "test": 0}, {"train": 3, "val": 0, "test": 0}])
def test_views_are_held_out_in_blenders_layout(tmp_path, counts):
    expected = {"train": ["train_1", "train_2"], "test": ["train_0"]}
    assert stems(write_blender(tmp_path, **counts)) == expected
    assert stems(tmp_path, splits=None) == expected
    assert stems(tmp_path, holdout=0) == {"train": ["train_0", "train_1", "train_2"]}


def test_a_split_of_missing_images_may_be_left_out_in_blenders_layout(tmp_path, caplog):
    folder = write_blender(tmp_path, train=3, val=1, test=2)
    for path in (folder / "test").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="2 of 2 images are missing"):
        load_scene(folder)
    assert stems(folder, missing_images="skip")["test"] == ["val_0"]
    assert "transforms_test.json: all 2 images are missing; the split is left out" in caplog.text


def test_splits_of_nsvf_are_those_of_images_that_are_there(tmp_path):
    (tmp_path / "rgb").mkdir()
    (tmp_path / "pose").mkdir()
    (tmp_path / "intrinsics.txt").write_text("5 0 3 0\n0 5 2 0\n0 0 1 0\n0 0 0 1\n")
    (tmp_path / "bbox.txt").write_text("-1 -1 -1 1 1 1")
    for name in ("0_a", "0_b", "1_c", "2_d"):
        (tmp_path / "pose" / f"{name}.txt").write_text("1 0 0 0\n0 1 0 0\n0 0 1 0\n0 0 0 1\n")
        if name != "2_d":
            Image.new("RGB", (6, 4)).save(tmp_path / "rgb" / f"{name}.png")
    assert stems(tmp_path) == {"train": ["0_a", "0_b"], "test": ["1_c"]}
    (tmp_path / "rgb" / "1_c.png").unlink()
    assert stems(tmp_path) == {"train": ["0_b"], "test": ["0_a"]}
