"""OpenVDB files of a density and its colours."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from voxelfield.grids.boxes import Box
from voxelfield.installed import MissingPackageError


def import_xuvdb() -> Any:
    """Imports xuvdb, which writes the files.

    Raises:
        MissingPackageError: It is not installed.
    """
    # What it is built on greets on the standard output, which belongs to whoever called.
    os.environ.setdefault("ENABLE_QUADRANTS_HEADER_PRINT", "false")
    try:
        return importlib.import_module("xuvdb")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("xuvdb", "quadrants"):
            raise
        raise MissingPackageError('xuvdb must be installed to write a vdb: pip install "voxelfield[vdb]"') from error


def write_openvdb(path: Path, density: np.ndarray, color: np.ndarray, box: Box) -> None:
    """Writes a density and its colours as the grids ``density``, a fog volume, and ``color``.

    Both are sparse: active are the voxels in which the density is not 0. Their transform places the centre of voxel
    (0, 0, 0) at the lower corner of the box and that of the last one at the upper corner.

    Args:
        path: Of the file.
        density: (X, Y, Z) float32, at least two points along each axis.
        color: (X, Y, Z, 3) float32.
        box: Places of the first and of the last point, world units.

    Raises:
        MissingPackageError: xuvdb is not installed.
        OSError: The file cannot be written.
    """
    xuvdb = import_xuvdb()
    low, high = np.asarray(box, dtype=np.float64)
    place = {"voxel_size": (high - low) / (np.array(density.shape) - 1), "origin_world": low, "active": density != 0}
    grids = [
        xuvdb.VdbGrid.from_dense(density, name="density", grid_class="fog volume", **place),
        xuvdb.VdbGrid.from_dense(color, name="color", background=(0.0, 0.0, 0.0), **place),
    ]
    xuvdb.write_vdb(path, grids)
