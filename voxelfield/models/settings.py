"""Settings of a model's training and sampling, which the trainer's configuration contains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from voxelfield.config import Count, Natural, NotNegative, Range, Resolution


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
class OccupancyUpdates:
    """Skipping of empty space.

    Attributes:
        resolution: Number of cells along each axis.
        start: Step of the first update; until then all cells count as occupied.
        every: Number of steps between updates.
        threshold: Opacity of a single sample above which a cell counts as occupied; lower while the field is a mist
            that is less opaque on average (:meth:`voxelfield.OccupancyGrid.update_from_vertices`).
    """

    resolution: Count = 192
    start: Natural = 100
    every: Count = 100
    threshold: Annotated[float, Range(0, 1, low_open=True, high_open=True)] = 0.01


@dataclass
class LossWeights:
    """Weights of the loss terms of :mod:`voxelfield.models.losses`; components have others.

    Attributes:
        sample_rgb: Colour error of single samples.
        distortion: Distance, in ``scene.unit``, between the samples that contribute to a ray.
        opacity_entropy: Binary entropy of the opacities of rays.
        sparsity: Cauchy penalty on the densities of the samples that are kept, per ``scene.unit``.
    """

    sample_rgb: NotNegative = 0.005
    distortion: NotNegative = 0.003
    opacity_entropy: NotNegative = 0.0
    sparsity: NotNegative = 0.0


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
