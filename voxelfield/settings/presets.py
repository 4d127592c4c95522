"""Settings by the names of the files in ``configs/``, composed for Python code as on the command line."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import asdict
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from voxelfield.config import parse, unknown_key
from voxelfield.datasets.loading import find_scene
from voxelfield.datasets.scene import Scene
from voxelfield.devices import choose_device
from voxelfield.installed import config_folder
from voxelfield.messages import clipped
from voxelfield.models.model_config import ModelConfig
from voxelfield.models.registry import announced_models, model_names
from voxelfield.settings.camera import CameraConfig
from voxelfield.settings.run import RunConfig
from voxelfield.settings.trainer import OptimizerConfig, TrainerConfig
from voxelfield.warps.warp import Warp

logger = logging.getLogger(__name__)


def config_name(device: str = "auto") -> str:
    """Returns the name of the primary config in ``configs/``: without a GPU, one that a CPU trains in minutes.

    Args:
        device: As for :func:`voxelfield.devices.choose_device`.
    """
    return "train" if choose_device(device).type == "cuda" else "train_cpu"


# With fewer photographs, training memorises them pixel by pixel unless it is short and fine levels decay.
_MANY_PHOTOGRAPHS = 100


# Settings that rule out a preset with sparse levels.
_RESOLUTION_SETTINGS = frozenset(
    ("trainer.finest_resolution", "trainer.sparse_resolutions", "trainer.stages", "model.resolutions")
)

REASONS = {
    "default": "a scene that ends at its box, and for models other than pyramid",
    "few_photographs": "this number of photographs",
    "few_photographs_dense": "this number of photographs with settings that rule out sparse levels",
    "forward_facing": "photographs that all face the same way",
    "many_photographs": "this number of photographs",
    "unbounded": "this number of photographs with settings that rule out sparse levels",
}
"""Why ``trainer=auto`` stands for a file in ``configs/trainer``, by its name."""


def trainer_for(scene: Scene, warp: Warp | None, model: str, *, keys: Collection[str], refines: bool) -> str:
    """Returns the file in ``configs/trainer`` that ``trainer=auto`` stands for.

    Presets with sparse levels are left out if cameras are refined, which does not support them, and if the user has
    chosen resolutions, which contradict those of the preset.

    Args:
        scene: The loaded scene.
        warp: The warp of its field. A scene with a warp consists of photographs of a place.
        model: A file in ``configs/model``. The presets for photographs are meant for the default one.
        keys: The keys that the user has given.
        refines: Whether cameras are refined.
    """
    if warp is None or model != "pyramid":
        return "default"
    sparse = not refines and _RESOLUTION_SETTINGS.isdisjoint(keys)
    if sum(len(split) for split in scene.splits.values()) >= _MANY_PHOTOGRAPHS:
        return "many_photographs" if sparse else "unbounded"
    if warp.is_forward_facing:
        return "forward_facing"
    return "few_photographs" if sparse else "few_photographs_dense"


def offer_defaults() -> None:
    """Offers the dataclasses' defaults to Hydra, so that the files in ``configs/`` only state differences.

    ``settings`` has all settings but the model's, ``model_config/NAME`` those of a model. A model that another package
    declares also becomes the choice ``model=NAME``. One that cannot be imported is left out with a warning, so that
    runs that do not use it are not affected.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    settings = asdict(RunConfig())
    del settings["model"]  # its keys depend on its kind
    store.store(name="settings", node=settings, provider="voxelfield")
    announced = announced_models()
    for name in model_names():
        try:
            defaults = asdict(ModelConfig.choose({"kind": name}, "model")(kind=name))
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            logger.warning("model=%s is not available, because its model cannot be used: %s", name, error)
            continue
        for group in ("model_config", "model") if name in announced else ("model_config",):
            store.store(group=group, name=name, node=defaults, provider="voxelfield.models")


