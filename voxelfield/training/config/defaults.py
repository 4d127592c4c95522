"""The dataclasses' defaults, offered to Hydra: the files in ``configs/`` only state what differs from them."""

from __future__ import annotations

import dataclasses
import logging

from hydra.core.config_store import ConfigStore

from voxelfield.models.model_config import ModelConfig
from voxelfield.models.registry import announced_models, model_names
from voxelfield.training.config.run import RunConfig

logger = logging.getLogger(__name__)


def offer_defaults() -> None:
    """Adds ``settings``, all settings but the model's, and ``model_config/NAME``, a model's, to what files can use.

    A model that another package declares also becomes the choice ``model=NAME``. One that cannot be imported is left
    out with a warning, so that runs that do not use it are not affected.
    """
    store = ConfigStore.instance()
    settings = dataclasses.asdict(RunConfig())
    del settings["model"]  # its keys depend on its kind
    store.store(name="settings", node=settings, provider="voxelfield")
    for name in model_names():
        try:
            defaults = dataclasses.asdict(ModelConfig.choose({"kind": name}, "model")(kind=name))
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            logger.warning("model=%s is not available, because its model cannot be used: %s", name, error)
            continue
        for group in ("model_config", "model") if name in announced_models() else ("model_config",):
            store.store(group=group, name=name, node=defaults, provider="voxelfield.models")
