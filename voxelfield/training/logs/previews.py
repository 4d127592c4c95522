"""Previews of a run during training."""

from __future__ import annotations

import logging
import math

from torch import Tensor

from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import evenly_spaced
from voxelfield.evaluation.metrics import psnr
from voxelfield.rendering.images import composite_background
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.rendering.view_pictures import comparison_panel
from voxelfield.training.logs.logging import RunLogger

logger = logging.getLogger(__name__)


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
