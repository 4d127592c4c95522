"""A surface fused from depth maps: a truncated signed distance, averaged over views (Curless and Levoy 1996)."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.export.geometry.lattice import Lattice
from voxelfield.export.geometry.occupied import OccupiedVertices, widened
from voxelfield.fields.field import Field
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.occupancy import OccupancyGrid


class FusedDepth:
    """Where the mean signed distance to what views show is zero; see :class:`Surface`.

    Each view gives the signed distance of a point to the surface in its depth map. More than ``truncation`` in front of
    the surface, the view only marks space as empty; more than ``truncation`` behind it, the view does not count. A
    point for which no view counts is unknown, so surfaces end where views end.

    Nothing is stored of space: the distance is a function of position, computed from the depth maps.

    Args:
        field: The field that the maps show.
        occupancy: Where it was sampled, on the field's device; beyond the neighbours of occupied cells nothing is
            fused.
        cameras: N pinhole cameras, on that device.
        depths: (N, H, W) their depth maps; infinite where nothing is shown. See :func:`depth_maps`.
        truncation: Distance, world units.

    Raises:
        ValueError: The cameras have a lens.
    """

    elsewhere = float("nan")

    def __init__(
        self, field: Field, occupancy: OccupancyGrid, cameras: Cameras, depths: Tensor, truncation: float
    ) -> None:
        if cameras.lens is not None:
            raise ValueError("cameras must be pinholes to fuse their depth, got cameras with a lens")
        self._field, self._occupancy = field, widened(occupancy)
        self._depths, self._truncation = depths, truncation
        self._cameras = cameras
        self._origins = cameras.c2w[:, :3, 3]
        self._axes = cameras.c2w[:, :3, :3]
        self._intrinsics = cameras.intrinsics

    def __call__(self, points: Tensor) -> Tensor:
        """See :class:`Surface`: minus the mean distance, in units of the truncation, within [-1, 1]."""
        total = torch.zeros(len(points), device=points.device)
        count = torch.zeros_like(total)
        for view in range(len(self._depths)):
            distance, seen = self._distance(points, view)
            total += torch.where(seen, distance, 0)
            count += seen
        return torch.where(count > 0, -total / count, torch.nan)

    def vertices(self, lattice: Lattice, chunk: int) -> OccupiedVertices:
        """See :class:`Surface`."""
        return OccupiedVertices(self._field, self._occupancy, lattice, chunk)

    def _distance(self, points: Tensor, view: int) -> tuple[Tensor, Tensor]:
        """Returns how far (M,) points are in front of what a view shows, truncated, and whether it tells that (M,)."""
        arm = points - self._origins[view]
        right, up, backward = (arm @ self._axes[view]).unbind(-1)
        fx, fy, cx, cy = self._intrinsics[view]
        ahead = -backward
        column, row = cx + fx * right / ahead, cy - fy * up / ahead
        width, height = self._cameras.size(view)
        inside = (ahead > 0) & (column >= 0) & (column < width) & (row >= 0) & (row < height)
        shown = self._depth_at(view, torch.where(inside, column, 0), torch.where(inside, row, 0))
        distance = (shown - arm.norm(dim=-1)) / self._truncation
        return distance.clamp(max=1), inside & (distance >= -1)

    def _depth_at(self, view: int, column: Tensor, row: Tensor) -> Tensor:
        """Returns the depth (M,) at image points; between the pixels around only where these show one surface."""
        width, height = self._cameras.size(view)
        depths = self._depths[view, :height, :width].reshape(-1)
        left, top = (column - 0.5).clamp(0, width - 1), (row - 0.5).clamp(0, height - 1)
        x, y = left.long().clamp(max=max(width - 2, 0)), top.long().clamp(max=max(height - 2, 0))
        u, v = left - x, top - y
        first = y * width + x
        across, down = int(width > 1), width * int(height > 1)
        corners = torch.stack([depths[first + step] for step in (0, across, down, across + down)])
        weights = torch.stack(((1 - u) * (1 - v), u * (1 - v), (1 - u) * v, u * v))
        nearest = depths[row.long() * width + column.long()]
        one_surface = corners.amax(dim=0) - corners.amin(dim=0) < self._truncation
        return torch.where(one_surface, (corners * weights).sum(dim=0), nearest)