def compose(*overrides: str, device: str = "auto", name: str | None = None) -> DictConfig:
    """Composes a configuration as ``python train.py OVERRIDES`` does.

    Args:
        overrides: Such as ``"model=sh"``, ``"trainer=fast"`` or ``"trainer.steps=500"``.
        device: Device of the run.
        name: Primary config in ``configs/``; None for the one for the device (:func:`config_name`).

    Raises:
        hydra.errors.HydraException: An override names a file or a key that does not exist.
    """
    import hydra

    offer_defaults()
    # This also works within a program that Hydra has started: the context restores Hydra's state.
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        return hydra.compose(name or config_name(device), overrides=[f"device={device}", *overrides])


def composition_error(error: Exception) -> str:
    """Returns an error of composing in one line; for an unknown key, suggests the closest match.

    Args:
        error: A ``HydraException``.
    """
    options, file = getattr(error, "options", None), getattr(error, "missing_cfg_file", None)
    if file and options:
        group, _, name = file.partition("/")
        if group != "scene":
            return f"{group} must be one of {', '.join(options)}, got {clipped(name)!r}"
        try:
            found = f": scene={find_scene(name).folder} is a scene of that name"
        except OSError:
            found = ""
        return f"scene must be a folder, or one of {', '.join(options)}, got {clipped(name)!r}{found}"
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key and isinstance(cause.parent_node, DictConfig):
        return unknown_key(cause.full_key, [str(key) for key in cause.parent_node])
    return " ".join(str(error).split())


def preset(*overrides: str, device: str = "auto", name: str | None = None) -> RunConfig:
    """Composes a configuration like :func:`compose` and returns it as validated settings.

    Args:
        overrides: As for :func:`compose`.
        device: Device of the run.
        name: As for :func:`compose`.

    Raises:
        ValueError: A value is not allowed, or would be ignored; the message names the key.
    """
    return parse(RunConfig, compose(*overrides, device=device, name=name))


def complete(
    model: ModelConfig | str,
    trainer: TrainerConfig | str | None = None,
    optimizer: OptimizerConfig | str | None = None,
    camera: CameraConfig | None = None,
    *,
    device: str = "auto",
    seed: int = 0,
    scene: Scene | None = None,
    warp: Warp | None = None,
) -> RunConfig:
    """Returns settings in which everything not given has the value of ``python train.py model=NAME``.

    Hydra is only used, and needs to be installed, if something is not given.

    Args:
        model: The model, or the name of a file in ``configs/model`` or of a model that another package declares.
        trainer: Settings of the training loop, or the name of a file in ``configs/trainer``.
        optimizer: Settings of the optimizer, or the name of a file in ``configs/optimizer``.
        camera: Settings of camera refinement; None keeps the given cameras.
        device: Device of the run.
        seed: Seed of torch's random number generators.
        scene: The scene, on which the trainer depends unless it is given (:func:`trainer_for`).
        warp: The warp of the scene's field, on which the trainer depends likewise.

    Raises:
        ValueError: A name does not exist, or a value is not allowed; the message says which.
    """
    given: dict[str, Any] = {"model": model, "trainer": trainer, "optimizer": optimizer}
    values = {key: value for key, value in given.items() if not isinstance(value, str | None)}
    if len(values) < len(given):
        kind = model if isinstance(model, str) else model.kind
        name = config_name(device)
        if scene is not None and (trainer == "auto" or (trainer is None and name == "train")):
            # A model that is given as an object has its own resolutions.
            keys = () if isinstance(model, str) else ("model.resolutions",)
            chosen = trainer_for(scene, warp, kind, keys=keys, refines=camera is not None and camera.refines)
            given["trainer"] = trainer if chosen == "default" else chosen
        # A model that is not declared anywhere has no file, but can be trained nevertheless.
        given["model"] = kind if isinstance(model, str) or kind in model_names() else None
        choices = [f"{group}={choice}" for group, choice in given.items() if isinstance(choice, str)]
        import hydra.errors

        try:
            composed = compose(*choices, device=device, name=name)
        except hydra.errors.MissingConfigException as error:
            raise ValueError(composition_error(error)) from error
        values = cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True)) | values
    if camera is not None:
        values["camera"] = camera
    return parse(RunConfig, values | {"device": device, "seed": seed})
