"""The conda recipe names the version and the dependencies of the project, under the names that conda-forge has."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

RECIPE = Path(__file__).parents[2] / "packaging" / "conda" / "recipe.yaml"
# Names of PyPI to those of conda-forge; what an extra of a package brings is a package there.
RENAMED = {"torch": ["pytorch"], "matplotlib": ["matplotlib-base"], "pooch[progress]": ["pooch"]}


def required_by_project() -> dict[str, str]:
    """Returns the packages that voxelfield[train] needs, with their versions."""
    required = {}
    for line in importlib.metadata.requires("voxelfield"):
        name, version = re.match(r"([\w-]+(?:\[\w+\])?)([^;\[]*)", line).groups()
        extra = re.search(r"extra == .(\w+)", line)
        if extra is None or extra[1] == "train":
            first, *others = RENAMED.get(name, [name])
            required |= {first: version.strip()} | dict.fromkeys(others, "")
    return required


def test_the_recipe_is_that_of_this_version():
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == importlib.metadata.version("voxelfield")
    requirements = [line.split(" ") for line in recipe["requirements"]["run"]]
    run = {name: "".join(version) for name, *version in requirements}
    assert run.pop("python") == importlib.metadata.metadata("voxelfield")["Requires-Python"]
    run.pop("python-abi3")  # conda's own, for modules that serve several Pythons
    assert run == required_by_project()
