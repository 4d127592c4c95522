"""Volumes as NanoVDB, sparse, through NVIDIA Warp."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from voxelfield.export.lattice import Lattice, joined_channels
from voxelfield.export.registry import FileFormat
from voxelfield.installed import import_optional

_TILE = 8  # voxels along the edge of a leaf, the smallest part that is stored
# Of a grid's header, which Warp has no functions to write: its place in the file and its name, by which readers choose.
_HEADER = np.dtype({"names": ("index", "count", "name"), "formats": ("<u4", "<u4", "S256"), "offsets": (24, 28, 40)})


@functools.cache
def _warp() -> tuple[Any, Any, Any]:
    """Returns Warp, and its kernels that copy an array into a volume, and a volume into an array."""
    warp = import_optional("warp", "read and write NanoVDB", "nvdb")
    warp.config.log_level = warp.LOG_WARNING

    @warp.kernel
    def store(volume: warp.uint64, values: warp.array3d(dtype=Any)) -> None:  # type: ignore
        i, j, k = warp.tid()
        warp.volume_store(volume, i, j, k, values[i, j, k])

    @warp.kernel
    def load(volume: warp.uint64, low: warp.vec3i, values: warp.array3d(dtype=Any)) -> None:  # type: ignore
        i, j, k = warp.tid()
        values[i, j, k] = warp.volume_lookup(volume, i + low[0], j + low[1], k + low[2], dtype=values.dtype)

    return warp, store, load


def _write(path: Path, lattice: Lattice, density: np.ndarray, rgb: np.ndarray) -> None:
    warp, store, _ = _warp()
    used = np.argwhere(density > 0) // _TILE
    tiles = np.unique(used, axis=0) if len(used) else np.zeros((1, 3))  # a volume without a tile is none
    points = warp.array((tiles * _TILE).astype(np.int32), device="cpu")
    spacing, low = lattice.spacing.tolist(), lattice.low.tolist()
    buffers: list[np.ndarray] = []
    for name, values, kind in (("density", density, warp.float32), ("color", joined_channels([rgb]), warp.vec3)):
        grid = warp.Volume.allocate_by_tiles(points, spacing, kind(0.0), low, device="cpu")
        inputs = [warp.uint64(grid.id), warp.array(values, dtype=kind, device="cpu")]
        warp.launch(store, dim=density.shape, inputs=inputs, device="cpu")
        buffers.append(grid.array().numpy().copy())
        buffers[-1][: _HEADER.itemsize].view(_HEADER)[0] = len(buffers) - 1, 2, name.encode()
    warp.Volume(warp.array(np.concatenate(buffers), device="cpu")).save_to_nvdb(str(path), "zip")


def _read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    warp, _, load = _warp()
    content, kinds = path.read_bytes(), {"float": warp.float32, "Vec3f": warp.vec3}
    try:
        first = grid = warp.Volume.load_from_nvdb(content, device="cpu")
    except Exception as error:  # Warp raises RuntimeError, struct.error and zlib.error
        raise ValueError(f"{path} must be a NanoVDB file, got one that Warp does not read: {error}") from error
    info, tiles = first.get_grid_info(), first.get_tiles().numpy()
    low, shape, channels = tiles.min(axis=0), np.ptp(tiles, axis=0) + _TILE, []
    spacing = np.array(info.transform_matrix).reshape(3, 3).diagonal()
    where = info.translation, warp.diag(warp.vec3(*spacing))
    while grid is not None:
        its = grid.get_grid_info()
        if its.type_str not in kinds or (its.translation, its.transform_matrix) != where:
            raise ValueError(f"{path} must have grids of float or Vec3f on one lattice along the axes, got {its}")
        values = warp.zeros(tuple(shape), dtype=kinds[its.type_str], device="cpu")
        inputs = [warp.uint64(grid.id), warp.vec3i(*low.tolist()), values]
        warp.launch(load, dim=values.shape, inputs=inputs, device="cpu")
        channels.append(values.numpy())
        grid = grid.load_next_grid()
    return joined_channels(channels), np.array(info.translation) + low * spacing, spacing


NVDB = FileFormat(of="volume", suffixes=(".nvdb",), write=_write, read=_read, require=_warp)
