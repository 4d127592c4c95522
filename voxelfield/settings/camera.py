"""Settings of camera refinement, and its coarse-to-fine schedule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from voxelfield.config import BelowOne, Natural, Positive, Range, Resolution
from voxelfield.settings.trainer import StageConfig, TrainerConfig

Share: TypeAlias = Annotated[float, Range(0, 1, low_open=True)]

# The default of ``pose_from`` in normalised device coordinates: the fog has cleared by then.
_POSE_FROM_IF_FORWARD = 0.3


@dataclass
class CameraStageConfig:
    """A resolution, and the share of the steps after which it applies.

    Attributes:
        start: Start of the stage, as a share of ``trainer.steps``.
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
    """Refinement of the training cameras; see :class:`voxelfield.components.refinement.CameraRefinement`.

    Attributes:
        name: ``none``, or ``refine`` to optimise poses along with the field.
        pose_lr: Learning rate of poses: about the largest change of a pose per step, in radians and world units; in
            normalised device coordinates, the unit is the depth of the scene's centre.
        final_factor: Factor of the learning rates after the last step (exponential decay).
        warm_up: Share of the steps in which the rate rises from zero, because an empty field holds no information about
            poses. It begins at ``pose_from``.
        pose_from: Share of the steps before poses are refined; null means 0.3 for a field in normalised device
            coordinates, and 0 for others. If all cameras face the same way, fog contracts them towards their mean while
            it turns them about the centre of the scene, and a field with wrong depths then reproduces the training
            images nearly as well.
        focal: Also optimise the focal length, as one factor common to all images.
        focal_lr: Learning rate of the logarithm of this factor.
        focal_from: Share of the steps after which the focal length is optimised, unless ``pose_from`` is later: early
            in training, the field is fog, which misleads it.
        search_poses: Number of poses tried for a camera that reproduces little of its image at the beginning of a stage
            (:class:`voxelfield.components.lost_cameras.LostCameras`); 0 disables the search.
        test_steps: Number of steps in which the pose of each evaluated view is refined first, with the field fixed; 0
            for none. The views are then evaluated with poses derived from their own images.
        test_lr: Learning rate of these poses.
        stages: Resolutions from coarse to fine, in place of ``trainer.stages``. From ``finest_from`` on, the resolution
            is that of the last of ``trainer.stages``; stages that are not coarser are left out. An empty list keeps
            ``trainer.stages``, for poses that are wrong by only a few pixels.
        finest_from: Start of the finest resolution, as a share of the steps; only used with ``stages``.
        occupancy_from: Share of the steps after which the occupancy grid is updated from the field, unless
            ``trainer.occupancy.start`` is later.
    """

    name: Literal["none", "refine"] = "none"
    pose_lr: Positive = 5e-3
    final_factor: Share = 0.01
    warm_up: BelowOne = 0.02
    pose_from: BelowOne | None = None
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
        """Whether cameras are refined."""
        return self.name == "refine"

    def kept_steps(self, steps: int, *, forward: bool) -> int:
        """Returns the number of first steps with the given cameras.

        Args:
            steps: Number of steps of the training.
            forward: Whether the field lies in normalised device coordinates.
        """
        default = _POSE_FROM_IF_FORWARD if forward else 0.0
        return round((default if self.pose_from is None else self.pose_from) * steps)

    def check(self, name: str) -> None:
        """Raises ValueError if settings contradict each other."""
        if not self.stages:
            return
        starts = [stage.start for stage in self.stages] + [self.finest_from]
        if starts[0] != 0 or any(later <= earlier for earlier, later in pairwise(starts)):
            raise ValueError(f"{name}.stages must start at 0 and rise to {name}.finest_from, got {starts}")
        resolutions = [stage.resolution for stage in self.stages]
        if resolutions != sorted(resolutions):
            raise ValueError(f"{name}.stages must not become coarser, got resolutions {resolutions}")

    def schedule(self, trainer: TrainerConfig) -> TrainerConfig:
        """Returns the trainer's settings with the stages and the start of occupancy updates that refinement needs."""
        prunes_from = max(trainer.occupancy.start, round(self.occupancy_from * trainer.steps))
        occupancy = replace(trainer.occupancy, start=prunes_from)
        if not self.stages:
            return replace(trainer, occupancy=occupancy)
        finest = trainer.stages[-1].resolution
        coarser = [stage for stage in self.stages if stage.resolution < finest]
        starts = [(stage.start, stage.resolution, stage.crop) for stage in coarser]
        starts.append((self.finest_from if coarser else 0.0, finest, False))
        # In a short run several stages may start at the same step; the last one counts.
        stages = {
            round(start * trainer.steps): StageConfig(round(start * trainer.steps), resolution, crop)
            for start, resolution, crop in starts
        }
        return replace(trainer, stages=list(stages.values()), occupancy=occupancy)
