"""Limits of the compiled ops, and checks of pyramid levels for several models.

The limits are repeated here because a configuration is checked before the compiled ops are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from voxelfield.config import Range
from voxelfield.grids.pyramid import check_resolutions
from voxelfield.ops.pyramid import Reduction

logger = logging.getLogger(__name__)

MAX_WIDTH = 128
MAX_LAYERS = 16
MAX_LEVELS = 16
MAX_DEGREE = 3

Degree: TypeAlias = Annotated[int, Range(0, MAX_DEGREE)]
FusedWidth: TypeAlias = Annotated[int, Range(1, MAX_WIDTH)]


def built_levels(resolutions: Sequence[int], stages: Sequence[int]) -> list[int]:
    """Returns the levels that training reaches, at least the first, and logs a warning about those left out.

    Args:
        resolutions: Resolutions of all levels. Duplicates are allowed: the trainer's finest resolution may coincide
            with one of the model's levels.
        stages: Resolutions of the trainer's stages.
    """
    finest = max(stages)
    used = _used_levels(resolutions, finest)
    left_out = [level for level in dict.fromkeys(resolutions) if level not in used]
    if left_out:
        logger.warning(
            "levels %s of model.resolutions are finer than all trainer.stages (%d): left out", left_out, finest
        )
    return used


def check_levels(
    resolutions: Sequence[int], finest: int, name: str, sparse: Sequence[int] = (), reduce: Reduction = "concat"
) -> int:
    """Returns the number of levels up to a resolution, at least the first.

    Raises:
        ValueError: A :class:`voxelfield.VoxelPyramid` cannot have them; the message begins with the model's ``name``.
    """
    used = _used_levels(resolutions, finest)
    check_resolutions(used, sparse, reduce, f"{name}.")
    if len(used) > MAX_LEVELS:
        raise ValueError(f"{name}.resolutions must be at most {MAX_LEVELS} levels, got {list(resolutions)}")
    return len(used) + len(sparse)


def _used_levels(resolutions: Sequence[int], finest: int) -> list[int]:
    return list(dict.fromkeys(level for level in resolutions if level <= finest)) or list(resolutions[:1])
