"""Settings of the softplus density, shared by two models."""

from __future__ import annotations

from dataclasses import dataclass

from voxelfield.config.types import Positive


@dataclass
class SoftplusDensityConfig:
    """Softplus density, with defaults for a single grid; see :class:`voxelfield.fields.density.DensityActivation`.

    Attributes:
        scale: Density per unit of raw value in the linear part of the activation.
        initial: Density at a raw value of 0, per world unit.
    """

    scale: Positive = 200.0
    initial: Positive = 0.1
