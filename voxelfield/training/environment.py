"""The colours of directions beyond the field: their choice, and their training along with the field."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from voxelfield.datasets.scene import Scene, Split
from voxelfield.fields.environment import Environment
from voxelfield.models.batch import Batch
from voxelfield.models.part import Part
from voxelfield.training.cameras.exposure import AffineExposure
from voxelfield.warps.warp import Warp

logger = logging.getLogger(__name__)

# Every how many pixels along each axis are read for the mean colour of the photographs.
_STRIDE = 4
# About how many rays along the shorter side of each photograph show whether colours depend on directions alone.
_RAYS_ACROSS = 64
# Rows of the panorama in whose cells the photographs are compared, 2.8 degrees each.
_COMPARED_ROWS = 64
# Photographs agree on a direction if so many of them show it, and so large a share, and if the standard deviation of
# their colours is below this.
_FEWEST, _FEWEST_SHARE, _AGREEMENT = 3, 0.05, 0.03
# Share of the pixels in such directions from which on a capture has an environment. It is 0.65 in the field of a drone
# under a sky; in captures without a sky it is 0.002 to 0.012 (fox, bonsai, room, fern) and 0.05 (skull).
_ENOUGH = 0.1


class EnvironmentBackground(Part):
    """Lays an environment behind the pixels of each batch; its gradients come through what the field lets pass.

    The environment belongs to the field, and so to its state.

    Args:
        environment: The environment, on the device.
        lr: Its learning rate, for training.
        exposure: The corrections of the photographs, which apply to it too, because the cameras captured it.
    """

    name = "environment"

    def __init__(self, environment: Environment, lr: float = 0.0, exposure: AffineExposure | None = None) -> None:
        self.environment = environment
        self._lr, self._exposure = lr, exposure

    def prepare(self, batch: Batch) -> None:
        """Replaces the background of the batch."""
        directions = batch.rays.directions.view(-1, batch.rays_per_pixel, 3).mean(dim=1)
        behind = self.environment(directions)
        if self._exposure is not None:
            behind = self._exposure(behind, torch.ones_like(behind[:, 0]), batch.images)
        batch.background = behind

    def param_groups(self) -> Mapping[str, tuple[Sequence[nn.Parameter], float]]:
        """Returns the maps."""
        return {"environment": (list(self.environment.parameters()), self._lr)}

    def parameters(self) -> Sequence[nn.Parameter]:
        """Returns none: the maps are among the model's."""
        return []


def choose_environment(scene: Scene, warp: Warp | None) -> Literal["none", "map"]:
    """Returns what ``model.environment=auto`` stands for, and logs it if that is ``map``; a collective call.

    A map pays where cameras see past the last box, and no matter is there. What they show then depends on the direction
    alone: photographs from different places agree on its colour, as they do not on that of matter.

    Args:
        scene: The scene.
        warp: The warp of its field. Normalised device coordinates extend to infinity.
    """
    if scene.bounded or (warp is not None and warp.is_forward_facing):
        return "none"
    share = share_of_environment(scene.train)
    if share < _ENOUGH:
        return "none"
    logger.info(
        "%.0f %% of all pixels depend on their direction alone, as those of a sky do: what lies beyond the last box is "
        "learned as a map of directions (model.environment=none: nothing is)",
        100 * share,
    )
    return "map"


def share_of_environment(split: Split) -> float:
    """Returns the share of pixels in directions on whose colours the photographs agree; a collective call."""
    rows, columns = _COMPARED_ROWS, 2 * _COMPARED_ROWS
    box = torch.zeros(2, 3)  # only the rays' directions are used
    # Of each direction: the number of photographs that show it and of their pixels, and the sums of the photographs'
    # mean colours and of their squares.
    totals = torch.zeros(rows * columns, 8)
    for index in split.held:
        image, mask = split.image(index)[..., :3], split.mask(index)
        every = max(1, min(image.shape[:2]) // _RAYS_ACROSS)
        v, u = torch.meshgrid(*(torch.arange(0, side, every) for side in image.shape[:2]), indexing="ij")
        u, v = u.flatten(), v.flatten()
        camera = torch.full_like(u, index)
        rays = split.cameras.rays(camera, torch.stack((u, v), dim=1) + 0.5, box)
        x, y, z = rays.directions.unbind(dim=1)
        row = ((0.5 - torch.asin(z.clamp(-1, 1)) / math.pi) * rows).long().clamp(0, rows - 1)
        column = ((0.5 - torch.atan2(y, x) / (2 * math.pi)) * columns).long().clamp(0, columns - 1)
        counted = torch.ones(len(u), 1) if mask is None else mask[v, u, None].float()
        pixels = counted * torch.cat((image[v, u] / 255, counted), dim=1)
        *color, count = torch.zeros(rows * columns, 4).index_add(0, row * columns + column, pixels).unbind(dim=1)
        means = torch.stack(color, dim=1) / count.clamp(min=1)[:, None]
        totals += torch.cat(((count > 0).float()[:, None], count[:, None], means, means.square()), dim=1)
    photographs, count, *sums = torch.stack(split.of_all([totals])).sum(dim=0).split((1, 1, 3, 3), dim=1)
    mean, square = (each / photographs.clamp(min=1) for each in sums)
    variance = (square - mean.square()).mean(dim=1, keepdim=True)
    enough = photographs >= max(_FEWEST, _FEWEST_SHARE * len(split))
    return float(count[enough & (variance < _AGREEMENT**2)].sum() / count.sum())


def mean_color(split: Split) -> Tensor:
    """Returns the mean colour (3,) of the images of all processes, float32 in [0, 1]; a collective call."""
    some = (split.image(index)[::_STRIDE, ::_STRIDE, :3] for index in split.held)
    means = split.of_all([pixels.float().mean(dim=(0, 1)).tolist() for pixels in some])
    return torch.tensor(means).mean(dim=0) / 255
