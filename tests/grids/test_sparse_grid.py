"""Sparse grids against dense ones with the same vertices; test_every_grid has more."""

from __future__ import annotations

import pytest
import torch
from image_ops import render_pyramid_image
from torch import Tensor

from voxelfield import GridAdam, VoxelPyramid, ops
from voxelfield.distributed.shards import new_table, tile_vertices
from voxelfield.fields.decoders import FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.field import RadianceField
from voxelfield.grids.sparse_grid import BLOCK_CELLS, BLOCK_VERTICES, SparseGrid
from voxelfield.ops._internal import optim
from voxelfield.ops._internal.stencil import atlas_coordinates, sum_duplicates_
from voxelfield.ops.marching import pack_occupancy

BOX = ((-1.0, -2.0, 0.0), (1.0, 2.0, 1.5))
BLOCKS = (4, 5, 3)
RESOLUTION = tuple(BLOCK_CELLS * count for count in BLOCKS)


def some_blocks(device: torch.device, seed: int = 0) -> Tensor:
    exists = torch.rand(BLOCKS, generator=torch.Generator().manual_seed(seed)) < 0.5
    return exists.to(device)


def filled(device: torch.device, exists: Tensor | None = None, channels: int = 4) -> tuple[SparseGrid, Tensor]:
    """A sparse grid whose features are those of a dense one (X, Y, Z, C), where it has blocks."""
    grid = SparseGrid(RESOLUTION, channels, BOX, device=device)
    grid.allocate(shrunk(some_blocks(device) if exists is None else exists), grid.aabb)
    dense = torch.randn(*grid.resolution, channels, device=device)
    with torch.no_grad():
        at = vertices_of(grid)
        grid.features.view(-1, channels)[rows_of(grid)] = dense[tuple(at.unbind(-1))]
    return grid, dense


def shrunk(exists: Tensor) -> Tensor:
    """Cells that lie within blocks, so that no neighbouring block is needed."""
    cells = torch.zeros([3 * size for size in exists.shape], dtype=torch.bool, device=exists.device)
    cells[1::3, 1::3, 1::3] = exists
    return cells


def vertices_of(grid: SparseGrid) -> Tensor:
    """For each vertex of each block, which vertex of the dense grid it is: (count, 512, 3)."""
    along = torch.arange(BLOCK_VERTICES, device=grid.exists.device)
    within = torch.stack(torch.meshgrid(along, along, along, indexing="ij"), dim=-1).view(-1, 3)
    return BLOCK_CELLS * grid.exists.nonzero()[:, None] + within


def rows_of(grid: SparseGrid) -> Tensor:
    """Where these lie in the atlas, worked out from the table alone."""
    ids = grid.blocks[grid.exists].long()
    first = BLOCK_VERTICES * torch.stack((ids >> 20, ids >> 10 & 1023, ids & 1023), dim=-1)
    within = vertices_of(grid) - BLOCK_CELLS * grid.exists.nonzero()[:, None]
    x, y, z = (first[:, None] + within).unbind(-1)
    return (x * grid.features.shape[1] + y) * grid.features.shape[2] + z


def read(grid: SparseGrid, points: Tensor) -> Tensor:
    """Samples the grid at world positions."""
    unit = (points - grid.aabb[0]) / (grid.aabb[1] - grid.aabb[0])
    return ops.sample_trilinear(grid.features, grid.atlas_positions(unit))


def dense_of(grid: SparseGrid) -> Tensor:
    """Returns the features of the dense grid with the same vertices, with zeros where there is no block."""
    return grid_of(grid, grid.features.detach())


def random_points(device: torch.device, count: int = 4000) -> Tensor:
    """In the unit cube, some beyond it."""
    return torch.rand(count, 3, device=device) * 1.2 - 0.1


