"""The colours of directions beyond the field: their choice, and their training along with the field."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import Positive
from voxelfield.datasets.images import CUT_OUT
from voxelfield.datasets.measures import ENOUGH_SKY, sky_share, transparency
from voxelfield.datasets.scene import Scene, Split
from voxelfield.fields.environment import Environment, environment_of
from voxelfield.models.batch import Batch
from voxelfield.models.component import Component
from voxelfield.warps.warp import Warp

logger = logging.getLogger(__name__)

# Stride of the pixels along each axis that are read for the mean colour of the photographs.
_STRIDE = 4


@dataclass(frozen=True)
class EnvironmentSettings(ComponentSettings):
    """Settings of :class:`EnvironmentBackground`, which a field with an environment has.

    Attributes:
        environment: The setting of the model that gives its field an environment.
        environment_lr: Learning rate of the colours of directions, with ``model.environment=map``.
    """

    name = "environment"
    environment: str = key("model.environment", fixed=True)
    environment_lr: Positive = key("optimizer.environment_lr", 0.02)

    def check(self, config: Any, prefix: str = "") -> None:
        """Raises ValueError if another background was chosen."""
        if self.environment == "map" and config.trainer.background != "random":
            raise ValueError(
                f"{prefix}trainer.background must be random with {prefix}model.environment=map, which takes its "
                f"place, got {config.trainer.background}"
            )

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component, after filling the environment with the photographs' mean colour."""
        environment = environment_of(training.model.field)
        if environment is None:
            return []
        train = training.scene.train
        shares = transparency(train)
        if sum(shares) >= CUT_OUT * len(shares):
            raise ValueError(
                "model.environment must be none for images of an object without its background, which show no "
                f"environment, got {self.environment}"
            )
        environment.fill(mean_color(train))
        return [EnvironmentBackground(environment, self.environment_lr)]


class EnvironmentBackground(Component):
    """Lays an environment behind the pixels of each batch; its gradient is scaled by the residual transmittance.

    The environment belongs to the field, and so to its state.
    """

    name = "environment"

    def __init__(self, environment: Environment, lr: float = 0.0) -> None:
        self.environment = environment
        self._lr = lr

    def prepare(self, batch: Batch) -> None:
        """Replaces the background of the batch."""
        directions = batch.rays.directions.view(len(batch.rgba), batch.rays_per_pixel, 3).mean(dim=1)
        batch.background = self.environment(directions)

    def param_groups(self) -> Mapping[str, tuple[Sequence[nn.Parameter], float]]:
        """Returns the maps."""
        return {"environment": (list(self.environment.parameters()), self._lr)}

    def parameters(self) -> Sequence[nn.Parameter]:
        """Returns none, because the maps are parameters of the model."""
        return []


def choose_environment(scene: Scene, warp: Warp | None) -> Literal["none", "map"]:
    """Returns the value for ``model.environment=auto``, and logs it if it is ``map``; a collective call.

    A map pays where cameras see past the last box into empty space. The colour there depends on the direction alone, so
    that photographs from different places agree on it, unlike on the colour of matter. Normalised device coordinates
    extend to infinity.
    """
    if scene.bounded or (warp is not None and warp.is_forward_facing):
        return "none"
    share = sky_share(scene.train)
    if share < ENOUGH_SKY:
        return "none"
    logger.info(
        "%.0f %% of all pixels depend on their direction alone, as those of a sky do: what lies beyond the last box is "
        "learned as a map of directions (model.environment=none: nothing is)",
        100 * share,
    )
    return "map"


def mean_color(split: Split) -> Tensor:
    """Returns the mean colour (3,) of the images of all processes, float32 in [0, 1]; a collective call."""
    some = (split.image(index)[::_STRIDE, ::_STRIDE, :3] for index in split.local_indices)
    means = split.all_gather([pixels.float().mean(dim=(0, 1)).tolist() for pixels in some])
    return torch.tensor(means).mean(dim=0) / 255
