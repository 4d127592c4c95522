"""A field's density and colour on a dense lattice."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxelfield.export.geometry.extraction import CHUNK
from voxelfield.export.geometry.lattice import Lattice
from voxelfield.export.geometry.occupied import OccupiedVertices, unravelled
from voxelfield.export.openvdb import import_xuvdb, write_openvdb
from voxelfield.export.region import Region
from voxelfield.fields.field import RadianceField
from voxelfield.files import atomic_path
from voxelfield.rendering.linear_light import linear_light
from voxelfield.rendering.occupancy import OccupancyGrid


@torch.no_grad()
def save_volume(
    path: Path,
    field: RadianceField,
    occupancy: OccupancyGrid,
    *,
    resolution: int | None = None,
    box: int = 1,
    chunk: int = CHUNK,
) -> None:
    """Writes a field's values on a lattice, as a compressed NumPy archive or for OpenVDB.

    The archive has ``density`` (X, Y, Z) float32, per world unit, ``rgb`` (X, Y, Z, 3) uint8, and ``aabb`` (2, 3)
    float32, the places of the first and of the last point, world units. Density is 0 where rays are not sampled; there
    colours are black. Elsewhere they are the mean over views along the axes, forwards and backwards. No more than a
    layer is held in memory.

    An OpenVDB file has the sparse grids ``density``, the same, and ``color``, three floats of linear light, in world
    units. Until it is written, it takes 16 bytes of memory for each point of the lattice, and about as much again for
    what is occupied.

    Args:
        path: ``*.npz`` or ``*.vdb``.
        field: The field.
        occupancy: Where rays are sampled, on the field's device.
        resolution: Cells along the longest edge of the box; None: as many as the field has voxels there.
        box: Of nested boxes, the one that is meant, in voxels of its size; 1 is the smallest.
        chunk: Evaluations of the field at once, to bound memory.

    Raises:
        ValueError: The path has another ending, a number is below 1, or there is no such box.
        MissingPackageError: The path ends in ``.vdb``, and xuvdb is not installed.
        OSError: The file cannot be written.
    """
    check_volume_path("path", path)
    for name, value in (("resolution", resolution), ("chunk", chunk)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    as_vdb = path.suffix.lower() == ".vdb"
    if as_vdb:
        import_xuvdb()
    region = Region.of(field, box)
    lattice = region.lattice(resolution)
    reached = OccupiedVertices(field, occupancy, lattice, chunk)
    views = torch.eye(3, device=field.aabb.device)
    views = torch.cat((views, -views))

    def rgb(points: Tensor) -> Tensor:
        _, found = field(points.repeat_interleave(len(views), dim=0), views.repeat(len(points), 1))
        mean = found.view(-1, len(views), 3).mean(dim=1).clamp(0, 1)
        return (255 * mean).round().to(torch.uint8)

    density = _Layers(field.density, torch.zeros(()), lattice, reached, chunk)
    colors = _Layers(rgb, torch.zeros(3, dtype=torch.uint8), lattice, reached, chunk // len(views) + 1)
    if as_vdb:
        whole, light = np.empty(lattice.shape, np.float32), np.empty((*lattice.shape, 3), np.float32)
        for first, (layer, shown) in enumerate(zip(density, colors, strict=True)):
            whole[first] = layer.numpy()
            light[first] = (linear_light(shown.float() / 255) * (layer != 0)[..., None]).numpy()
        with atomic_path(path) as temporary:
            write_openvdb(temporary, whole, light, region.box)
        return
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, layers in (("density", density), ("rgb", colors)):
            with file.open(f"{name}.npy", "w", force_zip64=True) as array:
                np.lib.format.write_array_header_1_0(array, layers.head)
                for layer in layers:
                    array.write(layer.numpy().tobytes())
        with file.open("aabb.npy", "w") as array:
            np.lib.format.write_array(array, np.array(region.box, np.float32))


class _Layers:
    """The layers (Y, Z, ...) of an array (X, Y, Z, ...) over a lattice, on the CPU, each made when it is asked for.

    Args:
        values: Maps world positions (M, 3) to the array's values (M, ...).
        empty: The value (...) where no point is reached.
        lattice: The points.
        reached: Which of them are evaluated.
        chunk: Points at once.
    """

    def __init__(
        self,
        values: Callable[[Tensor], Tensor],
        empty: Tensor,
        lattice: Lattice,
        reached: OccupiedVertices,
        chunk: int,
    ) -> None:
        self._values = values
        self._empty = empty
        self._lattice = lattice
        self._reached = reached
        self._chunk = chunk

    @property
    def head(self) -> dict[str, Any]:
        """What NumPy's files say of the whole array."""
        shape = (*self._lattice.shape, *self._empty.shape)
        return {"descr": self._empty.numpy().dtype.str, "fortran_order": False, "shape": shape}

    def __iter__(self) -> Iterator[Tensor]:
        _, height, depth = self._lattice.shape
        for first in range(self._lattice.shape[0]):
            inside = self._reached.layers(first, first + 1).view(-1)
            layer = self._empty.to(inside.device).repeat(len(inside), *[1] * self._empty.dim())
            for part in inside.nonzero()[:, 0].split(self._chunk):
                layer[part] = self._values(self._lattice.positions(unravelled(part, first, self._lattice)))
            yield layer.view(height, depth, *self._empty.shape).cpu()


def check_volume_path(name: str, path: Path) -> None:
    """Raises unless a path ends in ``.npz`` or ``.vdb``.

    Args:
        name: What the caller calls the path, for the message.
        path: The path.

    Raises:
        ValueError: It has another ending.
    """
    if path.suffix.lower() not in (".npz", ".vdb"):
        raise ValueError(f"{name} must be a file *.npz, *.vdb, got {path}")
