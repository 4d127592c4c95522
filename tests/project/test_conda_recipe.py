"""The conda recipe names the version and the dependencies of the project, under the names that conda-forge has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "packaging" / "conda" / "recipe.yaml"
# Names of PyPI to those of conda-forge; what an extra of a package brings is a package there.
RENAMED = {"torch": ["pytorch"], "matplotlib": ["matplotlib-base"], "pooch[progress]": ["pooch"]}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def required_by(project: dict[str, Any]) -> dict[str, str]:
    """Returns the packages that voxelfield[train] needs, with their versions."""
    required = {}
    for line in [*project["dependencies"], *project["optional-dependencies"]["train"]]:
        name, version = re.fullmatch(r"([\w-]+(?:\[\w+\])?)(.*)", line).groups()
        first, *others = RENAMED.get(name, [name])
        required |= {first: version} | dict.fromkeys(others, "")
    return required


def test_the_recipe_is_that_of_this_version(project):
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == project["version"]
    requirements = [line.split(" ") for line in recipe["requirements"]["run"]]
    run = {name: "".join(version) for name, *version in requirements}
    assert run.pop("python") == project["requires-python"]
    run.pop("python-abi3")  # conda's own, for modules that serve several Pythons
    assert run == required_by(project)
