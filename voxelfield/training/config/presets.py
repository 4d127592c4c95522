"""Settings by the names of the files in ``configs/``, for Python code: as the command line composes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, get_type_hints

from omegaconf import DictConfig

from voxelfield.config.parsing import parse
from voxelfield.devices import choose_device
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.fields.recipes.registry import recipe_names
from voxelfield.installed import config_folder
from voxelfield.training.config.optimizer import OptimizerConfig
from voxelfield.training.config.run import RunConfig
from voxelfield.training.config.trainer import TrainerConfig


def config_name(device: str = "auto") -> str:
    """Returns which file in ``configs/`` a run begins with: without a GPU, one that a CPU finishes in minutes.

    Args:
        device: As for :func:`voxelfield.devices.choose_device`.
    """
    return "train" if choose_device(device).type == "cuda" else "train_cpu"


# Fewer are remembered pixel by pixel, unless training is short and fine levels decay.
_MANY_PHOTOGRAPHS = 100


def trainer_for_photographs(model: str, name: str, count: int) -> str | None:
    """Returns the file in ``configs/trainer`` for photographs of real places, or None where there is none of its own.

    Args:
        model: The model: a file in ``configs/model``. Others than the default bring a trainer of their own.
        name: The file in ``configs/`` that the run begins with (:func:`config_name`). That of CPUs has one for all.
        count: Number of photographs, those held out included.
    """
    if (model, name) != ("pyramid", "train"):
        return None
    return "unbounded" if count >= _MANY_PHOTOGRAPHS else "few_photographs"


def compose(*overrides: str, device: str = "auto", name: str | None = None) -> DictConfig:
    """Composes a configuration as ``python train.py OVERRIDES`` does.

    Args:
        overrides: Such as ``"model=sh"``, ``"trainer=fast"`` or ``"trainer.steps=500"``.
        device: Where the run takes place.
        name: The file in ``configs/`` to begin with; None takes the one for the device (:func:`config_name`).

    Raises:
        hydra.errors.HydraException: An override names a file or a key that there is not.
    """
    import hydra

    from voxelfield.training.config.announced import offer_announced_recipes

    offer_announced_recipes()
    # This also works within a program that Hydra has started: the context puts its state back.
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        return hydra.compose(
            config_name(device) if name is None else name,
            overrides=[f"device={device}", *complete_overrides(overrides)],
        )


def complete_overrides(overrides: Iterable[str]) -> list[str]:
    """Makes overrides reach settings that no file mentions, so that a new setting needs nothing but its default.

    Hydra refuses ``trainer.loss.NAME=1`` where no composed file has that key; with ``++`` it adds or replaces.

    Args:
        overrides: Hydra's command line.

    Returns:
        The same, with ``++`` in front of those that begin with the key of a setting of :class:`RunConfig` in a group
        other than ``model``.
    """
    return [f"++{text}" if _is_setting(text.partition("=")[0]) else text for text in overrides]


def _is_setting(key: str) -> bool:
    group, *names = key.split(".")
    # The settings of a model depend on which it is; its file, or what its package announces, has all of them.
    if not names or group == "model":
        return False
    schema: Any = RunConfig
    for name in (group, *names):
        hints = get_type_hints(schema) if dataclasses.is_dataclass(schema) else {}
        if name not in hints:
            return False
        schema = hints[name]
    return True


def preset(*overrides: str, device: str = "auto", name: str | None = None) -> RunConfig:
    """Returns the checked settings that :func:`compose` composes.

    Args:
        overrides: As for :func:`compose`.
        device: Where the run takes place.
        name: As for :func:`compose`.

    Raises:
        ValueError: A value is not allowed; the message names the key.
    """
    return parse(RunConfig, compose(*overrides, device=device, name=name))


def complete(
    recipe: Recipe | str,
    trainer: TrainerConfig | str | None = None,
    optimizer: OptimizerConfig | str | None = None,
    device: str = "auto",
) -> RunConfig:
    """Returns settings in which whatever is not given is as ``python train.py model=RECIPE`` has it.

    Only what is not given is composed by Hydra, which need not be installed where all is.

    Args:
        recipe: The model, or the name of a file in ``configs/model`` or of a recipe that a package announces.
        trainer: The loop's settings, or the name of a file in ``configs/trainer``.
        optimizer: The optimizer's settings, or the name of a file in ``configs/optimizer``.
        device: Where the run takes place.

    Raises:
        ValueError: There is no such name, or a value is not allowed; the message says which.
    """
    if isinstance(recipe, Recipe) and isinstance(trainer, TrainerConfig) and isinstance(optimizer, OptimizerConfig):
        return RunConfig(device=device, model=recipe, trainer=trainer, optimizer=optimizer)
    import hydra.errors

    kind = recipe if isinstance(recipe, str) else recipe.kind
    # A recipe that is announced nowhere has no file of its own, but may be trained all the same.
    overrides = [f"model={kind}"] if isinstance(recipe, str) or kind in recipe_names() else []
    overrides += [f"trainer={trainer}"] if isinstance(trainer, str) else []
    overrides += [f"optimizer={optimizer}"] if isinstance(optimizer, str) else []
    try:
        composed = compose(*overrides, device=device)
    except hydra.errors.MissingConfigException as error:
        wanted = (error.missing_cfg_file or "").rpartition("/")
        raise ValueError(
            f"{wanted[0] or 'name'} must be one of {', '.join(error.options or ())}, got {wanted[2]!r}"
        ) from error
    settings = parse(RunConfig, composed)
    if isinstance(recipe, Recipe):
        settings.model = recipe
    if isinstance(trainer, TrainerConfig):
        settings.trainer = trainer
    if isinstance(optimizer, OptimizerConfig):
        settings.optimizer = optimizer
    return settings
