"""Volumes as image data of VTK, which ParaView and 3D Slicer open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from voxelfield.export.volume_file import Volume, VolumeFormat
from voxelfield.installed import import_optional


def _vtk(module: str) -> Any:
    return import_optional(module, "read and write the image data of VTK", "vti")


def _write(path: Path, volume: Volume) -> None:
    image = _vtk("vtkmodules.vtkCommonDataModel").vtkImageData()
    image.SetDimensions(*volume.channels["density"].shape)
    image.SetOrigin(*volume.low)
    image.SetSpacing(*volume.spacing)
    for name, values in volume.channels.items():
        # VTK counts points along x first.
        rows = np.ascontiguousarray(values.swapaxes(0, 2)).reshape(-1, *values.shape[3:])
        array = _vtk("vtkmodules.util.numpy_support").numpy_to_vtk(rows, deep=True)
        array.SetName(name)
        image.GetPointData().AddArray(array)
    image.GetPointData().SetActiveScalars("density")
    writer = _vtk("vtkmodules.vtkIOXML").vtkXMLImageDataWriter()
    writer.SetFileName(str(path))
    writer.SetInputData(image)
    if not writer.Write():
        raise OSError(f"{path} cannot be written")


def _read(path: Path) -> Volume:
    reader = _vtk("vtkmodules.vtkIOXML").vtkXMLImageDataReader()
    reader.SetFileName(str(path))
    if reader.CanReadFile(str(path)):
        reader.Update()
    image = reader.GetOutput()
    data = image.GetPointData()
    if not data.GetNumberOfArrays():
        raise ValueError(f"{path} must be image data of VTK with values at points, got none")
    x, y, z = image.GetDimensions()
    axes = image.GetDirectionMatrix()
    if not axes.IsIdentity():
        raise ValueError(f"{path} must have the axes of the world, got the directions {axes.GetData()}")
    to_numpy = _vtk("vtkmodules.util.numpy_support").vtk_to_numpy
    arrays = {data.GetArrayName(index): to_numpy(data.GetArray(index)) for index in range(data.GetNumberOfArrays())}
    channels = {name: rows.reshape(z, y, x, *rows.shape[1:]).swapaxes(0, 2) for name, rows in arrays.items()}
    return Volume(channels, image.GetPoint(0), image.GetSpacing())


VTI = VolumeFormat((".vti",), "ParaView", _write, _read)
