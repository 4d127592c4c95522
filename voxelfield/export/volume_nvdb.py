"""Volumes as NanoVDB, sparse, through NVIDIA Warp."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from voxelfield.export.volume_file import Volume, VolumeFormat
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
    def store(volume: warp.uint64, low: warp.vec3i, values: warp.array3d(dtype=Any)) -> None:  # type: ignore
        i, j, k = warp.tid()
        warp.volume_store(volume, i + low[0], j + low[1], k + low[2], values[i, j, k])

    @warp.kernel
    def load(volume: warp.uint64, low: warp.vec3i, values: warp.array3d(dtype=Any)) -> None:  # type: ignore
        i, j, k = warp.tid()
        values[i, j, k] = warp.volume_lookup(volume, i + low[0], j + low[1], k + low[2], dtype=values.dtype)

    return warp, store, load


def _write(path: Path, volume: Volume) -> None:
    warp, store, _ = _warp()
    density, rgb = volume.channels["density"], volume.channels["rgb"] / np.float32(255)
    used = np.argwhere(density > 0) // _TILE
    tiles = np.unique(used, axis=0) if len(used) else np.zeros((1, 3))  # a volume without a tile is none
    points = warp.array((tiles * _TILE).astype(np.int32), device="cpu")
    buffers = []
    for index, (name, values, kind) in enumerate((("density", density, warp.float32), ("color", rgb, warp.vec3))):
        grid = warp.Volume.allocate_by_tiles(
            points, tuple(volume.spacing), (0.0,) * 3 if kind is warp.vec3 else 0.0, tuple(volume.low), device="cpu"
        )
        inputs = [warp.uint64(grid.id), warp.vec3i(0, 0, 0), warp.array(values, dtype=kind, device="cpu")]
        warp.launch(store, dim=density.shape, inputs=inputs, device="cpu")
        buffers.append(grid.array().numpy().copy())
        buffers[-1][: _HEADER.itemsize].view(_HEADER)[0] = index, 2, name.encode()
    both = warp.Volume(warp.array(np.concatenate(buffers), device="cpu"))
    both.save_to_nvdb(str(path), "zip")


def _read(path: Path) -> Volume:
    warp, _, load = _warp()
    kinds = {"float": (warp.float32, ()), "Vec3f": (warp.vec3, (3,))}
    content = path.read_bytes()
    try:
        first = grid = warp.Volume.load_from_nvdb(content, device="cpu")
    except Exception as error:  # Warp raises RuntimeError, struct.error and zlib.error
        raise ValueError(f"{path} must be a NanoVDB file, got one that Warp does not read: {error}") from error
    info, tiles = first.get_grid_info(), first.get_tiles().numpy()
    channels: dict[str, np.ndarray] = {}
    matrix = np.array(info.transform_matrix).reshape(3, 3)
    if np.count_nonzero(matrix - np.diag(matrix.diagonal())):
        raise ValueError(f"{path} must have the axes of the world, got the transform {matrix.tolist()}")
    low = tiles.min(axis=0)
    shape = tuple(tiles.max(axis=0) + _TILE - low)
    while grid is not None:
        its = grid.get_grid_info()
        if its.type_str not in kinds or (its.translation, its.transform_matrix) != (
            info.translation,
            info.transform_matrix,
        ):
            raise ValueError(f"{path} must contain grids of float or Vec3f on one lattice, got {its}")
        kind, components = kinds[its.type_str]
        values = warp.zeros(shape, dtype=kind, device="cpu")
        inputs = [warp.uint64(grid.id), warp.vec3i(*low.tolist()), values]
        warp.launch(load, dim=shape, inputs=inputs, device="cpu")
        channels[f"{len(channels)} {its.name}"] = values.numpy().reshape(*shape, *components)
        grid = grid.load_next_grid()
    return Volume(channels, np.array(info.translation) + low * matrix.diagonal(), matrix.diagonal().tolist())


NVDB = VolumeFormat((".nvdb",), "Warp", _write, _read)
