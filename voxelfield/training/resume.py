"""Checks whether a run can resume: from a checkpoint, or as a finished run that has nothing left to do."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from voxelfield.components.registry import active, keys_with, registered
from voxelfield.evaluation.evaluation import picture_name
from voxelfield.messages import clipped
from voxelfield.models.component import Component
from voxelfield.models.model import Model
from voxelfield.models.settings import reached_resolution
from voxelfield.run_directory import MODEL_FILE, PER_VIEW, REPORT, VIDEO, read_metrics
from voxelfield.settings import RunConfig
from voxelfield.trained.checkpoint_file import ADDED, check_state

logger = logging.getLogger(__name__)

# Entries of every checkpoint that are not states of components.
_OF_MODEL = ("field", "occupancy")
_OF_SESSION = ("step", "train_seconds", "rays", "untrained_error", "diverged", "optimizer", "data", "config")
_REQUIRED = (*_OF_SESSION, *_OF_MODEL, "rng", "cuda_rng")

# Settings that a run may change when it is resumed, which is worth a warning.
_CHANGEABLE = ("optimizer.", "trainer.", "camera.", "seed")


def check_names(model: Model, components: Sequence[Component]) -> None:
    """Raises ValueError unless the model and each component have different entries in checkpoints."""
    state = model.state_dict()
    own = [name for name in state if name not in _OF_MODEL]
    if len(own) + len(_OF_MODEL) > len(state):
        raise ValueError(
            f"{type(model).__name__}.state_dict must include the entries of Model.state_dict, "
            f"{' and '.join(_OF_MODEL)}, got {', '.join(state) or 'none'}"
        )
    names = [component.name for component in components]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"components must have names of their own, got {', '.join(map(repr, twice))}")
    for owner, used, others in ((f"{type(model).__name__}.state_dict", own, ()), ("components", names, state)):
        taken = [name for name in used if name in {*_REQUIRED, *ADDED, *others}]
        if taken:
            raise ValueError(f"{owner} must not have the name of another entry of checkpoints, got {taken[0]!r}")


def check_complete(checkpoint: Mapping[str, Any]) -> None:
    """Raises TypeError if an entry of a checkpoint is missing."""
    missing = [name for name in _REQUIRED if name not in checkpoint]
    if missing:
        raise TypeError(f"checkpoint must be one that load_checkpoint returned, got one without {missing[0]!r}")


def check_resumable(
    checkpoint: Mapping[str, Any], saved: RunConfig, present: RunConfig, model: Model, components: Sequence[Component]
) -> None:
    """Rejects a checkpoint that does not fit a session, and logs a warning about settings that differ.

    Raises:
        ValueError: As for :meth:`voxelfield.Session.restore`.
    """
    _check_box(saved, present)
    saved_cells, cells = (list(x.shape) for x in (checkpoint["occupancy"]["occupied"], model.occupancy.occupied))
    if saved_cells != cells:
        raise ValueError(
            f"trainer.occupancy.resolution must be that of the checkpoint, {saved_cells[0]}, got {cells[0]}"
        )
    for kind in registered():
        kind.of(present).check_resumed(kind.of(saved), model)
    _check_parts(checkpoint, model, components)
    steps = checkpoint["step"]
    reached, wanted = (reached_resolution(config.trainer.stages, steps) for config in (saved, present))
    if reached != wanted:
        raise ValueError(
            f"trainer.stages must have reached the resolution of the checkpoint at step {steps}, {reached}, got "
            f"{wanted}"
        )
    check_state("field", model.field, checkpoint["field"], model.grid.levels)
    check_state("occupancy", model.occupancy, checkpoint["occupancy"])
    changed = changed_settings(asdict(saved), present)
    warned = [f"{key} is {now} instead of {old}" for key, (old, now) in changed.items() if key.startswith(_CHANGEABLE)]
    if warned:
        logger.warning("settings differ from those of the checkpoint: %s", clipped("; ".join(warned), 500))


def _check_box(saved: RunConfig, present: RunConfig) -> None:
    """Rejects another box or warp of the scene."""
    warp, own = saved.recorded_warp, present.recorded_warp
    if warp is not own and (warp is None or not warp.agrees_with(own)):
        remedy = ""
        if warp is not None and own is not None and warp.is_forward_facing != own.is_forward_facing:
            remedy = f": set warp.ndc={str(warp.is_forward_facing).lower()}"
        raise ValueError(
            f"scene.aabb and the settings of warp must be those of the checkpoint ({warp}), got {own}{remedy}"
        )
    if warp is None and saved.scene.aabb != present.scene.aabb:
        boxes = ([list(corner) for corner in config.scene.aabb or ()] for config in (saved, present))
        raise ValueError("scene.aabb must be that of the checkpoint, {}, got {}".format(*boxes))


def _check_parts(checkpoint: Mapping[str, Any], model: Model, components: Sequence[Component]) -> None:
    """Rejects a checkpoint with the state of other components than this session has."""
    own = {component.name: component for component in components if component.state_dict()}
    saved = [name for name in checkpoint if name not in {*_REQUIRED, *ADDED, *model.state_dict()}]
    for name in {**own, **dict.fromkeys(saved)}:
        if (name in saved) == (name in own):
            continue
        kinds = {kind.name: kind for kind in registered()}
        if name not in kinds:
            before, now = (", ".join(each for each in names if each not in kinds) for names in (saved, own))
            raise ValueError(f"components must be those of the checkpoint, {before or 'none'}, got {now or 'none'}")
        if not kinds[name].switches():
            raise TypeError(f"checkpoint must be one that load_checkpoint returned, got one without {name!r}")
        (key, wanted), (_, got) = kinds[name].in_words(name in saved), kinds[name].in_words(name in own)
        raise ValueError(f"{key} must be {wanted}, as in the checkpoint, got {got}")
    model.check_state(checkpoint)
    for name, component in own.items():
        component.check_state(checkpoint[name])


# Settings on which no result depends. Numbers of steps are compared separately, because a run may be extended.
_WITHOUT_EFFECT = (
    *("resume", "device", "devices", "process_timeout", "logger", "data.download"),
    *("trainer.steps", "trainer.images", "trainer.chunk"),
    *("trainer.log_every", "trainer.preview_every", "trainer.preview_views"),
    *("trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.checkpoint_errors"),
)

# Settings of the evaluation and of the files written after training.
_AFTER_TRAINING = ("trainer.evaluation", "trainer.evaluation_background", "trainer.model_file")


def recorded_settings(settings: RunConfig) -> dict[str, Any]:
    """Returns a run's settings as JSON values, with lists in place of tuples, for ``metrics.json``."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return values


def changed_settings(saved: Mapping[str, Any], settings: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Compares settings on which training depends with the settings of an earlier run.

    Returns:
        The earlier and the present value by key, such as ``trainer.rates.grid``.

    Raises:
        TypeError: The saved settings are not plain values.
    """
    changes = _changes(json.loads(json.dumps(saved)), recorded_settings(settings))
    return {k: values for k, values in changes if not _is_among(k, (*_AFTER_TRAINING, *keys_with("after_training")))}


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
    if next(_changes(saved, recorded_settings(settings)), None) is not None:
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
