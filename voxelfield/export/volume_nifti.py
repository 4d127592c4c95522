"""Volumes as NIfTI, the format of medical images, through nibabel."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from voxelfield.export.volume_file import Volume, VolumeFormat
from voxelfield.installed import import_optional


def _nibabel() -> Any:
    return import_optional("nibabel", "read and write NIfTI", "nifti")


def _write(path: Path, volume: Volume) -> None:
    # Several values at a point are a vector, along the fifth axis; the fourth would be time.
    affine = np.diag([*volume.spacing, 1.0])
    affine[:3, 3] = volume.low
    image = _nibabel().Nifti1Image(volume.features()[:, :, :, None], affine)
    image.header.set_intent("vector", name="density and rgb")
    content = image.to_bytes()
    path.write_bytes(gzip.compress(content) if path.suffix.lower() == ".gz" else content)


def _read(path: Path) -> Volume:
    nibabel = _nibabel()
    try:
        image = nibabel.as_closest_canonical(nibabel.load(path))
    except nibabel.filebasedimages.ImageFileError as error:
        raise ValueError(f"{path} must be a NIfTI file: {error}") from error
    scales = image.affine[:3, :3]
    if not np.allclose(scales, np.diag(scales.diagonal()), atol=1e-6 * np.abs(scales).max()):
        raise ValueError(f"{path} must have the axes of the world, got the affine {image.affine.tolist()}")
    values = np.asarray(image.dataobj, np.float32)
    return Volume({"values": values}, image.affine[:3, 3].tolist(), scales.diagonal().tolist())


NIFTI = VolumeFormat((".nii", ".nii.gz"), "3D Slicer or ITK-SNAP", _write, _read)
