"""The program ffmpeg, which reads and writes videos. imageio-ffmpeg provides it, or finds the system's."""

from __future__ import annotations

import importlib.util
import shutil

from voxelfield.installed import MissingPackageError


def ffmpeg_program(task: str) -> str:
    """Returns the path of ffmpeg.

    Args:
        task: The task that needs ffmpeg, for the message.

    Raises:
        MissingPackageError: imageio or imageio-ffmpeg is not installed, or they have no ffmpeg that can be run.
    """
    if any(importlib.util.find_spec(name) is None for name in ("imageio", "imageio_ffmpeg")):
        raise MissingPackageError(f'imageio[ffmpeg] must be installed to {task}: pip install "voxelfield[train]"')
    import imageio_ffmpeg

    try:
        program: str = imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise MissingPackageError(
            f"ffmpeg must be installed to {task}, got none: install it, or set IMAGEIO_FFMPEG_EXE to its path"
        ) from error
    # imageio-ffmpeg returns the path from IMAGEIO_FFMPEG_EXE without trying it.
    if shutil.which(program) is None:
        raise MissingPackageError(
            f"IMAGEIO_FFMPEG_EXE must be a program, to {task}, got {program}, which cannot be run: "
            "unset it, or set it to the path of ffmpeg"
        )
    return program
