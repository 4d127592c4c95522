"""Checks whether a session can resume from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from voxelfield.messages import clipped
from voxelfield.models.model import Model
from voxelfield.models.part import Part
from voxelfield.models.settings import reached_resolution
from voxelfield.training.config import RunConfig
from voxelfield.training.muon import network_matrices
from voxelfield.training.state.checkpoint import ADDED, check_state
from voxelfield.training.state.finished import changed_settings

logger = logging.getLogger(__name__)

# Entries of every checkpoint that are not states of parts.
_OF_MODEL = ("field", "occupancy")
_OF_SESSION = ("step", "train_seconds", "rays", "untrained_error", "diverged", "optimizer", "average", "data", "config")
_REQUIRED = (*_OF_SESSION, *_OF_MODEL, "rng", "cuda_rng")

# Settings that a run may change when it is resumed, which is worth a warning.
_CHANGEABLE = ("optimizer.", "trainer.", "camera.", "seed")

# The settings that choose parts with a state, and their values if they do and if they do not.
_SETTINGS_OF_PARTS = {
    "cameras": ("camera.name", "refine", "none"),
    "robust": ("trainer.loss.robust", "positive", "0"),
}


def check_names(model: Model, parts: Sequence[Part]) -> None:
    """Raises ValueError unless the model and each part have entries of checkpoints of their own."""
    state = model.state_dict()
    own = [name for name in state if name not in _OF_MODEL]
    if len(own) + len(_OF_MODEL) > len(state):
        raise ValueError(
            f"{type(model).__name__}.state_dict must include the entries of Model.state_dict, "
            f"{' and '.join(_OF_MODEL)}, got {', '.join(state) or 'none'}"
        )
    taken = [name for name in own if name in {*_REQUIRED, *ADDED}]
    if taken:
        raise ValueError(
            f"{type(model).__name__}.state_dict must not have the name of another entry of checkpoints, "
            f"got {taken[0]!r}"
        )
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"parts must have names of their own, got {', '.join(map(repr, names))}")
    taken = [name for name in names if name in {*_REQUIRED, *ADDED, *state}]
    if taken:
        raise ValueError(f"parts must not have the name of another entry of checkpoints, got {taken[0]!r}")


def check_complete(checkpoint: Mapping[str, Any]) -> None:
    """Raises TypeError if an entry of a checkpoint is missing."""
    missing = [name for name in _REQUIRED if name not in checkpoint]
    if missing:
        raise TypeError(f"checkpoint must be one that load_checkpoint returned, got one without {missing[0]!r}")


def check_resumable(
    checkpoint: Mapping[str, Any], saved: RunConfig, present: RunConfig, model: Model, parts: Sequence[Part]
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
    behind = checkpoint["config"]["model"]["environment"]
    if behind != present.model.environment:
        raise ValueError(f"model.environment must be {behind}, as in the checkpoint, got {present.model.environment}")
    for name in ("exposure", "vignetting", "response"):
        before, now = (str(getattr(config.trainer, name)).lower() for config in (saved, present))
        if before != now:
            raise ValueError(f"trainer.{name} must be {before}, as in the checkpoint, got {now}")
    update, own_update = saved.optimizer.matrices, present.optimizer.matrices
    if update != own_update and network_matrices(model.field):
        raise ValueError(f"optimizer.matrices must be {update}, as in the checkpoint, got {own_update}")
    _check_parts(checkpoint, model, parts)
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


def _check_parts(checkpoint: Mapping[str, Any], model: Model, parts: Sequence[Part]) -> None:
    """Rejects a checkpoint with the state of other parts than this session has."""
    own = {part.name: part for part in parts if part.state_dict()}
    saved = [name for name in checkpoint if name not in {*_REQUIRED, *ADDED, *model.state_dict()}]
    for name in {**own, **dict.fromkeys(saved)}:
        if (name in saved) == (name in own):
            continue
        if name not in _SETTINGS_OF_PARTS:
            raise ValueError(
                f"parts must be those of the checkpoint, {', '.join(saved) or 'none'}, got {', '.join(own) or 'none'}"
            )
        key, chosen, other = _SETTINGS_OF_PARTS[name]
        wanted, got = (chosen, other) if name in saved else (other, chosen)
        raise ValueError(f"{key} must be {wanted}, as in the checkpoint, got {got}")
    model.check_state(checkpoint)
    for name, part in own.items():
        part.check_state(checkpoint[name])
