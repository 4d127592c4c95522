"""Packages that only meshes need, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from voxelfield.installed import MissingPackageError

_DISTRIBUTIONS = {
    "skimage": "scikit-image",
    "trimesh": "trimesh",
    "fast_simplification": "fast-simplification",
    "xatlas": "xatlas",
    "scipy": "scipy",
}


def mesh_package(name: str) -> Any:
    """Imports a module of the extra ``mesh``.

    Args:
        name: Name of the module, such as ``skimage.measure``.

    Raises:
        MissingPackageError: Its package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = _DISTRIBUTIONS.get((error.name or "").partition(".")[0])
        if missing is None:
            raise
        raise MissingPackageError(
            f'{missing} must be installed to extract surfaces: pip install "voxelfield[mesh]"'
        ) from error
