"""AdamW over grids and networks."""

from __future__ import annotations

import torch

from voxelfield.fields import RadianceField
from voxelfield.training.config import OptimizerConfig


def make_optimizer(field: RadianceField, config: OptimizerConfig) -> torch.optim.AdamW:
    """Returns AdamW with one group for the grid and one for the decoder's network, if it has one.

    Each group remembers its undecayed rate as ``base_lr``.
    """
    groups = [{"params": [field.grid.features], "lr": config.grid_lr, "weight_decay": config.grid_decay}]
    if network := list(field.decoder.parameters()):
        groups.append({"params": network, "lr": config.network_lr, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True)
    for group in optimizer.param_groups:
        group["base_lr"] = group["lr"]
    return optimizer


def scale_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets every group's learning rate to a multiple of its undecayed one."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
