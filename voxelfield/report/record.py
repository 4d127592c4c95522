"""The content of a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from voxelfield.report.history import Curve, History
from voxelfield.report.thumbnails import ViewPictures
from voxelfield.training.config import RunConfig


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A finished run, as its report shows it.

    Attributes:
        metrics: What is in ``metrics.json``.
        config: All settings of the run.
        pictures: Pictures of the evaluated views, by view name; some views may have none.
        history: What was recorded while it trained.
        commands: Purposes with the shell commands that serve them.
        logged: Warnings in the run's log.
        finished: When it was, in words; empty if that is not known.
    """

    metrics: Mapping[str, Any]
    config: RunConfig
    pictures: Mapping[str, ViewPictures] = field(default_factory=dict)
    history: History = field(default_factory=dict)
    commands: tuple[tuple[str, str], ...] = ()
    logged: tuple[str, ...] = ()
    finished: str = ""

    def curve(self, tag: str) -> Curve:
        """Returns what was recorded under a tag; nothing if there is no such tag."""
        return self.history.get(tag, ())

    def last(self, tag: str) -> float | None:
        """Returns the last value that was recorded under a tag, or None."""
        curve = self.curve(tag)
        return curve[-1][1] if curve else None
