"""pack_tiles and unpack_tiles: copies of listed tiles, compared with indexing."""

from __future__ import annotations

import itertools

import pytest
import torch

from voxelfield.ops._internal import active_tiles, pack_tiles, unpack_tiles
from voxelfield.ops._internal.tiles import tiles_along

TILE = (4, 4, 8)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One vertex; rows that are cut by a face, aligned to 2, 4, 8 and 16 bytes; whole tiles; rows longer than a block.
SHAPES = [(1, 1, 1, 1), (9, 6, 20, 4), (5, 8, 9, 3), (4, 5, 11, 28), (8, 4, 16, 1), (6, 9, 12, 2), (3, 5, 9, 140)]


def list_of_tiles(resolution, device, share=0.6):
    """Some tiles in any order, with unused entries between them."""
    ids = [(x << 20) + (y << 10) + z for x, y, z in itertools.product(*map(range, tiles_along(resolution)))]
    ids = [tile for tile in ids if torch.rand(()) < share] + ids[-1:] + [-1, -1]
    return torch.tensor(ids, dtype=torch.int32)[torch.randperm(len(ids))].to(device)


def vertices_of(ids, resolution):
    """The place of each vertex of the grid in packed tiles: rows of x, y, z, entry, index in the tile."""
    rows = []
    for entry, tile in enumerate(ids.tolist()):
        corner = (tile >> 20, tile >> 10 & 1023, tile & 1023)
        for index, offset in enumerate(itertools.product(*map(range, TILE))):
            vertex = [side * place + at for side, place, at in zip(TILE, corner, offset, strict=True)]
            if tile >= 0 and all(v < size for v, size in zip(vertex, resolution, strict=True)):
                rows.append([*vertex, entry, index])
    return torch.tensor(rows).T


def numbers(shape, dtype, device):
    """Distinct numbers, negative zero and NaN, whose bits must all survive."""
    values = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).remainder(251) / 4
    values[::7] = float("nan")
    values[::5] = -0.0
    return values.view(shape).to(device, dtype)


def bits(x):
    return x.cpu().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_listed_tiles_are_copied_there_and_back(device, shape, dtype):
    ids = list_of_tiles(shape[:3], device)
    x, y, z, entry, index = vertices_of(ids, shape[:3])
    grid = numbers(shape, dtype, device)
    packed = torch.full((len(ids), 128, shape[3]), 7.0, device=device, dtype=dtype)
    expected = bits(packed).clone()
    expected[entry, index] = bits(grid)[x, y, z]
    assert pack_tiles(grid, ids, packed) is packed
    # Unused entries and vertices outside the grid keep what they held.
    assert torch.equal(bits(packed), expected)

    other = torch.full_like(grid, 3.0)
    expected = bits(other).clone()
    expected[x, y, z] = bits(grid)[x, y, z]
    unpack_tiles(packed, ids, other)
    assert torch.equal(bits(other), expected)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tiles_anywhere_in_memory(device, dtype, offset):
    shape = (5, 6, 16, 4)
    ids = list_of_tiles(shape[:3], device)
    memory = numbers((torch.Size(shape).numel() + offset,), dtype, device)
    grid, aligned = memory[offset:].view(shape), memory[offset:].view(shape).clone()
    packed = [torch.zeros(len(ids), 128, 4, device=device, dtype=dtype) for _ in range(2)]
    pack_tiles(grid, ids, packed[0])
    pack_tiles(aligned, ids, packed[1])
    assert torch.equal(bits(packed[0]), bits(packed[1]))
    grid.zero_()
    aligned.zero_()
    unpack_tiles(packed[0], ids, grid)
    unpack_tiles(packed[1], ids, aligned)
    assert torch.equal(bits(grid), bits(aligned))
    assert (bits(memory[:offset]) == bits(numbers((offset,), dtype, device))).all()


