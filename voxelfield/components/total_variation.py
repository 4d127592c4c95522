"""Total variation of the grids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import Count, Natural, NotNegative
from voxelfield.models.component import Component


@dataclass(frozen=True)
class TotalVariationSettings(ComponentSettings):
    """Settings of :class:`TotalVariation`. Presets set the last two for a weight that one may change to 0.

    Attributes:
        tv_features: Squared differences between the features of neighbouring vertices, summed over the vertices that
            are updated, in each active dense level by itself. A sum, not a mean, so that levels of all resolutions are
            equally smooth. Only its gradient is computed, so it is not among the logged terms.
        tv_every: Number of steps between applications of total variation (each weighted by this number).
        tv_until: First step without total variation.
    """

    name = "total_variation"
    tv_features: NotNegative = key("trainer.loss.tv_features", 0.0, off=0)
    tv_every: Count = key("trainer.loss.tv_every", 10, steps=True)
    tv_until: Natural = key("trainer.loss.tv_until", 0, steps=True)

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component."""
        return [TotalVariation(self, training)]


class TotalVariation(Component):
    """Adds the gradient of total variation to that of some steps."""

    name = "total_variation"
    smooths_grids = True

    def __init__(self, settings: TotalVariationSettings, training: Training) -> None:
        self._settings, self._model = settings, training.model
        self._loss_scale = training.config.trainer.loss_scale

    def before_step(self, step: int) -> None:
        """Adds the gradient, to which that of the step will be added."""
        weight, every = self._settings.tv_features, self._settings.tv_every
        if step < self._settings.tv_until and step % every == 0:
            self._model.setup.optimizer.add_total_variation(self._loss_scale * (every * weight))
