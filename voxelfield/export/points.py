"""The file of a point cloud."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from voxelfield.export.mesh import PointCloud
from voxelfield.files import atomic_write

_VERTEX = np.dtype([("place", "<f4", 3), ("normal", "<f4", 3), ("color", "u1", 3)])
_PROPERTIES = (
    *(f"float {name}" for name in ("x", "y", "z", "nx", "ny", "nz")),
    *(f"uchar {name}" for name in ("red", "green", "blue")),
)


def save_points(path: Path, cloud: PointCloud) -> None:
    """Writes points with their normals and colours as a binary PLY, in the units and axes of the world.

    Args:
        path: ``*.ply``.
        cloud: The points.

    Raises:
        ValueError: The path has another ending.
        OSError: The file cannot be written.
    """
    check_points_path("path", path)
    rows = np.empty(len(cloud.points), _VERTEX)
    rows["place"], rows["normal"], rows["color"] = cloud.points.numpy(), cloud.normals.numpy(), cloud.colors.numpy()
    head = ["ply", "format binary_little_endian 1.0", f"element vertex {len(rows)}"]
    head += [f"property {each}" for each in _PROPERTIES] + ["end_header", ""]
    with atomic_write(path) as file:
        file.write("\n".join(head).encode() + rows.tobytes())


def check_points_path(name: str, path: Path) -> None:
    """Raises unless a path ends in ``.ply``.

    Args:
        name: What the caller calls the path, for the message.
        path: The path.

    Raises:
        ValueError: It has another ending.
    """
    if path.suffix.lower() != ".ply":
        raise ValueError(f"{name} must be a file *.ply, got {path}")
