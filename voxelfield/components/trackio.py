"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxelfield.components.logger import LibraryLogger, LoggerSettings, RunLogger, run_name
from voxelfield.components.registry import key


@dataclass(frozen=True)
class TrackioSettings(LoggerSettings):
    """The setting of Trackio.

    Attributes:
        trackio: Whether Trackio records the run, in ``TRACKIO_DIR`` or, without it, in the folder of this machine that
            ``trackio show`` shows.
    """

    name = package = "trackio"
    trackio: bool = key("logger.trackio", False, off=False)

    def open(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> RunLogger:
        """Returns the logger. A run that is resumed is another run there."""
        trackio = self.library()
        # A run of the same name is one in the same folder, which this one repeats.
        named = {"project": self.project, "name": run_name(folder, first_step), "resume": "allow"}
        run = trackio.init(**named, config=settings)
        return LibraryLogger(
            self.name,
            numbers=lambda step, values: run.log(values, step=step),
            image=lambda step, tag, image: run.log({tag: trackio.Image(image)}, step=step),
            note=lambda step, tag, text: run.log({tag: trackio.Markdown(text)}, step=step),
            end=run.finish,
            step=first_step,
        )
