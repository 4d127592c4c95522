"""Settles the settings of a run, once its scene is loaded: the one place in which they depend on the scene."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from voxelfield import processes
from voxelfield.components.environment import choose_environment
from voxelfield.components.registry import active
from voxelfield.config import parse
from voxelfield.datasets.measures import check_visible
from voxelfield.datasets.poses import check_cameras_see, likely_mistake
from voxelfield.datasets.scene import Scene
from voxelfield.foundation.errors import shown
from voxelfield.grids.boxes import length_unit
from voxelfield.installed import config_folder
from voxelfield.models.model_config import ModelConfig, known_models
from voxelfield.rendering.cameras import fraction_through_box
from voxelfield.settings.presets import compose, composition_error, config_name
from voxelfield.settings.schema import CameraConfig, OptimizerConfig, RunConfig, SceneConfig, TrainerConfig
from voxelfield.warps.choice import WarpConfig
from voxelfield.warps.warp import Warp

logger = logging.getLogger(__name__)


class ResolvedConfig(RunConfig):
    """The settings of a run as :func:`resolve` has settled them for its scene."""


# With fewer photographs, training memorises them pixel by pixel unless it is short and fine levels decay.
_MANY_PHOTOGRAPHS = 100

# The largest min_weight for a scene that goes on beyond a box. It begins as a mist, whose samples have small weights:
# with 1e-3, photographs of a place trained to 16 dB instead of 33.
_FAINTEST = 1e-4

# Why trainer=auto stands for a file in configs/trainer.
_REASONS = {
    "default": "a scene that ends at its box, and for models other than pyramid",
    "few_photographs": "this number of photographs",
    "forward_facing": "photographs that all face the same way",
    "many_photographs": "this number of photographs",
}

# Types of a session's arguments, and the words for them in messages.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "scene": ((Scene,), "a voxelfield.Scene"),
    "model": ((ModelConfig, RunConfig, str), "a ModelConfig, the name of one or a RunConfig"),
    "trainer": ((TrainerConfig, str, type(None)), "a TrainerConfig, the name of a preset or None"),
    "optimizer": ((OptimizerConfig, str, type(None)), "an OptimizerConfig, the name of one or None"),
    "camera": ((CameraConfig, type(None)), "a CameraConfig or None"),
}


def resolve(settings: RunConfig, scene: Scene, warp: Warp | None) -> ResolvedConfig:
    """Returns the settings that the steps of a run follow and its checkpoints record; checks the scene.

    The result has the box of the scene, the settings from which its warp is made again, the background that
    ``model.environment=auto`` stands for, the schedule of camera refinement, as many rays as the box needs, and a
    threshold for faint samples that suits the scene. The given settings are those of :func:`planned`.

    Raises:
        ValueError: The scene has no training view, or none that shows anything or sees its box.
    """
    cameras = scene.train.cameras
    if len(scene.train) == 0:
        raise ValueError("scene.train must have at least one view, got none")
    if cameras.c2w.is_cuda:
        raise ValueError(f"scene.train.cameras must be on the CPU, got {cameras.c2w.device}")
    model, trainer = settings.model, settings.trainer
    if model.environment == "auto":
        # Another background than the default was chosen by the user.
        environment = choose_environment(scene, warp) if trainer.background == "random" else "none"
        model = replace(model, environment=environment)
    low, high = scene.aabb.tolist() if warp is None else warp.aabb
    for each in active(settings):
        trainer = each.adapt(trainer)
    check_visible(scene.train)
    if warp is None:
        check_cameras_see(cameras, scene.aabb, scene.format)
        trainer = trainer.with_rays_that_miss(fraction_through_box(cameras, torch.tensor((low, high))))
    elif trainer.render.min_weight > _FAINTEST:
        logger.info("trainer.render.min_weight is %g: the scene goes on beyond a box", _FAINTEST)
        trainer = replace(trainer, render=replace(trainer.render, min_weight=_FAINTEST))
    mistake = likely_mistake(cameras.viewing_poses(), scene.format)
    if mistake is not None:
        logger.warning("%s", mistake)
    corners = (tuple(low), tuple(high))
    # The warp for cameras that all face the same way has a unit of its own.
    own = length_unit(corners) if warp is None or not warp.is_forward_facing else 1.0
    box = SceneConfig(scene.name, corners, origin=cast("Any", scene.origin), unit=settings.scene.unit or own)
    settled = {"scene": box, "warp": WarpConfig.of(warp), "model": model, "trainer": trainer}
    return ResolvedConfig(**vars(settings) | settled)


def trainer_for(scene: Scene, warp: Warp | None, model: str) -> str:
    """Returns the file in ``configs/trainer`` that ``trainer=auto`` stands for.

    Presets for photographs are meant for scenes with a warp, which consist of photographs of a place, and for the
    default file in ``configs/model``.
    """
    if warp is None or model != "pyramid":
        return "default"
    if sum(len(split) for split in scene.splits.values()) >= _MANY_PHOTOGRAPHS:
        return "many_photographs"
    return "forward_facing" if warp.is_forward_facing else "few_photographs"


def completed(given: dict[str, Any], scene: Scene, warp: Warp | None, device: str) -> RunConfig:
    """Returns settings in which everything not given has the value of ``python train.py model=NAME``.

    Hydra is only used, and needs to be installed, if something is not given. The trainer depends on the scene and its
    warp unless it is given (:func:`trainer_for`).

    Args:
        given: Settings by their key, or the names of their files; None for those that are not given. There is a model.
        scene: The scene.
        warp: The warp of the scene's field.
        device: Device of the run.
    """
    values = {key: value for key, value in given.items() if not isinstance(value, str | None)}
    files = {group: given.get(group) for group in ("model", "trainer", "optimizer") if group not in values}
    if files:
        kind, name = given["model"] if "model" in files else given["model"].kind, config_name(device)
        if given.get("trainer") == "auto" or (given.get("trainer") is None and name == "train"):
            chosen = trainer_for(scene, warp, kind)
            files["trainer"] = files["trainer"] if chosen == "default" else chosen
        # A model that is not declared anywhere has no file, but can be trained nevertheless.
        files["model"] = kind if "model" in files or kind in known_models() else None
        import hydra.errors

        try:
            choices = (f"{group}={file}" for group, file in files.items() if file is not None)
            composed = compose(*choices, device=device, name=name)
        except hydra.errors.MissingConfigException as error:
            raise ValueError(composition_error(error)) from error
        values = cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True)) | values
    return parse(RunConfig, values | {"device": device})


def planned(settings: RunConfig) -> RunConfig:
    """Returns the settings that the processes of a run follow together, as ``trainer.scaling`` says."""
    return replace(settings, trainer=settings.trainer.scaled(processes.count()))


def resolve_arguments(
    scene: Scene,
    model: ModelConfig | RunConfig | str,
    trainer: TrainerConfig | str | None,
    optimizer: OptimizerConfig | str | None,
    camera: CameraConfig | None,
    warp: WarpConfig | Warp | None,
    device: torch.device | str | None,
    seed: int | None,
) -> ResolvedConfig:
    """Returns the settings of a session from its arguments, which are those of :class:`voxelfield.Session`."""
    given: dict[str, Any] = {"trainer": trainer, "optimizer": optimizer, "camera": camera}
    for name, value in {"scene": scene, "model": model, **given}.items():
        types, words = _TYPES[name]
        if not isinstance(value, types):
            raise TypeError(f"{name} must be {words}, got {shown(value)}")
    config = None
    if isinstance(model, RunConfig):
        settled = {"warp": warp} if isinstance(model, ResolvedConfig) else {}
        for name, value in {**given, "device": device, "seed": seed, **settled}.items():
            if value is not None:
                raise TypeError(f"{name} must be None with the settings of a whole run, got {shown(value)}")
        if isinstance(model, ResolvedConfig):
            return model
        config = parse(RunConfig, model)
        warp = config.warp if warp is None else warp
        model = config.model
    if warp is None or isinstance(warp, WarpConfig):
        chooses = parse(ModelConfig, {"kind": model}, "model") if isinstance(model, str) else model
        warp = chooses.choose_warp(scene, parse(WarpConfig, warp or {}, "warp"))
    if config is None:
        given |= {"model": model, "seed": seed}
        config = completed(given, scene, warp, "auto" if device is None else str(device))
    return resolve(planned(config), scene, warp)


@dataclass
class AutoTrainer:
    """The choice of ``trainer=auto``, which depends on the scene.

    Attributes:
        composed: The composed configuration, with interpolations.
        overrides: The overrides of which it was composed.
        model: The file in ``configs/model``.
        record: Folder in which ``config.yaml`` and ``overrides.yaml`` are written again; None writes nothing.
    """

    composed: DictConfig
    overrides: Sequence[str]
    model: str
    record: Path | None = None

    def choose(self, settings: RunConfig, scene: Scene, warp: Warp | None) -> RunConfig:
        """Returns the composed settings with the preset for a scene, in which the user's own settings are kept.

        Raises:
            ValueError: A setting contradicts those of the preset.
        """
        name = trainer_for(scene, warp, self.model)
        logger.info("trainer=%s is the default for %s", name, _REASONS[name])
        if name == "default":
            return settings
        merged = self._merged(name)
        if self.record is not None:
            OmegaConf.save(merged, self.record / "config.yaml")
            OmegaConf.save(OmegaConf.create([*self.overrides, f"trainer={name}"]), self.record / "overrides.yaml")
        both = (OmegaConf.to_container(config, resolve=True) for config in (self.composed, merged))
        before, after = (cast("dict[str, Any]", values) for values in both)
        differing = {key: value for key, value in after.items() if value != before[key]}
        groups = {key: parse(type(getattr(settings, key)), value, key) for key, value in differing.items()}
        chosen = replace(settings, **groups)
        chosen.check("")
        return chosen

    def _merged(self, name: str) -> DictConfig:
        """Returns the configuration with a preset merged under the overrides, which refer to its values."""
        from hydra.core.override_parser.overrides_parser import OverridesParser

        merged = copy.deepcopy(self.composed)
        with open_dict(merged):
            folder = config_folder() / "trainer"
            preset, auto = (OmegaConf.merge(asdict(TrainerConfig()), *_files(folder, file)) for file in (name, "auto"))
            # Other files of the configuration, such as a user's own, may have set keys of the trainer too.
            present, base = (OmegaConf.to_container(values, resolve=False) for values in (merged.trainer, auto))
            merged.trainer = OmegaConf.merge(preset, _differing(present, base))
            for override in OverridesParser.create().parse_overrides(list(self.overrides)):
                key = override.key_or_group
                if not key.startswith("trainer."):
                    continue
                if override.is_delete():
                    parent, _, last = key.rpartition(".")
                    cast("DictConfig", OmegaConf.select(merged, parent)).pop(last, None)
                else:
                    OmegaConf.update(merged, key, override.value(), merge=True)
        return merged


def _differing(present: Any, base: Any) -> dict[str, Any]:
    """Returns the values of nested mappings that differ from those of others."""
    found = {}
    for key, value in present.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := _differing(value, before):
                found[key] = inner
        elif value != before:
            found[key] = value
    return found


def _files(folder: Path, name: str) -> list[Any]:
    """Returns the content of a file in ``configs/``, after that of the files in its list of defaults."""
    content = cast("DictConfig", OmegaConf.load(folder / f"{name}.yaml"))
    bases = [base for base in content.pop("defaults", ()) if base != "_self_"]
    return [*(file for base in bases for file in _files(folder, base)), content]
