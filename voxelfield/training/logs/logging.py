"""Recording of a run, in TensorBoard or anywhere else."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from voxelfield.rendering.pixels import to_uint8

_log = logging.getLogger(__name__)

EVENTS = "events.out.tfevents.*"
"""Names of TensorBoard's files, which continue with the second in which a file was begun, the host and the process."""

_CHARTS = {
    "is the run well?": {
        "PSNR": ["Multiline", [r"train/psnr", r"test/psnr"]],
        "loss terms": ["Multiline", [r"loss/.*"]],
        "rays per second": ["Multiline", [r"train/rays_per_second"]],
    }
}


class RunLogger(Protocol):
    """The interface of loggers. Implementations must accept calls in any order until :meth:`close`."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers by tag, for example ``loss/photometric``, ``train/psnr``, ``test/psnr``."""

    def images(self, step: int, tag: str, image: torch.Tensor) -> None:
        """Records an image: (H, W, 3) floating point, nominally in [0, 1], any device."""

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Records the distribution of values: floating point of any shape, any device, at least one value."""

    def text(self, tag: str, text: str) -> None:
        """Records a text (Markdown), for example the composed configuration."""

    def hyperparameters(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Records the configuration with the final metrics; called once, at the end of a run."""

    def close(self) -> None:
        """Writes pending records; calling other methods afterwards is an error.

        If there is a method ``flush()``, it also writes pending records. It may be called from another thread, and is
        called before each checkpoint: records that it leaves pending are lost if the run is killed later.
        """


class NullLogger:
    """A logger that records nothing: ``logger=none``."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Does nothing."""

    def images(self, step: int, tag: str, image: torch.Tensor) -> None:
        """Does nothing."""

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Does nothing."""

    def text(self, tag: str, text: str) -> None:
        """Does nothing."""

    def hyperparameters(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class TensorBoardLogger:
    """Writes TensorBoard event files.

    The Custom Scalars tab shows three charts for a quick check of a run: ``train/psnr`` with ``test/psnr``, all
    ``loss/...`` tags, and ``train/rays_per_second``.

    Args:
        directory: Run directory; created if needed.
        first_step: Number of steps already done if a run that logged to the same directory is resumed, or 0 if it is
            repeated. TensorBoard then hides what that run logged for later steps. None hides nothing.
        chosen: Hyperparameters to list first in the table, such as those that a sweep varies.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path, first_step: int | None = None, chosen: Collection[str] = ()) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardLogger needs tensorboard: pip install 'voxelfield[train]', or choose logger=none"
            ) from error
        # The records of the step from which training resumes were made before its checkpoint, and are kept.
        purge_step = first_step + 1 if first_step else first_step
        earlier = set(directory.glob(EVENTS))
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)
        _put_before(earlier, set(directory.glob(EVENTS)) - earlier)
        # TensorBoard compresses an image in the thread that adds it, which takes longer than rendering it.
        self._pictures = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensorboard")
        self._adding: list[Future[None]] = []
        self._writer.add_custom_scalars(_CHARTS)
        self._step = first_step or 0
        self._chosen = chosen

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers by tag.

        Args:
            step: Number of optimizer steps taken.
            values: Numbers by tag; a slash in a tag groups charts.
        """
        self._step = max(self._step, step)
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def images(self, step: int, tag: str, image: torch.Tensor) -> None:
        """Records an image, in the background.

        Args:
            step: Number of optimizer steps taken.
            tag: Name of the image; the same tag at several steps gives a slider.
            image: (H, W, 3) floating point, nominally in [0, 1], any device. Rounded to 8 bits.
        """
        # Copied here, because other threads must not synchronise with the device while a CUDA graph is captured.
        pixels = to_uint8(image).cpu()
        self._adding.append(self._pictures.submit(self._add_picture, step, tag, pixels))

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Records the distribution of values.

        Args:
            step: Number of optimizer steps taken.
            tag: Name of the histogram; the same tag at several steps shows how it changes.
            values: Floating point of any shape, any device, at least one. Non-finite values are left out.
        """
        finite = values[values.isfinite()]
        if finite.numel() > 0:
            self._writer.add_histogram(tag, finite.float().cpu().numpy(), step)

    def _add_picture(self, step: int, tag: str, pixels: torch.Tensor) -> None:
        self._writer.add_image(tag, pixels, step, dataformats="HWC")

    def text(self, tag: str, text: str) -> None:
        """Records a text.

        Args:
            tag: Name of the text.
            text: Markdown.
        """
        self._writer.add_text(tag, text)

    def hyperparameters(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Records the row of this run in the HParams tab; called once, at the end.

        Args:
            config: Configuration, possibly nested; see :func:`flatten_config`.
            metrics: Final numbers by name; recorded as the scalars ``final/<name>`` at the last logged step.
        """
        from torch.utils.tensorboard.summary import hparams

        # TensorBoard's table has no booleans (torch writes them as 0 and 1), so they are written as in YAML.
        columns = {
            key: str(value).lower() if isinstance(value, bool) else value
            for key, value in flatten_config(config).items()
        }
        finals = {f"final/{name}": value for name, value in metrics.items()}
        # Not SummaryWriter.add_hparams, which opens a second event file in a subfolder, so that the run appears twice.
        file_writer = self._writer._get_file_writer()
        experiment, *others = hparams(columns, finals)
        _mark(experiment, self._chosen)
        for summary in (experiment, *others):
            file_writer.add_summary(summary)
        self.scalars(self._step, finals)

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
    """Renames earlier event files so that TensorBoard, which reads a folder's files by name, reads them first.

    Otherwise it would read them last if the clock was set back since, or if all were begun in the same second, and hide
    what it should show.

    Args:
        earlier: The earlier files.
        new: The files that must be read after them.
    """
    if not earlier or not new or max(earlier) < min(new):
        return
    second = int(min(new).name.removeprefix(EVENTS[:-1]).partition(".")[0])
    taken = {path.name for path in earlier}
    for path in sorted(earlier, reverse=True):
        rest = path.name.removeprefix(EVENTS[:-1]).partition(".")[2]
        while True:
            second -= 1
            name = f"{EVENTS[:-1]}{second:010d}.{rest}"
            if name not in taken:
                break
        path.rename(path.with_name(name))


def _mark(experiment: Any, names: Collection[str]) -> None:
    """Marks hyperparameters as differing between runs, so that TensorBoard's table lists them first.

    Args:
        experiment: The summary that describes the table; changed in place.
        names: Names of hyperparameters; unknown names are ignored.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    plugin = experiment.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    for info in data.experiment.hparam_infos:
        if "differs" in info.DESCRIPTOR.fields_by_name:  # not in the oldest supported versions
            info.differs = info.name in names
    plugin.content = data.SerializeToString()


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | str | bool]:
    """Flattens a configuration to one level of plain values.

    Args:
        config: Nested mapping.
        prefix: Prefix of each key.

    Returns:
        ``{"model.channels": 4, ...}``: nested keys joined by dots, None as "null", and any other value that is not int,
        float, str or bool converted by ``str``.
    """
    flat: dict[str, int | float | str | bool] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten_config(value, f"{name}."))
        elif value is None:
            flat[name] = "null"
        else:
            flat[name] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return flat
