"""Images in linear light as EXR files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from voxelfield.files import MARK, atomic_path
from voxelfield.installed import import_optional
from voxelfield.rendering.pixels import linear_light
from voxelfield.rendering.render import View


def import_openexr() -> Any:
    """Returns the module OpenEXR; raises MissingPackageError if it is not installed."""
    return import_optional("OpenEXR", "write EXR", "exr")


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
        # OpenEXR does not report errors at the end of the file, where the last rows are.
        last = light.shape[0] - 1
        try:
            exr.InputFile(str(temporary)).channel("R", scanLine1=last, scanLine2=last)
        except OSError as error:
            raise OSError(f"{path} could not be written: OpenEXR left it incomplete, as on a full disk") from error
