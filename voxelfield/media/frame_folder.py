"""Frames of a path as numbered image files, which a later call can complete."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from voxelfield.files import atomic_path, atomic_write, is_replaceable
from voxelfield.media.exr import import_openexr, write_exr
from voxelfield.media.png import PngWriter, marked
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.render import View

Kind = Literal["png", "exr"]
DESCRIPTION = "frames.json"
"""Name of the file that describes the content of a folder of frames."""

_FRAME = re.compile(r"(\d{4,})(_depth)?\.(png|exr)")

# What every description contains.
_DESCRIBED = {"frames": int, "width": int, "height": int, "kind": str, "path": str}

# Largest depth value of a 16-bit image; 0 marks rays that hit nothing.
_DEPTHS = 65535


@dataclass(frozen=True)
class FrameKind:
    """File format of frames.

    Attributes:
        kind: ``png``: 8 bits per channel. ``exr``: float32 in linear light, with opacity as A and depth as Z.
        depth: Whether each PNG is accompanied by its depth in 16 bits, as ``NNNN_depth.png``.
    """

    kind: Kind = "png"
    depth: bool = False


class FrameFolder:
    """A folder with the frames of one path; a context manager whose exit waits until all frames are written.

    A file ``frames.json`` describes the frames. Existing frames of the same run, path and size are kept, so that
    rendering can be stopped and continued, or divided among machines. Files that are not such frames are never
    replaced or deleted.

    Args:
        folder: Folder for the frames; created if needed. It must be empty or contain earlier frames and their
            description.
        cameras: All cameras of the path.
        wanted: File format of the frames.
        far: The largest depth that a PNG can represent, world units.
        source: Other values that the frames depend on, such as the run and its weights, as JSON values.
        overwrite: Delete frames of another run, path or size.

    Attributes:
        depth_unit: World units per step of a depth PNG.

    Raises:
        ValueError: The folder contains frames of another run, path or size.
        FileExistsError: The folder contains other files but no frames, or a file that voxelfield has not written in the
            place of a frame.
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
            import_openexr()
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
        known = self._known(path)
        earlier = list(_frames(self._folder, known)) if known is not None else []
        self._check([*earlier, *_frames(self._folder, description)])
        if known == dict(description):
            return
        if known is not None and not overwrite:
            raise ValueError(f"{self._folder} holds frames of another run, path or size; see its {DESCRIPTION}")
        for frame in earlier:
            frame.unlink()
        with atomic_write(path) as file:
            file.write((json.dumps(description, indent=1) + "\n").encode())

    def _known(self, path: Path) -> dict[str, Any] | None:
        """Returns the description of the frames in the folder, or None if the folder is empty."""
        try:
            known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from error
        if known is None:
            # Hidden files, such as those of a file manager, are in nobody's way.
            others = (entry.name for entry in sorted(self._folder.glob("*")) if not entry.name.startswith("."))
            other = next(others, None)
            if other is not None:
                raise FileExistsError(
                    f"the folder of frames must be empty or have a {DESCRIPTION}, got {self._folder}, which holds "
                    f"{other}: choose another folder"
                )
            return None
        if not isinstance(known, dict) or not all(isinstance(known.get(key), kind) for key, kind in _DESCRIBED.items()):
            raise FileExistsError(
                f"{path} must describe frames, but voxelfield has not written it: choose another folder"
            )
        return known

    def _check(self, frames: list[Path]) -> None:
        for frame in frames:
            if not is_replaceable(frame):
                raise FileExistsError(
                    f"{frame} is in the place of a frame, but voxelfield has not written it: choose another folder"
                )

    def has(self, index: int) -> bool:
        """Returns whether a frame exists; frames are written atomically."""
        return all(path.is_file() for path in self._paths(index))

    def save(self, index: int, view: View) -> None:
        """Writes a frame in the background.

        Args:
            index: Index of the frame.
            view: The rendered view.
        """
        image, *depth = self._paths(index)
        if self._wanted.kind == "exr":
            self._writer.submit(lambda: write_exr(image, view))
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


def _frames(folder: Path, description: Mapping[str, Any]) -> Iterator[Path]:
    """Yields the files in a folder that have the name of a frame of a description."""
    for path in sorted(folder.glob("*")):
        match = _FRAME.fullmatch(path.name)
        if match is None or match[3] != description["kind"] or match[1] != f"{int(match[1]):04d}":
            continue
        if int(match[1]) >= description["frames"]:
            continue
        if match[2] is None or description.get("depth_unit") is not None:
            yield path


def farthest(cameras: Cameras, aabb: Tensor) -> float:
    """Returns the largest distance from a camera to a corner of a box (2, 3), an upper bound of all depths."""
    positions = cameras.c2w[:, None, :3, 3].to(aabb.device)
    return float(torch.maximum((positions - aabb[0]).abs(), (positions - aabb[1]).abs()).norm(dim=-1).max())


def _digest(cameras: Cameras) -> str:
    digest = hashlib.sha256()
    lens = () if cameras.lens is None else (cameras.lens.rows,)
    for tensor in (cameras.c2w, cameras.intrinsics, *lens):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _write_depth(path: Path, view: View, unit: float) -> None:
    steps = (view.depth / unit).round().clamp(1, _DEPTHS)
    # If less than half of the light is absorbed, the mean depth is not meaningful.
    known = torch.where(view.opacity > 0.5, steps, 0).to(torch.int32).cpu().numpy().astype(np.uint16)
    with atomic_path(path, sync=False) as temporary:
        Image.fromarray(known).save(temporary, format="PNG", pnginfo=marked())