def test_all_tiles_are_a_whole_copy(device):
    grid = torch.randn(33, 18, 65, 4, device=device).half()
    ids, _ = active_tiles(torch.ones(2, 2, 2, dtype=torch.bool, device=device), grid.shape[:3])
    copy = torch.zeros_like(grid)
    unpack_tiles(pack_tiles(grid, ids, grid.new_empty(len(ids), 128, 4)), ids, copy)
    assert torch.equal(copy, grid)


def test_no_tiles(device):
    grid, before = torch.ones(4, 4, 8, 2, device=device), torch.ones(4, 4, 8, 2, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, 128, 2, device=device)
    assert pack_tiles(grid, *none).shape == (0, 128, 2)
    unpack_tiles(none[1], none[0], grid)
    assert torch.equal(grid, before)


def test_ids_past_the_grid_touch_nothing(device):
    grid, packed = torch.zeros(5, 6, 9, 2, device=device), torch.full((4, 128, 2), 7.0, device=device)
    ids = torch.tensor([2 << 20, 2 << 10, 2, 2**31 - 1], dtype=torch.int32, device=device)
    pack_tiles(grid, ids, packed)
    unpack_tiles(packed, ids, grid)
    assert torch.equal(packed, torch.full_like(packed, 7.0))
    assert torch.equal(grid, torch.zeros_like(grid))


@pytest.mark.cuda
def test_a_captured_graph_reads_the_present_list():
    grid = torch.randn(9, 6, 20, 4, device="cuda").half()
    ids = torch.full((3,), -1, dtype=torch.int32, device="cuda")
    packed, copy = torch.zeros(3, 128, 4, device="cuda").half(), torch.zeros_like(grid)
    pack_tiles(grid, ids, packed)  # loads the extension
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        unpack_tiles(pack_tiles(grid, ids, packed), ids, copy)
    ids[1] = (1 << 20) + 2
    graph.replay()
    expected = torch.zeros_like(grid)
    expected[4:8, :4, 16:] = grid[4:8, :4, 16:]
    assert torch.equal(copy, expected)


def test_registration(device):
    grid, ids = torch.rand(5, 6, 9, 2, device=device), torch.tensor([1, -1], dtype=torch.int32, device=device)
    packed = pack_tiles(grid, ids, torch.zeros(2, 128, 2, device=device))
    torch.library.opcheck(torch.ops.voxelfield.pack_tiles_.default, (grid, ids, packed))
    torch.library.opcheck(torch.ops.voxelfield.unpack_tiles_.default, (packed, ids, grid))


def test_unfit_arguments_are_refused(device):
    grid, packed = torch.zeros(5, 6, 9, 2, device=device), torch.zeros(3, 128, 2, device=device)
    ids = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="grid must be float32, float16 or bfloat16, got Double"):
        pack_tiles(grid.double(), ids, packed.double())
    with pytest.raises(RuntimeError, match=r"packed must be \(3, 128, 2\) Half on .*, got \(3, 128, 2\) Float"):
        unpack_tiles(packed, ids, grid.half())
    with pytest.raises(RuntimeError, match=r"packed must be \(2, 128, 2\) Float on .*, got \(3, 128, 2\) Float"):
        pack_tiles(grid, ids[:2], packed)
    with pytest.raises(RuntimeError, match=r"ids must be \(\*\) Int on .*, got \(3\) Long"):
        pack_tiles(grid, ids.long(), packed)
    with pytest.raises(RuntimeError, match="packed must be contiguous"):
        unpack_tiles(packed.mT.contiguous().mT, ids, grid)
    with pytest.raises(RuntimeError, match="grid must be contiguous"):
        unpack_tiles(packed, ids, grid.transpose(0, 1))
    with pytest.raises(RuntimeError, match="grid must have at most 4096 vertices along axis 1 if tiles are listed"):
        pack_tiles(torch.zeros(1, 4097, 1, 2, device=device), ids, packed)
