"""Volumes as arrays, the formats of their files, and grids that begin as such a file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from voxelfield.files import check_suffix, open_regular
from voxelfield.foundation.extensions import own_objects
from voxelfield.grids.voxel_grid import VoxelGrid


@dataclass(frozen=True, eq=False)
class Volume:
    """Values at the points of a lattice along the axes of the world.

    Attributes:
        channels: By name, arrays (X, Y, Z) or (X, Y, Z, C): ``density`` float32, per world unit, and ``rgb`` uint8,
            sRGB; a file of another program may contain others.
        low: Position (3,) of the first point, world units.
        spacing: Distances (3,) between neighbouring points along x, y and z, world units.
    """

    channels: dict[str, np.ndarray]
    low: Sequence[float]
    spacing: Sequence[float]

    def features(self) -> np.ndarray:
        """Returns all channels, one after another, as (X, Y, Z, C) float32; bytes become numbers in [0, 1]."""
        arrays = [each / np.float32(255) if each.dtype == np.uint8 else each for each in self.channels.values()]
        return np.concatenate([each.reshape(*each.shape[:3], -1).astype(np.float32) for each in arrays], axis=-1)


@dataclass(frozen=True)
class VolumeFormat:
    """A format of the files of volumes.

    Attributes:
        suffixes: Endings of its names.
        opens: What opens its files, for the log.
        write: Writes a volume with ``density`` and ``rgb`` to a new file; None for archives, which
            :func:`voxelfield.export.volume.save_volume` writes layer by layer.
        read: Reads a file of this or another program; raises ValueError if it is not a volume.
    """

    suffixes: Sequence[str]
    opens: str
    write: Callable[[Path, Volume], None] | None
    read: Callable[[Path], Volume]


@functools.cache
def volume_formats() -> dict[str, VolumeFormat]:
    """Returns the formats by suffix, which are declared in modules of this package."""
    return {suffix: each for each in own_objects(__package__, VolumeFormat) for suffix in each.suffixes}


def volume_format(path: Path | str, name: str = "path") -> VolumeFormat:
    """Returns the format of a file, called ``name`` in the message of ValueError if it has another suffix."""
    check_suffix(name, path, list(volume_formats()))
    return next(each for suffix, each in volume_formats().items() if Path(path).name.lower().endswith(suffix))


def load_volume(path: Path | str, *, device: torch.device | str | None = None) -> VoxelGrid:
    """Reads a volume, of ``voxelfield export --volume`` or of another program, as a grid that can be trained.

    Args:
        path: ``*.npz``, ``*.nvdb``, ``*.vti``, ``*.nii`` or ``*.nii.gz``. Its axes must be those of the world.
        device: Where the grid lives.

    Returns:
        A grid whose vertices are the points of the volume and whose features are all of its values, in the order of the
        file: density, per world unit, red, green and blue, in [0, 1], in the files of this package.

    Raises:
        MissingPackageError: The library of the format is not installed.
        ValueError: The file has another suffix, is not a volume, has other axes, or a single point along an axis.
        OSError: The file cannot be read.
    """
    path = Path(path)
    chosen = volume_format(path)
    open_regular(path).close()  # some libraries only print that they cannot open a file
    volume = chosen.read(path)
    features = volume.features()
    *shape, channels = features.shape
    if min(shape) < 2:
        raise ValueError(f"{path} must have at least 2 points along each axis, got {' x '.join(map(str, shape))}")
    low, last = np.array(volume.low, np.float64), np.array(shape) - 1
    grid = VoxelGrid(shape, channels, (low.tolist(), (low + last * volume.spacing).tolist()), device=device)
    with torch.no_grad():
        grid.features.copy_(torch.from_numpy(features))
    return grid
