"""Monitoring of a run: TensorBoard, comparison images, progress."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from tqdm import tqdm

from voxelfield.rendering.pixels import to_uint8
from voxelfield.training.images import turbo

_log = logging.getLogger(__name__)

ERROR_MAXIMUM = 0.25
"""Mean absolute colour error that :func:`comparison_panel` shows in the last colour of its map."""

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
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)
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


def comparison_panel(
    rgb: torch.Tensor,
    truth: torch.Tensor,
    depth: torch.Tensor,
    opacity: torch.Tensor,
    near_far: tuple[float, float] | None = None,
) -> torch.Tensor:
    """Places render, truth, error and depth side by side.

    The error is the absolute difference, averaged over the channels, in Turbo colours from 0 to the fixed
    ``ERROR_MAXIMUM``, so panels of different steps and views are comparable. Depth is in Turbo colours from near (blue)
    to far (red); pixels with opacity of at most 0.5 are white.

    Args:
        rgb: (H, W, 3) floating point, nominally in [0, 1].
        truth: (H, W, 3) floating point in [0, 1], same device.
        depth: (H, W) world units, same device.
        opacity: (H, W) in [0, 1], same device.
        near_far: Depths of the first and last colour. None uses the 1st and 99th percentile over the pixels with
            opacity above 0.5.

    Returns:
        (H, 4 * W, 3) float32 in [0, 1] on the device of ``rgb``, detached.

    Raises:
        ValueError: A shape is wrong or ``near_far`` is not increasing.
    """
    if rgb.ndim != 3 or rgb.shape[-1] != 3:
        raise ValueError(f"rgb must have shape (H, W, 3), got {tuple(rgb.shape)}")
    for name, image, shape in (
        ("truth", truth, rgb.shape),
        ("depth", depth, rgb.shape[:2]),
        ("opacity", opacity, rgb.shape[:2]),
    ):
        if image.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(image.shape)}")
    if near_far is not None and not near_far[0] < near_far[1]:
        raise ValueError(f"near_far must be increasing, got {near_far}")
    rgb, truth, depth = (image.detach().to(torch.float32) for image in (rgb, truth, depth))
    error = (rgb - truth).abs().mean(dim=-1) / ERROR_MAXIMUM
    depth_rgb = depth_colors(depth, opacity.detach(), near_far)
    return torch.cat((rgb.clamp(0, 1), truth.clamp(0, 1), turbo(error), depth_rgb), dim=1)


def depth_colors(
    depth: torch.Tensor, opacity: torch.Tensor, near_far: tuple[float, float] | None = None
) -> torch.Tensor:
    """Maps depth to Turbo colours from near (blue) to far (red), and to white where opacity is at most 0.5.

    Args:
        depth: (H, W) float32, world units.
        opacity: (H, W) in [0, 1], same device.
        near_far: As for :func:`comparison_panel`.

    Returns:
        (H, W, 3) float32 in [0, 1].
    """
    filled = (opacity > 0.5) & depth.isfinite()
    low, high = _depth_range(depth[filled]) if near_far is None else near_far
    # The lower bound avoids a division by zero for a flat wall.
    scaled = (depth - low) / max(high - low, 1e-6)
    return torch.where(filled.unsqueeze(-1), turbo(scaled), 1.0)


def _depth_range(depths: torch.Tensor) -> tuple[float, float]:
    """Returns the 1st and 99th percentile, by sorting, because torch.quantile rejects more than 2**24 values."""
    if depths.numel() == 0:
        return 0.0, 1.0
    ordered = depths.sort().values
    last = len(ordered) - 1
    return float(ordered[round(0.01 * last)]), float(ordered[round(0.99 * last)])


class Progress:
    """Progress of a run: step, PSNR, rays per second, time left.

    On a terminal it draws a tqdm bar; elsewhere (batch systems, log files) it logs a line now and then instead of
    printing control characters. Between displays, :meth:`update` only reads a clock, so it may be called every step.

    Args:
        total: Number of steps of the whole run.
        initial: Number of steps already done, when resuming.
        stream: Stream for the bar, standard error by default; the bar is drawn only if it is a terminal.
        interval: Seconds between two displays; None means 0.5 on a terminal, else 10.
        clock: Source of seconds.
    """

    def __init__(
        self,
        total: int,
        initial: int = 0,
        *,
        stream: TextIO | None = None,
        interval: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        terminal = stream.isatty()
        self._total = total
        self._clock = clock
        self._interval = interval if interval is not None else (0.5 if terminal else 10.0)
        self._first = self._step = initial
        self._started = self._shown = clock()
        self._rays = 0
        self._bar = (
            tqdm(
                total=total,
                initial=initial,
                file=stream,
                desc="train",
                dynamic_ncols=True,
                # This class limits the rate, so that PSNR is read from the device only when it is displayed.
                mininterval=0,
                miniters=1,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",
            )
            if terminal
            else None
        )

    def update(self, step: int, *, psnr: Callable[[], float] | None = None, rays: int = 0) -> None:
        """Reports that a step is done; displays it if a display is due or it is the last step.

        Args:
            step: Steps done so far, including earlier runs.
            psnr: Returns the training PSNR in dB; called only when it is displayed, because it may synchronise.
            rays: Rays rendered since the previous call.
        """
        self._step = step
        self._rays += rays
        now = self._clock()
        elapsed = now - self._shown
        if elapsed < self._interval and step < self._total:
            return
        fields = [] if psnr is None else [f"PSNR {psnr():.2f} dB"]
        if self._rays and elapsed > 0:
            fields.append(f"{_short(self._rays / elapsed)} rays/s")
        done = step - self._first
        if done > 0:
            fields.append(f"ETA {tqdm.format_interval((now - self._started) / done * (self._total - step))}")
        if self._bar is None:
            share = 100 * step / self._total if self._total else 100.0
            _log.info("%s", ", ".join([f"step {step}/{self._total} ({share:.0f} %)", *fields]))
        else:
            self._bar.set_postfix_str(", ".join(fields), refresh=False)
            self._bar.update(step - self._bar.n)
        # Read again, because computing the PSNR may have taken time.
        self._shown = self._clock()
        self._rays = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock and hides the bar during a block, such as an evaluation between steps."""
        began = self._clock()
        if self._bar is not None:
            self._bar.clear()
        try:
            yield
        finally:
            pause = self._clock() - began
            self._started += pause
            self._shown += pause
            if self._bar is not None:
                self._bar.refresh()

    def close(self) -> None:
        """Finishes the bar, leaving its last state on the screen."""
        if self._bar is not None:
            self._bar.update(self._step - self._bar.n)
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _short(number: float) -> str:
    """Writes 3120000 as 3.1M."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.1f}{letter}"
    return f"{number:.0f}"
