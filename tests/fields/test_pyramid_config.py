"""The model of pyramids: detail where images show something, within a limit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from voxelfield.models.pyramid import PyramidConfig
from voxelfield.models.settings import Sampling
from voxelfield.rendering.occupancy import OccupancyGrid

BOX = torch.tensor([[0.0] * 3, [1.0] * 3])


@pytest.mark.parametrize(("limit", "warned"), [(64, []), (24, [28]), (8, [28, 56])])
def test_detail_beyond_the_limit_is_left_out_and_the_log_says_so(caplog, monkeypatch, limit, warned):
    config = PyramidConfig(resolutions=[8], sparse_resolutions=[28, 56], max_blocks=limit)
    field = config.build(BOX, [8, 56], "cpu")
    model = config.build_model(field, OccupancyGrid(4, BOX), Sampling())
    asked = []

    def shown(shape: Sequence[int]) -> Tensor:
        asked.append(tuple(shape))
        cells = torch.zeros(shape, dtype=torch.int32)
        cells[0, 0] = 1 + torch.arange(shape[2])  # a column of blocks, most at its end
        cells[:2, :, 5] = 1
        return cells

    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(model, "count_shown", shown)
        model.begin_training(SimpleNamespace(optimizer=SimpleNamespace(grid=None)))
        model.add_detail(56)
    coarse, fine = field.grid.sparse_grids
    assert asked == [tuple(fine.exists.shape)] == [(8, 8, 8)]
    wanted = {28: 4 + 3, 56: 8 + 15}
    limits = {28: max(1, round(limit / 4)), 56: limit}
    assert [coarse.count, fine.count] == [min(wanted[level], limits[level]) for level in (28, 56)]
    assert fine.exists[0, 0, 7]
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        f"level {level} would have {wanted[level]} blocks: detail is left out beyond {limits[level]}; "
        f"raise model.max_blocks from {limit}"
        for level in warned
    ]
