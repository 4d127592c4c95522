"""Mistakes of the user, told in one line."""

from __future__ import annotations

import logging
from collections.abc import Callable

from voxelfield._library import KernelsUnavailableError
from voxelfield.installed import MissingPackageError
from voxelfield.messages import LONGEST_MESSAGE, clipped

logger = logging.getLogger(__name__)

TRAINING_PACKAGES = {
    "numpy": "numpy",
    "hydra": "hydra-core",
    "omegaconf": "hydra-core",
    "tensorboard": "tensorboard",
    "PIL": "pillow",
    "jinja2": "jinja2",
    "safetensors": "safetensors",
    "imageio": "imageio",
    "pooch": "pooch",
    "tqdm": "tqdm",
}
"""What ``pip install "voxelfield[train]"`` brings: names to import -> distributions."""

HOW_TO_INSTALL = 'pip install "voxelfield[train]"'
"""The command that brings them."""


def in_one_line(action: Callable[[], None]) -> int:
    """Does something; returns the exit status, and says in one line what was wrong.

    Args:
        action: Raises ValueError, OSError or MissingPackageError where the user can mend it.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        action()
    except (ValueError, OSError, KernelsUnavailableError, MissingPackageError) as error:
        logger.error("%s", clipped(str(error), LONGEST_MESSAGE))
        return 2
    return 0