def block_is_there(grid: SparseGrid, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each point's block exists, and whether the point is too near to a block's face to say which one it is."""
    size = torch.tensor(BLOCKS, device=unit.device)
    scaled = unit.clamp(0, 1) * size
    block = scaled.long().minimum(size - 1)
    near = ((scaled - scaled.round()).abs() < 1e-4).any(dim=-1)
    return grid.exists[tuple(block.unbind(-1))], near


def test_samples_are_those_of_the_dense_grid_where_blocks_are_and_zero_elsewhere(device):
    grid, dense = filled(device)
    unit = random_points(device)
    points = grid.aabb[0] + unit * (grid.aabb[1] - grid.aabb[0])
    there, near = block_is_there(grid, unit)
    expected = torch.where(there[:, None], ops.sample_trilinear(dense, unit), 0.0)
    found = read(grid, points)
    assert 0.3 < there.float().mean() < 0.7
    torch.testing.assert_close(found[~near], expected[~near], atol=5e-3, rtol=0)
    # Positions are kept a thousandth of a cell from faces; nothing else differs.
    inner = ((unit.clamp(0, 1) * torch.tensor(RESOLUTION, device=device)).frac() - 0.5).abs().amax(dim=-1) < 0.49
    torch.testing.assert_close(found[inner], expected[inner], atol=1e-4, rtol=0)


def test_shared_gradients_are_those_of_the_dense_grid(device):
    grid, dense = filled(device, torch.ones(BLOCKS, dtype=torch.bool, device=device))
    dense.requires_grad_()
    unit = torch.rand(20000, 3, device=device)
    back = torch.randn(len(unit), 4, device=device)
    ops.sample_trilinear(dense, unit).backward(back)
    read(grid, grid.aabb[0] + unit * (grid.aabb[1] - grid.aabb[0])).backward(back)
    grid.share_gradient()
    found = grid.features.grad.view(-1, 4)[rows_of(grid)]
    expected = dense.grad[tuple(vertices_of(grid).unbind(-1))]
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=1e-3)
    assert (found - expected).abs().mean() < 1e-4


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 12])
def test_a_table_of_touched_vertices_replaces_a_look_at_all_copies(device, channels):
    grid, _ = filled(device, channels=channels)
    unit = torch.rand(60, 3, device=device)
    read(grid, grid.aabb[0] + unit * (grid.aabb[1] - grid.aabb[0])).square().sum().backward()
    sums = grid.features.grad
    table = torch.empty(sums[..., 0].numel() // 128, 5, dtype=torch.int32, device=device)
    optim.touched_vertices(sums, table)
    few, expected, expected_table = int(table[:, 4].sum()), sums.clone(), torch.empty_like(table)
    grid.share(expected)
    optim.touched_vertices(expected, expected_table)
    sum_duplicates_(sums, grid._copies, grid._begins, table)
    assert torch.equal(sums, expected)
    assert torch.equal(table, expected_table), "copies that have become non-zero are in the table"
    assert few < int(table[:, 4].sum()) < sums[..., 0].numel() / 2


def test_copies_that_are_not_in_the_table_are_not_read(device):
    sums, begins = torch.ones(2, 4, 32, 3, device=device), torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    copies = torch.tensor([0, 200, 7, 31, 130], dtype=torch.int32, device=device)
    table = torch.zeros(2, 5, dtype=torch.int32, device=device)
    table[0, 0], table[0, 4] = -(2**31), 1
    sum_duplicates_(sums, copies, begins, table)
    expected = torch.ones(256, 3)
    expected[[7, 31, 130]] = 3
    assert torch.equal(sums.view(256, 3).cpu(), expected)
    assert table.tolist() == [[(1 << 7) - 2**31, 0, 0, 0, 2], [1 << 2, 0, 0, 0, 1]]


def test_the_planes_of_shared_vertices_are_those_of_whole_blocks(device):
    grid, _ = filled(device)
    grid.features.grad = torch.randn_like(grid.features)
    whole = grid.features.grad.clone()
    grid.share(whole)
    for begin in range(0, len(whole), BLOCK_VERTICES):
        end = begin + BLOCK_VERTICES
        low, high, shared = grid.shared_by(begin, end)
        assert low % BLOCK_VERTICES == high % BLOCK_VERTICES == 0
        assert 0 <= low <= begin < end <= high <= len(whole)
        part = grid.features.grad[low:high].clone()
        sum_duplicates_(part, *shared)
        assert torch.equal(part[begin - low : end - low], whole[begin:end])


def test_copies_stay_equal_through_training(device):
    grid, _ = filled(device)
    optimizer = GridAdam([grid.features], lr=0.1, weight_decay=0.1, skip_untouched=True)
    for _ in range(4):
        read(grid, torch.randn(500, 3, device=device)).square().sum().backward()
        grid.share_gradient()
        optimizer.step()
    dense = dense_of(grid)
    assert torch.equal(grid.features.detach().view(-1, 4)[rows_of(grid)], dense[tuple(vertices_of(grid).unbind(-1))])


def test_a_table_of_touched_vertices_changes_no_bit(device):
    """And the table is for one step only: the second one, without it, updates what the first one does not name."""
    (grid, _), (other, _) = filled(device), filled(device)
    with torch.no_grad():
        other.features.copy_(grid.features)
    optimizers = [GridAdam([each.features], lr=0.1, skip_untouched=True) for each in (grid, other)]
    table = new_table(-(-grid.features[..., 0].numel() // tile_vertices()), device)
    for seed in range(2):
        points = torch.rand(50, 3, generator=torch.Generator().manual_seed(seed)).to(device)
        read(grid, points).square().sum().backward()
        other.features.grad = grid.features.grad.clone()
        grid.share_gradient(table if seed == 0 else None)
        other.share_gradient()
        assert torch.equal(grid.features.grad, other.features.grad)
        if seed == 0:
            optimizers[0].set_touched(grid.features, table)
        before = grid.features.clone()
        for optimizer in optimizers:
            optimizer.step()
        assert 0 < int((grid.features != before).any(-1).sum()) < before[..., 0].numel()
        assert torch.equal(grid.features, other.features)


def test_blocks_that_stay_keep_features_and_moments(device):
    grid, _ = filled(device)
    optimizer = GridAdam([grid.features], lr=0.1)
    read(grid, torch.randn(500, 3, device=device)).sum().backward()
    grid.share_gradient()
    optimizer.step()
    before, dense = grid.exists, dense_of(grid)
    state = optimizer.state[grid.features]
    moments = grid_of(grid, state["exp_avg"])
    wanted = some_blocks(device, seed=1)
    assert grid.allocate(shrunk(wanted), grid.aabb, optimizer) == int(wanted.sum())
    assert torch.equal(grid.exists, wanted)
    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == grid.features.shape
    # Vertices of blocks that are still there, and zeros where all blocks of a vertex are new.
    kept = touched_vertices(before & wanted)
    torch.testing.assert_close(dense_of(grid)[kept], dense[kept])
    torch.testing.assert_close(grid_of(grid, state["exp_avg"])[kept], moments[kept])
    new = touched_vertices(wanted) & ~kept
    assert not dense_of(grid)[new].any()
    rows = grid.features.detach().view(-1, 4)[rows_of(grid)]
    assert torch.equal(rows, dense_of(grid)[tuple(vertices_of(grid).unbind(-1))]), "copies are equal"


def grid_of(grid: SparseGrid, values: Tensor) -> Tensor:
    """Values of the atlas on the dense grid's vertices."""
    dense = values.new_zeros(*grid.resolution, values.shape[-1])
    return dense.index_put_(tuple(vertices_of(grid).unbind(-1)), values.view(-1, values.shape[-1])[rows_of(grid)])


def touched_vertices(exists: Tensor) -> Tensor:
    touched = torch.zeros([BLOCK_CELLS * size + 1 for size in exists.shape], dtype=torch.bool, device=exists.device)
    for x, y, z in exists.nonzero().tolist():
        begin = [BLOCK_CELLS * at for at in (x, y, z)]
        touched[tuple(slice(at, at + BLOCK_VERTICES) for at in begin)] = True
    return touched


@pytest.mark.parametrize("cells", [(9, 11, 7), (2, 3, 1)])
def test_a_block_is_wanted_where_a_cell_overlaps_it(device, cells):
    grid = SparseGrid(RESOLUTION, 1, BOX, device=device)
    marked = torch.zeros(cells, dtype=torch.bool, device=device)
    marked[-1, 0, 0] = True
    half = torch.tensor([[-0.5, -2.0, 0.0], [1.0, 1.0, 2.0]], device=device)
    grid.allocate(marked, half)
    low = [
        half[0, axis] + (half[1, axis] - half[0, axis]) * (cells[axis] - 1 if axis == 0 else 0) / cells[axis]
        for axis in range(3)
    ]
    high = [low[axis] + (half[1, axis] - half[0, axis]) / cells[axis] for axis in range(3)]
    for index in torch.ones(BLOCKS).nonzero().tolist():
        begin = [BOX[0][a] + (BOX[1][a] - BOX[0][a]) * index[a] / BLOCKS[a] for a in range(3)]
        end = [BOX[0][a] + (BOX[1][a] - BOX[0][a]) * (index[a] + 1) / BLOCKS[a] for a in range(3)]
        overlaps = all(begin[a] < high[a] - 1e-6 and end[a] > low[a] + 1e-6 for a in range(3))
        assert bool(grid.exists[tuple(index)]) == overlaps, index


@pytest.mark.parametrize("parts", [1, 2])
def test_no_more_blocks_than_allowed_and_those_with_the_largest_sums(device, parts):
    grid = SparseGrid(RESOLUTION, 2, BOX, device=device)
    need = torch.randperm(60, generator=torch.Generator().manual_seed(1)).view(BLOCKS).to(device)
    cells = need.to(torch.int32)
    for axis in range(3):
        cells = cells.repeat_interleave(parts, axis)
    assert grid.allocate(cells, grid.aabb, max_blocks=17) == 59
    assert torch.equal(grid.exists, need >= 60 - 17)
    assert grid.features.shape[0] * grid.features.shape[1] * grid.features.shape[2] >= 17 * 512
    assert grid.allocate(cells, grid.aabb, max_blocks=59) == 59
    assert torch.equal(grid.exists, need > 0)


def test_sums_do_not_overflow(device):
    grid = SparseGrid(RESOLUTION, 1, BOX, device=device)
    cells = torch.ones(BLOCKS, dtype=torch.int32, device=device)
    cells[1, 2] = 2**31 - 1
    cells = cells.repeat_interleave(2, 0)
    assert grid.allocate(cells, grid.aabb, max_blocks=3) == 60
    assert grid.exists[1, 2].all()


def test_coarser_levels_get_fewer_blocks(device):
    pyramid = VoxelPyramid((4,), 2, BOX, sparse_resolutions=(28, 56), device=device)
    limits = pyramid.block_limits(36)
    assert limits == {28: 9, 56: 36}
    everything = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    wanted = pyramid.allocate(56, everything, pyramid.aabb, max_blocks=36)
    assert wanted == {level: grid.exists.numel() for level, grid in zip((28, 56), pyramid.sparse_grids, strict=True)}
    assert [grid.count for grid in pyramid.sparse_grids] == [9, 36]


def test_a_state_brings_its_shape_and_fits_its_blocks(device):
    grid, _ = filled(device)
    smaller = SparseGrid((7, 7, 7), 4, ((0, 0, 0), (1, 1, 1)), device=device)
    smaller.load_state_dict(grid.state_dict())
    assert torch.equal(dense_of(smaller), dense_of(grid))
    assert torch.equal(read(smaller, grid.aabb), read(grid, grid.aabb))
    state = grid.state_dict() | {"features": torch.zeros(8, 8, 8, 4)}
    with pytest.raises(ValueError, match=r"features must have shape \(.*\) for \d+ blocks, got \(8, 8, 8, 4\)"):
        smaller.load_state_dict(state)


def make_pyramid(device: torch.device, exists: Tensor | None = None) -> VoxelPyramid:
    pyramid = VoxelPyramid((4, 8), 4, BOX, sparse_resolutions=(24,), init_range=0.5, device=device)
    sparse = pyramid.sparse_grids[0]
    if exists is None:
        exists = torch.rand(sparse.exists.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    pyramid.allocate(24, shrunk(exists.to(device)), pyramid.aabb)
    with torch.no_grad():
        sparse.features.normal_()
        sparse.features.grad = torch.zeros_like(sparse.features)
        sparse.features.copy_(consistent(sparse))
    pyramid.activate(24)
    return pyramid


def consistent(grid: SparseGrid) -> Tensor:
    """The atlas with equal copies."""
    atlas = torch.zeros_like(grid.features)
    atlas.view(-1, atlas.shape[-1])[rows_of(grid)] = dense_of(grid)[tuple(vertices_of(grid).unbind(-1))]
    return atlas


def test_a_sparse_level_without_blocks_stays_off(device):
    pyramid = VoxelPyramid((4, 8), 4, BOX, sparse_resolutions=(24, 50), device=device)
    pyramid.activate(50)
    assert pyramid.active == 2
    pyramid.allocate(24, torch.ones(1, 1, 1, dtype=torch.bool, device=device), pyramid.aabb)
    pyramid.activate(50)
    assert pyramid.active == 3


def make_field(device: torch.device) -> RadianceField:
    pyramid = make_pyramid(device)
    decoder = FusedMLPDecoder(12, 32, 16, 1, 1, ExponentialDensity(5.0)).to(device)
    return RadianceField(pyramid, decoder).to(device)


def arguments(field: RadianceField, dtype: torch.dtype) -> dict[str, object]:
    return {
        "aabb": field.grid.aabb,
        "levels": [level.detach().to(dtype) for level in field.grid.levels],
        "blocks": field.grid.blocks,
        "density_weights": [weight.detach() for weight in field.decoder.density_network],
        "aabb_occupancy": field.grid.aabb,
        "occupied": pack_occupancy(torch.ones(4, 4, 4, dtype=torch.bool, device=field.aabb.device)),
        "step": 0.03,
        "density_initial": 5.0,
    }


def test_the_image_of_a_sparse_field_is_that_of_its_cpu_form(device):
    field = make_field(device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    c2w = torch.eye(4, device=device)
    c2w[2, 3] = 4.0
    camera = (c2w, torch.tensor([30.0, 30.0, 12.0, 12.0], device=device), 24, 24)
    background = torch.ones(3, device=device)
    colors = {"color_weights": [weight.detach() for weight in field.decoder.color_network], "degree": 1}
    rgb, opacity, _ = render_pyramid_image(*camera, **arguments(field, dtype), **colors, background=background)
    on_host = make_field(torch.device("cpu"))
    on_host.load_state_dict(field.state_dict())
    host = [x.cpu() if isinstance(x, Tensor) else x for x in camera]
    colors = {name: [w.cpu() for w in x] if isinstance(x, list) else x for name, x in colors.items()}
    shown = arguments(on_host, torch.float32) | {"background": background.cpu()}
    expected, expected_opacity, _ = render_pyramid_image(*host, **shown, **colors)
    assert expected_opacity.max() > 0.5
    torch.testing.assert_close(rgb.cpu(), expected, atol=3e-2, rtol=0)
    torch.testing.assert_close(opacity.cpu(), expected_opacity, atol=3e-2, rtol=0)


def test_more_blocks_than_can_be_counted_are_refused(device):
    # The memory is not touched. Cells along x would number more than 2^31.
    blocks = torch.empty(320_000_000, 1, 1, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="blocks must have at most 524288 blocks along each axis, got 320000000"):
        atlas_coordinates(torch.rand(10, 3, device=device), blocks, (8, 8, 8))


def test_a_pyramid_with_blocks_keeps_its_box(device):
    pyramid = make_pyramid(device)
    with pytest.raises(ValueError, match="aabb must stay as it is once sparse levels have blocks"):
        pyramid.refit(((0, 0, 0), (1, 1, 1)))


def test_a_pyramid_without_blocks_moves_its_sparse_levels_along(device):
    pyramid = VoxelPyramid((4, 8), 4, BOX, sparse_resolutions=(24,), device=device)
    pyramid.refit(((0, 0, 0), (1, 1, 1)))
    assert pyramid.sparse_grids[0].resolution == (22, 22, 22)
    assert torch.equal(pyramid.sparse_grids[0].aabb, pyramid.aabb)
