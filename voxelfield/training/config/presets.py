"""Settings by the names of the files in ``configs/``, composed for Python code as on the command line."""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import DictConfig

from voxelfield.config.parsing import parse
from voxelfield.devices import choose_device
from voxelfield.installed import config_folder
from voxelfield.models.recipe import Recipe
from voxelfield.models.registry import recipe_names
from voxelfield.training.config.optimizer import OptimizerConfig
from voxelfield.training.config.run import RunConfig
from voxelfield.training.config.trainer import TrainerConfig


def config_name(device: str = "auto") -> str:
    """Returns the name of the primary config in ``configs/``: without a GPU, one that a CPU trains in minutes.

    Args:
        device: As for :func:`voxelfield.devices.choose_device`.
    """
    return "train" if choose_device(device).type == "cuda" else "train_cpu"


# With fewer photographs, training memorises them pixel by pixel unless it is short and fine levels decay.
_MANY_PHOTOGRAPHS = 100


def trainer_for_photographs(
    model: str, name: str, count: int, *, forward: Callable[[], bool], sparse: bool
) -> str | None:
    """Returns the trainer in ``configs/trainer`` for photographs of real places; None if there is no special one.

    Args:
        model: The model: a file in ``configs/model``. Models other than the default select a trainer of their own.
        name: The primary config of the run (:func:`config_name`). The one for CPUs has one trainer for all scenes.
        count: Number of photographs, including held-out views.
        forward: Tells whether the field lies in normalised device coordinates, because all photographs face the same
            way. Called only if the choice depends on it, because the answer may require reading files.
        sparse: Whether the run can have sparse levels. Camera refinement does not support them, and settings of the
            resolutions contradict those of a preset with sparse levels.
    """
    if (model, name) != ("pyramid", "train"):
        return None
    if count >= _MANY_PHOTOGRAPHS:
        return "many_photographs" if sparse else "unbounded"
    return "forward_facing" if forward() else "few_photographs"


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

    from voxelfield.training.config.defaults import offer_defaults

    offer_defaults()
    # This also works within a program that Hydra has started: the context restores Hydra's state.
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        return hydra.compose(
            config_name(device) if name is None else name,
            overrides=[f"device={device}", *overrides],
        )


def preset(*overrides: str, device: str = "auto", name: str | None = None) -> RunConfig:
    """Composes a configuration like :func:`compose` and returns it as validated settings.

    Args:
        overrides: As for :func:`compose`.
        device: Device of the run.
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
    """Returns settings in which everything not given has the value of ``python train.py model=RECIPE``.

    Hydra is only used, and needs to be installed, if something is not given.

    Args:
        recipe: The model, or the name of a file in ``configs/model`` or of a recipe that another package declares.
        trainer: Settings of the training loop, or the name of a file in ``configs/trainer``.
        optimizer: Settings of the optimizer, or the name of a file in ``configs/optimizer``.
        device: Device of the run.

    Raises:
        ValueError: A name does not exist, or a value is not allowed; the message says which.
    """
    if isinstance(recipe, Recipe) and isinstance(trainer, TrainerConfig) and isinstance(optimizer, OptimizerConfig):
        return RunConfig(device=device, model=recipe, trainer=trainer, optimizer=optimizer)
    import hydra.errors

    kind = recipe if isinstance(recipe, str) else recipe.kind
    # A recipe that is not declared anywhere has no file, but can be trained nevertheless.
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
