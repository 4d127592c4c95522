"""Every kind of grid, with and without working copies, and their values as torch's own operations compute them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield import VoxelGrid, VoxelPyramid
from voxelfield.components.muon import OrthogonalMatrices
from voxelfield.grids.adam import GridAdam
from voxelfield.models.component import Component
from voxelfield.models.dense import DenseConfig
from voxelfield.models.settings import Sampling
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.training.optimizer import Optimizers

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
STORED = (None, (0, 2, 3), (3,), None)


def without_blocks(device: torch.device | str) -> VoxelPyramid:
    """Returns two dense levels and a sparse one of 27 blocks, of which none exists."""
    return VoxelPyramid((4, 8), 2, BOX, sparse_resolutions=(21,), init_range=1.0, device=device)


def _sparse(device: torch.device | str) -> VoxelPyramid:
    pyramid = without_blocks(device)
    allocate(pyramid, 0)
    with torch.no_grad():
        pyramid.sparse_grids[0].features.uniform_(-1, 1)
    return pyramid


def allocate(pyramid: VoxelPyramid, seed: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Gives the sparse level random blocks, the first among them, and activates it."""
    exists = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(seed)) < 0.5
    exists[0, 0, 0] = True
    cells = torch.zeros(9, 9, 9, dtype=torch.bool)
    cells[1::3, 1::3, 1::3] = exists  # within the blocks, so that no neighbouring block is needed
    pyramid.allocate(21, cells.to(pyramid.aabb.device), pyramid.aabb, optimizer)
    pyramid.activate(21)


GRIDS: dict[str, Callable[[torch.device | str], VoxelGrid | VoxelPyramid]] = {
    "grid": lambda device: VoxelGrid((5, 6, 7), 2, BOX, init_std=1.0, device=device),
    "pyramid": lambda device: VoxelPyramid((4, 8), 2, BOX, init_range=1.0, device=device),
    "sum": lambda device: VoxelPyramid((4, 8), 2, BOX, reduce="sum", init_range=1.0, device=device),
    "sum of some features": lambda device: VoxelPyramid(
        (2, 4, 8, 16), 4, BOX, reduce="sum", level_channels=STORED, init_range=1.0, device=device
    ),
    "sparse": _sparse,
}
"""Every kind of grid, by name."""

WITHOUT, WITH = tuple(GRIDS), tuple(f"{name} with copies" for name in GRIDS)
KINDS = (*WITHOUT, *WITH)


def build(kind: str, device: torch.device | str = "cpu") -> VoxelGrid | VoxelPyramid:
    """Returns a random model whose features have the same values in float16."""
    model = GRIDS[kind.removesuffix(" with copies")](device)
    with torch.no_grad():
        for level in model.levels:
            level.copy_(level.half())
    if kind in WITH:
        model.enable_copies(torch.float16)
    return model


def grid_adam(model: VoxelGrid | VoxelPyramid, **options) -> GridAdam:
    """Returns a GridAdam for a model, which also updates its copies if there are any."""
    optimizer = GridAdam(model.levels, **options)
    if model.working_copies is not None:
        for level, copy in zip(model.levels, model.working_copies.copies, strict=True):
            optimizer.set_working(level, copy)
    return optimizer


def by_torch(model: VoxelGrid | VoxelPyramid, points: Tensor) -> Tensor:
    """Samples the active features (not the copies) of a model by ``F.grid_sample`` in float64."""
    low, high = model.aabb.double()
    unit = (points.double() - low) / (high - low)
    sampled = [
        _sampled(level.double(), unit) if blocks is None else _sampled_blocks(level.double(), blocks, unit)
        for level, blocks in list(zip(model.levels, model.blocks, strict=True))[: model.active]
    ]
    stored = model.combination.channels if isinstance(model, VoxelPyramid) and model.reduce == "sum" else None
    if stored is not None:
        total = sampled[0]
        for values, each in zip(sampled[1:], stored[1:] or [None] * len(sampled), strict=False):
            columns = range(model.channels) if each is None else each
            total = total.index_add(1, torch.tensor([*columns], device=points.device), values)
        return total.float()
    values = torch.cat(sampled, dim=-1)
    return F.pad(values, (0, model.channels - values.shape[-1])).float()


def _sampled(values: Tensor, unit: Tensor) -> Tensor:
    volume, where = values.permute(3, 2, 1, 0)[None], 2 * unit[None, :, None, None] - 1
    return F.grid_sample(volume, where, align_corners=True, padding_mode="border")[0, :, :, 0, 0].T


def _sampled_blocks(atlas: Tensor, blocks: Tensor, unit: Tensor) -> Tensor:
    """Samples the block of 8 x 8 x 8 vertices around each point, where there is one, 1/1024 cell from its faces."""
    count = torch.tensor(blocks.shape, device=unit.device)
    cells = unit.clamp(0, 1) * count * 7
    block = (cells / 7).long().minimum(count - 1)
    number = blocks[tuple(block.unbind(-1))]
    first = 8 * torch.stack((number >> 20, number >> 10 & 1023, number & 1023), dim=-1)
    last = torch.tensor(atlas.shape[:3], device=unit.device) - 1
    within = (cells - 7 * block).clamp(1 / 1024, 7 - 1 / 1024)
    return _sampled(atlas, (first + within) / last) * (number >= 0)[:, None]


def somewhere(count: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns random points (count, 3), some of them outside of ``BOX``."""
    return 2.2 * torch.rand(count, 3, device=device) - 1.1


class Group(Component):
    """Parameters with a learning rate of their own."""

    def __init__(self, **groups) -> None:
        self._groups = groups

    def param_groups(self):
        return self._groups


def optimizers_of(model, config, rates, copies=torch.float32, **groups) -> Optimizers:
    """The optimizers of a session with these settings, and of groups of parameters with their rates."""
    matrices = [OrthogonalMatrices(model)] if config.matrices == "muon" else []
    return Optimizers(model, config, rates, [*matrices, Group(**groups)], copies)


def model_of(field, model=None, occupancy=None):
    """A model of a field, by default with all of a few cells occupied."""
    occupancy = OccupancyGrid(4, field.aabb).to(field.aabb.device) if occupancy is None else occupancy
    return (DenseConfig() if model is None else model).build_model(field, occupancy, Sampling())
