"""What changes as training goes on: learning rates and the grid's resolution."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from voxelfield.training.config import StageConfig


def exponential_decay(step: Tensor, steps: int, final: float) -> Tensor:
    """Returns the factor on the learning rate: 1 at step 0, ``final`` at step ``steps``, exponential between.

    Args:
        step: One integer, on any device.
        steps: Number of steps of the run.
        final: The factor in the end.
    """
    factor: Tensor = final ** (step / steps)
    return factor


def stage_at(stages: Sequence[StageConfig], step: int) -> int:
    """Returns the index of the stage that a step belongs to."""
    return max(index for index, stage in enumerate(stages) if stage.step <= step)
