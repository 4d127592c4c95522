"""Settings as ``voxelfield.settings`` composes them, for tests that need many: ten times as fast.

Hydra reads and merges all files for each composition, which takes longer than many a test. Here it composes every
choice of files once in a process; values, such as ``trainer.steps=5``, are put into a copy. The tests in
``tests/training/test_config.py`` compare both ways. What is about Hydra itself, or about files that change, must be
tested with the package's own functions.
"""

from __future__ import annotations

import copy
import functools

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from voxelfield.config import parse
from voxelfield.installed import config_folder
from voxelfield.settings import RunConfig
from voxelfield.settings import compose as compose_by_hydra
from voxelfield.settings.presets import config_name


def compose(*overrides: str, device: str = "auto", name: str | None = None) -> DictConfig:
    """As :func:`voxelfield.settings.compose`, whose arguments these are."""
    choices = tuple(text for text in overrides if _is_choice(text))
    values = [f"device={device}", *(text for text in overrides if text not in choices)]
    config = copy.deepcopy(_composed(choices, config_name(device) if name is None else name))
    for text in values:
        override = _parsed(text)
        added = override.is_add() or override.is_force_add()
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=added)
    return config


def preset(*overrides: str, device: str = "auto", name: str | None = None) -> RunConfig:
    """As :func:`voxelfield.settings.preset`, whose arguments these are."""
    return parse(RunConfig, compose(*overrides, device=device, name=name))


def _is_choice(text: str) -> bool:
    group = text.partition("=")[0]
    return "." not in group and (config_folder() / group).is_dir()


@functools.cache
def _composed(choices: tuple[str, ...], name: str) -> DictConfig:
    return compose_by_hydra(*choices, device="cpu", name=name)


@functools.cache
def _parsed(text: str) -> Override:
    (override,) = OverridesParser.create().parse_overrides([text])
    return override
