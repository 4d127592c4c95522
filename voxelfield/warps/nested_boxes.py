"""Nested boxes, for scenes that extend further than a grid of one resolution can."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from voxelfield.grids.boxes import Box, box_extent, box_tensor, parse_box
from voxelfield.ops._packing import PackedSamples
from voxelfield.warps.warp import Warp

# As in extension/common/constants.h, repeated here because a configuration is checked before the extension is loaded.
MAX_BOXES = 12
# Gap between neighbouring boxes in warped coordinates, in halves of a box's longest edge. It has room for one voxel of
# a level of resolution 16 with up to 7 cubes, so that the features of one box do not affect another box. Coarser voxels
# straddle two boxes; training tolerates that.
_GAP = 0.25


@dataclass(frozen=True)
class NestedBoxes(Warp):
    """Concentric boxes, each ``ratio`` times as large as the next smaller one.

    In warped coordinates, all boxes have the size of the smallest one and stand side by side along x; the unit is half
    of its longest edge. A world point belongs to the smallest box that contains it. Voxels thus grow with the distance
    from the centre, as a pixel's footprint does, and rays stay straight within a box, whereas a contraction of space
    (Barron et al. 2022, mip-NeRF 360, equation 10) would bend them. Instant-NGP (Mueller et al. 2022, appendix E) uses
    such cascades for its occupancy grid.

    Args:
        aabb: (2, 3) the smallest box, world units; it should contain the parts that need the most detail.
        count: Number of boxes, 1 to 12.
        ratio: Ratio of the sizes of successive boxes, above 1.
        near: Distance from a camera within which no samples are placed, world units. Space this close is seen by only
            one camera, so training could fit that camera's image by placing matter right in front of its lens.

    Raises:
        ValueError: An argument is out of range.
    """

    aabb: Box
    count: int
    ratio: float = 2.0
    near: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "aabb", parse_box(self.aabb))
        if not isinstance(self.count, int) or not 1 <= self.count <= MAX_BOXES:
            raise ValueError(f"count must be 1 to {MAX_BOXES} boxes, got {self.count}")
        if not (math.isfinite(self.ratio) and self.ratio > 1):
            raise ValueError(f"ratio must be finite and above 1, got {self.ratio}")
        if not (math.isfinite(self.near) and self.near >= 0):
            raise ValueError(f"near must be finite and not negative, got {self.near}")
        try:
            _ = self.outermost
        except (OverflowError, ValueError) as error:
            raise ValueError(
                f"ratio must leave the largest of {self.count} boxes within the range of float32, got {self.ratio}"
            ) from error

    @property
    def unit(self) -> float:
        """Half of the smallest box's longest edge, world units: the unit in warped coordinates."""
        return max(box_extent(self.aabb)) / 2

    @property
    def outermost(self) -> Box:
        """The largest box, world units."""
        return self.world_box(self.count)

    @property
    def clearance(self) -> float:
        """See :class:`Warp`."""
        return self.near

    @property
    def settings(self) -> dict[str, Any]:
        """See :class:`Warp`."""
        return {"boxes": self.count, "ratio": self.ratio, "near": self.near}

    @property
    def summary(self) -> tuple[str, str]:
        """See :class:`Warp`."""
        low, high = (", ".join(f"{value:.3g}" for value in corner) for corner in self.outermost)
        return "nested boxes", f"{self.count}, the outermost ({low}) to ({high})"

    def world_box(self, number: int) -> Box:
        """See :class:`Warp`. Number 1 is the smallest."""
        reach = self.ratio ** (number - 1)
        sides = [(centre, half * reach) for centre, half in zip(*self._centre_and_half, strict=True)]
        return parse_box(([centre - half for centre, half in sides], [centre + half for centre, half in sides]))

    def voxels_in_world(self, voxels: Sequence[float], number: int) -> Sequence[float]:
        """See :class:`Warp`."""
        return [edge * self.unit * self.ratio ** (number - 1) for edge in voxels]

    @property
    def warped_aabb(self) -> Box:
        """The bounding box of all boxes in warped coordinates."""
        x, y, z = self._half
        return parse_box(((-x, -y, -z), (x + self._pitch * (self.count - 1), y, z)))

    @property
    def op_arguments(self) -> list[float]:
        """The ten numbers that represent the boxes in compiled ops, in the order of extension/rays/cut_rays_ops.h."""
        centre, half = self._centre_and_half
        return [*centre, *half, self.ratio, float(self.count), self._pitch, self.near]

    def from_world(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Warp`. Points outside the largest box become infinite."""
        centre, half = self._tensors(points.device)
        local = (points - centre) / self.unit
        far = (local.abs() / half).amax(dim=-1)
        # Count comparisons instead of taking a logarithm: a point on a face must belong to the box with that face.
        scales = self._scales(points.device)
        box = (far[:, None] > scales[:-1]).sum(dim=-1)
        scale = scales[box]
        warped = local / scale[:, None]
        warped = torch.cat((warped[:, :1] + self._pitch * box[:, None], warped[:, 1:]), dim=-1)
        # Otherwise a point outside the largest box could be mapped into another box.
        warped = torch.where((far > scales[-1])[:, None], warped.new_full((), math.inf), warped)
        return warped, scale * self.unit

    def from_world_near(self, points: Tensor, warped: Tensor) -> Tensor:
        """See :class:`Warp`. If ``warped`` is not finite, the smallest box is selected."""
        box = torch.round(warped[:, 0].nan_to_num() / self._pitch).clamp(0, self.count - 1)
        scale = self.unit * self.ratio**box
        # Python numbers, not tensors: tensors cannot be copied from the host during CUDA graph capture.
        middles, _ = self._centre_and_half
        x, y, z = ((along - middle) / scale for along, middle in zip(points.unbind(-1), middles, strict=True))
        return torch.stack((x + self._pitch * box, y, z), dim=-1)

    def to_world(self, warped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`Warp`. Positions in a gap between boxes belong to the nearest box."""
        centre, half = self._tensors(warped.device)
        box = torch.round(warped[:, 0] / self._pitch).long().clamp_(0, self.count - 1)
        local = torch.cat((warped[:, :1] - self._pitch * box[:, None], warped[:, 1:]), dim=-1)
        far = (local.abs() / half).amax(dim=-1)
        used = (far <= 1) & ((box == 0) | (far >= 1 / self.ratio))
        scale = self._scales(warped.device)[box]
        return local * (scale * self.unit)[:, None] + centre, box, used

    def world_distances(self, samples: PackedSamples, origins: Tensor, directions: Tensor) -> Tensor:
        """See :class:`Warp`."""
        x, y, z = samples.positions.unbind(-1)
        box = torch.round(x / self._pitch).clamp(0, self.count - 1)
        scale = self.unit * self.ratio**box
        # Python numbers instead of a tensor, because a copy from the host cannot be captured in a CUDA graph.
        middles, _ = self._centre_and_half
        local = zip((x - self._pitch * box, y, z), middles, strict=True)
        world = torch.stack([along * scale + middle for along, middle in local], dim=-1)
        rays = samples.ray_index
        return ((world - origins[rays]) * directions[rays]).sum(dim=-1)

    def world_lengths(self, samples: PackedSamples, origins: Tensor, directions: Tensor) -> Tensor:
        """See :class:`Warp`."""
        rays, distances = samples.ray_index, self.world_distances(samples, origins, directions)
        return samples.dt * self.from_world(origins[rays] + distances[:, None] * directions[rays])[1]

    def ray_spacing(self, origins: Tensor, angles: Tensor) -> float:
        """See :class:`Warp`. In units of a box, rays are farthest apart in the smallest one, at its far corner."""
        centre = box_tensor(self.aabb, origins.device).mean(dim=0)
        distance = (origins - centre).norm(dim=-1) + math.sqrt(3) * self.unit
        return float((distance * angles).max()) / self.unit

    def cells_in_use(self, resolution: Sequence[int], device: torch.device) -> Tensor:
        """See :class:`Warp`."""
        low, high = self.warped_aabb
        edges = [
            torch.linspace(low[axis], high[axis], cells + 1, device=device) for axis, cells in enumerate(resolution)
        ]
        box = torch.round((edges[0][:-1] + edges[0][1:]) / 2 / self._pitch).clamp_(0, self.count - 1)
        nearest, farthest = [], []
        for axis, along in enumerate(edges):
            before, after = along[:-1], along[1:]
            if axis == 0:
                before, after = before - self._pitch * box, after - self._pitch * box
            reach, ends = self._half[axis], (before.abs(), after.abs())
            nearest.append(torch.where((before < 0) & (after > 0), 0.0, torch.minimum(*ends)) / reach)
            farthest.append(torch.maximum(*ends) / reach)

        def largest(along: list[Tensor]) -> Tensor:
            x, y, z = along
            return torch.maximum(torch.maximum(x[:, None, None], y[:, None]), z)

        inner = (box == 0)[:, None, None]
        return (largest(nearest) < 1) & (inner | (largest(farthest) > 1 / self.ratio))

    @property
    def _half(self) -> tuple[float, ...]:
        return tuple(extent / 2 / self.unit for extent in box_extent(self.aabb))

    @property
    def _pitch(self) -> float:
        return 2 * self._half[0] + _GAP

    @property
    def _centre_and_half(self) -> tuple[list[float], list[float]]:
        """The centre of the smallest box and half of its edges, world units."""
        sides = list(zip(*self.aabb, strict=True))
        return [(low + high) / 2 for low, high in sides], [(high - low) / 2 for low, high in sides]

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the centre (3,), world units, and half of the edges (3,), warped units, of the smallest box."""
        aabb = box_tensor(self.aabb, device)
        return aabb.mean(dim=0), (aabb[1] - aabb[0]) / (2 * self.unit)

    def _scales(self, device: torch.device) -> Tensor:
        return torch.tensor([self.ratio**box for box in range(self.count)], dtype=torch.float32, device=device)
