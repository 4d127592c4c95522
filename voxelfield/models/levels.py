"""Limits of the compiled ops, and checks of pyramid levels that several models share.

The limits are repeated here because a configuration is checked before the compiled ops are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from voxelfield.config.parsing import Range

logger = logging.getLogger(__name__)

MAX_WIDTH = 128
MAX_LAYERS = 16
MAX_LEVELS = 16
MAX_DEGREE = 3

Degree: TypeAlias = Annotated[int, Range(0, MAX_DEGREE)]
FusedWidth: TypeAlias = Annotated[int, Range(1, MAX_WIDTH)]


def used_levels(resolutions: Sequence[int], finest: int) -> list[int]:
    """Returns the levels up to a resolution, at least the first.

    Args:
        resolutions: Resolutions of all levels. Duplicates are allowed: the trainer's finest resolution may coincide
            with one of the model's levels.
        finest: The finest resolution of training.
    """
    return list(dict.fromkeys(level for level in resolutions if level <= finest)) or list(resolutions[:1])


def built_levels(resolutions: Sequence[int], stages: Sequence[int]) -> list[int]:
    """Returns the levels that training reaches, and logs a warning about those that are left out.

    Args:
        resolutions: Resolutions of all levels.
        stages: Resolutions of the trainer's stages.
    """
    finest = max(stages)
    used = used_levels(resolutions, finest)
    left_out = [level for level in dict.fromkeys(resolutions) if level not in used]
    if left_out:
        logger.warning(
            "levels %s of model.resolutions are finer than all trainer.stages (%d): left out", left_out, finest
        )
    return used


def initial_ranges(coarsest: float, levels: Sequence[int]) -> list[float]:
    """Returns, for each level, the half-width of the range around zero from which its features are initialised.

    Args:
        coarsest: The half-width for the coarsest level; the other levels start at zero.
        levels: The levels' resolutions.
    """
    return [coarsest] + [0.0] * (len(levels) - 1)


def check_levels(resolutions: Sequence[int], finest: int, name: str) -> list[int]:
    """Returns the levels up to a resolution, after checking them.

    Args:
        resolutions: Resolutions of all levels.
        finest: The finest resolution of training.
        name: The model's key in the configuration.

    Raises:
        ValueError: They are not 1 to 16 levels from coarse to fine.
    """
    used = used_levels(resolutions, finest)
    if not 1 <= len(used) <= MAX_LEVELS or used != sorted(used):
        raise ValueError(
            f"{name}.resolutions must be 1 to {MAX_LEVELS} levels from coarse to fine, got {list(resolutions)}"
        )
    return used
