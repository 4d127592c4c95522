"""Soft masks: pixels count in training as much as their mask says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.models.batch import Batch
from voxelfield.models.component import Component


@dataclass(frozen=True)
class SoftMaskSettings(ComponentSettings):
    """The setting of :class:`SoftMaskWeights`, which is an option of loading.

    Attributes:
        soft_masks: Whether the grey values of masks are weights.
    """

    name = "soft_masks"
    soft_masks: bool = key("data.soft_masks", off=False)

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component, if the training images have masks."""
        return [SoftMaskWeights()] if "mask_weight" in training.scene.train.extras else []


class SoftMaskWeights(Component):
    """Multiplies the squared errors of each pixel by its weight in the mask, which batches carry as 0 to 255."""

    name = "soft_masks"

    def prepare(self, batch: Batch) -> None:
        """Gives the pixels their weights."""
        batch.weigh(batch["mask_weight"].float() / 255)
