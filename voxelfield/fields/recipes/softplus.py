"""Settings of the softplus density, which two recipes share."""

from __future__ import annotations

from dataclasses import dataclass

from voxelfield.config.types import Positive


@dataclass
class SoftplusDensityConfig:
    """Softplus density, by default of a single grid; see :class:`voxelfield.fields.density.DensityActivation`.

    Attributes:
        scale: Density that a raw value of one adds, where the activation is straight.
        initial: Density where the raw value is 0, per world unit.
    """

    scale: Positive = 200.0
    initial: Positive = 0.1
