"""Weights of photographs: blurred ones count less."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch
from PIL import Image
from torch import Tensor

from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import NotNegative
from voxelfield.datasets.measures import BLURRED, sharpness
from voxelfield.datasets.scene import Split
from voxelfield.models.batch import Batch
from voxelfield.models.component import Component


@dataclass(frozen=True)
class SharpnessSettings(ComponentSettings):
    """Settings of :class:`SharpnessWeights`.

    Attributes:
        sharpness: Exponent of the weights of blurred photographs in all terms that compare colours
            (:func:`voxelfield.components.sharpness.sharpness_weights`); with 0 all photographs count alike.
    """

    name = "sharpness"
    sharpness: NotNegative = key("trainer.loss.sharpness", 0.0, off=0)

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component."""
        training.pixels.carry(self.name, sharpness_weights(training.scene.train, self.sharpness))
        return [SharpnessWeights()]


class SharpnessWeights(Component):
    """Multiplies the squared errors of each pixel by the weight of its photograph, of :func:`sharpness_weights`.

    Batches carry the weights as ``"sharpness"``.
    """

    name = "sharpness"

    def prepare(self, batch: Batch) -> None:
        """Gives the pixels their weights."""
        batch.weigh(batch[self.name])


def sharpness_weights(split: Split, exponent: float) -> Tensor:
    """Computes the weights of photographs, (N,) float32 on the CPU, whose mean is 1.

    Photographs that ``voxelfield inspect`` calls blurred count as the ratio of their sharpness to the lowest that is
    not blurred (:data:`voxelfield.datasets.measures.BLURRED` of the median), to the power of ``exponent``, which is not
    negative; all others count alike. Sharpness is measured in the images as trained on, so blur smaller than their
    pixels does not count.

    A collective call if the split has a ``local_slice``.
    """
    measured = split.all_gather(
        [sharpness(Image.fromarray(split.image(index).numpy())) for index in split.local_indices]
    )
    least = BLURRED * median(measured)
    weights = torch.tensor([min(1.0, value / least) if least > 0 else 1.0 for value in measured]).pow(exponent)
    return weights / weights.mean()
