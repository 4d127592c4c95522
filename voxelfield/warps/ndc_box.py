"""Normalised device coordinates, for cameras that all look the same way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from voxelfield.grids.boxes import Box, parse_box
from voxelfield.ops._packing import PackedSamples
from voxelfield.warps.warp import Pose, Warp, Window

FARTHEST = 1000.0
"""Depth, in depths of the near plane, beyond which there are no samples: within a thousandth of the grid's depth from
infinity, which is less than a voxel."""


@dataclass(frozen=True)
class NdcBox(Warp):
    """The space in front of a reference camera, in a projection that turns its frustum into a box.

    A point at (x, y) and at depth d in front of the reference camera is at x / d, y / d and near / d in warped
    coordinates, up to scale: these are the normalised device coordinates of NeRF (Mildenhall et al. 2020, appendix C),
    with 1 / d increasing towards the camera. A projection maps lines to lines, so rays stay straight. A voxel covers
    the same number of the reference camera's pixels at any depth, and infinity is a face of the box.

    The unit of warped coordinates is half the longer edge of the window. Along z, the grid ends at 0, which is
    infinity, and at the near plane.

    Args:
        aabb: (2, 3) the region of interest, world units.
        camera: The reference camera to world, three rows of four; OpenGL axes.
        near: Depth of the near plane, world units. Every photograph's camera must be on the near side of this plane.
        window: Limits ((x0, y0), (x1, y1)) of x / depth and y / depth; the rest is not represented.
        depth: Extent of the grid along z, in units of x / depth, like the limits of the window.

    Raises:
        ValueError: An argument is out of range, or the camera's axes are not orthonormal.
    """

    aabb: Box
    camera: Pose
    near: float
    window: Window
    depth: float
    count = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "aabb", parse_box(self.aabb))
        axes = [row[:3] for row in self.camera]
        products = [[sum(a * b for a, b in zip(one, other, strict=True)) for one in axes] for other in axes]
        orthonormal = all(abs(products[i][j] - (i == j)) < 1e-3 for i, j in product(range(3), repeat=2))
        if not (orthonormal and all(math.isfinite(row[3]) for row in self.camera)):
            raise ValueError(f"camera must be a rotation with a translation, got {self.camera}")
        for name, value in (("near", self.near), ("depth", self.depth)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and positive, got {value}")
        (x0, y0), (x1, y1) = self.window
        if not (all(map(math.isfinite, (x0, y0, x1, y1))) and x0 < x1 and y0 < y1):
            raise ValueError(f"window must be finite, with lower limits below upper ones, got {self.window}")
        if not self.depth_of_centre > self.near:
            raise ValueError(
                f"aabb must have its centre beyond the near plane at depth {self.near:.4g}, got {self.aabb} with the "
                f"centre at depth {self.depth_of_centre:.4g}"
            )

    @property
    def depth_of_centre(self) -> float:
        """Depth of the centre of :attr:`aabb` in front of the reference camera, world units."""
        x, y, z = ((a + b) / 2 for a, b in zip(*self.aabb, strict=True))
        away = [along - row[3] for along, row in zip((x, y, z), self.camera, strict=True)]
        return -sum(a * row[2] for a, row in zip(away, self.camera, strict=True))

    @property
    def warped_aabb(self) -> Box:
        """See :class:`Warp`."""
        (x0, y0), (x1, y1) = self.window
        x, y = (x1 - x0) / 2 / self.slope, (y1 - y0) / 2 / self.slope
        return parse_box(((-x, -y, 0.0), (x, y, self.reach)))

    @property
    def outermost(self) -> Box:
        """See :class:`Warp`."""
        ends = product(*zip(*self.window, strict=True), (self.near, self.near * FARTHEST))
        axes = list(zip(*(self._in_world(x * depth, y * depth, depth) for x, y, depth in ends), strict=True))
        return parse_box((tuple(map(min, axes)), tuple(map(max, axes))))

    @property
    def reference(self) -> tuple[Pose, Window] | None:
        """See :class:`Warp`."""
        return self.camera, self.window

    @property
    def motion_unit(self) -> float:
        """See :class:`Warp`. The depth of the box's centre, because these scenes may have any scale."""
        return self.depth_of_centre

    @property
    def settings(self) -> dict[str, Any]:
        """See :class:`Warp`."""
        return {"ndc": True, "near": self.near, "camera": self.camera, "window": self.window, "depth": self.depth}

    @property
    def summary(self) -> tuple[str, str]:
        """See :class:`Warp`."""
        text = f"all cameras face the same way; near plane at depth {self.near:.4g}"
        return "normalised device coordinates", text

    def agrees_with(self, other: Warp | None) -> bool:
        """See :class:`Warp`. Ignores rounding: the last digits of a window depend on the processor."""
        return isinstance(other, NdcBox) and all(
            math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6) for a, b in zip(self._numbers, other._numbers, strict=True)
        )

    def voxels_in_world(self, voxels: Sequence[float], number: int) -> Sequence[float]:
        """See :class:`Warp`. Returns a cube that is as wide as a voxel at the centre of the box."""
        edge = min(voxels[:2]) * self.slope * self.depth_of_centre
        return edge, edge, edge

    def from_world(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Warp`. The length of a unit is the one along the reference camera's optical axis."""
        depth = self._depth(points)
        warped = self._project(points)
        seen = (depth >= self.near) & (depth <= self.near * FARTHEST) & self._in_window(warped)
        warped = torch.where(seen[:, None], warped, warped.new_full((), math.inf))
        return warped, depth.clamp(min=self.near).square() / (self.near * self.warped_aabb[1][2])

    def from_world_near(self, points: Tensor, warped: Tensor) -> Tensor:
        """See :class:`Warp`. ``warped`` has no effect, because there is a single box."""
        return self._project(points)

    def to_world(self, warped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`Warp`. Positions at infinity are moved to the farthest depth that has samples."""
        used = self._in_window(warped) & (warped[:, 2] >= 0) & (warped[:, 2] <= self.warped_aabb[1][2])
        box = torch.zeros(len(warped), dtype=torch.int64, device=warped.device)
        return self._unproject(warped), box, used

    def map_rays(
        self, origins: Tensor, directions: Tensor, near: Tensor, far: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :class:`Warp`. Mapped rays begin at the near plane, or where the given interval does."""
        start, slope = self._depth(origins), -self._along(directions, 2)
        # Where a ray crosses the two planes between which samples lie. A ray parallel to them never does; it lies
        # between them or not, and dividing by zero gives infinities of the right signs.
        at_near, at_far = ((depth - start) / slope for depth in (self.near, self.near * FARTHEST))
        begin = torch.maximum(near, torch.minimum(at_near, at_far))
        end = torch.minimum(far, torch.maximum(at_near, at_far))
        passes = end > begin  # False for NaN
        begin, end = torch.where(passes, begin, near), torch.where(passes, end, near)
        first = self._project(origins + begin[:, None] * directions)
        whole = self._project(origins + end[:, None] * directions) - first
        length = whole.norm(dim=-1)
        passes = passes & (length > 0) & length.isfinite()
        unit = torch.where(passes[:, None], whole / length[:, None], directions)
        zero = torch.zeros_like(length)
        return torch.where(passes[:, None], first, 0.0), unit, zero, torch.where(passes, length, zero)

    def world_distances(self, samples: PackedSamples, origins: Tensor, directions: Tensor) -> Tensor:
        """See :class:`Warp`."""
        rays = samples.ray_index
        return ((self._unproject(samples.positions) - origins[rays]) * directions[rays]).sum(dim=-1)

    def world_lengths(self, samples: PackedSamples, origins: Tensor, directions: Tensor) -> Tensor:
        """See :class:`Warp`."""
        near = torch.zeros_like(origins[:, 0])
        _, along, _, _ = self.map_rays(origins, directions, near, torch.full_like(near, math.inf))
        half = 0.5 * samples.dt[:, None] * along[samples.ray_index]
        before, after = (self._unproject(samples.positions + shift) for shift in (-half, half))
        return (after - before).norm(dim=-1)

    def ray_spacing(self, origins: Tensor, angles: Tensor) -> float:
        """See :class:`Warp`. Rays are farthest apart at the corners of the window."""
        (x0, y0), (x1, y1) = self.window
        steepest = max(x0 * x0, x1 * x1) + max(y0 * y0, y1 * y1)
        nearest = max(1.0, float(((self.near - self._depth(origins)) / self.near).max()))
        return float(angles.max()) * nearest * (1 + steepest) / self.slope

    @property
    def _numbers(self) -> list[float]:
        """All numbers that define the coordinates."""
        rows = (*self.aabb, *self.camera, *self.window)
        return [self.near, self.depth, *(number for row in rows for number in row)]

    @property
    def slope(self) -> float:
        """Half the longer edge of the window: the unit of warped coordinates."""
        (x0, y0), (x1, y1) = self.window
        return max(x1 - x0, y1 - y0) / 2

    @property
    def reach(self) -> float:
        """Position of the near plane along z, in warped coordinates."""
        return self.depth / self.slope

    def _along(self, vectors: Tensor, axis: int) -> Tensor:
        """Returns the components (M,) of world vectors along an axis of the reference camera."""
        x, y, z = vectors.unbind(-1)
        # Python numbers instead of a tensor, because a copy from the host cannot be captured in a CUDA graph.
        a, b, c = (row[axis] for row in self.camera)
        return a * x + b * y + c * z

    def _from_camera(self, points: Tensor) -> Tensor:
        """Returns world positions (M, 3) relative to the reference camera's position, in the world's axes."""
        x, y, z = points.unbind(-1)
        return torch.stack((x - self.camera[0][3], y - self.camera[1][3], z - self.camera[2][3]), dim=-1)

    def _in_window(self, warped: Tensor) -> Tensor:
        """Returns which positions (M, 3) in warped coordinates lie within the window."""
        x, y, _ = self.warped_aabb[1]
        return (warped[:, 0].abs() <= x) & (warped[:, 1].abs() <= y)

    def _depth(self, points: Tensor) -> Tensor:
        return -self._along(self._from_camera(points), 2)

    def _project(self, points: Tensor) -> Tensor:
        """Maps world positions (M, 3) to warped coordinates, as if those before the near plane were at its depth."""
        away = self._from_camera(points)
        depth = (-self._along(away, 2)).clamp(min=self.near)
        (x0, y0), (x1, y1) = self.window
        x = (self._along(away, 0) / depth - (x0 + x1) / 2) / self.slope
        y = (self._along(away, 1) / depth - (y0 + y1) / 2) / self.slope
        return torch.stack((x, y, self.reach * self.near / depth), dim=-1)

    def _unproject(self, warped: Tensor) -> Tensor:
        """Maps positions (M, 3) in warped coordinates to the world, at depths from the near plane to the farthest."""
        x, y, z = warped.unbind(-1)
        depth = (self.reach * self.near / z.clamp(min=self.reach / FARTHEST)).clamp(min=self.near)
        (x0, y0), (x1, y1) = self.window
        across = (x * self.slope + (x0 + x1) / 2) * depth
        up = (y * self.slope + (y0 + y1) / 2) * depth
        rows = [right * across + high * up - back * depth + at for right, high, back, at in self.camera]
        return torch.stack(rows, dim=-1)

    def _in_world(self, right: float, up: float, depth: float) -> tuple[float, float, float]:
        x, y, z = (a * right + b * up - c * depth + at for a, b, c, at in self.camera)
        return x, y, z
