"""The settings with which ``train.py`` would begin on a machine with a GPU, without training."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from voxelfield.cli import train
from voxelfield.datasets.scene import Scene
from voxelfield.runs import train as run_training
from voxelfield.settings import RunConfig


def settings_of_run(
    monkeypatch: pytest.MonkeyPatch, directory: Path, *arguments: str, scene: Scene | None = None
) -> RunConfig:
    """Runs a command line up to where the session would be built.

    Args:
        monkeypatch: Pytest's fixture.
        directory: The run directory.
        arguments: The command line.
        scene: The loaded scene; None loads that which the command line names.
    """
    begun: list[RunConfig] = []

    def begin(settings: RunConfig, *_: object) -> NoReturn:
        begun.append(settings)
        raise SystemExit

    monkeypatch.setattr(train, "config_name", lambda device="auto": "train")
    monkeypatch.setattr(run_training, "_begin", begin)
    if scene is not None:
        monkeypatch.setattr(run_training, "load_configured_scene", lambda *_, **__: scene)
    # Hydra's logging would stay for other tests.
    quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none", f"hydra.run.dir={directory}", "device=cpu")
    train.main([*arguments, *quiet])
    (settings,) = begun
    return settings
