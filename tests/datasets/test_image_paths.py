"""Names of images in the files of scenes that other machines and programs have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from voxelfield.datasets.image_paths import find_images, why_missing


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder / "transforms.json"


def find(file: Path, *names: str) -> list[str]:
    found = find_images(file, names, "file_path")
    return [found[name].relative_to(file.parent).as_posix() for name in names]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("images/a.png", "images/a.png"),
        ("./images/../images/a.png", "images/a.png"),
        ("{folder}/images/a.png", "images/a.png"),
        ("images\\a.png", "images/a.png"),
        (".\\images\\a.png", "images/a.png"),
        ("C:\\Users\\me\\scene\\images\\a.png", "images/a.png"),
        ("D:/captures/images/a.png", "images/a.png"),
        ("\\\\server\\share\\images\\a.png", "images/a.png"),
        ("/home/me/scene/images/a.png", "images/a.png"),
        ("scene/images/a.png", "images/a.png"),
        ("../scene/images/a.png", "images/a.png"),
        ("Images/A.PNG", "images/a.png"),
        ("images/a.jpg", "images/a.png"),
        ("images/a", "images/a.png"),
        ("images/b", "images/b.JPG"),
        ("images/c_0.5", "images/c_0.5.jpeg"),
        ("/home/me/images/left\\deep/a", "images/left/deep/a.png"),
        ("/elsewhere/top.png", "top.png"),
    ],
)
def test_a_name_is_found_within_the_folder(tmp_path, name, expected):
    images = ("images/a.png", "images/b.JPG", "images/c_0.5.jpeg", "images/left/deep/a.png", "top.png")
    file = touch(tmp_path / "scene", *images)
    assert find(file, name.format(folder=tmp_path / "scene")) == [expected]


def test_a_backslash_may_be_part_of_a_name(tmp_path):
    assert find(touch(tmp_path, "images/a.png", "images\\a.png"), "images\\a.png") == ["images\\a.png"]


def test_two_names_never_become_one_image(tmp_path):
    file = touch(tmp_path, "images/a.png")
    assert find(file, "images/a.png", "images/a.jpg") == ["images/a.png", "images/a.jpg"]
    assert find(file, "images/A.jpg", "images/a.bmp") == ["images/A.jpg", "images/a.bmp"]
    touch(tmp_path, "images/A.png")
    assert find(file, "images/a.jpg") == ["images/a.jpg"], "two files are like the name"


def test_missing_images_of_another_machine_are_not_refused_beside_others_that_are_found(tmp_path):
    file = touch(tmp_path, "images/a.png")
    assert find(file, "/home/me/images/b.png", "/home/me/images/a.png") == ["home/me/images/b.png", "images/a.png"]
    assert find(file, "images/c", "images\\d.tga") == ["images/c.png", "images/d.tga"]


@pytest.mark.parametrize(
    "name",
    [
        *("/home/me/images/b.png", "C:\\x\\b.png", "\\..\\..\\b.png"),
        *("../other/secret.png", "images/../../other/secret.png", "{outside}"),
    ],
)
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, name):
    file = touch(tmp_path / "scene", "images/a.png")
    touch(tmp_path, "other/secret.png")
    with pytest.raises(ValueError, match="'file_path' must be inside the scene's folder, got "):
        find(file, name.format(outside=tmp_path / "other" / "secret.png"))


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ("input/A.jpg", "; there is {folder}/input/A.jpg: were the images moved or renamed?"),
        ("images/a.avif", "; there is {folder}/images/a.avif: convert such files to one of .png, .jpg"),
        ("notes.txt", "; {folder} contains no images at all: were they copied along?"),
        ("images/x.png", "; {folder} contains 1 images of other names, such as images/x.png"),
    ],
)
def test_the_likely_cause_is_named_if_all_images_are_missing(tmp_path, there, message):
    touch(tmp_path, there)
    assert why_missing(tmp_path, tmp_path / "images" / "a.png").startswith(message.format(folder=tmp_path))
