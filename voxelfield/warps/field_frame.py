"""The frame in which the grid of an unbounded field lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from voxelfield.grids.boxes import Box
from voxelfield.ops._packing import PackedSamples


class FieldFrame(Protocol):
    """Maps the world to the frame of a field's grid, so that a finite grid covers what is far away.

    In the frame, a ray is a straight line, or a sequence of straight pieces. Occupied cells, samples and distances
    between samples are in the frame. Implementations are immutable and comparable by value. Their methods are safe
    during the capture of a CUDA graph unless they say otherwise.
    """

    @property
    def aabb(self) -> Box:
        """The box that holds what matters most, world units."""
        ...

    @property
    def count(self) -> int:
        """Number of boxes that :meth:`in_world` returns."""
        ...

    @property
    def frame_aabb(self) -> Box:
        """The box of the grid, in the frame."""
        ...

    @property
    def outermost(self) -> Box:
        """A box around everything that the frame covers, world units."""
        ...

    @property
    def clearance(self) -> float:
        """Distance from a camera within which training places no matter, world units."""
        ...

    @property
    def op_arguments(self) -> list[float]:
        """The numbers by which compiled ops cut rays into the pieces of nested boxes; empty if rays are not cut."""
        ...

    @property
    def fits_image_kernels(self) -> bool:
        """Whether kernels that render whole images can map rays to this frame."""
        ...

    def in_world(self, number: int) -> Box:
        """Returns one of the boxes, world units. Number 1 is :attr:`aabb`; each further box contains the one before."""
        ...

    def agrees_with(self, other: FieldFrame | None) -> bool:
        """Returns whether a field in this frame can continue training in ``other``."""
        ...

    def voxels_in_world(self, voxels: Sequence[float], number: int) -> tuple[float, float, float]:
        """Returns the edges, in world units, of a voxel in a box.

        Args:
            voxels: Edges of a voxel in the frame.
            number: As for :meth:`in_world`.
        """
        ...

    def to_frame(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Maps world positions to the frame; not for graph capture.

        Args:
            points: (M, 3) world positions, float32.

        Returns:
            (M, 3) positions in the frame, infinite where it does not reach; and (M,) the length in world units of one
            unit of the frame at each point.
        """
        ...

    def to_frame_of(self, points: Tensor, places: Tensor) -> Tensor:
        """Maps world positions to the frame near given places, differentiably.

        Args:
            points: (M, 3) world positions.
            places: (M, 3) positions in the frame; if the frame has several boxes, they select the box for each point.

        Returns:
            (M, 3) positions in the frame.
        """
        ...

    def to_world(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps positions in the frame to the world; not for graph capture.

        Args:
            places: (M, 3) float32.

        Returns:
            (M, 3) world positions, (M,) the indices of their boxes, int64, and (M,) whether rays can pass there.
        """
        ...

    def map_rays(
        self, origins: Tensor, directions: Tensor, near: Tensor, far: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Maps rays to the frame, unless compiled ops do so by :attr:`op_arguments`.

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
            samples: M samples of R rays, with positions in the frame.
            origins: (R, 3) world units.
            directions: (R, 3) unit length.
        """
        ...

    def world_lengths(self, samples: PackedSamples, origins: Tensor, directions: Tensor) -> Tensor:
        """Returns the lengths (M,) of samples along their rays, world units; not for graph capture.

        Args:
            samples: M samples of R rays, with positions and lengths in the frame.
            origins: (R, 3) world units.
            directions: (R, 3) unit length.
        """
        ...

    def ray_spacing(self, origins: Tensor, angles: Tensor) -> float:
        """Returns the largest distance between neighbouring rays, in units of the frame, where detail matters most.

        Args:
            origins: (N, 3) origins of pairs of rays, N at least 1, world units.
            angles: (N,) angles between the rays of each pair, radians.
        """
        ...

    def cells_in_use(self, resolution: Sequence[int], device: torch.device) -> Tensor:
        """Returns which cells of a grid over :attr:`frame_aabb` rays can pass through.

        Args:
            resolution: Number of cells along x, y and z.
            device: Device of the result.

        Returns:
            (X, Y, Z) bool.
        """
        ...
