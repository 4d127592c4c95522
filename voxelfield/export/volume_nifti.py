"""Volumes as NIfTI, the format of medical images, through nibabel."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from voxelfield.export.lattice import Lattice, joined_channels
from voxelfield.export.registry import FileFormat
from voxelfield.installed import import_optional


def _nibabel() -> Any:
    return import_optional("nibabel", "read and write NIfTI", "nifti")


def _write(path: Path, lattice: Lattice, density: np.ndarray, rgb: np.ndarray) -> None:
    affine = np.diag([*lattice.spacing.tolist(), 1.0])
    affine[:3, 3] = lattice.low
    # Several values at a point are a vector, along the fifth axis; the fourth would be time.
    image = _nibabel().Nifti1Image(joined_channels((density, rgb))[:, :, :, None], affine)
    image.header.set_intent("vector", name="density and rgb")
    content = image.to_bytes()
    path.write_bytes(gzip.compress(content) if path.suffix.lower() == ".gz" else content)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    nibabel = _nibabel()
    try:
        image = nibabel.as_closest_canonical(nibabel.load(path))
    except nibabel.filebasedimages.ImageFileError as error:
        raise ValueError(f"{path} must be a NIfTI file: {error}") from error
    axes = image.affine[:3, :3]
    if not np.allclose(axes, np.diag(axes.diagonal()), atol=1e-6 * np.abs(axes).max()):
        raise ValueError(f"{path} must have the axes of the world, got the affine {image.affine.tolist()}")
    return joined_channels([np.asarray(image.dataobj, np.float32)]), image.affine[:3, 3], axes.diagonal()


NIFTI = FileFormat(of="volume", suffixes=(".nii", ".nii.gz"), write=_write, read=_read, require=_nibabel)
