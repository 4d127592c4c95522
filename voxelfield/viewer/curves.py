"""The numbers of a training, for charts."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from voxelfield.report.history import read_history
from voxelfield.training.logs.logging import RunLogger


class Curves:
    """Numbers by tag and step; threads may add and read at once."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, float]] = {}
        self._lock = threading.Lock()
        self._version = 0

    @property
    def version(self) -> int:
        """Changes with every addition."""
        return self._version

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds numbers of a step; one that is there already is replaced."""
        with self._lock:
            for tag, value in values.items():
                self._values.setdefault(tag, {})[step] = float(value)
            self._version += 1

    def series(self, tag: str) -> tuple[list[float], list[float]]:
        """Returns the steps at which a tag has a finite number, in order, and these numbers; none for another tag."""
        with self._lock:
            found = sorted(self._values.get(tag, {}).items())
        finite = [(float(step), value) for step, value in found if math.isfinite(value)]
        return [step for step, _ in finite], [value for _, value in finite]


class RecordingLogger:
    """Passes all records on, and keeps the numbers.

    Args:
        behind: The underlying logger, which receives the records.
        curves: Receives the numbers.
    """

    def __init__(self, behind: RunLogger, curves: Curves) -> None:
        self._behind = behind
        self._curves = curves

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers by tag."""
        self._curves.add(step, values)
        self._behind.scalars(step, values)

    def images(self, step: int, tag: str, image: torch.Tensor) -> None:
        """Records a picture, as for :class:`voxelfield.training.logs.logging.RunLogger`."""
        self._behind.images(step, tag, image)

    def text(self, tag: str, text: str) -> None:
        """Records a text."""
        self._behind.text(tag, text)

    def hyperparameters(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Records the configuration with the final metrics."""
        self._behind.hyperparameters(config, metrics)

    def close(self) -> None:
        """Closes the underlying logger."""
        self._behind.close()


def read_curves(folder: Path, curves: Curves) -> None:
    """Adds the numbers that a run has logged to TensorBoard; nothing if it has not.

    Args:
        folder: The run's.
        curves: Receives them.
    """
    for tag, curve in read_history(folder).items():
        for step, value in curve:
            curves.add(step, {tag: value})
