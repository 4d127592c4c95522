"""TensorBoard."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from voxelfield.components.logger import LoggerSettings, RunLogger, flattened
from voxelfield.components.registry import key
from voxelfield.installed import import_optional
from voxelfield.rendering.pixels import to_uint8
from voxelfield.run_directory import EVENTS

SHOWN_AS = {"test/psnr": "PSNR/previewed_views", "train/psnr": "PSNR/training_pixels"}
"""Tags that TensorBoard has under another name. It sorts charts by name, and capitals come first."""


@dataclass(frozen=True)
class TensorBoardSettings(LoggerSettings):
    """The setting of TensorBoard.

    Attributes:
        tensorboard: Whether TensorBoard records the run, in event files in its folder, from which the report has its
            curves.
    """

    name = package = "tensorboard"
    tensorboard: bool = key("logger.tensorboard", False, off=False)

    def library(self) -> Any:
        """Returns torch's module for TensorBoard."""
        return import_optional("torch.utils.tensorboard", "record a run, unless logger=none")

    def open(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> RunLogger:
        """Returns the logger, which hides records of an interrupted run after ``first_step``."""
        return TensorBoardLogger(folder, first_step)


class TensorBoardLogger:
    """Writes TensorBoard event files.

    Args:
        directory: Run directory; created if needed.
        first_step: Number of steps already done if a run that logged to the same directory is resumed, or 0 if it is
            repeated. TensorBoard then hides the records of later steps. None hides nothing.

    Raises:
        MissingPackageError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path, first_step: int | None = None) -> None:
        writer = TensorBoardSettings().library().SummaryWriter
        # The records of the step from which training resumes were made before its checkpoint, and stay visible.
        earlier = set(directory.glob(EVENTS))
        self._writer: Any = writer(str(directory), purge_step=first_step + 1 if first_step else first_step)
        _put_before(earlier, set(directory.glob(EVENTS)) - earlier)
        # TensorBoard compresses an image in the thread that adds it, which takes longer than rendering it.
        self._pictures = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensorboard")
        self._adding: list[Future[None]] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers by tag; a slash in a tag groups charts. PSNR is shown first, in a group of its own."""
        for tag, value in values.items():
            self._writer.add_scalar(SHOWN_AS.get(tag, tag), value, step)

    def images(self, step: int, tag: str, image: torch.Tensor) -> None:
        """Records an image in the background, rounded to 8 bits; the same tag at several steps gives a slider."""
        # Copied here, because other threads must not synchronise with the device while a CUDA graph is captured.
        pixels = to_uint8(image).cpu()
        self._adding.append(self._pictures.submit(self._writer.add_image, tag, pixels, step, dataformats="HWC"))

    def text(self, tag: str, text: str) -> None:
        """Records a text."""
        self._writer.add_text(tag, text)

    def hyperparameters(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Records the row of this run in the HParams tab; called once, at the end.

        Final numbers are recorded as ``final/<name>`` beside the settings that were given. As metrics of TensorBoard's
        own kind, they would be charts of one point.
        """
        from torch.utils.tensorboard.summary import hparams

        cells = flattened(config) | {f"final/{name}": value for name, value in metrics.items()}
        # Not SummaryWriter.add_hparams, which opens a second event file in a subfolder, so that the run appears twice.
        for summary in hparams({name: _cell(value) for name, value in cells.items()}, {}):
            self._writer.file_writer.add_summary(summary)

    def flush(self) -> None:
        """Writes pending records.

        Raises:
            OSError: An image could not be added.
        """
        for adding in list(self._adding):
            adding.result()
        self._writer.flush()

    def close(self) -> None:
        """Writes pending records and closes the event file.

        Raises:
            OSError: An image could not be added.
        """
        self._pictures.shutdown()
        self._writer.close()
        for adding in self._adding:
            adding.result()


def _put_before(earlier: Collection[Path], new: Collection[Path]) -> None:
    """Renames earlier event files so that TensorBoard, which reads files by name, reads them before the new ones.

    Otherwise it would read them last if the clock was set back since, or if all were begun in the same second, and hide
    what it should show.
    """
    if not earlier or not new or max(earlier) < min(new):
        return
    prefix = EVENTS[:-1]
    second = int(min(new).name.removeprefix(prefix).partition(".")[0])
    for path in sorted(earlier, reverse=True):
        rest = path.name.removeprefix(prefix).partition(".")[2]
        renamed = path
        while renamed in earlier:
            second -= 1
            renamed = path.with_name(f"{prefix}{second:010d}.{rest}")
        path.rename(renamed)


def _cell(value: Any) -> int | float | str:
    """Returns a value for TensorBoard's table, which has no booleans and no null: these are written as in YAML."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    with contextlib.suppress(TypeError, ValueError):  # of a text, as on a command line
        return float(value)
    return str(value)
