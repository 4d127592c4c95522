"""A finished run, loaded again for rendering rather than for more training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from voxelfield.datasets.scene import Scene
from voxelfield.display import FieldRenderer, Way
from voxelfield.fields import RadianceField
from voxelfield.occupancy import OccupancyGrid
from voxelfield.training.checkpoint import load_checkpoint
from voxelfield.training.config import TrainerConfig, parse
from voxelfield.training.optimizer import copies_dtype
from voxelfield.training.run import build_field
from voxelfield.training.views import view_renderer


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """What a checkpoint holds of a scene.

    Attributes:
        field: The field, without gradients; its grids are in the dtype in which training on that device reads them.
        occupancy: Where there is something to sample.
        trainer: The loop's settings, of which the evaluation is part.
        config: The run's whole configuration.
        steps: Steps of training done.
    """

    field: RadianceField
    occupancy: OccupancyGrid
    trainer: TrainerConfig
    config: DictConfig
    steps: int

    def renderer(self, way: Way | None = None) -> FieldRenderer:
        """Returns what renders views as the run's own evaluation does.

        Args:
            way: As for :class:`voxelfield.FieldRenderer`.
        """
        return view_renderer(self.field, self.occupancy, self.trainer, way)


def load_run(path: Path | str, device: torch.device | str) -> TrainedRun:
    """Loads what a run has trained; none of its scene's files are needed.

    Args:
        path: A run directory or a checkpoint, see :func:`voxelfield.training.checkpoint.resolve_checkpoint`.
        device: Where field and occupancy go, such as ``"cuda"``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no usable checkpoint, or its configuration does not make sense.
    """
    device = torch.device(device)
    checkpoint = load_checkpoint(Path(path))
    config = OmegaConf.create(checkpoint["config"])
    trainer = parse(TrainerConfig, config.trainer, "trainer")
    aabb = torch.tensor(OmegaConf.to_container(config.scene.aabb), dtype=torch.float32)
    field = build_field(config.model, Scene(config.scene.name, aabb, {}), trainer)
    field.load_state_dict(checkpoint["field"])
    field.requires_grad_(False)
    field.grid.to(copies_dtype(trainer.precision, device))
    occupancy = OccupancyGrid(trainer.occupancy.resolution, aabb)
    occupancy.load_state_dict(checkpoint["occupancy"])
    return TrainedRun(field.to(device), occupancy.to(device), trainer, config, checkpoint["step"])
