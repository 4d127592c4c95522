"""Writing a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from voxelfield.files import atomic_write
from voxelfield.report.history import read_history
from voxelfield.report.page import make_page
from voxelfield.report.record import RunRecord
from voxelfield.report.surroundings import commands, finishing_time, logged_warnings
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.training.config import RunConfig
from voxelfield.training.state.run_directory import REPORT


def write_report(
    directory: Path,
    metrics: Mapping[str, Any],
    config: RunConfig,
    thumbnails: Thumbnails,
    *,
    path: Path | None = None,
) -> Path:
    """Writes the report of a run, whole or not at all.

    Args:
        directory: Run directory, whose records and log are read.
        metrics: What is in its ``metrics.json``.
        config: All settings of the run.
        thumbnails: Thumbnails of the evaluated views.
        path: File to write; None: ``report.html`` in the directory.

    Returns:
        The file.

    Raises:
        OSError: It cannot be written.
    """
    record = RunRecord(
        metrics,
        config,
        thumbnails.pictures(),
        read_history(directory),
        commands(directory),
        logged_warnings(directory),
        finishing_time(directory),
    )
    path = directory / REPORT if path is None else path
    page = make_page(record).encode("utf-8", errors="replace")
    with atomic_write(path) as file:
        file.write(page)
    return path
