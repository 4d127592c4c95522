"""Registration of other packages' recipes with Hydra."""

from __future__ import annotations

import dataclasses
import logging

from hydra.core.config_store import ConfigStore

from voxelfield.models.recipe import Recipe
from voxelfield.models.registry import announced_recipes

logger = logging.getLogger(__name__)


def offer_announced_recipes() -> None:
    """Adds a choice ``model=NAME``, with the recipe's defaults, for every recipe that another package declares.

    A recipe that cannot be imported is left out with a warning, so that runs that do not use it are not affected.
    """
    for name in announced_recipes():
        try:
            defaults = dataclasses.asdict(Recipe.choose({"kind": name}, "model")(kind=name))
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            logger.warning("model=%s is not available, because its recipe cannot be used: %s", name, error)
        else:
            ConfigStore.instance().store(group="model", name=name, node=defaults, provider="voxelfield.models")
