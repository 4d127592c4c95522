"""Detects finished runs, so that ``resume=auto`` neither repeats one nor mistakes another run for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from voxelfield.evaluation.evaluation import picture_name
from voxelfield.messages import clipped
from voxelfield.training.cameras.refined_cameras import CAMERAS_FILE
from voxelfield.training.config import RunConfig
from voxelfield.training.state.run_directory import METRICS, MODEL_FILE, PER_VIEW, REPORT, VIDEO

# Settings on which no result depends. Numbers of steps are compared separately, because a run may be extended.
_WITHOUT_EFFECT = (
    *("resume", "device", "devices", "process_timeout", "logger", "data.download"),
    *("trainer.steps", "trainer.images", "trainer.chunk"),
    *("trainer.log_every", "trainer.preview_every", "trainer.preview_views"),
    *("trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.checkpoint_errors"),
)

# Settings of the evaluation and of the files written after training.
_AFTER_TRAINING = (
    *("trainer.evaluation", "trainer.evaluation_background", "trainer.model_file"),
    *("camera.test_steps", "camera.test_lr"),
)


def recorded_settings(settings: RunConfig) -> dict[str, Any]:
    """Returns a run's settings as JSON values, with lists in place of tuples, for ``metrics.json``."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return values


def changed_settings(saved: Mapping[str, Any], settings: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Compares settings on which training depends with those of an earlier run.

    Returns:
        The earlier and the present value by key, such as ``trainer.rates.grid``.

    Raises:
        TypeError: The saved settings are not plain values.
    """
    changes = _changes(json.loads(json.dumps(saved)), recorded_settings(settings))
    return {key: values for key, values in changes if not _is_among(key, _AFTER_TRAINING)}


def finished_metrics(directory: Path, settings: RunConfig) -> dict[str, Any] | None:
    """Returns the metrics of a run that has done everything configured, or None if something is missing.

    Raises:
        ValueError: The finished run in the directory has other settings; the message names the first.
    """
    metrics = read_metrics(directory / METRICS)
    if metrics is None or metrics["steps"] < settings.trainer.steps:
        return None
    saved = metrics["settings"]
    for key, (before, now) in changed_settings(saved, settings).items():
        raise ValueError(
            f"{key} must be that of the finished run in {directory}, {clipped(repr(before))}, for resume=auto, got "
            f"{clipped(repr(now))}: choose another hydra.run.dir, or leave resume out to train anew there"
        )
    if next(_changes(saved, recorded_settings(settings)), None) is not None:
        return None  # the run was evaluated in another way
    return metrics if all((directory / name).is_file() for name in _results(metrics, settings)) else None


def read_metrics(path: Path) -> dict[str, Any] | None:
    """Returns the content of a ``metrics.json``; None if it does not exist or is not one of voxelfield's."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    kinds: dict[str, Any] = {"psnr": (int, float), "steps": int, "settings": dict, "psnr_per_view": dict, "split": str}
    if not isinstance(metrics, dict) or not all(isinstance(metrics.get(key), kind) for key, kind in kinds.items()):
        return None
    return metrics if math.isfinite(metrics["psnr"]) else None


def _results(metrics: Mapping[str, Any], settings: RunConfig) -> Iterator[str]:
    """Yields the names of the files that a finished run has written."""
    config = settings.trainer
    yield PER_VIEW
    if settings.camera.refines:
        yield CAMERAS_FILE
    if config.model_file != "none":
        yield MODEL_FILE
    if config.evaluation.video_frames > 0:
        yield VIDEO
    if config.evaluation.report:
        yield REPORT
    if config.evaluation.save_images:
        yield from (f"{metrics['split']}/{picture_name(view)}" for view in metrics["psnr_per_view"])


def _changes(saved: Mapping[str, Any], present: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in present.items():
        key = f"{prefix}{name}"
        before = saved.get(name)
        if _is_among(key, _WITHOUT_EFFECT):
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            yield from _changes(before, value, f"{key}.")
        elif before != value:
            yield key, (before, value)


def _is_among(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)
