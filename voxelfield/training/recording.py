"""Metrics of the steps since the last record, and whether training goes wrong."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from voxelfield import processes
from voxelfield.models.model import Model
from voxelfield.models.part import Part
from voxelfield.peer_memory import peak_bytes
from voxelfield.training.config import TrainerConfig
from voxelfield.training.logs.records import has_diverged, mean_losses, rates_of_steps
from voxelfield.training.optimizer import Optimizers
from voxelfield.training.step import TrainingStep

logger = logging.getLogger(__name__)


class Recorder:
    """Collects metrics, and compares the loss with that of the untrained field.

    Attributes:
        diverged: Whether, at the last record, training pixels were rendered clearly worse than by the untrained field.
    """

    def __init__(
        self, model: Model, parts: Sequence[Part], step: TrainingStep, optimizers: Optimizers, config: TrainerConfig
    ) -> None:
        self._model, self._parts, self._step, self._optimizers, self._config = model, parts, step, optimizers, config
        # Infinite until the first step has been taken, so that training does not count as diverged before.
        self._untrained_error = torch.full_like(step.error, math.inf)
        self.diverged = False

    def note_untrained_error(self) -> None:
        """Stores the loss of the first step, whose pixels were rendered before it changed the field."""
        self._untrained_error.copy_(processes.sum_of(self._step.share_of_error))

    def is_due(self, step: int) -> bool:
        """Returns whether a record is due after a number of steps."""
        return step % self._config.log_every == 0 or step == self._config.steps

    def is_finite(self) -> bool:
        """Returns whether all parameters of the field are finite; synchronises with the device, a collective call."""
        own = self._optimizers.local_shards(self._model.field.parameters())
        return not processes.any_of(not all(bool(parameter.detach().sum().isfinite()) for parameter in own))

    def collect_metrics(self, step: int, seconds: float, since_last: float) -> dict[str, float]:
        """Returns the metrics of the steps since the last call, by tag; synchronises with the device.

        Args:
            step: Number of steps done.
            seconds: Training time.
            since_last: Training time since the last call, seconds.

        Raises:
            FloatingPointError: The loss or the field is not finite.
            EmptyFieldError: No cell is occupied.
        """
        totals = self._step.totals.read()
        losses = mean_losses(totals)
        # Where the field is NaN, no sample is visible, so the loss of the remaining samples may be finite.
        if not self.is_finite() or not all(math.isfinite(value) for value in losses.values()):
            raise FloatingPointError(
                f"step {step}: the loss or the field was not finite since the last record, now {losses}; lower "
                "optimizer.grid_lr or optimizer.network_lr, or trainer.loss_scale where gradients are float16, or set "
                "trainer.not_finite=skip"
            )
        self._note_divergence(step, losses["loss/photometric"])
        values = losses | rates_of_steps(totals, self._config, since_last)
        values["train/occupancy"] = self._model.occupied_fraction(step)
        values["train/seconds"] = seconds
        for part in (self._model, *self._parts):
            values |= part.scalars()
        values |= {f"lr/{name}": rate for name, rate in self._optimizers.rates().items()}
        device = self._model.device
        if device.type == "cuda":
            values["gpu/allocated_GiB"] = torch.cuda.memory_allocated(device) / 2**30
            values["gpu/peak_GiB"] = peak_bytes(device) / 2**30
        return values

    def _note_divergence(self, step: int, loss: float) -> None:
        """Compares the loss since the last record with that of the first step."""
        before, self.diverged = self.diverged, has_diverged(step, loss, float(self._untrained_error))
        if self.diverged and not before:
            logger.warning(
                "step %d: training diverges, with training pixels at %.1f dB after %.1f dB before the first step; "
                "lower trainer.rates.grid and trainer.rates.network",
                step,
                -10 * math.log10(loss),
                -10 * math.log10(max(float(self._untrained_error), 1e-10)),
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries of a checkpoint."""
        return {"untrained_error": self._untrained_error, "diverged": self.diverged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the entries of a checkpoint."""
        self.diverged = state["diverged"]
        self._untrained_error.copy_(state["untrained_error"])
