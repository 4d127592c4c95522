"""Robust weights: parts of photographs that show something that moves do not count in the losses."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from voxelfield import processes
from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import BelowOne, Count, NotNegative
from voxelfield.datasets.images import image_size
from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import picture_name
from voxelfield.files import is_replaceable
from voxelfield.media.png import write_png
from voxelfield.models.batch import Batch, Outputs, columns_and_rows
from voxelfield.models.component import Component
from voxelfield.models.pixel_sampler import pixels_that_count
from voxelfield.run_directory import MASKS

logger = logging.getLogger(__name__)

# Outlier fractions. A cell moves if the mean over its 3x3 neighbourhood reaches _SEED; or, because it then contains an
# edge of the same person, if it is beside such a cell and its own fraction reaches _EDGE.
_SEED, _EDGE = 0.5, 0.2
# Largest number of pixels in a cell's counts, and number of inliers with which they begin.
_MEMORY, _PRIOR = 48.0, 4.0
# Largest fraction of a photograph that is ignored. If all of it differs, a passer-by is not the reason.
_MOST = 0.5
# Errors are counted in this unit: sums of integers do not depend on their order, on devices and over processes.
_UNIT = 2.0**-24


@dataclass(frozen=True)
class RobustSettings(ComponentSettings):
    """Settings of :class:`RobustWeights`.

    Attributes:
        robust: Squared error, as a multiple of the mean, above which a pixel is unlike the field. Parts of photographs
            that consist of such pixels show something that moves and are ignored by all terms that compare colours
            (:class:`voxelfield.components.robust.RobustWeights`). 4 suits photographs with passers-by; 0 ignores
            nothing.
        robust_from: Share of the steps before which nothing is ignored, because the field does not show the scene yet.
        robust_every: Number of steps between decisions on what is ignored.
        robust_cells: Largest number of cells along the longer side of the photographs; what is ignored consists of
            cells. Each takes about 25 bytes on the device.
    """

    name = "robust"
    robust: NotNegative = key("trainer.loss.robust", 0.0, off=0)
    robust_from: BelowOne = key("trainer.loss.robust_from", 0.1, idle=True)
    robust_every: Count = key("trainer.loss.robust_every", 50, idle=True, steps=True)
    robust_cells: Count = key("trainer.loss.robust_cells", 48, idle=True)

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component."""
        return [RobustWeights(self, training)]


