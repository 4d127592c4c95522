"""Every format of data sets: a damaged folder is a sound scene, or refused in one line that names file or option."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fuzz_damage import damaged_file
from fuzz_property import tally
from fuzz_scenes import OPTIONS, SCENES, assert_sound, write_files
from hypothesis import given
from hypothesis import strategies as st

from voxelfield.datasets.loading import load_scene
from voxelfield.datasets.registry import formats
from voxelfield.warps.choice import WarpConfig, choose_warp
from voxelfield.warps.ndc_box import NdcBox


def test_every_format_is_fuzzed():
    assert {known.name for known in formats()} == {name for name, _ in SCENES.values()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    logger = logging.getLogger("voxelfield")
    level = logger.level
    logger.setLevel(logging.ERROR)  # every scene warns about missing parts
    yield tmp_path_factory.mktemp("scenes")
    logger.setLevel(level)


def load_or_refuse(name: str, folder: Path, **options: object) -> None:
    """Fails unless a folder is loaded as a sound scene or refused in one line."""
    try:
        scene = load_scene(folder, **options)
    except (ValueError, OSError) as error:
        text = str(error)
        named = str(folder) in text or any(option in text for option in OPTIONS)
        assert "\n" not in text, f"more than one line: {text}"
        assert len(text) < 2000, f"a refusal of {len(text)} characters: {text[:200]}"
        assert named, f"names neither a file nor an option: {text}"
        tally[name]["refused"] += 1
    else:
        assert_sound(scene)
        tally[name]["loaded"] += 1


@pytest.mark.parametrize("name", SCENES)
@given(data=st.data())
def test_damaged_files(name, folder, data):
    files = dict(SCENES[name][1]())
    # Mostly what lists the images: of the images themselves there are more.
    listing = [path for path in files if not path.endswith(".png")]
    chosen = data.draw(st.sampled_from([*listing, *listing, data.draw(st.sampled_from(sorted(files)))]))
    if data.draw(st.integers(0, 15)) == 0:
        del files[chosen]
    else:
        files[chosen] = data.draw(damaged_file(chosen, files[chosen]))
    place = folder / name / chosen.replace("/", "_")
    for path in (place / other for other in SCENES[name][1]()):
        path.unlink(missing_ok=True)
    write_files(place, files)
    splits = data.draw(st.sampled_from([None, ("train",), ("train", "test")]))
    load_or_refuse(name, place, splits=splits, downscale=data.draw(st.sampled_from([1, 1, 2])))


def test_a_scene_that_faces_one_way_is_among_them(folder):
    write_files(folder / "forward", SCENES["llff_forward"][1]())
    assert isinstance(choose_warp(load_scene(folder / "forward"), WarpConfig(ndc=True)), NdcBox)


@pytest.mark.parametrize("name", ["blender", "nerfstudio"])
@given(data=st.data())
def test_poses_that_are_accepted_are_those_of_the_file(name, folder, data):
    files = dict(SCENES[name][1]())
    (listing,) = (path for path in files if path.endswith(".json"))
    files[listing] = data.draw(damaged_file(listing, files[listing]))
    write_files(folder / "poses" / name, files)
    try:
        scene = load_scene(folder / "poses" / name, splits=None)
    except (ValueError, OSError):
        return
    frames = json.loads(files[listing])["frames"]
    known = torch.tensor([frame["transform_matrix"] for frame in frames], dtype=torch.float64).float()
    for split in scene.splits.values():
        for pose in split.cameras.c2w:
            assert bool((known == pose).flatten(1).all(dim=1).any()), "a pose that the file does not have"
