"""Files with names of images: whatever they hold, only pictures of the listed formats are decoded."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
from fuzz_damage import damaged_bytes
from fuzz_pictures import READ, only_listed_formats, read_or_refuse, sound_pictures, with_right_crcs
from fuzz_property import tally
from hypothesis import given
from hypothesis import strategies as st

from voxelfield.files import IMAGE_SUFFIXES


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pictures")


def is_read(name: str) -> bool:
    return name.split()[0] in READ


def try_picture(folder: Path, name: str, suffix: str, content: bytes) -> bool:
    copies, path = folder / "copies", folder / f"r_0{suffix}"
    path.write_bytes(content)
    shutil.rmtree(copies, ignore_errors=True)
    with only_listed_formats(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of damaged metadata
        read = read_or_refuse(path, copies)
    tally[f"picture {name.split()[0]}"]["read" if read else "refused"] += 1
    return read


@given(data=st.data())
def test_sound_pictures_are_read_by_their_content(folder, data):
    is_listed = data.draw(st.booleans())
    name = data.draw(st.sampled_from([name for name in sorted(sound_pictures()) if is_read(name) == is_listed]))
    read = try_picture(folder, name, data.draw(st.sampled_from(IMAGE_SUFFIXES)), sound_pictures()[name])
    assert is_listed or not read


@given(data=st.data())
def test_damaged_pictures(folder, data):
    name = data.draw(st.sampled_from([name for name in sorted(sound_pictures()) if is_read(name)]))
    content = data.draw(damaged_bytes(sound_pictures()[name]))
    if data.draw(st.booleans()):
        content = with_right_crcs(content)
    try_picture(folder, name, ".png", content)


@given(data=st.data())
def test_any_bytes(folder, data):
    """Behind the beginning of a picture of any format, or of none."""
    name = data.draw(st.sampled_from(sorted(sound_pictures())))
    start = sound_pictures()[name][: data.draw(st.integers(0, 40))]
    try_picture(folder, name, ".jpg", start + data.draw(st.binary(max_size=200)))
