"""Installed parts: optional packages, the configurations and the bundled scene, in a clone or an installed copy."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = "0.1.0"
"""Version of the package, which the checkpoints of a run name."""

BUNDLED_SCENE = "bricks"
"""Name of the scene that is included in voxelfield."""

_PACKAGE = Path(__file__).resolve().parent


class MissingPackageError(ImportError):
    """A package that is only required for some tasks is not installed; the message says how to install it."""


def import_optional(module: str, task: str, extra: str = "train") -> Any:
    """Returns a module of a package that is only required for some tasks.

    Raises MissingPackageError, which names the task and the extra of voxelfield that installs the package.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise MissingPackageError(
            f'{package} must be installed to {task}: pip install "voxelfield[{extra}]"'
        ) from error


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keeps Python from collecting garbage, in any thread.

    During the capture of a CUDA graph, memory that GPUs share must not be freed. And importing torch creates about a
    million objects that are never freed; scanning them would take a tenth of the import time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def config_folder() -> Path:
    """Returns the folder of the configuration files, or raises FileNotFoundError."""
    folders = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
    for folder in folders:
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"configurations are neither in {folders[0]} nor in {folders[1]}; reinstall voxelfield")


def bundled_scene() -> Path:
    """Returns the folder of the bundled scene, which may be missing in a partial copy."""
    packaged = _PACKAGE / "scenes" / BUNDLED_SCENE
    return packaged if packaged.is_dir() else _PACKAGE.parent / "data" / BUNDLED_SCENE
