"""The mean of a field's weights over the last steps of training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from voxelfield.models.model import Model
from voxelfield.training.optimizer import Optimizers

# Number of steps between updates of the average: weights of consecutive steps hardly differ, and an update moves as
# much memory as a step.
_EVERY = 10
# Number of time constants that the average covers: earlier weights would contribute less than a hundredth.
_SPAN = 5


class WeightAverage:
    r"""Exponential moving average of a field's weights, :math:`\bar{w} \leftarrow \beta \bar{w} + (1 - \beta) w`.

    At a high learning rate, the weights jump around a minimum; their mean is closer to it and generalises better
    (Polyak and Juditsky 1992; Izmailov et al. 2018). Averaging begins some time constants before the end of training.

    ``torch.optim.swa_utils.AveragedModel`` is not suitable: it copies the whole module at the start, and does not
    support grids that change their shape.

    Args:
        model: The model whose weights are averaged.
        optimizers: Those of the model, which may have divided its grids: each process then averages its shards.
        steps: Number of steps of the run.
        time_constant: Number of steps after which the contribution of an update has decayed to 1/e; the decay per step
            is :math:`\beta = e^{-1 / \mathrm{time\_constant}}`. 0 disables averaging.
    """

    def __init__(self, model: Model, optimizers: Optimizers, steps: int, time_constant: int) -> None:
        self._model, self._optimizers = model, optimizers
        self._steps = steps
        self._first = max(0, steps - _SPAN * time_constant)
        self._share = -math.expm1(-_EVERY / time_constant) if time_constant > 0 else 0.0
        self._mean: list[Tensor] | None = None

    def _weights(self) -> list[Tensor]:
        return list(self._optimizers.local_shards(self._model.field.parameters()))

    def restart(self) -> None:
        """Discards the average; call this when the grids have changed their shape."""
        self._mean = None

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Updates the average with the weights after a number of steps, if an update is due."""
        if self._share == 0 or step < self._first or (step % _EVERY != 0 and step != self._steps):
            return
        weights = self._weights()
        if self._mean is None:
            self._mean = [weight.detach().clone() for weight in weights]
        else:
            torch._foreach_lerp_(self._mean, weights, self._share)

    @torch.no_grad()
    def apply(self) -> None:
        """Replaces the field's weights, and the grids' working copies, by their average, if there is one."""
        if self._mean is None:
            return
        for weight, mean in zip(self._weights(), self._mean, strict=True):
            weight.copy_(mean)
        self._optimizers.refresh_copies()
        self._mean = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: the averages under the names of the weights; a collective call."""
        if self._mean is None:
            return {"mean": None}
        division, named = self._optimizers.division, list(self._model.field.named_parameters())
        means: list[Any] = self._mean
        if division is not None:
            means = [division.collected(weight, mean) for (_, weight), mean in zip(named, self._mean, strict=True)]
        return {"mean": {name: mean for (name, _), mean in zip(named, means, strict=True)}}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Loads a state from any device, unless this run would not yet have begun averaging at that step."""
        mean = state["mean"]
        if mean is None or self._share == 0 or step < self._first:
            self._mean = None
            return
        division = self._optimizers.division
        self._mean = [
            (mean[name] if division is None else division.local_planes(weight, mean[name])).to(weight.device)
            for name, weight in self._model.field.named_parameters()
        ]
