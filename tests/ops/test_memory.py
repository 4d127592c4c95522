"""Grids whose elements no 32-bit offset can count. CUDA only: a machine with a GPU has the memory for it."""

from __future__ import annotations

import pytest
import torch
from reference import sample_grid
from tolerances import assert_matches

from voxelfield.ops import sample_pyramid, sample_trilinear, trilinear_interpolate

pytestmark = [pytest.mark.cuda]

GIB = 2**30
RESOLUTION = (1026, 1024, 1024)
CHANNELS = 2
CORNER = 4  # how many of the furthest vertices along each axis the points see

both_dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)


@pytest.fixture(autouse=True)
def _give_memory_back():
    yield
    torch.cuda.empty_cache()


def need(gib):
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory, has {free / GIB:.0f}")


def far_end(count=500):
    """Points in the last cells of all three axes, off their faces; and the same within the cut-out corner."""
    cells = torch.randint(CORNER - 1, (count, 3), device="cuda")
    local = cells + 0.1 + 0.8 * torch.rand(count, 3, device="cuda", dtype=torch.float64)
    last = torch.tensor(RESOLUTION, device="cuda") - 1
    points = ((last - CORNER + 1 + local) / last).float()
    # The reference gets the same points, rounded to float32 as they are.
    inside = points.double() * last - (last - CORNER + 1)
    return points, inside / (CORNER - 1)


@both_dtypes
def test_far_end_of_a_grid_beyond_32_bits(dtype):
    need(20 if dtype == torch.float16 else 24)
    grid = torch.zeros(*RESOLUTION, CHANNELS, device="cuda", dtype=dtype)
    assert grid.numel() > 2**31
    corner = (slice(-CORNER, None),) * 3
    grid[corner] = torch.randn(CORNER, CORNER, CORNER, CHANNELS, device="cuda", dtype=dtype)
    expected_grid = grid[corner].double().requires_grad_()
    points, expected_points = far_end()
    points.requires_grad_()
    expected_points.requires_grad_()
    grid.requires_grad_()

    value = sample_trilinear(grid, points)
    expected = sample_grid(expected_grid, expected_points)
    # Arithmetic in float32 places a point to 2^-24 of a thousand cells, some 6e-5 of a cell along each axis; neighbours
    # differ by up to about 6, and some hundred points meet in a vertex. A wrong offset errs by 1.
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(value.detach().double(), expected.detach(), rtol=rounding, atol=2e-3)

    grad = torch.randn(len(points), CHANNELS, device="cuda", dtype=dtype)
    value.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(grid.grad[corner].double(), expected_grid.grad, rtol=rounding, atol=1e-2)
    assert grid.grad.count_nonzero() == grid.grad[corner].count_nonzero()
    scale = (torch.tensor(RESOLUTION, device="cuda") - 1) / (CORNER - 1)
    torch.testing.assert_close(points.grad.double() / scale, expected_points.grad, rtol=0, atol=1e-2)


@both_dtypes
def test_vertices_along_a_grid_beyond_32_bits(dtype):
    need(6 if dtype == torch.float16 else 12)
    # Spacings that are powers of two: coordinates are exact, and a vertex comes back bit by bit.
    grid = torch.zeros(1025, 1025, 1025, CHANNELS, device="cuda", dtype=dtype)
    index = torch.randint(1025, (2000, 3), device="cuda")
    index[0], index[1] = 0, 1024
    index[2:1000, 0] = 1020 + index[2:1000, 0] % 5
    x, y, z = index.unbind(dim=1)
    grid[x, y, z] = torch.randn(2000, CHANNELS, device="cuda", dtype=dtype)
    assert (x * 1025 * 1025 * CHANNELS).max() > 2**31
    assert torch.equal(sample_trilinear(grid, (index / 1024).float()), grid[x, y, z])


def test_cells_beyond_32_bits():
    need(10)
    count = 2**28 + 5
    feats = torch.zeros(count, 8, 1, device="cuda", dtype=torch.float16)
    assert feats.numel() > 2**31
    points = torch.zeros(count, 3, device="cuda")
    feats[-5:] = torch.randn(5, 8, 1, device="cuda", dtype=torch.float16)
    value = trilinear_interpolate(feats, points)
    assert_matches(value[-5:], feats[-5:].double().mean(dim=1))
    assert not value[:-5].any()


def test_more_points_than_32_bits_count_coordinates():
    need(20)
    # 2^31 coordinates and results.
    count = 2**31 // 3 + 7
    points = torch.full((count, 3), 0.25, device="cuda")
    points[-3:] = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], device="cuda")
    grid = torch.randn(2, 2, 2, 4, device="cuda", dtype=torch.float16)
    value = sample_trilinear(grid, points)
    assert torch.equal(value[-3:], torch.stack([grid[1, 0, 0], grid[0, 1, 0], grid[0, 0, 1]]))
    assert torch.equal(value[:-3].amin(dim=0), value[0])
    assert torch.equal(value[:-3].amax(dim=0), value[0])


@pytest.mark.parametrize("channels", [(12,), (4, 8)], ids=str)
def test_launches_of_many_points_join(channels):
    need(24)
    grids = [torch.randn(6 + c, 5, 7, c, device="cuda", dtype=torch.float16) for c in channels]

    def sample(points):
        return sample_trilinear(grids[0], points) if len(grids) == 1 else sample_pyramid(grids, points)

    # One more would have elements that no 32-bit offset counts.
    seam = 0x7FFFFFFF // sum(channels)
    points = torch.rand(seam + 1000, 3, device="cuda")
    value = sample(points)
    for part in (slice(0, 999), slice(seam - 999, seam + 1000)):
        assert torch.equal(value[part], sample(points[part]))
