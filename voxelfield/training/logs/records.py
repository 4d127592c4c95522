"""Records of a run in training: numbers of the steps since the last record, and previews."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import evenly_spaced
from voxelfield.evaluation.metrics import mse_to_psnr, psnr
from voxelfield.rendering.pixels import composite_background
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.rendering.view_pictures import comparison_panel
from voxelfield.training.config import TrainerConfig
from voxelfield.training.logs.logging import RunLogger

logger = logging.getLogger(__name__)


def mean_losses(totals: Mapping[str, float]) -> dict[str, float]:
    """Returns the means of the loss terms over some steps, NaN if all of them were skipped.

    Args:
        totals: Sums over at least one step, from :class:`voxelfield.training.step.TrainingStep`.
    """
    steps = totals["steps"] - totals.get("skipped", 0)
    return {name: total / steps if steps else math.nan for name, total in totals.items() if name.startswith("loss/")}


def has_diverged(step: int, loss: float, untrained: float) -> bool:
    """Returns whether a field reproduces the training images clearly worse than before its first step.

    A field may become worse in its very first steps. After that, a field that learns at all is better, and batches of
    pixels differ by less than 1.8 dB; a field with far too high learning rates is worse by 3 dB and more, and stays so.

    Args:
        step: Number of steps done.
        loss: Mean squared error of pixels since the last record.
        untrained: Mean squared error of the first step, whose pixels were rendered before it changed the field.
    """
    return step >= 20 and loss > 1.5 * untrained


def rates_of_steps(totals: Mapping[str, float], config: TrainerConfig, seconds: float) -> dict[str, float]:
    """Returns the PSNR of some steps, and the numbers of rays and samples that they used.

    Args:
        totals: As for :func:`mean_losses`.
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
        "train/psnr": float(mse_to_psnr(torch.tensor(mean_losses(totals)["loss/photometric"]))),
        "train/rays_per_step": rays / steps,
        "train/samples_per_ray": totals["samples"] / rays,
        "train/rays_per_second": rays / seconds,
    }
    if "skipped" in totals:
        values["train/skipped_steps"] = totals["skipped"]
    if "candidates" in totals:
        values["train/candidates_per_ray"] = totals["candidates"] / rays
    return values


def log_preview(
    renderer: FieldRenderer, split: Split, background: Tensor, log: RunLogger, step: int, views: int
) -> None:
    """Logs render | truth | error | depth at fixed views, and their mean PSNR as ``test/psnr``.

    Args:
        renderer: A renderer of the field's current state.
        split: The split whose views are rendered.
        background: (3,) colour over which views are rendered, on the renderer's device.
        log: The logger.
        step: Number of steps done.
        views: Number of views, spread evenly over the split.
    """
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
