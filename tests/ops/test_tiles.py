"""touched_vertices, pack_vertices and unpack_vertices, compared with indexing."""

from __future__ import annotations

import pytest
import torch

from voxelfield.ops._internal.optim import active_tiles, pack_vertices, touched_vertices, unpack_vertices

SHAPES = [(1, 1, 1, 1), (9, 6, 20, 4), (5, 8, 9, 3), (4, 5, 11, 28), (8, 4, 16, 1), (3, 5, 9, 140)]


def table_of(grad, ids=None, **options):
    """The table of a gradient's vertices, with the numbers of vertices before each tile, and their total."""
    tiles = -(-grad.shape[:3].numel() // 128) if ids is None else len(ids)
    table = torch.empty(tiles, 5, dtype=torch.int32, device=grad.device)
    touched_vertices(grad, table, ids, **options)
    total = int(table[:, 4].sum())
    table[:, 4] = table[:, 4].cumsum(0) - table[:, 4]
    return table, total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("every", [False, True])
def test_touched_vertices_are_copied_there_and_back(device, shape, dtype, listed, every):
    mask = torch.rand(shape[:3], device=device) < 0.3
    grad = torch.randn(shape, device=device) * mask[..., None]
    grid, ids = torch.randn(shape, device=device).to(dtype), None
    if listed:
        ids, _ = active_tiles(torch.ones(1, 1, 1, dtype=torch.bool, device=device), shape[:3])
        ids = torch.cat([ids.flip(0), torch.full_like(ids[:1], -1)])
    table, total = table_of(grad, ids, every=every)
    mask |= every
    assert total == int(mask.sum())
    packed = torch.zeros(total, shape[3], device=device, dtype=dtype)
    pack_vertices(grid, table, packed, ids)
    if not listed:
        assert torch.equal(packed, grid[mask])
    copy = torch.zeros_like(grid)
    unpack_vertices(packed, table, copy, ids)
    assert torch.equal(copy, grid * mask[..., None])


def test_vertices_without_a_row_are_left_out(device):
    grid = torch.randn(5, 6, 9, 2, device=device)
    table, total = table_of(grid)
    packed = torch.zeros(total - 7, 2, device=device)
    pack_vertices(grid, table, packed)
    assert torch.equal(packed, grid.flatten(0, 2)[: total - 7])
    copy = torch.zeros_like(grid)
    unpack_vertices(packed, table, copy)
    assert torch.equal(copy.flatten(0, 2)[: total - 7], packed)
    assert not copy.flatten(0, 2)[total - 7 :].any()


def test_tiles_begin_at_the_first_vertex(device):
    part = torch.randn(2, 6, 9, 2, device=device)
    grid = torch.zeros(5, 6, 9, 2, device=device)
    table, total = table_of(part)
    unpack_vertices(part.view(total, 2), table, grid, first=2 * 6 * 9)
    assert torch.equal(grid[2:4], part)
    assert not grid[:2].any()
    assert not grid[4:].any()
