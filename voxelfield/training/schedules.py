"""What changes as training goes on: learning rates and the grid's resolution."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from voxelfield.training.config import StageConfig


def exponential_decay(step: int, steps: int, final: float) -> float:
    """Returns the factor on the learning rate: 1 at step 0, ``final`` at step ``steps``, exponential between."""
    return float(final ** (step / steps))


def stage_at(stages: Sequence[StageConfig], step: int) -> int:
    """Returns the index of the stage that a step belongs to."""
    return max(index for index, stage in enumerate(stages) if stage.step <= step)


def cubic_voxels(aabb: Tensor, resolution: int) -> tuple[int, int, int]:
    """Returns the number of vertices along each axis that fills a box with ``resolution**3`` cubes.

    Args:
        aabb: (2, 3) box, world units.
        resolution: Cube root of the number of voxels.
    """
    extent = [float(e) for e in (aabb[1] - aabb[0]).tolist()]
    edge = math.prod(extent) ** (1 / 3) / resolution
    x, y, z = (max(2, round(e / edge)) for e in extent)
    return x, y, z
