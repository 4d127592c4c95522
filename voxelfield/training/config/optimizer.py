"""Settings of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from voxelfield.config.types import NotNegative, Positive


@dataclass
class OptimizerConfig:
    """Settings of AdamW.

    Attributes:
        grid_lr: Learning rate of grids.
        network_lr: Learning rate of all other parameters of the field.
        exposure_lr: Learning rate of the exposures of training images, with ``trainer.exposure=affine``.
        view_lr_factor: Factor on ``grid_lr`` for channels that only describe view dependence, such as all but the
            constant spherical harmonic (``view_channels`` of a :class:`voxelfield.fields.decoders.Decoder`); 3D
            Gaussian Splatting (Kerbl et al. 2023) uses 1/20 for its harmonics. Must be 1 for a decoder without such
            channels.
        eps: Added to the square root of the second moment in Adam.
        grid_weight_decay: Decoupled weight decay of grids (Loshchilov and Hutter 2019), at the vertices that a step
            updates. It makes features decay to zero where the images do not sustain them.
        network_weight_decay: Decoupled weight decay of all other parameters of the field.
        skip_untouched: Do not update vertices, nor their moments, that no sample of the step has read.
    """

    grid_lr: Positive = 0.02
    network_lr: Positive = 0.005
    exposure_lr: Positive = 0.01
    view_lr_factor: Positive = 1.0
    eps: NotNegative = 1e-15
    grid_weight_decay: NotNegative = 0.05
    network_weight_decay: NotNegative = 0.0
    skip_untouched: bool = True
