"""Grids and pyramids with and without working copies, and their values as torch's own operations compute them."""

from __future__ import annotations

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
KINDS = ("grid", "pyramid", "grid with copies", "pyramid with copies")


def build(kind: str, device: torch.device | str = "cpu") -> VoxelGrid | VoxelPyramid:
    """Returns a random model whose features have the same values in float16."""
    if kind.startswith("grid"):
        model: VoxelGrid | VoxelPyramid = VoxelGrid((5, 6, 7), 2, BOX, init_std=1.0, device=device)
    else:
        model = VoxelPyramid((4, 8), 2, BOX, init_range=1.0, device=device)
    with torch.no_grad():
        for level in model.levels:
            level.copy_(level.half())
    if "copies" in kind:
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
    """Samples the features (not the copies) of a model over ``BOX``."""
    sampled = [
        F.grid_sample(
            level.permute(3, 2, 1, 0)[None], points[None, :, None, None], align_corners=True, padding_mode="border"
        )[0, :, :, 0, 0].T
        for level in model.levels
    ]
    return torch.cat(sampled, dim=-1)


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
