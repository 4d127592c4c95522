"""The mean of a field's weights over the last steps of training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField

# Steps between two looks at the weights: neighbouring ones hardly differ, and a look moves as much memory as a step.
_EVERY = 10
# Time constants over which the average runs: what lies further back would weigh less than a hundredth.
_SPAN = 5


class WeightAverage:
    r"""Exponential moving average of a field's weights, :math:`\bar{w} \leftarrow \beta \bar{w} + (1 - \beta) w`.

    Single steps at a high learning rate jump about a minimum; their mean lies nearer to it, and generalises better
    (Polyak and Juditsky 1992; Izmailov et al. 2018). It begins with the weights some time constants before the end.

    ``torch.optim.swa_utils.AveragedModel`` does not fit: it copies the whole module from the start, working copies of
    grids included, and does not follow grids that change their shape.

    Args:
        field: The field that is trained.
        steps: Number of steps of the run.
        time_constant: Steps in which the weight of one look falls to 1/e, the decay being
            :math:`\beta = e^{-1 / \mathrm{time\_constant}}` a step; 0 for no average at all.
    """

    def __init__(self, field: RadianceField, steps: int, time_constant: int) -> None:
        self._field = field
        self._steps = steps
        self._first = max(0, steps - _SPAN * time_constant)
        self._share = -math.expm1(-_EVERY / time_constant) if time_constant > 0 else 0.0
        self._mean: list[Tensor] | None = None

    def restart(self) -> None:
        """Forgets what was averaged: the grids have changed their shape."""
        self._mean = None

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes the weights after a step into account, if it is due.

        Args:
            step: Number of steps done.
        """
        if self._share == 0 or step < self._first or (step % _EVERY != 0 and step != self._steps):
            return
        weights: list[Tensor] = list(self._field.parameters())
        if self._mean is None:
            self._mean = [weight.detach().clone() for weight in weights]
        else:
            torch._foreach_lerp_(self._mean, weights, self._share)

    @torch.no_grad()
    def apply(self) -> None:
        """Makes the field's weights their average, if there is one; copies that grids are read from follow."""
        if self._mean is None:
            return
        for weight, mean in zip(self._field.parameters(), self._mean, strict=True):
            weight.copy_(mean)
        self._field.grid.refresh_copies()
        self._mean = None

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs, the averages under the names of the weights."""
        names = [name for name, _ in self._field.named_parameters()]
        return {"mean": None if self._mean is None else dict(zip(names, self._mean, strict=True))}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Takes what :meth:`state_dict` returned, on any device, unless this run would not have begun an average then.

        Args:
            state: The state.
            step: Number of steps done when it was saved.
        """
        mean = state["mean"]
        wanted = mean is not None and self._share > 0 and step >= self._first
        weights = self._field.named_parameters()
        self._mean = [mean[name].to(weight.device) for name, weight in weights] if wanted else None
