"""Settings by the names of the files in ``configs/``, composed for Python code as on the command line."""

from __future__ import annotations

import logging
from dataclasses import asdict

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from voxelfield.config import parse, unknown_key
from voxelfield.datasets.loading import find_scene
from voxelfield.devices import choose_device
from voxelfield.foundation.extensions import foreign_code
from voxelfield.installed import config_folder
from voxelfield.messages import clipped
from voxelfield.models.model_config import ModelConfig, announced_models, known_models
from voxelfield.settings.schema import RunConfig

logger = logging.getLogger(__name__)


def config_name(device: str = "auto") -> str:
    """Returns the name of the primary config in ``configs/``: without a GPU, one that a CPU trains in minutes."""
    return "train" if choose_device(device).type == "cuda" else "train_cpu"


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
    for name in known_models():
        try:
            with foreign_code():
                defaults = asdict(ModelConfig.choose({"kind": name}, "model")(kind=name))
        except ValueError as error:
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
    """Returns a ``HydraException`` of composing in one line; for an unknown key, suggests the closest match."""
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
    """Composes a configuration with the arguments of :func:`compose`, and returns it as validated settings.

    Raises ValueError if a value is not allowed, or would be ignored; the message names the key.
    """
    return parse(RunConfig, compose(*overrides, device=device, name=name))
