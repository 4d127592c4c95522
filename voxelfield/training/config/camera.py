"""Whether cameras are learned too, and how training then goes from coarse to fine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from voxelfield.config.parsing import Range
from voxelfield.config.types import BelowOne, Natural, Positive, Resolution
from voxelfield.training.config.trainer import StageConfig, TrainerConfig

Share: TypeAlias = Annotated[float, Range(0, 1, low_open=True)]


@dataclass
class CameraStageConfig:
    """From some share of the steps on, a resolution.

    Attributes:
        start: Share of ``trainer.steps``.
        resolution: Cube root of the number of voxels.
        crop: Crop the grid to occupied space first.
    """

    start: BelowOne
    resolution: Resolution
    crop: bool = False


def _default_stages() -> list[CameraStageConfig]:
    return [
        CameraStageConfig(0.0, 16),
        CameraStageConfig(0.1, 32),
        CameraStageConfig(0.2, 64),
        CameraStageConfig(0.3, 128, crop=True),
        CameraStageConfig(0.4, 256),
    ]


@dataclass
class CameraConfig:
    """Refinement of the training cameras; see :class:`voxelfield.training.camera_refinement.CameraRefinement`.

    Attributes:
        name: ``none``, or ``refine``: poses are learned along with the field.
        pose_lr: Learning rate of poses: about the radians, and the world units, that a pose can move by in a step.
        final_factor: Share of the rate that is left after the last step (exponential decay).
        warm_up: Share of the steps over which the rate rises from zero, because an empty field says nothing of poses.
        focal: Learn the focal length too: one factor on those of all images.
        focal_lr: Learning rate of its logarithm.
        focal_from: Share of the steps after which it is learned: fog, with which training begins, misleads it.
        search_poses: Number of poses in which a camera is tried if it shows little of its image as a stage begins
            (:class:`voxelfield.training.lost_cameras.LostCameras`); 0: none is looked for.
        test_steps: Steps in which each view that is judged has its own pose refined first, with the field as it is;
            0: none. The views then are judged with poses that their own images told.
        test_lr: Learning rate of these poses.
        stages: Resolutions from coarse to fine, in place of ``trainer.stages``. From ``finest_from`` on the resolution
            is that of the last of those; stages that are no coarser are left out.
        finest_from: Share of the steps.
        occupancy_from: Share of the steps from which the field is asked which cells are empty, if
            ``trainer.occupancy.start`` is no later.
    """

    name: Literal["none", "refine"] = "none"
    pose_lr: Positive = 5e-3
    final_factor: Share = 0.01
    warm_up: BelowOne = 0.02
    focal: bool = False
    focal_lr: Positive = 2e-3
    focal_from: BelowOne = 0.1
    search_poses: Natural = 128
    test_steps: Natural = 0
    test_lr: Positive = 1e-3
    stages: list[CameraStageConfig] = field(default_factory=_default_stages)
    finest_from: BelowOne = 0.5
    occupancy_from: BelowOne = 0.05

    @property
    def refines(self) -> bool:
        """Whether cameras are learned."""
        return self.name == "refine"

    def check(self, name: str) -> None:
        """Raises ValueError where settings do not fit one another."""
        starts = [stage.start for stage in self.stages] + [self.finest_from]
        if starts[0] != 0 or any(later <= earlier for earlier, later in pairwise(starts)):
            raise ValueError(f"{name}.stages must start at 0 and rise to {name}.finest_from, got {starts}")
        resolutions = [stage.resolution for stage in self.stages]
        if resolutions != sorted(resolutions):
            raise ValueError(f"{name}.stages must not become coarser, got resolutions {resolutions}")

    def schedule(self, trainer: TrainerConfig) -> TrainerConfig:
        """Returns the trainer's settings with the stages, and the start of pruning, that refinement asks for."""
        finest = trainer.stages[-1].resolution
        coarser = [stage for stage in self.stages if stage.resolution < finest]
        starts = [(stage.start, stage.resolution, stage.crop) for stage in coarser]
        starts.append((self.finest_from if coarser else 0.0, finest, False))
        # In a short run several may fall on one step, of which the last counts.
        stages = {
            round(start * trainer.steps): StageConfig(round(start * trainer.steps), resolution, crop)
            for start, resolution, crop in starts
        }
        prunes_from = max(trainer.occupancy.start, round(self.occupancy_from * trainer.steps))
        return replace(trainer, stages=list(stages.values()), occupancy=replace(trainer.occupancy, start=prunes_from))
