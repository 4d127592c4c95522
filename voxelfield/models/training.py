"""Input of a model's training, the memory that it needs, and where matter can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.models.component import LossTerms
from voxelfield.models.settings import OccupancyUpdates, StageConfig
from voxelfield.rendering.cameras import Cameras, distance_to_nearest, views_of_points
from voxelfield.warps.warp import Warp

# Number of views of a point, in a scene without transparent pixels, below which no matter is placed there.
_FEWEST_VIEWS = 2

_GIB = 2**30

PositionDensity = Callable[[Tensor], Tensor]
"""A function that maps positions (M, 3) to densities (M,)."""


class EmptyFieldError(RuntimeError):
    """No occupied cell is left, so there is nothing to render or train."""


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """Input of a model's training.

    Attributes:
        stages: Coarse-to-fine schedule.
        occupancy: Schedule of the occupancy grid's updates.
        losses: The loss terms on rendered rays.
        optimizer: The optimizers of the training (:class:`voxelfield.training.optimizer.Optimizers`).
        cameras: The training cameras as given, on the device.
        visual_hull: Returns which cells (X, Y, Z) of a box (2, 3) the training images do not show as transparent, bool;
            None if the poses are too inaccurate to exclude space by that. A collective call.
        divide: Divides the evaluation of densities over processes: given a function of positions (M, 3), returns one of
            the same values (M,).
        reliable_poses: Whether the poses are accurate enough to exclude space that cameras cannot see.
    """

    stages: Sequence[StageConfig]
    occupancy: OccupancyUpdates
    losses: LossTerms
    optimizer: Any
    cameras: Cameras
    visual_hull: Callable[[Tensor, tuple[int, int, int]], Tensor] | None
    reliable_poses: bool = True
    divide: Callable[[PositionDensity], PositionDensity] = lambda density: density


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes of device memory, by use.

    Attributes:
        parameters: Grids at their final resolution, float32.
        gradients: Accumulated gradients of the grids, float32.
        optimizer: Adam's two moments.
        copies: Working copies of the grids, if these are not the parameters themselves.
        average: What components keep for each feature of the grids, such as a moving average of the weights.
        images: Training images of this process, 8-bit RGBA, with masks the indices of the pixels that count, with
            ``trainer.loss.structure`` their weights, and whatever else the pixels carry, such as depths; 0 if a GPU
            reads them from host memory.
        samples: Ray samples of a step, and everything computed from them.
        sparse: The share of sparse levels in the first five, if they have as many blocks as they may.
    """

    parameters: int
    gradients: int
    optimizer: int
    copies: int
    average: int
    images: int
    samples: int
    sparse: int = 0

    @property
    def total(self) -> int:
        """The sum over all uses."""
        return self.grids + self.images + self.samples

    @property
    def grids(self) -> int:
        """Bytes that grow with the number of the grids' features."""
        return self.parameters + self.gradients + self.optimizer + self.copies + self.average

    def __str__(self) -> str:
        """Returns one line with all uses, in GiB."""
        parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in asdict(self).items() if name != "sparse")
        return f"{self.total / _GIB:.2f} GiB ({parts})"


def cells_with_views(warp: Warp, cameras: Cameras, aabb: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Marks the cells (X, Y, Z) of a box in warped coordinates in which the images can determine matter.

    A single image cannot determine the distance of what it shows, so cells must be in several views. Cells next to a
    camera are excluded: the camera's own rays begin behind them, so only other cameras would see matter there, which
    training would use to imitate what lies behind it.
    """
    coarse = [max(1, cells // 2) for cells in shape]
    axes = [
        aabb[0, axis] + (torch.arange(cells, device=aabb.device) + 0.5) * ((aabb[1, axis] - aabb[0, axis]) / cells)
        for axis, cells in enumerate(coarse)
    ]
    centres = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, 3)
    world = warp.to_world(centres)[0]
    views = views_of_points(cameras, world, warp.clearance).view(coarse)
    enough = (views >= min(_FEWEST_VIEWS, len(cameras))).float()[None, None]
    # The boundary of the visible region runs through cells, not along their faces.
    enough = F.max_pool3d(enough, 3, stride=1, padding=1)
    beside_cameras = (distance_to_nearest(cameras, world) <= warp.clearance).view(coarse)
    return F.interpolate(enough * ~beside_cameras, size=shape, mode="nearest")[0, 0] > 0
