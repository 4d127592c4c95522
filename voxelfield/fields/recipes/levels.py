"""Limits of the compiled ops, and levels that training reaches: what several recipes check.

The ops are not asked for their limits: a configuration is checked before anything is loaded.
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
        resolutions: Of all levels. One may be named twice: the trainer's own finest may be one of the model's levels.
        finest: The resolution that training reaches.
    """
    return list(dict.fromkeys(level for level in resolutions if level <= finest)) or list(resolutions[:1])


def built_levels(resolutions: Sequence[int], stages: Sequence[int]) -> list[int]:
    """Returns the levels that training reaches, and warns of those that are left out.

    Args:
        resolutions: Of all levels.
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
    """Returns within what range of zero the features of each level start.

    Args:
        coarsest: That of the coarsest level; the others start at zero.
        levels: Their resolutions.
    """
    return [coarsest] + [0.0] * (len(levels) - 1)


def check_levels(resolutions: Sequence[int], finest: int, name: str) -> list[int]:
    """Returns the levels up to a resolution.

    Args:
        resolutions: Of all levels.
        finest: The resolution that training reaches.
        name: Where the recipe stands in the configuration.

    Raises:
        ValueError: They are no 1 to 16 levels from coarse to fine.
    """
    used = used_levels(resolutions, finest)
    if not 1 <= len(used) <= MAX_LEVELS or used != sorted(used):
        raise ValueError(
            f"{name}.resolutions must be 1 to {MAX_LEVELS} levels from coarse to fine, got {list(resolutions)}"
        )
    return used
