"""Reports user errors in one line."""

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
"""Packages that ``pip install "voxelfield[train]"`` installs: import names -> distributions."""

HOW_TO_INSTALL = 'pip install "voxelfield[train]"'
"""The command that installs them."""


def in_one_line(action: Callable[[], None]) -> int:
    """Runs an action and returns the exit status; prints a user error in one line.

    Args:
        action: Raises ValueError, OSError or MissingPackageError for errors that the user can fix.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        action()
    except (ValueError, OSError, KernelsUnavailableError, MissingPackageError) as error:
        logger.error("%s", clipped(str(error), LONGEST_MESSAGE))
        return 2
    return 0
