"""Records of a run in training: metrics of the last steps, whether training goes wrong, and previews."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch

from voxelfield.datasets.scene import Split
from voxelfield.devices import peak_bytes
from voxelfield.evaluation.evaluation import evenly_spaced
from voxelfield.evaluation.metrics import mse_to_psnr, psnr
from voxelfield.models.model import Model
from voxelfield.rendering.pixels import composite_background
from voxelfield.rendering.view_pictures import comparison_panel
from voxelfield.settings import TrainerConfig
from voxelfield.training.logs import RunLogger
from voxelfield.training.state import TrainingState

logger = logging.getLogger(__name__)


def collect_metrics(training: TrainingState, config: TrainerConfig) -> dict[str, float]:
    """Returns the metrics of the steps since the last call, by tag; synchronises with the device.

    Args:
        training: The training, whose attribute ``diverged`` is updated.
        config: Its settings.

    Raises:
        FloatingPointError: The loss or the field is not finite.
        EmptyFieldError: No cell is occupied.
    """
    step, model, device, since_last = training.steps, training.model, training.device, training.clock.lap()
    totals = training.training_step.totals.read()
    taken = totals["steps"] - totals.get("skipped", 0)
    losses = {name: total / taken if taken else math.nan for name, total in totals.items() if name.startswith("loss/")}
    # Where the field is NaN, no sample is visible, so the loss of the remaining samples may be finite.
    if not training.is_finite() or not all(math.isfinite(value) for value in losses.values()):
        raise FloatingPointError(
            f"step {step}: the loss or the field was not finite since the last record, now {losses}; lower "
            "optimizer.grid_lr or optimizer.network_lr, or trainer.loss_scale where gradients are float16, or set "
            "trainer.not_finite=skip"
        )
    _note_divergence(training, losses["loss/photometric"])
    values = losses | {"train/psnr": float(mse_to_psnr(torch.tensor(losses["loss/photometric"])))}
    values |= rates_of_steps(totals, config, since_last)
    values["train/occupancy"] = model.occupied_fraction(step)
    values["train/seconds"] = training.clock.seconds
    for component in (model, *training.components):
        values |= component.scalars()
    values |= {f"lr/{name}": rate for name, rate in training.optimizers.rates().items()}
    if device.type == "cuda":
        values["gpu/allocated_GiB"] = torch.cuda.memory_allocated(device) / 2**30
        values["gpu/peak_GiB"] = peak_bytes(device) / 2**30
    return values


def _note_divergence(training: TrainingState, loss: float) -> None:
    """Compares the mean squared error of pixels since the last record with the error of the first step.

    A field may become worse in its very first steps. After that, a field that learns at all is better, and batches of
    pixels differ by less than 1.8 dB; a field with far too high learning rates is worse by 3 dB and more, and stays so.
    """
    before, untrained = training.diverged, float(training.untrained_error)
    training.diverged = training.steps >= 20 and loss > 1.5 * untrained
    if training.diverged and not before:
        logger.warning(
            "step %d: training diverges, with training pixels at %.1f dB after %.1f dB before the first step; "
            "lower trainer.rates.grid and trainer.rates.network",
            *(training.steps, -10 * math.log10(loss), -10 * math.log10(max(untrained, 1e-10))),
        )


def rates_of_steps(totals: Mapping[str, float], config: TrainerConfig, seconds: float) -> dict[str, float]:
    """Returns the numbers of rays and samples that some steps used.

    Args:
        totals: Sums over at least one step (:attr:`voxelfield.training.step.TrainingStep.totals`).
        config: Settings of the training loop.
        seconds: Duration of the steps.

    Raises:
        ValueError: No pixel's samples fitted in the capacity.
    """
    steps, rays = totals["steps"], totals["rays"]
    if rays < steps * config.supersampling**2:
        names, room = "trainer.visible_samples", str(config.visible_samples)
        if "candidates" in totals:
            names, room = f"trainer.candidate_samples and {names}", f"{config.candidate_samples} and {room}"
        raise ValueError(f"{names} must have room for one pixel's samples, got {room}: raise it")
    values = {
        "train/rays_per_step": rays / steps,
        "train/samples_per_ray": totals["samples"] / rays,
        "train/rays_per_second": rays / seconds,
    }
    if "skipped" in totals:
        values["train/skipped_steps"] = totals["skipped"]
    if "candidates" in totals:
        values["train/candidates_per_ray"] = totals["candidates"] / rays
    return values


def log_stage(model: Model, log: RunLogger, step: int) -> None:
    """Logs the grid's new box and resolution, after ``step`` steps."""
    grid = model.grid
    logger.info("step %d: grid %d x %d x %d over %s", step, *grid.resolution, grid.aabb.tolist())
    vertices = sum(level[..., 0].numel() for level in grid.levels[: grid.active])
    log.scalars(step, {"stage/resolution": model.resolution, "stage/vertices": vertices})


def log_preview(model: Model, split: Split, log: RunLogger, step: int, views: int) -> None:
    """Logs render | truth | error | depth at fixed views, and their mean PSNR as ``test/psnr``.

    Args:
        model: The model in its current state.
        split: The split whose views are rendered.
        log: The logger.
        step: Number of steps done.
        views: Number of views, spread evenly over the split.
    """
    renderer, background = model.renderer(few=True), model.background
    scores = []
    for index in evenly_spaced(views, len(split)):
        view = renderer.view(split.cameras, index)
        truth = composite_background(split.image(index).to(view.rgb.device), background)
        scores.append(float(psnr(view.rgb.clamp(0, 1), truth, split.mask(index, truth.device))))
        panel = comparison_panel(view, truth)
        log.images(step, f"test/{split.names[index]}", panel)
    mean = math.fsum(scores) / len(scores)
    log.scalars(step, {"test/psnr": mean})
    logger.info("step %d: PSNR %.2f dB over %d test views", step, mean, len(scores))
