"""What tests of small trainings share: a logger that keeps numbers, an interruption, and checkpoints compared."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from voxelfield.components.logger import NullLogger
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.training.session import Hook, Session

LEGO = Path(__file__).parent / "fixtures" / "lego"


class Recorder(NullLogger):
    """Keeps scalars; calls ``watch`` with each batch of them while training stands still."""

    def __init__(self, watch: Callable[[int, dict[str, float]], None] | None = None) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.watch = watch

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.records.append((step, dict(values)))
        if self.watch is not None:
            self.watch(step, values)

    def series(self, tag: str) -> list[tuple[int, float]]:
        """The steps at which a number was recorded, with its values."""
        return [(step, values[tag]) for step, values in self.records if tag in values]

    def values(self, tag: str) -> list[float]:
        """The values of a number."""
        return [value for _, value in self.series(tag)]


def fitted(session: Session) -> Session:
    """Trains a session to its end."""
    assert session.fit()
    return session


def restored(session: Session, path: Path) -> Session:
    """Restores a session from a checkpoint, or from the last one of a folder."""
    session.restore(load_checkpoint(path))
    return session


def interrupt_at(step: int) -> Hook:
    """A hook that ends training after a number of steps, as Ctrl-C does."""

    def stop(session: Session) -> None:
        if session.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return stop


def differences(first: Any, second: Any, name: str = "state") -> list[str]:
    """Names of the leaves at which two checkpoints differ in the least bit."""
    if isinstance(first, torch.Tensor):
        same = first.shape == second.shape and torch.equal(first, second)
        return [] if same else [name]
    if isinstance(first, dict):
        assert first.keys() == second.keys(), name
        return [leaf for key in first for leaf in differences(first[key], second[key], f"{name}.{key}")]
    if isinstance(first, (list, tuple)):
        assert len(first) == len(second), name
        pairs = enumerate(zip(first, second, strict=True))
        return [leaf for index, (a, b) in pairs for leaf in differences(a, b, f"{name}[{index}]")]
    return [] if first == second else [name]
