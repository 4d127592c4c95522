"""MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from voxelfield.components.logger import LibraryLogger, LoggerSettings, RunLogger, flattened, run_name
from voxelfield.components.registry import key


@dataclass(frozen=True)
class MlflowSettings(LoggerSettings):
    """The setting of MLflow.

    Attributes:
        mlflow: Whether MLflow records the run, at ``MLFLOW_TRACKING_URI`` or, without it, where MLflow does by itself:
            in a database in the working directory, which ``mlflow ui`` shows.
    """

    name = package = "mlflow"
    environment: ClassVar[Mapping[str, str]] = {"MLFLOW_DISABLE_TELEMETRY": "true"}
    mlflow: bool = key("logger.mlflow", False, off=False)

    def open(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> RunLogger:
        """Returns the logger. A run that is resumed is another run there; texts and images are artifacts."""
        mlflow = self.library()
        client, entities = mlflow.MlflowClient(), mlflow.entities
        experiment = client.get_experiment_by_name(self.project)
        number = client.create_experiment(self.project) if experiment is None else experiment.experiment_id
        run = client.create_run(number, run_name=run_name(folder, first_step)).info.run_id
        parameters = [entities.Param(name, str(value)) for name, value in flattened(settings).items()]
        for first in range(0, len(parameters), 100):  # the most that MLflow accepts at once
            client.log_batch(run, params=parameters[first : first + 100])

        def numbers(step: int, values: Mapping[str, float]) -> None:
            now = int(1000 * time.time())
            metrics = [entities.Metric(tag, value, now, step) for tag, value in values.items()]
            client.log_batch(run, metrics=metrics)

        return LibraryLogger(
            self.name,
            numbers=numbers,
            image=lambda step, tag, image: client.log_image(run, image, key=tag, step=step),
            note=lambda _, tag, text: client.log_text(run, text, f"{tag}.md"),
            end=lambda: client.set_terminated(run),
            step=first_step,
        )
