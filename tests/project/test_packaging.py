"""Wheels and source archives: what they hold, and that what they hold works."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools
from build_testing import (
    NO_COMPILER,
    USE,
    assert_nothing_was_built,
    digest_of,
    environment,
    loaded_from,
    needs_posix,
    run_python,
    succeeded,
)

from voxelfield import _build

pytest_plugins = ["build_fixtures"]
pytestmark = needs_posix


def packed_sources(project: Path) -> set[str]:
    """Every file of the package as an install must hold it, binaries aside."""

    def files(folder: str, pattern: str = "*") -> set[str]:
        found = (project / folder).rglob(pattern)
        return {path.relative_to(project).as_posix() for path in found if path.is_file()}

    endings = (".py", ".json", ".typed", ".html", ".css", ".js", ".glsl", ".md")
    package = {name for name in files("voxelfield") if name.endswith(endings)}
    sources = {f"voxelfield/{name}" for name in files("extension")}
    configs = {f"voxelfield/{name}" for name in files("configs", "*.yaml")}
    scenes = {f"voxelfield/scenes/{name.removeprefix('data/')}" for name in files("data/bricks")}
    assert {"voxelfield/py.typed", "voxelfield/datasets/manifests/lego.json"} <= package
    assert "voxelfield/configs/trainer/default.yaml" in configs
    assert "voxelfield/scenes/bricks/train/r_0.png" in scenes
    return package | sources | configs | scenes


def content_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}


@pytest.fixture
def isolated(tmp_path):
    """An environment in which setuptools can be imported and torch cannot, as under build isolation."""
    library = tmp_path / "isolated"
    library.mkdir()
    packages = Path(setuptools.__file__).parents[1]
    metadata = packages / f"setuptools-{importlib.metadata.version('setuptools')}.dist-info"
    for entry in (packages / "setuptools", packages / "_distutils_hack", metadata):
        (library / entry.name).symlink_to(entry)
    return {**environment(library, tmp_path / "cache"), "PYTHONNOUSERSITE": "1"}


def test_a_wheel_built_in_isolation_holds_the_sources_and_no_binary(project, isolated, tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    done = succeeded(run_python("-S", "-c", code, cwd=project, env=isolated))
    assert "torch is not importable in this build" in done.stderr
    assert "on first use" in done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert content_of(wheel) == packed_sources(project)


def test_a_source_archive_holds_all_that_a_build_needs(project, isolated, tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    succeeded(run_python("-S", "-c", code, cwd=project, env=isolated))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    origins = {"extension/": "extension/", "configs/": "configs/", "scenes/": "data/"}
    packed = packed_sources(project)
    for inside, origin in origins.items():
        packed = {name.replace(f"voxelfield/{inside}", origin) for name in packed}
    assert packed | {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= names


def test_a_wheel_of_compiled_kernels_is_not_built_without_torch(project, isolated, tmp_path):
    isolated["VOXELFIELD_WHEEL"] = "1"
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    done = run_python("-S", "-c", code, cwd=project, env=isolated)
    assert done.returncode == 1
    assert "VOXELFIELD_WHEEL=1 needs torch, which build isolation hides" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_an_old_setuptools_is_named_before_it_stops_at_the_license(project, isolated):
    code = "import runpy, setuptools; setuptools.__version__ = '65.5.0'; runpy.run_path('setup.py')"
    done = run_python("-S", "-c", code, cwd=project, env=isolated)
    assert done.stderr == (
        "voxelfield: building needs setuptools 77 or later, got 65.5.0: pip install 'setuptools>=77'\n"
    )


@pytest.mark.sweep
def test_a_wheel_of_compiled_kernels_carries_both_halves_and_no_sources(project, tmp_path):
    names = ["_C", "_C_cuda"] if _build.architectures.find_cuda_home() else ["_C"]
    # One CUDA source shows whether that half is packed; all of them take minutes.
    for source in (project / "extension").rglob("*.cu"):
        if source.name != "rays.cu":
            source.unlink()
    requested = {"VOXELFIELD_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"} if "_C_cuda" in names else {}
    env = environment(tmp_path, tmp_path / "cache", VOXELFIELD_WHEEL="1", **requested)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    succeeded(run_python("-m", "pip", "wheel", *options, str(project), cwd=tmp_path, env=env))
    (wheel,) = tmp_path.glob("*.whl")
    assert re.search(r"-cp310-abi3-\w+\.whl$", wheel.name)
    halves = {f"voxelfield/{name}.abi3.so{end}" for name in names for end in ("", ".digest")}
    packed = {name for name in packed_sources(project) if not name.startswith("voxelfield/extension/")}
    assert content_of(wheel) == packed | halves

    site = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = run_python("-c", USE, cwd=tmp_path, env=environment(site, tmp_path / "cache", CXX=NO_COMPILER))
    assert loaded_from(done) == site / "voxelfield" / "_C.abi3.so"
    assert_nothing_was_built(done)

    cuda = site / "voxelfield" / "_C_cuda.abi3.so"
    if cuda.is_file():
        stamp = _build.sources.read_stamp(cuda)
        assert stamp.digest == digest_of(project / "extension")
        assert stamp.architectures == _build.architectures.Architectures(("90",), ())
        assert stamp.cuda >= 12
        needed = subprocess.run(["readelf", "-d", str(cuda)], capture_output=True, text=True, check=True)
        # libtorch brings libtorch_cuda along, which holds the stream symbol; the linker must not drop it.
        assert "Shared library: [libtorch.so]" in needed.stdout
        assert "libtorch_python" not in needed.stdout
        assert "libcudart" not in needed.stdout, "the CUDA runtime must be linked statically"
