"""The modelled surface of the bundled scene, and distances between a mesh and the part of it that cameras see."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trimesh
from scipy.spatial import cKDTree
from torch import Tensor

from voxelfield.rendering.cameras import Cameras

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from make_bricks.harbour.assembly import build_harbour
from make_bricks.rendering.scene import WORLD_OFFSET, WORLD_PER_STUD

# Enough for several points per pixel of the buffers below; otherwise occluded points would show through.
OCCLUDING = 3_000_000
JUDGED = 300_000
BUFFER = 300  # pixels along each side
TOLERANCE = 0.012  # world units; a pixel of such a buffer is 0.01 wide
# The exact distance is computed to the triangles of this many nearest samples.
NEIGHBOURS = 4


def modelled_surface() -> trimesh.Trimesh:
    """Returns the triangles from which the images of the scene ``bricks`` were rendered, world units."""
    model = build_harbour()
    solids = [solid for parts in model.parts.values() for solid in parts]
    halves = np.array([(0, 1, 2), (0, 2, 3)])
    solids += [(panel.corners, halves) for panel in model.panels]
    starts = np.cumsum([0] + [len(vertices) for vertices, _ in solids[:-1]])
    vertices = np.concatenate([vertices for vertices, _ in solids]) * WORLD_PER_STUD + WORLD_OFFSET
    faces = np.concatenate([triangles + start for (_, triangles), start in zip(solids, starts, strict=True)])
    return trimesh.Trimesh(vertices, faces, process=False)


@dataclass(frozen=True)
class Samples:
    """Uniformly distributed points on a mesh.

    Attributes:
        mesh: The mesh.
        points: (M, 3).
        faces: (M,) the triangle of each point.
        seen: (M,) whether a camera sees the point.
    """

    mesh: trimesh.Trimesh
    points: np.ndarray[Any, Any]
    faces: np.ndarray[Any, Any]
    seen: np.ndarray[Any, Any]


def sample(mesh: trimesh.Trimesh, cameras: Cameras) -> Samples:
    """Samples points on a mesh and determines which of them cameras see."""
    points, faces = trimesh.sample.sample_surface(mesh, OCCLUDING, seed=0)[:2]
    return Samples(mesh, points, faces, seen_points(torch.from_numpy(points).float(), cameras).numpy())


def seen_points(points: Tensor, cameras: Cameras) -> Tensor:
    """Returns which points (M, 3) of a surface are the nearest, within a tolerance, in a pixel of some camera."""
    seen = torch.zeros(len(points), dtype=torch.bool)
    scale = BUFFER / cameras.width
    for pose, (fx, fy, cx, cy) in zip(cameras.c2w, (cameras.intrinsics * scale).tolist(), strict=True):
        right, up, backward = ((points - pose[:3, 3]) @ pose[:3, :3]).unbind(-1)
        column, row = (cx - fx * right / backward).long(), (cy + fy * up / backward).long()
        inside = (backward < 0) & (column >= 0) & (column < BUFFER) & (row >= 0) & (row < BUFFER)
        pixel, depth = (row * BUFFER + column)[inside], -backward[inside]
        nearest = torch.full((BUFFER * BUFFER,), torch.inf).scatter_reduce(0, pixel, depth, "amin")
        seen[inside] |= depth <= nearest[pixel] + TOLERANCE
    return seen


def distances(origin: Samples, target: Samples) -> np.ndarray[Any, Any]:
    """Returns the distances from the visible points of one mesh to the nearest point of another mesh."""
    chosen = origin.points[:JUDGED][origin.seen[:JUDGED]]
    _, near = cKDTree(target.points).query(chosen, k=NEIGHBOURS, workers=-1)
    found = np.full(len(chosen), np.inf)
    for column in near.T:
        triangles = target.mesh.triangles[target.faces[column]]
        closest = trimesh.triangles.closest_point(triangles, chosen)
        found = np.minimum(found, np.linalg.norm(closest - chosen, axis=1))
    return found
