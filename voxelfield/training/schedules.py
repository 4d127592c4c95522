"""Schedules of the learning rates and of the grid's resolution."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from voxelfield.training.config import StageConfig


def exponential_decay(step: Tensor, steps: int, final: float) -> Tensor:
    """Returns the factor on the learning rate: exponential from 1 at step 0 to ``final`` at step ``steps``.

    Args:
        step: Step number, a scalar integer tensor on any device.
        steps: Number of steps of the run.
        final: The factor at the last step.
    """
    factor: Tensor = final ** (step / steps)
    return factor


def stage_at(stages: Sequence[StageConfig], step: int) -> int:
    """Returns the index of the stage to which a step belongs."""
    return max(index for index, stage in enumerate(stages) if stage.step <= step)


def reached_resolution(stages: Sequence[StageConfig], steps: int) -> int:
    """Returns the resolution of the stage to which the last of a number of steps belongs."""
    return stages[stage_at(stages, max(steps - 1, 0))].resolution
