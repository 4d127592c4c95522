"""Simplification and repair of meshes."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.export.geometry.packages import mesh_package


def largest_component(vertices: Tensor, faces: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the connected part of a mesh with the largest area.

    Args:
        vertices: (V, 3).
        faces: (F, 3) int64, at least one.

    Raises:
        MissingPackageError: trimesh is not installed.
    """
    edges = torch.cat((faces[:, :2], faces[:, 1:]))
    labels = mesh_package("trimesh.graph").connected_component_labels(edges.numpy(), node_count=len(vertices))
    label = torch.from_numpy(labels).long()[faces[:, 0]]
    corners = vertices[faces].double()
    area = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).norm(dim=-1)
    largest = torch.zeros(int(label.max()) + 1, dtype=torch.float64).index_add_(0, label, area).argmax()
    return _used(vertices, faces[label == largest])


def fill_holes(vertices: Tensor, faces: Tensor) -> tuple[Tensor, Tensor]:
    """Closes the holes of a mesh, each with a fan of triangles between the vertices of its rim.

    A fan is flat where the rim is, and good where the rim is convex; a large hole of another shape gets folds. A hole
    whose rim touches itself may stay open.

    Args:
        vertices: (V, 3).
        faces: (F, 3) int64.

    Raises:
        MissingPackageError: trimesh is not installed.
    """
    trimesh = mesh_package("trimesh")
    mesh = trimesh.Trimesh(vertices.numpy(), faces.numpy(), process=False)
    trimesh.repair.fill_holes(mesh, use_fan=True)
    return vertices, torch.from_numpy(mesh.faces.copy()).long()


def decimate(vertices: Tensor, faces: Tensor, max_faces: int) -> tuple[Tensor, Tensor]:
    """Merges triangles until there are no more than wanted, by their quadric error (Garland and Heckbert 1997).

    Args:
        vertices: (V, 3).
        faces: (F, 3) int64.
        max_faces: Number of triangles, at least 1; where a mesh has no more, it stays as it is.

    Raises:
        MissingPackageError: fast-simplification is not installed.
    """
    if len(faces) <= max_faces:
        return vertices, faces
    simplify = mesh_package("fast_simplification").simplify
    points, triangles = simplify(vertices.numpy(), faces.int().numpy(), target_count=max_faces)
    return torch.from_numpy(points).float(), torch.from_numpy(triangles).long()


def _used(vertices: Tensor, faces: Tensor) -> tuple[Tensor, Tensor]:
    """Drops vertices that no triangle has."""
    used, index = faces.unique(return_inverse=True)
    return vertices[used], index
