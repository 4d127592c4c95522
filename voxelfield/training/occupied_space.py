"""Where a field may have matter: what the training images rule out, and what the field itself says."""

from __future__ import annotations

import torch

from voxelfield.fields.field import RadianceField
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.grids.boxes import box_extent
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.visual_hull import visual_hull
from voxelfield.training.batches import PixelSampler
from voxelfield.training.config import TrainerConfig


class EmptyFieldError(RuntimeError):
    """Nothing is left that could be seen or trained."""


class OccupiedSpace:
    """Keeps a field's occupancy grid up to date while the field is trained.

    Args:
        field: The field, on its device.
        recipe: What built it.
        config: The loop's settings.

    Attributes:
        grid: The occupancy grid, on the field's device.
    """

    def __init__(self, field: RadianceField, recipe: Recipe, config: TrainerConfig) -> None:
        self._field = field
        self._recipe = recipe
        self._config = config.occupancy
        self.grid = OccupancyGrid(_cells(field, config.occupancy.resolution), field.grid.aabb).to(field.aabb.device)

    def restrict_to_images(self, pixels: PixelSampler) -> None:
        """Rules out what the training images show as transparent, as finely as the present box allows.

        Args:
            pixels: The training images.

        Raises:
            EmptyFieldError: They show nothing in the field's box.
        """
        aabb, boxes = self._field.grid.aabb, self._field.boxes
        x, y, z = self.grid.occupied.shape
        if boxes is not None:
            # A visual hull needs transparent pixels, which photographs of surroundings do not have.
            self.grid.restrict(boxes.cells_in_use((x, y, z), aabb.device), aabb)
            return
        self.grid.restrict(visual_hull(pixels.alpha, pixels.cameras, aabb, (x, y, z)), aabb)
        if not bool(self.grid.occupied.any()):
            raise EmptyFieldError(
                f"the training images show nothing inside {aabb.tolist()}: check scene.aabb and that the poses are "
                "camera to world in OpenGL axes"
            )

    def is_due(self, step: int) -> bool:
        """Tells whether the grid is to be refreshed before a step.

        Args:
            step: Number of steps done.
        """
        config = self._config
        return step >= config.start and (step - config.start) % config.every == 0

    @torch.no_grad()
    def refresh(self, distance: float) -> None:
        """Asks the field which cells are occupied.

        Args:
            distance: Between samples along rays, in the grid's frame.
        """
        self._recipe.refresh_occupancy(self._field, self.grid, distance, self._config.threshold)

    def fraction(self, step: int) -> float:
        """Returns the share of occupied cells; waits for the device.

        Args:
            step: Number of steps done, for the message.

        Raises:
            EmptyFieldError: There is none.
        """
        fraction = self.grid.fraction()
        if fraction == 0:
            raise EmptyFieldError(
                f"step {step}: the field has become empty everywhere. Lower trainer.occupancy.threshold or "
                "optimizer.grid_lr, raise model.density.initial, or check that scene.aabb holds the scene"
            )
        return fraction


def _cells(field: RadianceField, resolution: int) -> int | list[int]:
    """Returns the numbers of cells; with nested boxes, as many along the longest edge of each."""
    if field.boxes is None:
        return resolution
    return [max(1, round(resolution * extent / 2)) for extent in box_extent(field.boxes.row)]
