"""Warps, which map the world to a finite grid, for fields of scenes that extend beyond a box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from voxelfield.grids.boxes import Box
from voxelfield.ops._packing import PackedSamples

Row: TypeAlias = tuple[float, float, float, float]
Pose: TypeAlias = tuple[Row, Row, Row]
"""The first three rows of a camera-to-world matrix, OpenGL axes."""

Window: TypeAlias = tuple[tuple[float, float], tuple[float, float]]
"""Lower and upper limits of x / depth and y / depth in a camera's frame: ((x0, y0), (x1, y1))."""


class Warp(Protocol):
    """Maps world positions to the coordinates of a field's grid, so that a finite grid also covers distant regions.

    Positions after this mapping are in *warped coordinates*. There, a ray is a straight line, or a sequence of straight
    pieces, and the grid is a box, :attr:`warped_aabb`. Grids, occupied cells, samples and distances between samples are
    in warped coordinates; cameras, rays and depths are in world coordinates.

    Warps derive from this class, are immutable and are comparable by value. Their methods are safe during the capture
    of a CUDA graph unless they say otherwise.

    Attributes:
        aabb: The box of interest, world units.
        count: Number of boxes that :meth:`world_box` returns.
        near: Where sampling begins, world units: a distance from each camera, or the depth of the near plane.
    """

    aabb: Box
    count: int
    near: float

    @property
    def warped_aabb(self) -> Box:
        """The box of the grid, in warped coordinates."""

    @property
    def outermost(self) -> Box:
        """A box around everything that the warp covers, world units."""

    @property
    def clearance(self) -> float:
        """Distance from each camera within which nothing is sampled, world units; 0 by default."""
        return 0.0

    @property
    def reference(self) -> tuple[Pose, Window] | None:
        """The pose and the window of a camera that sees all that the warp covers; None if there is no such camera."""
        return None

    @property
    def is_forward_facing(self) -> bool:
        """Whether the warp covers only the space in front of cameras that all face the same way."""
        return self.reference is not None

    @property
    def motion_unit(self) -> float:
        """Unit of translations when cameras are refined, world units times ``scene.unit``; 1 by default."""
        return 1.0

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of :class:`voxelfield.warps.choice.WarpConfig` from which an equal warp can be built."""

    @property
    def summary(self) -> tuple[str, str]:
        """A label and a text of one line that describe the warp, for reports."""

    @property
    def op_arguments(self) -> list[float]:
        """The numbers with which kernels cut rays into the pieces of nested boxes.

        Empty if rays are mapped by :meth:`map_rays` instead, which kernels that render whole images do not support.
        """
        return []

    def world_box(self, number: int) -> Box:
        """Returns one of the boxes, world units. Number 1 is :attr:`aabb`; each further box contains the one before."""
        if number != 1:
            raise ValueError(f"number must be 1, got {number}")
        return self.aabb

    def agrees_with(self, other: Warp | None) -> bool:
        """Returns whether a field in this warp can continue training in ``other``; by default only in an equal one."""
        return self == other

    def voxels_in_world(self, voxels: Sequence[float], number: int) -> Sequence[float]:
        """Returns the edges, in world units, of a voxel with given edges in warped coordinates.

        ``number`` is that of its box, as for :meth:`world_box`.
        """

    def from_world(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Maps world positions (M, 3) float32 to warped coordinates; not for graph capture.

        Returns (M, 3) positions in warped coordinates, infinite for points that the warp does not cover; and (M,) the
        length in world units of one unit of warped coordinates at each point.
        """

    def from_world_near(self, points: Tensor, warped: Tensor) -> Tensor:
        """Maps world positions (M, 3) to warped coordinates (M, 3), differentiably.

        ``warped`` (M, 3) are positions in warped coordinates that select the box for each point.
        """

    def to_world(self, warped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps positions (M, 3) float32 from warped coordinates to the world; not for graph capture.

        Returns (M, 3) world positions, (M,) the indices of their boxes, int64, and (M,) whether rays can pass through
        them.
        """

    def map_rays(
        self, origins: Tensor, directions: Tensor, near: Tensor, far: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Maps rays to warped coordinates; by default returns them as they are, for ops with :attr:`op_arguments`.

        Origins (R, 3), unit directions (R, 3), ``near`` (R,) and ``far`` (R,) are float32, in world units. Returns the
        same four in warped coordinates, for the ops that march rays.
        """
        return origins, directions, near, far

    def world_distances(self, samples: PackedSamples, origins: Tensor, directions: Tensor) -> Tensor:
        """Returns the distances (M,) of samples from the origins of their rays, world units.

        The samples have positions in warped coordinates; origins (R, 3) are in world units, and directions (R, 3) of
        unit length.
        """

    def world_lengths(self, samples: PackedSamples, origins: Tensor, directions: Tensor) -> Tensor:
        """Returns the lengths (M,) of samples along their rays, world units; not for graph capture.

        The samples have positions and lengths in warped coordinates; rays are as for :meth:`world_distances`.
        """

    def ray_spacing(self, origins: Tensor, angles: Tensor) -> float:
        """Returns the largest distance between neighbouring rays where detail matters most, in warped coordinates.

        ``origins`` (N, 3), N at least 1, are those of pairs of rays, world units, and ``angles`` (N,) those between the
        rays of each pair, radians.
        """

    def cells_in_use(self, resolution: Sequence[int], device: torch.device) -> Tensor:
        """Returns which cells of a grid over :attr:`warped_aabb` rays can pass through, (X, Y, Z) bool; all by default.

        ``resolution`` is the number of cells along x, y and z, and ``device`` that of the result.
        """
        return torch.ones(tuple(resolution), dtype=torch.bool, device=device)


def nested_box_args(warp: Warp | None) -> list[float]:
    """Returns :attr:`Warp.op_arguments`; empty without a warp."""
    return [] if warp is None else warp.op_arguments
