"""Checks of a session's arguments, and its settings made from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from voxelfield import processes
from voxelfield.components.environment import choose_environment
from voxelfield.components.registry import active
from voxelfield.config import parse
from voxelfield.datasets.measures import check_visible
from voxelfield.datasets.poses import check_cameras_see, likely_mistake
from voxelfield.datasets.scene import Scene
from voxelfield.foundation.errors import shown
from voxelfield.models.component import Component, Loss
from voxelfield.models.model_config import ModelConfig
from voxelfield.rendering.march import Sampler
from voxelfield.settings import CameraConfig, OptimizerConfig, RunConfig, SceneConfig, TrainerConfig, complete
from voxelfield.warps.choice import WarpConfig
from voxelfield.warps.warp import Warp

logger = logging.getLogger(__name__)


# Types of a session's arguments, and the words for them in messages.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "scene": ((Scene,), "a voxelfield.Scene"),
    "model": ((ModelConfig, RunConfig, str), "a ModelConfig, the name of one or a RunConfig"),
    "trainer": ((TrainerConfig, str, type(None)), "a TrainerConfig, the name of a preset or None"),
    "optimizer": ((OptimizerConfig, str, type(None)), "an OptimizerConfig, the name of one or None"),
    "camera": ((CameraConfig, type(None)), "a CameraConfig or None"),
    "output": ((str, os.PathLike, type(None)), "a path or None"),
}


def check_types(
    losses: Mapping[str, Loss], components: Sequence[Component], sampler: Sampler, **arguments: object
) -> None:
    """Raises TypeError unless the arguments of a session have the right types."""
    checked = [(name, value, *_TYPES[name]) for name, value in arguments.items()]
    checked += [
        (f"components[{index}]", component, (Component,), "a voxelfield.models.Component")
        for index, component in enumerate(components)
    ]
    for name, value, types, words in checked:
        if not isinstance(value, types):
            raise TypeError(f"{name} must be {words}, got {shown(value)}")
    for name, loss in losses.items():
        if not callable(loss):
            raise TypeError(f"losses[{name!r}] must be a function of outputs and batch, got {shown(loss)}")
    if not callable(sampler):
        raise TypeError(f"sampler must be a function like visible_samples, got {shown(sampler)}")


def run_settings(
    scene: Scene,
    model: ModelConfig | RunConfig | str,
    trainer: TrainerConfig | str | None,
    optimizer: OptimizerConfig | str | None,
    camera: CameraConfig | None,
    warp: WarpConfig | Warp | None,
    device: torch.device | str | None,
    seed: int | None,
) -> RunConfig:
    """Returns all settings of a session, with the scene's box and the chosen warp; checks the scene.

    The arguments are those of :class:`voxelfield.Session`.
    """
    if isinstance(model, RunConfig):
        given = {"trainer": trainer, "optimizer": optimizer, "camera": camera, "device": device, "seed": seed}
        for name, value in given.items():
            if value is not None:
                raise TypeError(f"{name} must be None with the settings of a whole run, got {shown(value)}")
        config = parse(RunConfig, model)
        warp = config.warp if warp is None else warp
    if warp is None or isinstance(warp, WarpConfig):
        chooses = config.model if isinstance(model, RunConfig) else model
        if isinstance(chooses, str):
            chooses = parse(ModelConfig, {"kind": chooses}, "model")
        warp = chooses.choose_warp(scene, parse(WarpConfig, warp or {}, "warp"))
    if not isinstance(model, RunConfig):
        device, seed = "auto" if device is None else str(device), 0 if seed is None else seed
        config = complete(model, trainer, optimizer, camera, device=device, seed=seed, scene=scene, warp=warp)
    if len(scene.train) == 0:
        raise ValueError("scene.train must have at least one view, got none")
    if scene.train.cameras.c2w.is_cuda:
        raise ValueError(f"scene.train.cameras must be on the CPU, got {scene.train.cameras.c2w.device}")
    if config.model.environment == "auto":
        # Another background than the default was chosen by the user.
        environment = choose_environment(scene, warp) if config.trainer.background == "random" else "none"
        config.model = replace(config.model, environment=environment)
    low, high = scene.aabb.tolist() if warp is None else warp.aabb
    config.scene, config.warp = SceneConfig(scene.name, (tuple(low), tuple(high))), WarpConfig.of(warp)
    config.trainer = config.trainer.scaled(processes.count())
    for settings in active(config):
        config.trainer = settings.adapt(config.trainer)
    check_visible(scene.train)
    if warp is None:
        check_cameras_see(scene.train.cameras, scene.aabb)
    mistake = likely_mistake(scene.train.cameras.viewing_poses())
    if mistake is not None:
        logger.warning("%s", mistake)
    return config
