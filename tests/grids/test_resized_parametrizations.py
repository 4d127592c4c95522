"""Grids whose features torch computes from other parameters cannot be resampled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from voxelfield import VoxelGrid

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("kind", ["parametrization", "pruning"])
def test_upsample_and_refit_refuse_features_that_are_computed(kind):
    grid = VoxelGrid(4, 2, BOX)
    if kind == "parametrization":
        parametrize.register_parametrization(grid, "features", Doubled())
    else:
        prune.random_unstructured(grid, "features", amount=0.5)
    before = grid.features.clone()
    for resize, name in ((lambda: grid.upsample(7), "upsample"), (lambda: grid.refit(BOX, 7), "refit")):
        with pytest.raises(ValueError, match=f"^features must be a parameter for {name}, got values that are computed"):
            resize()
    assert torch.equal(grid.features, before)
    assert grid.resolution == (4, 4, 4)
