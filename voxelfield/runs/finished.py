"""Whether a run directory holds a finished run that has nothing left to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from voxelfield.components.registry import active
from voxelfield.evaluation.evaluation import picture_name
from voxelfield.messages import clipped
from voxelfield.run_directory import MODEL_FILE, PER_VIEW, REPORT, VIDEO, read_metrics
from voxelfield.settings import RunConfig
from voxelfield.training.checkpoints import changed_settings


def finished_metrics(directory: Path, settings: RunConfig) -> dict[str, Any] | None:
    """Returns the metrics of a run that has done everything configured, or None if something is missing.

    Raises:
        ValueError: The finished run in the directory has other settings; the message names the first.
    """
    try:
        metrics = read_metrics(directory)
    except (OSError, ValueError):
        return None
    if metrics["steps"] < settings.trainer.steps or not math.isfinite(metrics["psnr"]):
        return None
    saved = metrics["settings"]
    for key, (before, now) in changed_settings(saved, settings).items():
        raise ValueError(
            f"{key} must be that of the finished run in {directory}, {clipped(repr(before))}, for resume=auto, got "
            f"{clipped(repr(now))}: choose another hydra.run.dir, or leave resume out to train anew there"
        )
    if changed_settings(saved, settings, evaluation=True):
        return None  # the run was evaluated in another way
    return metrics if all((directory / name).is_file() for name in _results(metrics, settings)) else None


def _results(metrics: Mapping[str, Any], settings: RunConfig) -> Iterator[str]:
    """Yields the names of the files that a finished run has written."""
    config = settings.trainer
    yield PER_VIEW
    yield from (name for each in active(settings) for name in each.results)
    if config.model_file != "none":
        yield MODEL_FILE
    if config.evaluation.video_frames > 0:
        yield VIDEO
    if config.evaluation.report:
        yield REPORT
    if config.evaluation.save_images:
        yield from (f"{metrics['split']}/{picture_name(view)}" for view in metrics["psnr_per_view"])
