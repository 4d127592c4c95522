from voxelfield.ops._internal.active_tiles import active_tiles, tiles_along
from voxelfield.ops import _constants
import torch


def _index(grid, ids):
    M = _constants.MAX_TILES_ALONG
    ids = ids[ids >= 0].long()
    a, b, c = ids // (M * M), ids // M % M, ids % M
    w = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), torch.arange(8), indexing="ij"), -1).view(-1, 3)
    x = a[:, None] * 4 + w[:, 0]
    y = b[:, None] * 4 + w[:, 1]
    z = c[:, None] * 8 + w[:, 2]
    ok = (x < grid.shape[0]) & (y < grid.shape[1]) & (z < grid.shape[2])
    return x, y, z, ok


def pack_tiles(grid, ids, out):
    used = (ids >= 0).nonzero()[:, 0]
    x, y, z, ok = _index(grid, ids)
    v = out.new_zeros(*ok.shape, grid.shape[3])
    v[ok] = grid[x[ok], y[ok], z[ok]]
    out[used] = v


def unpack_tiles(packed, ids, grid):
    used = (ids >= 0).nonzero()[:, 0]
    x, y, z, ok = _index(grid, ids)
    grid[x[ok], y[ok], z[ok]] = packed[used][ok]
