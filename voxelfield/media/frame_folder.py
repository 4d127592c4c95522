"""Frames of a path as numbered image files, which a later call can complete."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from voxelfield.files import MARK, atomic_path, is_replaceable, read_json_object, write_json
from voxelfield.installed import import_optional
from voxelfield.media.png import BackgroundWriter, write_png
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.pixels import linear_light
from voxelfield.rendering.render import View

DESCRIPTION = "frames.json"
"""Name of the file that describes the content of a folder of frames."""

_FRAME = re.compile(r"\d{4,}(_depth)?\.(png|exr)")

# Largest depth value of a 16-bit image; 0 marks rays that hit nothing.
_DEPTHS = 65535


class FrameFolder(AbstractContextManager["FrameFolder"]):
    """A folder with the frames of one path; a context manager whose exit waits until all frames are written.

    A file ``frames.json`` describes the frames. Existing frames of the same run, path and size remain, so that
    rendering can be stopped and continued, or divided among machines. Files that voxelfield has not written are never
    replaced or deleted.

    Args:
        folder: Folder for the frames; created if needed. It must be empty or contain earlier frames and their
            description.
        cameras: All cameras of the path.
        kind: ``png``: 8 bits per channel. ``exr``: float32 in linear light, with opacity as A and depth as Z.
        depth: Write the depth of each PNG in 16 bits, as ``NNNN_depth.png``; ``far`` is the largest, world units.
        source: Other values that the frames depend on, such as the run and its weights, as JSON values.
        overwrite: Delete frames of another run, path or size.

    Attributes:
        depth_unit: World units per step of a depth PNG.

    Raises:
        ValueError: The folder contains frames of another run, path or size.
        FileExistsError: The folder contains other files but no frames, or voxelfield has not written a file that has
            the name of a frame.
        MissingPackageError: ``kind`` is ``exr`` and OpenEXR is not installed.
        OSError: The folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        cameras: Cameras,
        kind: Literal["png", "exr"],
        depth: bool,
        far: float,
        source: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> None:
        if kind == "exr":
            import_optional("OpenEXR", "write EXR", "exr")
        self.depth_unit = far / _DEPTHS
        self._folder, self._kind, self._depth = folder, kind, depth
        self._writer = BackgroundWriter()
        description = {
            "frames": len(cameras),
            "width": cameras.width,
            "height": cameras.height,
            "kind": kind,
            "depth_unit": self.depth_unit if depth else None,
            "path": _digest(cameras),
            **source,
        }
        known = self._read_description(description)
        wanted = {path for index in range(len(cameras)) for path in self._paths(index)}
        own = []
        for path in sorted(folder.glob("*")):
            if _FRAME.fullmatch(path.name) and is_replaceable(path):
                own.append(path)
            elif path in wanted:
                raise FileExistsError(
                    f"{path} has the name of a frame, but voxelfield has not written it: choose another folder"
                )
        if known == description:
            return
        if known is not None and not overwrite:
            raise ValueError(f"{folder} contains frames of another run, path or size; see its {DESCRIPTION}")
        for path in own:
            path.unlink()
        write_json(folder / DESCRIPTION, description)

    def _read_description(self, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the description of the frames in the folder, or None if the folder is empty."""
        path = self._folder / DESCRIPTION
        if path.is_file():
            known = read_json_object(path)
            if not wanted.keys() <= known.keys():
                raise FileExistsError(f"{path} was not written by voxelfield render: choose another folder")
            return known
        # Hidden files, such as a file manager leaves, do no harm.
        others = sorted(entry.name for entry in self._folder.glob("*") if not entry.name.startswith("."))
        if others:
            raise FileExistsError(
                f"the folder of frames must be empty or have a {DESCRIPTION}, got {self._folder}, which contains "
                f"{others[0]}: choose another folder"
            )
        return None

    def has(self, index: int) -> bool:
        """Returns whether a frame exists; frames are written atomically."""
        return all(path.is_file() for path in self._paths(index))

    def save(self, index: int, view: View) -> None:
        """Writes the rendered view of a frame in the background."""
        image, *depth = self._paths(index)
        if self._kind == "exr":
            self._writer.submit(_write_exr, image, view)
            return
        self._writer.save(image, view.rgb)
        for path in depth:
            self._writer.submit(_write_depth, path, view, self.depth_unit)

    def _paths(self, index: int) -> list[Path]:
        image = self._folder / f"{index:04d}.{self._kind}"
        return [image, self._folder / f"{index:04d}_depth.png"] if self._depth else [image]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writer.close(cancel=kind is not None)


def farthest(cameras: Cameras, aabb: Tensor) -> float:
    """Returns the largest distance from a camera to a corner of a box (2, 3), an upper bound of all depths."""
    positions = cameras.c2w[:, None, :3, 3].to(aabb.device)
    return float(torch.maximum((positions - aabb[0]).abs(), (positions - aabb[1]).abs()).norm(dim=-1).max())


def _digest(cameras: Cameras) -> str:
    digest = hashlib.sha256()
    lens = None if cameras.lens is None else cameras.lens.rows
    for tensor in (cameras.c2w, cameras.intrinsics, lens, cameras.rolling, cameras.values.get("time")):
        if tensor is not None:
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _write_depth(path: Path, view: View, unit: float) -> None:
    steps = (view.depth / unit).round().clamp(1, _DEPTHS)
    # If less than half of the light is absorbed, the mean depth is not meaningful.
    known = torch.where(view.opacity > 0.5, steps, 0).to(torch.int32).cpu().numpy().astype(np.uint16)
    write_png(path, Image.fromarray(known))


def _write_exr(path: Path, view: View) -> None:
    """Writes a view in linear light, with its opacity as A and its depth as Z, float32, completely or not at all."""
    import OpenEXR

    light = linear_light(view.rgb.clamp(0, 1)).cpu().numpy()
    channels = {
        **{name: np.ascontiguousarray(light[..., index]) for index, name in enumerate("RGB")},
        "A": view.opacity.cpu().numpy(),
        "Z": view.depth.cpu().numpy(),
    }
    header = {"compression": OpenEXR.ZIP_COMPRESSION, "type": OpenEXR.scanlineimage, "software": MARK}
    with atomic_path(path, sync=False) as temporary:
        try:
            OpenEXR.File(header, channels).write(str(temporary))
        except RuntimeError as error:
            reason = " ".join(str(error).split()).rpartition(str(temporary))[2].strip('". ')
            raise OSError(f"{path} could not be written: {reason}") from error
        # OpenEXR does not report errors at the end of the file, where the last rows are.
        last = light.shape[0] - 1
        try:
            OpenEXR.InputFile(str(temporary)).channel("R", scanLine1=last, scanLine2=last)
        except OSError as error:
            raise OSError(f"{path} could not be written: OpenEXR left it incomplete, as on a full disk") from error
