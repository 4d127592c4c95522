"""Compiles the extension where torch can be imported (``--no-build-isolation``); otherwise packs its sources only.

Under build isolation torch is absent on purpose (see pyproject.toml): the extension is then compiled on first use.
``VOXELFIELD_WHEEL=1`` leaves the sources out, so that what is installed never compiles (packaging/build_wheel.sh).
``VOXELFIELD_WERROR=1`` makes the compilers' warnings errors (.ci/run).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import setuptools
from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
COMPILED_ONLY = os.environ.get("VOXELFIELD_WHEEL") == "1"

# An older one stops at the license in pyproject.toml, with a message that does not name the remedy.
if int(setuptools.__version__.partition(".")[0]) < 77:
    sys.exit(
        f"voxelfield: building needs setuptools 77 or later, got {setuptools.__version__}: pip install 'setuptools>=77'"
    )


def load_builder() -> ModuleType:
    """Imports voxelfield/_build by path: importing voxelfield would need the dependencies of its ops too."""
    folder = HERE / "voxelfield" / "_build"
    spec = importlib.util.spec_from_file_location(
        "voxelfield_build", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compiled_parts() -> dict[str, Any]:
    """Returns setup()'s arguments for the compiled modules; none where torch is not importable."""
    if importlib.util.find_spec("torch") is None:
        if COMPILED_ONLY:
            sys.exit("voxelfield: VOXELFIELD_WHEEL=1 needs torch, which build isolation hides: use --no-isolation")
        sys.stderr.write(
            "voxelfield: torch is not importable in this build (build isolation), so the extension is not compiled "
            "now; it will be on first use, or by `python -m voxelfield build`. To compile at install: "
            "pip install --no-build-isolation .\n"
        )
        return {}
    builder = load_builder()
    names, note = builder.compiling.choose_modules()
    if note:
        sys.stderr.write(f"voxelfield: {note}\n")
    return {
        "ext_modules": builder.compiling.extensions(
            names, sources_relative_to=HERE, strict=os.environ.get("VOXELFIELD_WERROR") == "1"
        ),
        "cmdclass": {"build_ext": builder.compiling.build_command()},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


def packages_below(folder: str, name: str) -> dict[str, str]:
    """Returns the packages as which a folder outside of voxelfield/ is installed within it, and where they lie."""
    root = HERE / folder
    found = (root, *(below for below in sorted(root.rglob("*")) if below.is_dir() and below.name != "__pycache__"))
    return {".".join((name, *below.relative_to(root).parts)): below.relative_to(HERE).as_posix() for below in found}


# An installed copy includes the sources to compile itself, the configurations, and a scene to train on.
SOURCES = {} if COMPILED_ONLY else packages_below("extension", "voxelfield.extension")
CONFIGS = packages_below("configs", "voxelfield.configs")
SCENES = packages_below("data/bricks", "voxelfield.scenes.bricks")

setup(
    packages=[*find_packages(include=["voxelfield", "voxelfield.*"]), *SOURCES, *CONFIGS, *SCENES],
    package_dir=SOURCES | CONFIGS | SCENES,
    include_package_data=False,  # package_data below says all; MANIFEST.in is for source archives
    package_data={name: ["*.h", "*.cpp", "*.cu", "*.cuh"] for name in SOURCES}
    | {name: ["*.yaml"] for name in CONFIGS}
    | {name: ["*.json", "*.png"] for name in SCENES}
    | {
        "voxelfield": ["py.typed", "templates/*"],
        "voxelfield.captures": ["templates/*"],
        "voxelfield.datasets": ["manifests/*.json"],
        "voxelfield.export": ["templates/*"],
        "voxelfield.report": ["templates/*"],
    },
    **compiled_parts(),
)
