"""Images in linear light as EXR files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from voxelfield.files import MARK, atomic_path
from voxelfield.installed import MissingPackageError
from voxelfield.rendering.images import linear_light
from voxelfield.rendering.render import View

# Rows of a chunk with ZIP compression.
_ROWS = 16


def import_openexr() -> Any:
    """Returns the module OpenEXR.

    Raises:
        MissingPackageError: OpenEXR is not installed.
    """
    try:
        import OpenEXR
    except ModuleNotFoundError as error:
        raise MissingPackageError('OpenEXR must be installed to write EXR: pip install "voxelfield[exr]"') from error
    return OpenEXR


def write_exr(path: Path, view: View) -> None:
    """Writes a view with its opacity as A and its depth as Z, float32; the file appears completely or not at all.

    Args:
        path: File to write; its parent directory is created if needed.
        view: The rendered view.

    Raises:
        MissingPackageError: OpenEXR is not installed.
        OSError: The file cannot be written.
    """
    exr = import_openexr()
    light = linear_light(view.rgb.clamp(0, 1)).cpu().numpy()
    channels = {
        **{name: np.ascontiguousarray(light[..., index]) for index, name in enumerate("RGB")},
        "A": view.opacity.cpu().numpy(),
        "Z": view.depth.cpu().numpy(),
    }
    header = {"compression": exr.ZIP_COMPRESSION, "type": exr.scanlineimage, "software": MARK}
    with atomic_path(path, sync=False) as temporary:
        try:
            exr.File(header, channels).write(str(temporary))
        except RuntimeError as error:
            reason = " ".join(str(error).split()).rpartition(str(temporary))[2].strip('". ')
            raise OSError(f"{path} could not be written: {reason}") from error
        # OpenEXR does not report errors at the end of the file.
        if not _is_whole(temporary, light.shape[0]):
            raise OSError(f"{path} could not be written: OpenEXR left it incomplete, as it does on a full disk")


def _is_whole(path: Path, height: int) -> bool:
    """Returns whether a file ends with its last chunk of rows."""
    try:
        data = memoryview(path.read_bytes())
        position = 8
        while data[position] != 0:  # attributes: name, type, size, value
            for _ in range(2):
                position = bytes(data[position : position + 256]).index(0) + position + 1
            (length,) = struct.unpack_from("<i", data, position)
            position += 4 + length
        chunks = -(-height // _ROWS)
        offsets = struct.unpack_from(f"<{chunks}Q", data, position + 1)
        _, length = struct.unpack_from("<2i", data, max(offsets))
    except (struct.error, ValueError, IndexError):
        return False
    return min(offsets) > 0 and max(offsets) + 8 + length == len(data)
