"""Recording of a run, in TensorBoard or anywhere else."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from voxelfield.installed import MissingPackageError
from voxelfield.rendering.pixels import to_uint8
from voxelfield.run_directory import EVENTS

logger = logging.getLogger(__name__)

SHOWN_AS = {"test/psnr": "PSNR/previewed_views", "train/psnr": "PSNR/training_pixels"}
"""Tags that TensorBoard has under another name. It sorts charts by name, and capitals come first."""


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
                    kind = type(behind).__name__
                    logger.error("%s failed (%s): nothing more is recorded, and training continues", kind, error)
                self._failed = behind

        return forward


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
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingPackageError(
                'tensorboard must be installed to record a run, unless logger=none: pip install "voxelfield[train]"'
            ) from error
        # The records of the step from which training resumes were made before its checkpoint, and stay visible.
        earlier = set(directory.glob(EVENTS))
        self._writer: Any = SummaryWriter(str(directory), purge_step=first_step + 1 if first_step else first_step)
        _put_before(earlier, set(directory.glob(EVENTS)) - earlier)
        # TensorBoard compresses an image in the thread that adds it, which takes longer than rendering it.
        self._pictures = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensorboard")
        self._adding: list[Future[None]] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers by tag, in which a slash groups charts; PSNR is shown first, in a group of its own."""
        for tag, value in values.items():
            self._writer.add_scalar(SHOWN_AS.get(tag, tag), value, step)

    def images(self, step: int, tag: str, image: torch.Tensor) -> None:
        """Records an image, in the background, rounded to 8 bits; the same tag at several steps gives a slider."""
        # Copied here, because other threads must not synchronise with the device while a CUDA graph is captured.
        pixels = to_uint8(image).cpu()
        self._adding.append(self._pictures.submit(self._writer.add_image, tag, pixels, step, dataformats="HWC"))

    def text(self, tag: str, text: str) -> None:
        """Records a text in Markdown under a name."""
        self._writer.add_text(tag, text)

    def hyperparameters(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Records the row of this run in the HParams tab; called once, at the end.

        The settings that were given may be nested. Final numbers are recorded as ``final/<name>`` beside them; as
        metrics of TensorBoard's own kind, they would be charts of one point.
        """
        from torch.utils.tensorboard.summary import hparams

        cells = flattened(config) | {f"final/{name}": value for name, value in metrics.items()}
        # Not SummaryWriter.add_hparams, which opens a second event file in a subfolder, so that the run appears twice.
        for summary in hparams({key: _cell(value) for key, value in cells.items()}, {}):
            self._writer.file_writer.add_summary(summary)

    def flush(self) -> None:
        """Writes pending records; raises OSError if an image could not be added."""
        for adding in list(self._adding):
            adding.result()
        self._writer.flush()

    def close(self) -> None:
        """Writes pending records and closes the event file; raises OSError if an image could not be added."""
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


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested configuration in one level, ``{"model.channels": 4, ...}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _cell(value: Any) -> int | float | str:
    """Returns a value for TensorBoard's table, which has no booleans and no null: these are written as in YAML."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    with contextlib.suppress(TypeError, ValueError):  # of a text, as on a command line
        return float(value)
    return str(value)
