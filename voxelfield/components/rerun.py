"""Rerun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

        def log(step: int, shown: Mapping[str, Any]) -> None:
            recording.set_time("step", sequence=step)
            for tag, value in shown.items():
                recording.log(tag, value)

        return LibraryLogger(
            self.name,
            numbers=lambda step, values: log(step, {tag: rerun.Scalars(value) for tag, value in values.items()}),
            image=lambda step, tag, image: log(step, {tag: rerun.Image(image).compress(jpeg_quality=95)}),
            note=lambda step, tag, text: log(step, {tag: rerun.TextDocument(text, media_type="text/markdown")}),
            end=recording.disconnect,
            step=first_step,
        )
