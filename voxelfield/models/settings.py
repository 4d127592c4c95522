"""Settings of a model's training and sampling, which the trainer's configuration contains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from voxelfield.config import BelowOne, Count, Natural, NotNegative, Range, Resolution


@dataclass
class StageConfig:
    """One stage of the coarse-to-fine schedule.

    Attributes:
        step: First step of the stage.
        resolution: Cube root of the number of voxels; voxels are cubes, so a flat box gets fewer along its short axes.
            A pyramid activates its levels up to this resolution.
        crop: Crop the box to occupied space first.
    """

    step: Natural
    resolution: Resolution
    crop: bool = False


@dataclass
class OccupancyConfig:
    """Skipping of empty space.

    Attributes:
        resolution: Number of cells along each axis.
        start: Step of the first update; until then all cells count as occupied.
        every: Number of steps between updates.
        threshold: Opacity of a single sample above which a cell counts as occupied; lower while the field is a mist
            that is less opaque on average (:meth:`voxelfield.OccupancyGrid.update_from_vertices`).
        hidden_at: Share of the steps after which the cells that no training image shows are emptied permanently, but
            not before ``start``, nor before the last stage has lasted as long as all earlier ones. A field has matter
            there that nothing has taught it, which views from other sides may show. 0 keeps these cells. They are also
            kept where cameras are learned, where the field has a warp, and where its density depends on values of rays.
    """

    resolution: Count = 128
    start: Natural = 100
    every: Count = 50
    threshold: Annotated[float, Range(0, 1, low_open=True, high_open=True)] = 0.01
    hidden_at: BelowOne = 0.5

    def hidden_step(self, steps: int, stages: Sequence[StageConfig]) -> int | None:
        """Returns the step of ``hidden_at`` in a training of a number of steps; None if it is not reached."""
        if self.hidden_at == 0:
            return None
        # A young level moves matter into cells that are still hidden. A crop, too, makes cells occupied again.
        last = max(stage.step for stage in stages if stage.step < steps)
        step = max(self.start, 2 * last, min(round(self.hidden_at * steps), steps - 1))
        return step if step < steps else None


@dataclass
class LossConfig:
    """Weights of the loss terms, and the schedule of the terms on the grid; see :mod:`voxelfield.models.losses`.

    Attributes:
        structure: Squared error relative to the local variance of the photographs, for sharper texture of low contrast.
            Where a photograph is flat, a weight of 9e-4 doubles the photometric loss; where it has contrast, it adds
            less. ``trainer=many_photographs`` uses 2.5e-3; 0.0135 was too much on the same capture. Meant for opaque
            photographs: transparent pixels count as black. Keeps one byte for each training pixel.
        depth: Log-distance between ray termination and the scene's depths (:mod:`voxelfield.components.depth`); 0.3 is
            enough. A run loads its scene with depths, and refuses one without. Keeps four bytes for each training
            pixel, and two more for the reliability of sparse points.
        sample_rgb: Colour error of single samples.
        ssim: 1 - SSIM of patches of pixels; requires patches (``trainer.patches``).
        distortion: Distance, in world units, between the samples that contribute to a ray.
        opacity_entropy: Binary entropy of the opacities of rays.
        sparsity: Cauchy penalty on the densities of samples.
        exposure: Squared deviation of the exposure corrections from the identity, with ``trainer.exposure=affine``.
        tones: Squared deviation of ``trainer.vignetting`` and ``trainer.response`` from the identity.
        tv_features: Squared differences between the features of neighbouring vertices, summed over the vertices that
            are updated, in each active dense level by itself. A sum, not a mean, so that levels of all resolutions are
            equally smooth. Only its gradient is computed, so it is not among the logged terms.
        tv_every: Number of steps between applications of total variation (each weighted by this number).
        tv_until: First step without total variation.
        robust: Squared error, as a multiple of the mean, above which a pixel is unlike the field. Parts of photographs
            that consist of such pixels show something that moves and are ignored by all terms that compare colours
            (:class:`voxelfield.components.robust.RobustWeights`). 4 suits photographs with passers-by; 0 ignores
            nothing.
        robust_from: Share of the steps before which nothing is ignored, because the field does not show the scene yet.
        robust_every: Number of steps between decisions on what is ignored.
        robust_cells: Largest number of cells along the longer side of the photographs; what is ignored consists of
            cells. Each takes about 25 bytes on the device.
        sharpness: Exponent of the weights of blurred photographs in all terms that compare colours
            (:func:`voxelfield.components.sharpness.sharpness_weights`); with 0 all photographs count alike.
    """

    structure: NotNegative = 0.0
    depth: NotNegative = 0.0
    sample_rgb: NotNegative = 0.005
    ssim: NotNegative = 0.0
    distortion: NotNegative = 0.003
    opacity_entropy: NotNegative = 0.0
    sparsity: NotNegative = 0.0
    exposure: NotNegative = 1e-3
    tones: NotNegative = 1e-3
    tv_features: NotNegative = 0.0
    tv_every: Count = 10
    tv_until: Natural = 0
    robust: NotNegative = 0.0
    robust_from: BelowOne = 0.1
    robust_every: Count = 50
    robust_cells: Count = 48
    sharpness: NotNegative = 0.0


@dataclass(frozen=True)
class Sampling:
    """How rays are sampled and views are drawn, at any resolution of the grid.

    Attributes:
        voxels_per_step: Distance between samples, in voxels.
        min_transmittance: A ray stops once its transmittance falls below this.
        min_weight: Samples with a smaller compositing weight are dropped.
        precision: Autocast dtype of the field.
        supersampling: Number of rays along each side of a pixel of a view.
        pixel_averaging: Values that are averaged over a pixel's rays (:class:`voxelfield.FieldRenderer`).
        background: Colour behind views.
        chunk: Number of rays per chunk where views are rendered by :func:`voxelfield.rendering.render.render_view`.
    """

    voxels_per_step: float = 0.8
    min_transmittance: float = 1e-4
    min_weight: float = 1e-4
    precision: torch.dtype = torch.float32
    supersampling: int = 1
    pixel_averaging: str = "linear_light"
    background: Literal["white", "black"] = "white"
    chunk: int = 1 << 16


def stage_at(stages: Sequence[StageConfig], step: int) -> int:
    """Returns the index of the stage to which a step belongs."""
    return max(index for index, stage in enumerate(stages) if stage.step <= step)


def reached_resolution(stages: Sequence[StageConfig], steps: int) -> int:
    """Returns the resolution of the stage to which the last of a number of steps belongs."""
    return stages[stage_at(stages, max(steps - 1, 0))].resolution
