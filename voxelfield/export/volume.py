"""What a field stores, as arrays: its density and colour on a lattice, and what lies beyond it as a panorama."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from voxelfield.export.lattice import (
    BOX,
    RESOLUTION,
    Lattice,
    box_lattice,
    check_finite_values,
    in_chunks,
    joined_channels,
    occupied_layers,
)
from voxelfield.export.registry import ExportFormat, ExportSource, FileFormat, file_format
from voxelfield.fields.field import colors_at
from voxelfield.files import atomic_path, open_regular
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.media.png import BackgroundWriter
from voxelfield.models.model import Model
from voxelfield.progress import tracked
from voxelfield.rendering.pixels import to_uint8

logger = logging.getLogger(__name__)

# Density per the model's unit up to which space counts as empty, because it is invisible.
_MIN_DENSITY = 1e-3
# Values of a point where rays are not sampled.
_EMPTY = {"density": torch.zeros(()), "rgb": torch.zeros(3, dtype=torch.uint8)}


@torch.no_grad()
def save_volume(path: Path | str, model: Model, *, resolution: int | None = None, box: int = 1) -> None:
    """Writes a field's values on a lattice: ``density``, float32, per world unit, and ``rgb``, sRGB.

    Where rays are not sampled, density is 0 and colours are black. Elsewhere, colours are the mean over views along the
    axes, forwards and backwards. Positions in the file are those of the world. A NumPy archive is written layer by
    layer; it has ``density`` (X, Y, Z) float32, ``rgb`` (X, Y, Z, 3) uint8, and ``aabb`` (2, 3) float32, the positions
    of the first and the last point. For the other formats, the whole volume is in memory.
    :func:`voxelfield.load_volume` reads all of them.

    Args:
        path: ``*.npz``, ``*.nvdb``, ``*.nii`` or ``*.nii.gz``.
        model: The field with its occupied cells, such as
            :attr:`voxelfield.trained.trained_model.TrainedModel.model`.
        resolution: Cells along the longest edge of the box; None: as many as the field has voxels along it.
        box: Number of the nested box to write, with its voxel size; 1 is the smallest.

    Raises:
        MissingPackageError: The library of the format is not installed.
        ValueError: The path has another suffix, a number is below 1, or there is no such box.
        FloatingPointError: A density or colour is not finite; no file is written.
        OSError: The file cannot be written.
    """
    chosen = file_format("volume", path)
    field, (lattice, _) = model.field, box_lattice(model, box, resolution)
    occupied = occupied_layers(model, lattice)
    views = torch.eye(3, device=model.device)
    views = torch.cat((views, -views))

    shows_something = False

    def density(points: Tensor) -> Tensor:
        nonlocal shows_something
        found = field.density(points)
        check_finite_values("densities", found)
        shows_something |= bool((found * model.unit > _MIN_DENSITY).any())
        return found

    def rgb(points: Tensor) -> Tensor:
        found = colors_at(field, points.repeat_interleave(len(views), dim=0), views.repeat(len(points), 1))
        check_finite_values("colours", found)
        return to_uint8(found.view(-1, len(views), 3).mean(dim=1))

    def layers(name: str) -> Iterator[np.ndarray]:
        values, count = (density, 1) if name == "density" else (rgb, len(views))
        for number in tracked(range(lattice.shape[0]), f"writing {name}"):
            inside = occupied(number, number + 1).view(-1)
            layer = _EMPTY[name].to(inside.device).repeat(len(inside), *[1] * _EMPTY[name].dim())
            points = lattice.layer_positions(inside.nonzero()[:, 0], number)
            layer[inside] = in_chunks(values, points, evaluations=count)
            yield layer.view(*lattice.shape[1:], *_EMPTY[name].shape).cpu().numpy()

    with atomic_path(path) as temporary:
        if chosen is ARCHIVE:
            chosen.write(temporary, lattice, layers)
        else:
            chosen.write(temporary, lattice, *(np.stack(list(layers(name))) for name in _EMPTY))
    if not shows_something:
        logger.warning(
            "%s contains no visible density: its box is empty at this resolution, or the whole field is", path
        )


def _write_archive(path: Path, lattice: Lattice, layers: Callable[[str], Iterator[np.ndarray]]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, empty in _EMPTY.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as array:
                shape = (*lattice.shape, *empty.shape)
                head = {"descr": empty.numpy().dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(array, head)
                for layer in layers(name):
                    array.write(layer.tobytes())
        with file.open("aabb.npy", "w") as array:
            high = lattice.low + lattice.spacing * (torch.tensor(lattice.shape) - 1)
            np.lib.format.write_array(array, torch.stack((lattice.low, high)).float().numpy())


def _read_archive(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            low, high = archive["aabb"].astype(np.float64)
            values = joined_channels([archive[name] for name in archive.files if name != "aabb"])
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{path} must be an archive of --volume: {error}") from error
    return values, low, (high - low) / (np.array(values.shape[:3]) - 1).clip(min=1)


def load_volume(path: Path | str, *, device: torch.device | str | None = None) -> VoxelGrid:
    """Reads a volume, of ``voxelfield export --volume`` or of another program, as a grid that can be trained.

    Args:
        path: ``*.npz``, ``*.nvdb``, ``*.nii`` or ``*.nii.gz``. Its axes must be those of the world.
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
    chosen = file_format("volume", path)
    assert chosen.read is not None
    open_regular(path).close()  # some libraries only print that they cannot open a file
    values, low, spacing = chosen.read(path)
    *shape, channels = values.shape
    if min(shape) < 2:
        raise ValueError(f"{path} must have at least 2 points along each axis, got {' x '.join(map(str, shape))}")
    high = low + (np.array(shape) - 1) * spacing
    grid = VoxelGrid(shape, channels, (low.tolist(), high.tolist()), device=device)
    with torch.no_grad():
        grid.features.copy_(torch.from_numpy(values))
    return grid


def _write(path: Path, source: ExportSource, **options: int) -> str:
    save_volume(path, source.model, **options)
    return "density and colour"


ARCHIVE = FileFormat(of="volume", suffixes=(".npz",), write=_write_archive, read=_read_archive)
VOLUME = ExportFormat(
    name="volume",
    help="density and colour on a lattice: npz, nvdb, nii or nii.gz",
    opens="numpy.load (npz), Warp (nvdb) or 3D Slicer (nii)",
    write=_write,
    suffixes=(".npz", ".nvdb", ".nii", ".nii.gz"),
    options=(RESOLUTION, BOX),
    check=lambda path, given: file_format("volume", path).require(),
)


def _check_environment(source: ExportSource) -> None:
    if source.model.environment is None:
        raise ValueError("--environment must be left out for this run, which was trained with model.environment=none")


def _write_environment(path: Path, source: ExportSource) -> str:
    assert source.model.environment is not None
    with BackgroundWriter(workers=1) as writer:
        writer.save(path, source.model.environment.panorama())
    return "a panorama"


ENVIRONMENT = ExportFormat(
    name="environment",
    help="a panorama of what lies beyond the field, of a run with model.environment=map: png",
    opens="any image viewer",
    write=_write_environment,
    suffixes=(".png",),
    check_source=_check_environment,
)
