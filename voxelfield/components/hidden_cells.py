"""Cells that no training image shows, which are emptied during training."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from voxelfield import processes
from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import BelowOne
from voxelfield.models.component import Component
from voxelfield.models.model import Model
from voxelfield.rendering.march import pixel_stride, ray_spacing, visible_cells

logger = logging.getLogger(__name__)

# A cell counts as shown by an image where a sample has at least this compositing weight; without a limit, samples
# behind opaque surfaces would count too. This many rays of an image cross each cell side by side, if its pixels allow.
_MIN_WEIGHT_SHOWN = 1e-4
_RAYS_ACROSS_CELL = 2


@dataclass(frozen=True)
class HiddenCellSettings(ComponentSettings):
    """Settings of :class:`HiddenCells`.

    Attributes:
        hidden_at: Share of the steps after which the cells that no training image shows are emptied permanently, but
            not before ``start``, nor before the last stage has lasted as long as all earlier ones. A field has matter
            there that nothing has taught it, which views from other sides may show. 0 keeps these cells. They are also
            kept where cameras are learned, where the field has a warp, and where its density depends on values of rays.
    """

    name = "hidden_cells"
    hidden_at: BelowOne = key("trainer.occupancy.hidden_at", 0.5, off=0)

    def step(self, trainer: Any) -> int:
        """Returns the step for these settings of the training loop."""
        # A young level moves matter into cells that are still hidden. A crop, too, makes cells occupied again.
        last = max(stage.step for stage in trainer.stages if stage.step < trainer.steps)
        return max(1, trainer.occupancy.start, 2 * last, min(round(self.hidden_at * trainer.steps), trainer.steps - 1))

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component."""
        return [HiddenCells(training.model, self.step(training.config.trainer))]


class HiddenCells(Component):
    """Excludes the cells in which no pixel of a training image has a visible sample, before one step."""

    name = "hidden_cells"
    before_model = True  # which then updates the cells that are left

    def __init__(self, model: Model, step: int) -> None:
        self._model, self._step = model, step

    def before_step(self, step: int) -> None:
        """Excludes the cells if it is time, unless the poses are too inaccurate to exclude space; a collective call."""
        setup = self._model.setup
        if step == self._step and setup.visual_hull is not None:
            self.exclude(step)
            setup.optimizer.restrict()

    def exclude(self, step: int) -> None:
        """Excludes the cells, after a number of steps; a collective call.

        Where pixels are much finer than cells, some of them are examined, two along each side of a cell.

        All cells are kept, which is logged, if the field has a warp, because photographs of surroundings do not gain;
        if its density depends on values of rays, with which other cells may be visible; and if nothing is visible yet.
        """
        shown = None
        if self._model.warp is not None:
            reason = "the field has a warp"
        elif self._model.field.density_inputs:
            reason = "the density depends on values of rays"
        else:
            shown, reason = self._shown_cells(), "they show no matter yet"
        if shown is None or not bool(shown.any()):
            logger.info("step %d: cells that the training images do not show are kept, because %s", step, reason)
            return
        self._model.occupancy.exclude(~shown)
        logger.info("step %d: the training images show %.1f %% of the cells", step, 100 * float(shown.float().mean()))

    def _shown_cells(self) -> Tensor:
        """Returns (X, Y, Z) bool: the cells in which a training image has a visible sample; a collective call."""
        model, cameras = self._model, self._model.setup.cameras
        field, occupancy, chunk = model.field, model.occupancy, model.sampling.chunk
        settings = replace(model.settings, min_weight=max(model.settings.min_weight, _MIN_WEIGHT_SHOWN))
        with model.autocast():
            parts = visible_cells(
                field,
                occupancy,
                settings,
                cameras[processes.rank() :: processes.count()],
                spacing=ray_spacing(field, occupancy.aabb, cameras),
                every=pixel_stride(field, occupancy, cameras, _RAYS_ACROSS_CELL),
                chunk=max(1 << 19, chunk) if model.is_marched_at_once else chunk,
            )
        sizes = [finer // cells for finer, cells in zip(parts.shape, occupancy.occupied.shape, strict=True)]
        return processes.sum_of(F.max_pool3d(parts[None].float(), sizes)[0]) > 0