class RobustWeights(Component):
    """Gives weight 0 to the pixels of cells of the photographs that show something that moves.

    RobustNeRF (Sabour et al. 2023, equations 8 to 10) compares each pixel's error with the median, and ignores pixels
    only where neighbourhoods of 16 x 16 pixels are full of errors, since errors at static edges are thin. It draws
    patches for this. Here single pixels are drawn, and each photograph has a coarse map of cells, which counts the
    pixels that were drawn and those unlike the field. A pixel is unlike the field if its squared error exceeds a
    threshold of its cell: ``config.robust`` times the mean error of the pixels that are not ignored, of all photographs
    or of the same one, whichever is larger; plus the variance of the photograph's colours in the cell, which is the
    error that a field without any detail would have there. Every ``config.robust_every`` steps, the counts decide which
    cells move: cells whose 3 x 3 neighbourhood is mostly unlike the field, and cells beside them that are partly unlike
    it. The weights of a step do not depend on the errors of that step.

    In a process group, counts are summed before they are evaluated, so that all processes ignore the same cells.

    Args:
        config: The settings.
        training: The training, whose images are weighed.

    Attributes:
        moves: (N, Y, X) bool on the device, the cells that are ignored.
        cell: Side of a cell in pixels.
    """

    name = "robust"

    def __init__(self, config: RobustSettings, training: Training) -> None:
        scene, pixels = training.scene, training.pixels
        split, start = scene.train, round(config.robust_from * training.config.trainer.steps)
        height, width, device = split.cameras.height, split.cameras.width, pixels.cameras.c2w.device
        self._scene, self._split, self._factor, self._every = scene, split, config.robust, config.robust_every
        # The first counts serve to find the errors with which pixels are compared.
        self._start = max(start, 2 * self._every)
        self.cell = -(-max(height, width) // config.robust_cells)
        shape = len(split), -(-height // self.cell), -(-width // self.cell)
        self.moves = torch.zeros(shape, dtype=torch.bool, device=device)
        self._counts = torch.zeros(2, *shape, device=device)
        self._new_counts = torch.zeros(2, self.moves.numel(), dtype=torch.int32, device=device)
        self._errors = torch.zeros(2, len(split), dtype=torch.int64, device=device)
        self._thresholds = torch.full(shape, torch.inf, device=device)
        contrast, sizes = cell_variances(pixels.images, self.cell), cell_sizes(split, self.cell).to(device)
        if len(sizes) < len(split):
            contrast, sizes = (processes.gather_rows(each, processes.row_counts(each)) for each in (contrast, sizes))
        self._contrast, self._sizes = contrast, sizes
        self._scale = torch.ones((), device=device)

    def before_step(self, step: int) -> None:
        """Evaluates the counts, if it is time; a collective call, which does not synchronise with the device."""
        if step == 0 or step % self._every > 0:
            return
        new, (errors, pixels) = processes.sum_of(self._new_counts), processes.sum_of(self._errors)
        if step >= self._start:
            self._counts += new.view_as(self._counts)
            self._counts *= _MEMORY / self._counts[0].clamp(min=_MEMORY)
            self.moves.copy_(moving_cells(*self._counts))
            self._rescale()
        level = errors.sum().double() / pixels.sum().clamp(min=1)
        own = errors.double() / pixels.clamp(min=1)
        base = self._factor * _UNIT * torch.maximum(own, level)
        self._thresholds.copy_(base[:, None, None] + self._contrast)
        self._new_counts.zero_()
        self._errors.zero_()

    def _rescale(self) -> None:
        self._scale.copy_(1 / (1 - self._ignored()))

    def _ignored(self) -> Tensor:
        """Returns the ignored fraction of the pixels that are drawn, ()."""
        return (self._sizes * self.moves).sum() / self._sizes.sum()

    def prepare(self, batch: Batch) -> None:
        """Gives the pixels their weights, whose mean over all photographs is 1."""
        height, width = self._split.cameras.height, self._split.cameras.width
        column, row = (columns_and_rows(batch.pixels, width, height) // self.cell).unbind(dim=1)
        _, rows, columns = self.moves.shape
        self._cells = (batch.images * rows + row) * columns + column
        self._stays = ~self.moves.view(-1)[self._cells]
        batch.weigh(self._stays * self._scale)

    def losses(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """Counts the pixels; adds no term."""
        with torch.no_grad():
            error = (outputs.pixels - batch.truth).square().mean(dim=1)
            fitting = outputs.rendering.rays_kept // batch.rays_per_pixel
            drawn = (torch.arange(len(error), device=error.device) < fitting) & error.isfinite()
            unlike = drawn & (error > self._thresholds.view(-1)[self._cells])
            stays = drawn & self._stays
            size = torch.where(stays, error.clamp(max=1) / _UNIT, 0.0).long()
            self._new_counts.index_add_(1, self._cells, torch.stack((drawn, unlike)).to(torch.int32))
            self._errors.index_add_(1, batch.images, torch.stack((size, stays.long())))
        return {}

    def scalars(self) -> dict[str, float]:
        """Returns the fraction of the photographs that is ignored."""
        return {"robust/ignored": float(self._ignored())}

    def state_dict(self) -> dict[str, Any]:
        """Returns the cells, the thresholds and all counts; a collective call."""
        return {
            "moves": self.moves,
            "counts": self._counts,
            "thresholds": self._thresholds,
            "new_counts": processes.sum_of(self._new_counts),
            "errors": processes.sum_of(self._errors),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state has other cells."""
        saved, own = tuple(state["moves"].shape), tuple(self.moves.shape)
        if saved != own:
            raise ValueError(
                f"trainer.loss.robust_cells, trainer.image_size and the training images must be those of the "
                f"checkpoint, with {saved} images, rows and columns of cells, got {own}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state; the first process continues all counts that were not evaluated yet."""
        self.moves.copy_(state["moves"])
        self._counts.copy_(state["counts"])
        self._thresholds.copy_(state["thresholds"])
        self._new_counts.copy_(state["new_counts"]).mul_(processes.is_first())
        self._errors.copy_(state["errors"]).mul_(processes.is_first())
        self._rescale()

    def mask(self, index: int) -> Tensor:
        """Returns the pixels of a photograph that count, (height, width) bool on the CPU, without those masked before.

        Args:
            index: Number of a photograph whose image this process holds.
        """
        width, height = self._split.cameras.size(index)
        moves = self.moves[index].repeat_interleave(self.cell, 0).repeat_interleave(self.cell, 1)
        stays, given = ~moves[:height, :width].cpu(), self._split.mask(index)
        return stays if given is None else stays & given

    def write_results(self, folder: Path) -> None:
        """Writes a mask for each training photograph to the folder ``masks``, black where it is ignored.

        The masks have the sizes, folders and names of the photographs' files, as in COLMAP's layout: ``a.jpg.png`` for
        ``a.jpg``. Photographs of other splits get the masks that they have, or white ones, because loaders of such a
        folder expect a mask for each photograph. Masks of training images without files are named after the views.
        Masks that were edited, and files that voxelfield did not write, are kept, with a warning.

        Raises:
            OSError: A mask cannot be written.
        """
        splits = self._scene.splits.values()
        root = _images_folder([path.parent for split in splits for path in split.paths or ()])
        kept = []
        for split in splits:
            trained = split is self._split
            if not trained and (split.paths is None or not processes.is_first()):
                continue
            for index in split.local_indices:
                mask = self.mask(index) if trained else split.mask(index)
                if mask is None:
                    mask = torch.ones(split.image(index).shape[:2], dtype=torch.bool)
                pixels = Image.fromarray(mask.numpy())
                if split.paths is None:
                    path = folder / MASKS / picture_name(split.names[index])
                else:
                    inner = split.paths[index].relative_to(root)
                    path = folder / MASKS / inner.with_name(f"{inner.name}.png")
                    pixels = pixels.resize(image_size(split.paths[index]), Image.Resampling.NEAREST)
                if is_replaceable(path):
                    write_png(path, pixels)
                else:
                    kept.append(path)
        if kept:
            logger.warning("%d masks that were edited are kept, the first is %s", len(kept), kept[0])


def _images_folder(folders: Sequence[Path]) -> Path:
    """Returns the folder of images, beside which loaders look for masks: one of that name, or else the common one."""
    common = Path(os.path.commonpath(folders)) if folders else Path()
    named = (folder for folder in (common, *common.parents) if folder.name.partition("_")[0] == "images")
    return next(named, common)


def cell_sizes(split: Split, cell: int) -> Tensor:
    """Returns the number of pixels that are drawn in each cell of the local photographs, (N, Y, X) float32 on the CPU.

    Args:
        split: The photographs.
        cell: Side of a cell in pixels.
    """
    counted = pixels_that_count(split)
    if counted is None:
        counted = torch.ones(1, *split.images.shape[1:3], dtype=torch.bool)
    sizes = [F.avg_pool2d(each[None].float(), cell, ceil_mode=True, divisor_override=1) for each in counted]
    return torch.cat(sizes).expand(len(split.images), -1, -1).contiguous()


def cell_variances(images: Tensor, cell: int) -> Tensor:
    """Returns the variance of colours in each cell of photographs, (N, Y, X) float32: the mean of the channels.

    Args:
        images: (N, H, W, 4) uint8 RGBA, straight alpha. The variance is averaged over a white and a black background,
            so it includes silhouettes.
        cell: Side of a cell in pixels.
    """
    variances = []
    for image in images:
        rgb, alpha = (image.float() / 255).split((3, 1), dim=-1)
        planes = torch.cat((rgb * alpha, rgb * alpha + 1 - alpha), dim=-1).movedim(-1, 0)
        mean, mean_square = F.avg_pool2d(torch.stack((planes, planes.square())), cell, ceil_mode=True)
        variances.append((mean_square - mean.square()).mean(dim=0))
    return torch.stack(variances)


def moving_cells(drawn: Tensor, unlike: Tensor) -> Tensor:
    """Returns which cells of photographs move, (N, Y, X) bool.

    Args:
        drawn: (N, Y, X) float32, numbers of pixels that were drawn in each cell.
        unlike: (N, Y, X) float32, numbers of these pixels that are unlike the field.
    """
    around = F.avg_pool2d(torch.stack((drawn + _PRIOR / 9, unlike), dim=1), 3, 1, 1)
    seeds = around[:, 1] >= _SEED * around[:, 0]
    beside = F.max_pool2d(seeds.float(), 3, 1, 1) > 0
    moves = seeds | (beside & (unlike >= _EDGE * (drawn + 1)))
    share = moves.sum(dim=(1, 2)) / (drawn > 0).sum(dim=(1, 2)).clamp(min=1)
    return moves & (share <= _MOST)[:, None, None]
