"""Locks a run directory before Hydra writes there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from voxelfield.messages import LONGEST_MESSAGE, clipped, one_line
from voxelfield.training.state.run_directory import RunDirectoryLock, check_results


class HoldRunDirectory(Callback):
    """Ends the program in one line if ``hydra.run.dir`` is in use, contains other files, or is read-only.

    The runs of a sweep lock their directories themselves, once Hydra has created them.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Locks the directory until the program ends."""
        directory = Path(config.hydra.run.dir)
        try:
            if directory.resolve() == _scene_folder(config).resolve():
                raise ValueError(f"hydra.run.dir must not be the folder of the scene, got {directory}")
            check_results(directory)
            RunDirectoryLock.acquire(directory)
        except ValueError as error:
            _end(clipped(str(error), LONGEST_MESSAGE))
        except OSError as error:
            folder = clipped(config.hydra.run.dir)
            _end(f"hydra.run.dir must be a folder that can be written to, got {folder}: {error.strerror or error}")


def _scene_folder(config: DictConfig) -> Path:
    """Returns the folder that the settings name, whether it exists or not."""
    # Settings that are missing or cannot be resolved are reported later.
    return Path(
        *(str(OmegaConf.select(config, key, throw_on_resolution_failure=False)) for key in ("data.root", "scene.name"))
    )


def _end(message: str) -> NoReturn:
    print(one_line(message), file=sys.stderr)  # noqa: T201
    sys.exit(2)
