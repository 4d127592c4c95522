"""Copies of the project, as fixtures: a test module takes them with ``pytest_plugins = ["build_fixtures"]``.

Their sources carry a mark, so that no binary of the tree under test, and no installed voxelfield, can stand in for
what a test asks to be built.
"""

from __future__ import annotations

import shutil

import pytest
from build_testing import REPO, environment, run_python, succeeded, without_binaries

from voxelfield import _library
from voxelfield._build import sources


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A marked clone of the project without binaries. Nothing may be written to it."""
    root = tmp_path_factory.mktemp("clone")
    for folder in ("voxelfield", "extension"):
        shutil.copytree(REPO / folder, root / folder, ignore=without_binaries)
    with (root / "extension" / "module" / "library.cpp").open("a") as source:
        source.write(f"// A copy for tests: {root}\n")
    return root


@pytest.fixture
def installed(clone, tmp_path):
    """The folder that a sources-only install leaves on the path: the extension's sources lie within the package."""
    site = tmp_path / "site"
    shutil.copytree(clone / "voxelfield", site / "voxelfield")
    shutil.copytree(clone / "extension", site / "voxelfield" / "extension")
    return site


@pytest.fixture
def project(clone, tmp_path):
    """The marked clone with all that packaging needs, to be written to."""
    root = tmp_path / "project"
    shutil.copytree(clone, root)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, root)
    for name in ("configs", "data/bricks"):
        shutil.copytree(REPO / name, root / name)
    return root


@pytest.fixture
def packaged(clone, monkeypatch):
    """Points this process's builder and loader at the clone, with nothing loaded and no other copy installed."""
    monkeypatch.setattr(_library.importlib.metadata, "distributions", lambda **_: [])
    monkeypatch.setattr(sources, "_PACKAGE", clone / "voxelfield")
    monkeypatch.setattr(_library, "_loaded", {})
    monkeypatch.setattr(_library, "_failed", {})


@pytest.fixture(scope="module")
def cpu_half(clone, tmp_path_factory):
    """The CPU half of the marked clone, by the command line. Its objects stay beside it, in ``objects``."""
    out = tmp_path_factory.mktemp("built") / "modules"
    env = environment(clone, out.parent / "cache")
    command = ["-m", "voxelfield", "build", "--only", "cpu", "--out", str(out), "--objects", "objects"]
    done = run_python(*command, cwd=out.parent, env=env)
    module = out / "_C.abi3.so"
    assert f"built {module}" in succeeded(done).stderr
    assert sorted(out.iterdir()) == [module, sources.digest_path(module)], "something else was left in the folder"
    assert not (out.parent / "cache").exists()
    return module


@pytest.fixture
def kept_objects(cpu_half):
    """Folder of the objects from which ``cpu_half`` was linked: see ``build_testing.reuse``."""
    return cpu_half.parents[1] / "objects"
