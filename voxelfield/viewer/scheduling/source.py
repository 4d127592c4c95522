"""Sources of the field that is shown."""

from __future__ import annotations

from typing import Protocol

import torch

from voxelfield.training.trained_model import TrainedModel


class Source(Protocol):
    """Hands out the newest state of a field. Called by the thread that draws, and never waits.

    Attributes:
        device: Where the field is.
    """

    device: torch.device

    def poll(self) -> TrainedModel | None:
        """Returns the field if it has changed since the last call, which is now the caller's alone; otherwise None."""


class FinishedRun:
    """A field that does not change.

    Args:
        run: The field.
    """

    def __init__(self, run: TrainedModel) -> None:
        self._run: TrainedModel | None = run
        self.device = run.field.aabb.device

    def poll(self) -> TrainedModel | None:
        """As for :class:`Source`."""
        run, self._run = self._run, None
        return run
