"""Rerun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from voxelfield.components.logger import LibraryLogger, LoggerSettings, RunLogger, run_name
from voxelfield.components.registry import key


@dataclass(frozen=True)
class RerunSettings(LoggerSettings):
    """The setting of Rerun.

    Attributes:
        rerun: Whether Rerun records the run, in ``rerun_STEP.rrd`` in its folder, from the step at which training
            begins or is resumed.
    """

    name = package = "rerun"
    rerun: bool = key("logger.rerun", False, off=False)

    def open(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> RunLogger:
        """Returns the logger. Images are compressed as JPEG; the text ``config`` has the settings."""
        rerun = self.library()
        recording = rerun.RecordingStream(self.project, recording_id=run_name(folder, first_step))
        recording.save(folder / f"rerun_{first_step:07d}.rrd")

        def record(step: int, values: Mapping[str, Any]) -> None:
            recording.set_time("step", sequence=step)
            for tag, value in values.items():
                if isinstance(value, str):
                    shown = rerun.TextDocument(value, media_type="text/markdown")
                elif isinstance(value, np.ndarray):
                    shown = rerun.Image(value).compress(jpeg_quality=95)
                else:
                    shown = rerun.Scalars(value)
                recording.log(tag, shown)

        return LibraryLogger(record, recording.disconnect, first_step)
