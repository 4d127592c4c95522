"""The CMake build, as a C++ user takes it: build, install, find_package, link, run; and Python without the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_testing import REPO, needs_posix, succeeded

from voxelfield import _build

pytestmark = [
    pytest.mark.sweep,
    needs_posix,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake"),
    pytest.mark.skipif(
        torch.version.cuda is not None and _build.architectures.find_cuda_home() is None,
        reason="find_package(Torch) needs the CUDA toolkit beside a torch with CUDA",
    ),
]

LOAD = """
import sys, torch
torch.ops.load_library(sys.argv[1])
grid = torch.arange(8.0).reshape(1, 2, 2, 2, 1)
options = (0, True, False, False, False)
print("centre", torch.ops.voxelfield.sample_trilinear([grid], torch.full((1, 1, 3), 0.5), *options).item())
assert "voxelfield" not in sys.modules
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if shutil.which("ccache"):
        environment["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=1800
    )
    return succeeded(done)


def configure_and_build(source: Path, build: Path, prefixes: str, *options: str) -> None:
    # Nothing here is about speed.
    quick = ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0"]
    run("cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={prefixes}", *quick, *options, cwd=build.parent)
    run("cmake", "--build", build, "--parallel", "2", cwd=build.parent)


@pytest.fixture(scope="module")
def installed_library(tmp_path_factory):
    """A prefix into which CMake has installed the library, with CUDA where there is a GPU to try it."""
    root = tmp_path_factory.mktemp("cmake")
    cuda = "ON" if torch.cuda.is_available() else "OFF"
    configure_and_build(REPO, root / "build", torch.utils.cmake_prefix_path, f"-DVOXELFIELD_CUDA={cuda}")
    run("cmake", "--install", root / "build", "--prefix", root / "prefix", cwd=root)
    return root / "prefix"


def test_the_example_finds_the_installed_package_links_and_agrees_with_the_formula(installed_library, tmp_path):
    prefixes = f"{installed_library};{torch.utils.cmake_prefix_path}"
    configure_and_build(REPO / "examples" / "cpp", tmp_path / "build", prefixes)
    done = run(tmp_path / "build" / "sample_grid", cwd=tmp_path)
    assert done.stdout.splitlines()[0] == "cpu"
    assert done.stdout.count(" agrees ") == 3 * (1 + torch.cuda.is_available())


def test_python_loads_the_library_without_the_package(installed_library, tmp_path):
    (library,) = installed_library.glob("lib*/libvoxelfield.so")
    assert "centre 3.5" in run(sys.executable, "-c", LOAD, library, cwd=tmp_path).stdout
