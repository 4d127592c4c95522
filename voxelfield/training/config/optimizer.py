"""How the optimizer is told to learn."""

from __future__ import annotations

from dataclasses import dataclass

from voxelfield.config.types import NotNegative, Positive


@dataclass
class OptimizerConfig:
    """AdamW.

    Attributes:
        grid_lr: Learning rate of grids.
        network_lr: Learning rate of everything else.
        exposure_lr: Learning rate of the exposures of training images, with ``trainer.exposure=affine``.
        view_lr_factor: Share of ``grid_lr`` at which channels learn that only matter for the viewing direction,
            harmonics of colour beyond the constant one (``view_channels`` of a
            :class:`voxelfield.fields.decoders.Decoder`); 3D Gaussian Splatting (Kerbl et al. 2023) uses 1/20 for its
            harmonics. 1 for a decoder without such channels.
        eps: Adam's floor on the root of the second moment.
        grid_decay: Decoupled weight decay of grids (Loshchilov and Hutter 2019), at the vertices that a step updates:
            what rays do not hold up sinks to zero.
        network_decay: Decoupled weight decay of everything else.
        skip_untouched: Leave vertices alone, moments too, that no sample of the step was near.
    """

    grid_lr: Positive = 0.02
    network_lr: Positive = 0.005
    exposure_lr: Positive = 0.01
    view_lr_factor: Positive = 1.0
    eps: NotNegative = 1e-15
    grid_decay: NotNegative = 0.05
    network_decay: NotNegative = 0.0
    skip_untouched: bool = True
