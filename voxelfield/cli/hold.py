"""Takes a run directory before Hydra writes there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from voxelfield.messages import clipped
from voxelfield.training.run_directory import DirectoryInUseError, hold


class HoldRunDirectory(Callback):
    """Ends the program in one line if another run is at work in ``hydra.run.dir``, or if it cannot be written to.

    The runs of a sweep take their directories themselves, once Hydra has made them.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Holds the directory until the program ends."""
        try:
            hold(Path(config.hydra.run.dir))
        except DirectoryInUseError as error:
            _end(str(error))
        except OSError as error:
            folder = clipped(config.hydra.run.dir)
            _end(f"hydra.run.dir must be a folder that can be written to, got {folder}: {error.strerror or error}")


def _end(message: str) -> NoReturn:
    print(message, file=sys.stderr)  # noqa: T201
    sys.exit(2)
