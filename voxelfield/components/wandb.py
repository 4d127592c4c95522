"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from voxelfield.components.logger import LibraryLogger, LoggerSettings, RunLogger, run_name
from voxelfield.components.registry import key


@dataclass(frozen=True)
class WandbSettings(LoggerSettings):
    """The setting of Weights & Biases.

    Attributes:
        wandb: Whether Weights & Biases records the run, in the run's folder. Nothing is sent unless ``WANDB_MODE`` is
            ``online``; ``wandb sync`` sends it later.
    """

    name = package = "wandb"
    environment: ClassVar[Mapping[str, str]] = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",  # it would record what the terminal shows, progress bars included
        "WANDB_ERROR_REPORTING": "false",
    }
    wandb: bool = key("logger.wandb", False, off=False)

    def open(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> RunLogger:
        """Returns the logger. A run that is resumed is another run there; texts are in its summary."""
        wandb = self.library()
        run = wandb.init(project=self.project, name=run_name(folder, first_step), dir=folder, config=settings)
        return LibraryLogger(
            self.name,
            numbers=lambda step, values: run.log(values, step=step),
            image=lambda step, tag, image: run.log({tag: wandb.Image(image)}, step=step),
            note=lambda _, tag, text: run.summary.update({tag: text}),
            end=run.finish,
            step=first_step,
        )
