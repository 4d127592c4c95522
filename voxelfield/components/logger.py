"""Loggers, which record what training does: their interface, and the base class of their settings.

A logger is one file here, or in another package, with a class of :class:`LoggerSettings`; ``configs/logger/NAME.yaml``
makes it the choice ``logger=NAME``. The choices can be combined, as in ``logger=[tensorboard,wandb]``.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.installed import import_optional
from voxelfield.models.component import Component
from voxelfield.rendering.pixels import to_uint8

logger = logging.getLogger(__name__)


class RunLogger(Protocol):
    """The interface of loggers. Implementations must accept calls in any order until :meth:`close`."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers by tag, for example ``loss/photometric``, ``train/psnr``, ``test/psnr``."""

    def images(self, step: int, tag: str, image: torch.Tensor) -> None:
        """Records an image: (H, W, 3) floating point, nominally in [0, 1], any device."""

    def text(self, tag: str, text: str) -> None:
        """Records a text (Markdown), for example the composed configuration."""

    def hyperparameters(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Records the settings that were given, with the final metrics; called once, at the end of a run."""

    def close(self) -> None:
        """Writes pending records; calling other methods afterwards is an error.

        If there is a method ``flush()``, it also writes pending records. It may be called from another thread, and is
        called before each checkpoint: records that it leaves pending are lost if the run is killed later.
        """


class NullLogger:
    """A logger that records nothing: ``logger=none``."""

    def scalars(self, *values: Any, **named: Any) -> None:
        """Does nothing."""

    images = text = hyperparameters = close = scalars


class FailsafeLogger:
    """Forwards records until the underlying logger fails; reports that once, and drops all later records.

    It closes the underlying logger, which ``behind`` returns and which may be exchanged, even if that has failed, and
    flushes it if it has a method ``flush``.
    """

    def __init__(self, behind: Callable[[], RunLogger]) -> None:
        self._behind = behind
        self._failed: RunLogger | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        def forward(*values: Any) -> None:
            behind = self._behind()
            if behind is self._failed and name != "close":
                return
            try:
                getattr(behind, name, NullLogger().close)(*values)
            except Exception as error:  # third-party loggers may raise anything
                if behind is not self._failed:
                    kind = getattr(behind, "name", type(behind).__name__)
                    logger.error("%s failed (%s): nothing more is recorded, and training continues", kind, error)
                self._failed = behind

        return forward


class SeveralLoggers:
    """Forwards records to several loggers, of which one that fails does not stop the others."""

    def __init__(self, loggers: Sequence[RunLogger]) -> None:
        self._loggers = [FailsafeLogger(partial(next, itertools.repeat(each))) for each in loggers]

    def __getattr__(self, name: str) -> Callable[..., None]:
        def forward(*values: Any) -> None:
            for each in self._loggers:
                getattr(each, name)(*values)

        return forward


@dataclass(frozen=True)
class LoggerSettings(ComponentSettings):
    """Base class of the settings of loggers. Each adds its switch, ``logger.NAME``.

    Attributes:
        package: The library, and the extra that installs it; those of TensorBoard differ.
        environment: Variables that set the library up, with their values where the user has set none.
        project: Name by which services group runs.
    """

    package: ClassVar[str]
    environment: ClassVar[Mapping[str, str]] = {}
    project: str = key("logger.project")

    def build(self, training: Training) -> Iterable[Component]:
        """Returns nothing: a logger does not join the steps."""
        return ()

    def check_installed(self) -> None:
        """Raises MissingPackageError, which names the extra, if the library is not installed."""
        if importlib.util.find_spec(self.package) is None:
            self.library()

    def library(self) -> Any:
        """Imports and returns the library; a logger of another package overrides this, to name what installs it."""
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        return import_optional(self.package, f"record a run with logger={self.name}", self.package)

    def open(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> RunLogger:
        """Returns a logger of the run in a folder, with nested settings, of which some steps are already done."""
        raise NotImplementedError(f"{type(self).__name__} must define open")


@dataclass
class LibraryLogger:
    """Records a run by functions of a library.

    Attributes:
        name: Name of the library, for messages.
        numbers: Called with a step, and numbers by tag.
        image: Called with a step, a tag, and an image (H, W, 3) of 8 bits, a NumPy array.
        note: Called with a step, a tag, and a text in Markdown.
        end: Ends the run.
        step: Number of steps done at the last record.
    """

    name: str
    numbers: Callable[[int, dict[str, float]], Any]
    image: Callable[[int, str, Any], Any]
    note: Callable[[int, str, str], Any]
    end: Callable[[], Any]
    step: int

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers by tag."""
        self.step = step
        self.numbers(step, dict(values))

    def images(self, step: int, tag: str, image: torch.Tensor) -> None:
        """Records an image (H, W, 3), rounded to 8 bits."""
        self.image(step, tag, to_uint8(image).cpu().numpy())

    def text(self, tag: str, text: str) -> None:
        """Records a text at the step of the latest numbers."""
        self.note(self.step, tag, text)

    def hyperparameters(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Records final metrics as ``final/<name>``; all settings are recorded at the start."""
        self.numbers(self.step, {f"final/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        """Ends the run, the first time that it is called."""
        end, self.end = self.end, lambda: None
        end()


def run_name(folder: Path, first_step: int) -> str:
    """Returns the name of a run in lists: scene and time, as in its folder, and the step from which it is resumed."""
    return " ".join(folder.resolve().parts[-2:]) + (f" from step {first_step}" if first_step else "")


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested configuration in one level, ``{"model.channels": 4, ...}``."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
