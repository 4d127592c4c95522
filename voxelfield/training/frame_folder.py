"""Frames of a path as numbered image files, which a later call can go on with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from voxelfield.files import atomic_path, atomic_write
from voxelfield.installed import MissingPackageError
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.linear_light import linear_light
from voxelfield.rendering.render import View
from voxelfield.training.png import PngWriter

Kind = Literal["png", "exr"]
DESCRIPTION = "frames.json"
"""Name of the file that says what a folder of frames holds."""

# Depths of a 16-bit image; 0 stands for rays that meet nothing.
_DEPTHS = 65535


@dataclass(frozen=True)
class FrameKind:
    """What is written of each frame.

    Attributes:
        kind: ``png``: 8 bits a channel. ``exr``: float32 in linear light, with opacity as A and depth as Z.
        depth: Whether a PNG has its depth beside it, 16 bits, as ``NNNN_depth.png``.
    """

    kind: Kind = "png"
    depth: bool = False


class FrameFolder:
    """A folder with the frames of one path; to be used as a context manager, which ends when all are written.

    A file ``frames.json`` says what the frames are of. Frames of the same run, path and size that are there are kept,
    so that rendering can be stopped and continued, or divided among machines.

    Args:
        folder: Receives the frames; created if needed.
        cameras: All stations of the path.
        wanted: What is written of each.
        far: The largest depth that a PNG can show, world units.
        source: What else the frames depend on, in values that JSON has, such as the run and its steps.
        overwrite: Replace frames of something else.

    Attributes:
        depth_unit: World units of one step of a depth's PNG.

    Raises:
        ValueError: The folder holds frames of something else.
        MissingPackageError: EXR is wanted and OpenEXR is not installed.
        OSError: The folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        cameras: Cameras,
        wanted: FrameKind,
        far: float,
        source: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> None:
        if wanted.kind == "exr":
            _open_exr()
        self.depth_unit = far / _DEPTHS
        self._folder = folder
        self._wanted = wanted
        self._writer = PngWriter()
        description = {
            "frames": len(cameras),
            "width": cameras.width,
            "height": cameras.height,
            "kind": wanted.kind,
            "depth_unit": self.depth_unit if wanted.depth else None,
            "path": _digest(cameras),
            **source,
        }
        self._describe(description, overwrite)

    def _describe(self, description: Mapping[str, Any], overwrite: bool) -> None:
        path = self._folder / DESCRIPTION
        if path.is_file():
            try:
                known = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{path}: not valid JSON ({error})") from error
            if known == dict(description):
                return
            if not overwrite:
                raise ValueError(f"{self._folder} holds frames of another run, path or size; see its {DESCRIPTION}")
            for frame in self._folder.glob("[0-9]*.*"):
                frame.unlink()
        with atomic_write(path) as file:
            file.write((json.dumps(description, indent=1) + "\n").encode())

    def has(self, index: int) -> bool:
        """Tells whether a frame is there; frames appear whole or not at all."""
        return all(path.is_file() for path in self._paths(index))

    def save(self, index: int, view: View) -> None:
        """Writes a frame in the background.

        Args:
            index: Number of the station.
            view: Its image.
        """
        image, *depth = self._paths(index)
        if self._wanted.kind == "exr":
            self._writer.submit(lambda: _write_exr(image, view))
            return
        self._writer.save(image, view.rgb)
        for path in depth:
            self._writer.submit(lambda path=path: _write_depth(path, view, self.depth_unit))  # type: ignore[misc]

    def _paths(self, index: int) -> list[Path]:
        name = f"{index:04d}"
        depth = [self._folder / f"{name}_depth.png"] if self._wanted.depth else []
        return [self._folder / f"{name}.{self._wanted.kind}", *depth]

    def __enter__(self) -> FrameFolder:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._writer.__exit__(kind, *rest)


def farthest(cameras: Cameras, aabb: Tensor) -> float:
    """Returns the largest distance from a camera to a corner of a box (2, 3), beyond which no depth lies."""
    positions = cameras.c2w[:, None, :3, 3].to(aabb.device)
    return float(torch.maximum((positions - aabb[0]).abs(), (positions - aabb[1]).abs()).norm(dim=-1).max())


def _digest(cameras: Cameras) -> str:
    digest = hashlib.sha256()
    for tensor in (cameras.c2w, cameras.intrinsics):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _write_depth(path: Path, view: View, unit: float) -> None:
    steps = (view.depth / unit).round().clamp(1, _DEPTHS)
    # Beyond half transparent, the mean depth is that of nothing in particular.
    known = torch.where(view.opacity > 0.5, steps, 0).to(torch.int32).cpu().numpy().astype(np.uint16)
    with atomic_path(path, sync=False) as temporary:
        Image.fromarray(known).save(temporary, format="PNG")


def _write_exr(path: Path, view: View) -> None:
    exr = _open_exr()
    light = linear_light(view.rgb.clamp(0, 1)).cpu().numpy()
    channels = {
        **{name: np.ascontiguousarray(light[..., index]) for index, name in enumerate("RGB")},
        "A": view.opacity.cpu().numpy(),
        "Z": view.depth.cpu().numpy(),
    }
    header = {"compression": exr.ZIP_COMPRESSION, "type": exr.scanlineimage}
    with atomic_path(path, sync=False) as temporary:
        exr.File(header, channels).write(str(temporary))


def _open_exr() -> Any:
    try:
        import OpenEXR
    except ModuleNotFoundError as error:
        raise MissingPackageError('OpenEXR must be installed to write EXR: pip install "voxelfield[exr]"') from error
    return OpenEXR
