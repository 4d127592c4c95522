"""The mean of a field's weights over the last steps of training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import Natural
from voxelfield.models.component import Component
from voxelfield.models.model import Model

# Number of steps between updates of the average: weights of consecutive steps hardly differ, and an update moves as
# much memory as a step.
_EVERY = 10
# Number of time constants that the average covers: earlier weights would contribute less than a hundredth.
_SPAN = 5


@dataclass(frozen=True)
class AveragingSettings(ComponentSettings):
    """Settings of :class:`WeightAverage`.

    Attributes:
        average_steps: Time constant, in steps, of an exponential moving average of the field's weights that replaces
            them at the end (:class:`voxelfield.components.averaging.WeightAverage`); 0 means no average.
    """

    name = "average"
    average_steps: Natural = key("trainer.average_steps", 0, steps=True)

    @property
    def feature_bytes(self) -> int:  # type: ignore[override]
        """Those of the mean."""
        return 4 if self.average_steps > 0 else 0

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component, which does nothing without a time constant: each checkpoint has its state."""
        return [WeightAverage(training.model, training.config.trainer.steps, self.average_steps)]


class WeightAverage(Component):
    r"""Exponential moving average of a field's weights, :math:`\bar{w} \leftarrow \beta \bar{w} + (1 - \beta) w`.

    At a high learning rate, the weights jump around a minimum; their mean is closer to it and generalises better
    (Polyak and Juditsky 1992; Izmailov et al. 2018). Averaging begins some time constants before the end of training.

    ``torch.optim.swa_utils.AveragedModel`` is not suitable: it copies the whole module at the start, and does not
    support grids that change their shape.

    Args:
        model: The model whose weights are averaged; each process averages its shards of divided grids.
        steps: Number of steps of the run.
        time_constant: Number of steps after which the contribution of an update has decayed to 1/e; the decay per step
            is :math:`\beta = e^{-1 / \mathrm{time\_constant}}`. 0 disables averaging.
    """

    name = "average"

    def __init__(self, model: Model, steps: int, time_constant: int) -> None:
        self._model, self._steps = model, steps
        self._first = max(0, steps - _SPAN * time_constant)
        self._share = -math.expm1(-_EVERY / time_constant) if time_constant > 0 else 0.0
        self._mean: list[Tensor] | None = None

    def _weights(self) -> list[Tensor]:
        return list(self._model.setup.optimizer.local_shards(self._model.field.parameters()))

    def stage_begun(self) -> None:
        """Discards the average, because the grids have changed their shape."""
        self._mean = None

    @torch.no_grad()
    def step_done(self, step: int) -> None:
        """Updates the average with the weights after a number of steps, if an update is due."""
        if step <= self._first:
            self._mean = None  # of a checkpoint whose run had begun earlier
        if self._share == 0 or step < self._first or (step % _EVERY != 0 and step != self._steps):
            return
        weights = self._weights()
        if self._mean is None:
            self._mean = [weight.detach().clone() for weight in weights]
        else:
            torch._foreach_lerp_(self._mean, weights, self._share)

    @torch.no_grad()
    def finish(self) -> None:
        """Replaces the field's weights, and the grids' working copies, by their average, if there is one."""
        if self._mean is None:
            return
        for weight, mean in zip(self._weights(), self._mean, strict=True):
            weight.copy_(mean)
        self._model.setup.optimizer.refresh_copies()
        self._mean = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: the averages under the names of the weights; a collective call."""
        if self._mean is None:
            return {"mean": None}
        names, weights = zip(*self._model.field.named_parameters(), strict=True)
        means = self._model.setup.optimizer.collected(weights, self._mean)
        return {"mean": dict(zip(names, means, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state from any device, if this run averages."""
        self._mean = None
        if state["mean"] is not None and self._share > 0:
            names, weights = zip(*self._model.field.named_parameters(), strict=True)
            means = self._model.setup.optimizer.local_values(weights, [state["mean"][name] for name in names])
            self._mean = [mean.to(weight.device) for weight, mean in zip(weights, means, strict=True)]
