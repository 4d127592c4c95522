"""What is fitted: one dataclass for each ``model.kind``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias, cast

from voxelfield.training.config.parsing import Range, parse
from voxelfield.training.config.types import Count, NotNegative, Positive, Resolution

# The limits of the compiled ops, which are not asked here: a configuration is checked before anything is loaded.
MAX_WIDTH = 128
MAX_LAYERS = 16
MAX_LEVELS = 16
MAX_DEGREE = 3

Degree: TypeAlias = Annotated[int, Range(0, MAX_DEGREE)]
FusedWidth: TypeAlias = Annotated[int, Range(1, MAX_WIDTH)]


@dataclass
class ExponentialDensityConfig:
    """Exponential density; see :class:`voxelfield.decoders.ExponentialDensity`.

    Attributes:
        initial: Density where the network says 0, per world unit.
    """

    initial: Positive = 1.0


@dataclass
class SoftplusDensityConfig:
    """Softplus density, by default of a single grid; see :class:`voxelfield.decoders.DensityActivation`.

    Attributes:
        scale: Density that a raw value of one adds, where the activation is straight.
        initial: Density where the raw value is 0, per world unit.
    """

    scale: Positive = 200.0
    initial: Positive = 0.1


@dataclass
class SHDensityConfig(SoftplusDensityConfig):
    """The same with the defaults of a sum of grids."""

    scale: Positive = 2.0e5
    initial: Positive = 1.0


@dataclass
class PyramidModelConfig:
    """Grids from coarse to fine, read side by side; two shallow networks make density and colour of them.

    Attributes:
        kind: Tells this model from the others.
        resolutions: Of the levels. Those finer than all ``trainer.stages`` are left out, and one that is named twice
            counts once.
        channels: Features of a level at a vertex.
        init_range: Features start uniformly within this of zero.
        width: Of both networks' hidden layers.
        geometry: Numbers that the density network hands to the colour network.
        hidden: Hidden layers of the colour network.
        view_degree: Of the harmonics that tell the colour network the viewing direction.
        density: How density comes of the density network.
    """

    kind: Literal["pyramid"] = "pyramid"
    resolutions: list[Resolution] = field(default_factory=lambda: [16, 32, 64, 128, 256, 400])
    channels: FusedWidth = 4
    init_range: NotNegative = 1e-4
    width: FusedWidth = 128
    geometry: FusedWidth = 16
    hidden: Annotated[int, Range(1, MAX_LAYERS - 1)] = 3
    view_degree: Degree = 3
    density: ExponentialDensityConfig = field(default_factory=ExponentialDensityConfig)

    def check(self, name: str) -> None:
        """Raises ValueError where settings do not fit one another."""
        harmonics = (self.view_degree + 1) ** 2
        if self.geometry + harmonics > MAX_WIDTH:
            raise ValueError(
                f"{name}.geometry must be at most {MAX_WIDTH - harmonics} with {name}.view_degree={self.view_degree}, "
                f"got {self.geometry}"
            )


@dataclass
class SHModelConfig:
    """Density and spherical-harmonics colour, no network: grids from coarse to fine, added up.

    Attributes:
        kind: Tells this model from the others.
        resolutions: Of the levels, each a whole multiple of the one before. Those finer than all ``trainer.stages``
            are left out.
        degree: Of the harmonics.
        init_range: Features start uniformly within this of zero.
        density: How density comes of the first channel.
    """

    kind: Literal["sh"] = "sh"
    resolutions: list[Resolution] = field(default_factory=lambda: [40, 80, 160, 320])
    degree: Degree = 2
    init_range: NotNegative = 1e-4
    density: SHDensityConfig = field(default_factory=SHDensityConfig)


@dataclass
class MLPModelConfig:
    """One grid of density and features, of which a shallow network makes colour.

    Attributes:
        kind: Tells this model from the others.
        features: Features of a vertex, beside density.
        width: Of the hidden layers.
        hidden: Hidden layers.
        view_degree: Of the harmonics that tell the network the viewing direction.
        init_std: Standard deviation of the features at the start.
        density: How density comes of the first channel.
    """

    kind: Literal["mlp"] = "mlp"
    features: Count = 11
    width: Count = 64
    hidden: Count = 2
    view_degree: Degree = 3
    init_std: NotNegative = 0.1
    density: SoftplusDensityConfig = field(default_factory=SoftplusDensityConfig)


ModelConfig: TypeAlias = PyramidModelConfig | SHModelConfig | MLPModelConfig


def parse_model(values: Any, name: str = "model") -> ModelConfig:
    """Returns the checked dataclass of a model's kind; arguments and errors as for :func:`parse`."""
    return parse(cast("type[ModelConfig]", ModelConfig), values, name)


def used_levels(resolutions: Sequence[int], finest: int) -> list[int]:
    """Returns the levels up to a resolution, at least the first.

    Args:
        resolutions: Of all levels. One may be named twice: the trainer's own finest may be one of the model's levels.
        finest: The resolution that training reaches.
    """
    return list(dict.fromkeys(level for level in resolutions if level <= finest)) or list(resolutions[:1])


def check_levels(model: ModelConfig, finest: int, name: str) -> None:
    """Raises ValueError unless the levels up to a resolution make a pyramid.

    Args:
        model: The model.
        finest: The resolution that training reaches.
        name: Where the model stands in the configuration.
    """
    if model.kind == "mlp":
        return
    used = used_levels(model.resolutions, finest)
    if not 1 <= len(used) <= MAX_LEVELS or used != sorted(used):
        raise ValueError(
            f"{name}.resolutions must be 1 to {MAX_LEVELS} levels from coarse to fine, got {model.resolutions}"
        )
    if model.kind == "sh" and any(finer % coarser for coarser, finer in pairwise(used)):
        raise ValueError(f"{name}.resolutions must each be a whole multiple of the one before, got {model.resolutions}")
    if model.kind == "pyramid" and len(used) * model.channels > MAX_WIDTH:
        raise ValueError(
            f"{name}.channels must be at most {MAX_WIDTH // len(used)} with {len(used)} levels, got {model.channels}"
        )
