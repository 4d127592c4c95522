"""Space in which a field may have matter, according to the training images and to the field itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.models.model import Model
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.projection import distance_to_nearest, views_of_points
from voxelfield.rendering.visual_hull import visual_hull
from voxelfield.training.batches import PixelSampler
from voxelfield.training.config.trainer import OccupancyConfig
from voxelfield.warps.warp import Warp

# Number of views of a point, in a scene without transparent pixels, below which no matter is placed there.
_FEWEST_VIEWS = 2


class EmptyFieldError(RuntimeError):
    """No occupied cell is left, so there is nothing to render or train."""


class OccupiedSpace:
    """Keeps a field's occupancy grid up to date during training.

    Args:
        model: The model.
        config: Settings of the training loop.

    Attributes:
        grid: The occupancy grid, on the field's device.
    """

    def __init__(self, model: Model, config: OccupancyConfig) -> None:
        self._model = model
        self._config = config
        self.grid = model.occupancy

    def restrict_to_images(self, pixels: PixelSampler) -> None:
        """Excludes the cells that the training images show as transparent, at the resolution of the present box.

        Args:
            pixels: The training images.

        Raises:
            EmptyFieldError: The images show nothing in the field's box.
        """
        if self._model.warp is not None:
            # A visual hull needs transparent pixels, which photographs of surroundings do not have.
            self.restrict_to_box(pixels.cameras)
            return
        aabb = self._model.grid.aabb
        x, y, z = self.grid.occupied.shape
        self.grid.restrict(visual_hull(pixels.alpha, pixels.cameras, aabb, (x, y, z)), aabb)
        if not bool(self.grid.occupied.any()):
            raise EmptyFieldError(
                f"the training images show nothing inside {aabb.tolist()}: check scene.aabb and that the poses are "
                "camera to world in OpenGL axes"
            )

    def restrict_to_box(self, cameras: Cameras | None = None) -> None:
        """Excludes the cells of the field's present box that no ray passes through, regardless of the images.

        Args:
            cameras: Cameras with reliable poses; in an unbounded scene, their positions exclude further cells.
        """
        aabb, warp = self._model.grid.aabb, self._model.warp
        x, y, z = self.grid.occupied.shape
        possible = torch.ones_like(self.grid.occupied)
        if warp is not None:
            possible = warp.cells_in_use((x, y, z), aabb.device)
            if cameras is not None:
                possible &= _may_be_matter(warp, cameras, aabb, (x, y, z))
        self.grid.restrict(possible, aabb)

    def is_due(self, step: int) -> bool:
        """Returns whether the grid must be refreshed before a step.

        Args:
            step: Number of steps done.
        """
        config = self._config
        return step >= config.start and (step - config.start) % config.every == 0

    def refresh(self, distance: float) -> None:
        """Updates the occupied cells from the field.

        Args:
            distance: Distance between samples along rays, in warped coordinates.
        """
        self._model.refresh_occupancy(distance, self._config.threshold)

    def fraction(self, step: int) -> float:
        """Returns the fraction of cells that are occupied; synchronises with the device.

        Args:
            step: Number of steps done, for the message.

        Raises:
            EmptyFieldError: No cell is occupied.
        """
        fraction = self.grid.fraction()
        if fraction == 0:
            raise EmptyFieldError(
                f"step {step}: the field has become empty everywhere. Lower trainer.occupancy.threshold or "
                "optimizer.grid_lr, raise model.density.initial, or check that scene.aabb holds the scene"
            )
        return fraction


def _may_be_matter(warp: Warp, cameras: Cameras, aabb: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Marks the cells in which the images can determine matter.

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
