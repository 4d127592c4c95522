"""The warp in which the grid of an unbounded field lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from voxelfield.grids.boxes import Box
from voxelfield.ops._packing import PackedSamples


class Warp(Protocol):
    """Maps the world to the warp of a field's grid, so that a finite grid covers what is far away.

    In the warp, a ray is a straight line, or a sequence of straight pieces. Occupied cells, samples and distances
    between samples are in warped coordinates. Implementations are immutable and comparable by value. Their methods are
    safe during the capture of a CUDA graph unless they say otherwise.
    """

    @property
    def aabb(self) -> Box:
        """The box that holds what matters most, world units."""
        ...

    @property
    def count(self) -> int:
        """Number of boxes that :meth:`world_box` returns."""
        ...

    @property
    def warped_aabb(self) -> Box:
        """The box of the grid, in warped coordinates."""
        ...

    @property
    def outermost(self) -> Box:
        """A box around everything that the warp covers, world units."""
        ...

    @property
    def clearance(self) -> float:
        """Distance from a camera within which training warped no matter, world units."""
        ...

    @property
    def op_arguments(self) -> list[float]:
        """The numbers by which compiled ops cut rays into the pieces of nested boxes; empty if rays are not cut."""
        ...

    @property
    def fits_image_kernels(self) -> bool:
        """Whether kernels that render whole images can map rays to this warp."""
        ...

    def world_box(self, number: int) -> Box:
        """Returns one of the boxes, world units. Number 1 is :attr:`aabb`; each further box contains the one before."""
        ...

    def agrees_with(self, other: Warp | None) -> bool:
        """Returns whether a field in this warp can continue training in ``other``."""
        ...

    def voxels_in_world(self, voxels: Sequence[float], number: int) -> tuple[float, float, float]:
        """Returns the edges, in world units, of a voxel in a box.

        Args:
            voxels: Edges of a voxel in warped coordinates.
            number: As for :meth:`world_box`.
        """
        ...

    def from_world(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Maps world positions to the warp; not for graph capture.

        Args:
            points: (M, 3) world positions, float32.

        Returns:
            (M, 3) positions in warped coordinates, infinite where it does not reach; and (M,) the length in world
            units of one unit of the frame at each point.
        """
        ...

    def from_world_near(self, points: Tensor, warped: Tensor) -> Tensor:
        """Maps world positions to the warp near given warped, differentiably.

        Args:
            points: (M, 3) world positions.
            warped: (M, 3) positions in warped coordinates; if the warp has several boxes, they select the box for each
                point.

        Returns:
            (M, 3) positions in warped coordinates.
        """
        ...

    def to_world(self, warped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps positions in warped coordinates to the world; not for graph capture.

        Args:
            warped: (M, 3) float32.

        Returns:
            (M, 3) world positions, (M,) the indices of their boxes, int64, and (M,) whether rays can pass there.
        """
        ...

    def map_rays(
        self, origins: Tensor, directions: Tensor, near: Tensor, far: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Maps rays to the warp, unless compiled ops do so by :attr:`op_arguments`.

        Args:
            origins: (R, 3) float32, world units.
            directions: (R, 3) float32, unit length.
            near: (R,) float32, world units.
            far: (R,) float32, world units.

        Returns:
            The same four, for the ops that march rays.
        """
        ...

    def world_distances(self, samples: PackedSamples, origins: Tensor, directions: Tensor) -> Tensor:
        """Returns the distances (M,) of samples from the origins of their rays, world units.

        Args:
            samples: M samples of R rays, with positions in warped coordinates.
            origins: (R, 3) world units.
            directions: (R, 3) unit length.
        """
        ...

    def world_lengths(self, samples: PackedSamples, origins: Tensor, directions: Tensor) -> Tensor:
        """Returns the lengths (M,) of samples along their rays, world units; not for graph capture.

        Args:
            samples: M samples of R rays, with positions and lengths in warped coordinates.
            origins: (R, 3) world units.
            directions: (R, 3) unit length.
        """
        ...

    def ray_spacing(self, origins: Tensor, angles: Tensor) -> float:
        """Returns the largest distance between neighbouring rays, in units of the warp, where detail matters most.

        Args:
            origins: (N, 3) origins of pairs of rays, N at least 1, world units.
            angles: (N,) angles between the rays of each pair, radians.
        """
        ...

    def cells_in_use(self, resolution: Sequence[int], device: torch.device) -> Tensor:
        """Returns which cells of a grid over :attr:`warped_aabb` rays can pass through.

        Args:
            resolution: Number of cells along x, y and z.
            device: Device of the result.

        Returns:
            (X, Y, Z) bool.
        """
        ...
