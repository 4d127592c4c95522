"""Lists of voxels, next to a dense grid and to a search for each corner; their sparse grids. See test_contracts.py."""

from __future__ import annotations

import math

import pytest
import torch

from voxelfield import ops
from voxelfield.grids.sparse_grid import SparseGrid

SIZE = (9, 17, 5)
MANY, FEW = 4000, 40  # points that are sampled through the atlas, and corner by corner


def voxels(device="cpu", dtype=torch.float64, channels=3, size=SIZE, share=0.3):
    coords = (torch.rand(size) < share).nonzero()
    coords = coords[torch.randperm(len(coords))].to(device)
    return coords, torch.randn(len(coords), channels, dtype=dtype, device=device)


def expected(coords, features, points, size=SIZE, align_corners=False, renormalize=False):
    """Corner by corner, in float64."""
    dense = torch.zeros(*(n + 4 for n in size), features.shape[1] + 1, dtype=torch.float64)
    dense = dense.index_put(
        tuple((coords.cpu() + 2).T), torch.nn.functional.pad(features.cpu().double(), (0, 1), value=1.0)
    )
    limits = torch.tensor(size)
    place = points.cpu().double() * (limits - 1) if align_corners else points.cpu().double() * limits - 0.5
    place = place.clamp(torch.full((3,), -1.5), limits + 0.5)
    first = place.floor()
    total = 0
    for corner in torch.cartesian_prod(*[torch.arange(2)] * 3):
        weight = torch.where(corner == 1, place - first, 1 + first - place).prod(dim=-1, keepdim=True)
        total = total + weight * dense[tuple((first.long() + 2 + corner).unbind(-1))]
    values, weights = total.split((features.shape[1], 1), dim=-1)
    return torch.where(weights > 0, values / weights.clamp(min=1e-300), 0.0) if renormalize else values


@pytest.mark.parametrize("count", [MANY, FEW])
@pytest.mark.parametrize("size", [SIZE, (8, 8, 8), (1, 2, 3)])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("missing", ["zeros", "renormalize"])
def test_values_are_those_of_a_dense_grid(device, count, size, align_corners, missing):
    coords, features = voxels(device, size=size, share=0.7)
    index = ops.VoxelIndex(coords, size)
    points = 1.6 * torch.rand(count, 3, dtype=torch.float64, device=device) - 0.3
    found = ops.sample_voxels(features, index, points, missing=missing, align_corners=align_corners)
    wanted = expected(coords, features, points, size, align_corners, missing == "renormalize")
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("count", [MANY, FEW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_features(device, count, dtype):
    coords, features = voxels(device, dtype)
    points = torch.rand(2, count // 2, 3, device=device)
    found = ops.sample_voxels(features.requires_grad_(), ops.VoxelIndex(coords.int(), SIZE), points)
    assert found.shape == (2, count // 2, 3)
    assert found.dtype == dtype
    tolerance = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps + 1e-4}
    torch.testing.assert_close(found.double().cpu(), expected(coords, features, points).detach(), **tolerance)
    assert torch.autograd.grad(found.sum(), features)[0].dtype == dtype


@pytest.mark.parametrize("count", [600, 6])
@pytest.mark.parametrize("missing", ["zeros", "renormalize"])
def test_derivatives(device, count, missing):
    coords, features = voxels(device, channels=1, size=(3, 2, 2), share=0.8)
    index = ops.VoxelIndex(coords, (3, 2, 2))
    cells = torch.rand(count, 3, device=device) * torch.tensor([4, 3, 3], device=device) - 0.5
    points = (cells.floor() + 0.2 + 0.6 * torch.rand(count, 3, device=device)) / torch.tensor([3, 2, 2], device=device)

    def sample(features, points):
        return ops.sample_voxels(features, index, points, missing=missing)

    options = {"fast_mode": True, "nondet_tol": 1e-10}
    inputs = features.requires_grad_(), points.double().requires_grad_()
    assert torch.autograd.gradcheck(sample, inputs, **options)
    assert torch.autograd.gradgradcheck(sample, inputs, **options)


def test_batches(device):
    lists = [voxels(device) for _ in range(3)]
    coords = torch.cat([torch.nn.functional.pad(c, (1, 0), value=i) for i, (c, _) in enumerate(lists)])
    features = torch.cat([f for _, f in lists])
    index = ops.VoxelIndex(coords, SIZE, batch=4)  # the last one has no voxel
    points = torch.rand(4, 7, 5, 3, dtype=torch.float64, device=device)
    found = ops.sample_voxels(features, index, points)
    for element, (own, rows) in enumerate(lists):
        torch.testing.assert_close(found[element], ops.sample_voxels(rows, ops.VoxelIndex(own, SIZE), points[element]))
    assert found[3].eq(0).all()
    assert ops.VoxelIndex(coords, SIZE).batch == 3
    element = torch.tensor([2, 0, 1, 3, 9], device=device)
    mixed = ops.sample_voxels(features, index, points[0, 0], element)
    for row, number in enumerate(element.tolist()):
        wanted = ops.sample_voxels(features, index, points[0, 0].expand(4, 5, 3))[number % 4, row]
        torch.testing.assert_close(mixed[row], wanted if number < 4 else torch.zeros_like(wanted))


@pytest.mark.parametrize("count", [MANY, 3])
def test_points_without_voxels(device, count):
    coords, features = voxels(device, torch.float32)
    index = ops.VoxelIndex(coords, SIZE)
    points = torch.full((count, 3), 0.5, device=device)
    points[0, 0], points[1, 1], points[2, 2] = math.nan, math.inf, 1e30
    points.requires_grad_()
    for missing in ("zeros", "renormalize"):
        found = ops.sample_voxels(features, index, points, missing=missing)
        (gradient,) = torch.autograd.grad(found.sum(), points)
        assert found[:3].eq(0).all()
        assert gradient[:3].eq(0).all()
    assert ops.sample_voxels(features, index, points[:0]).shape == (0, 3)
    empty = ops.VoxelIndex(coords[:0], SIZE)
    assert ops.sample_voxels(features[:0], empty, points.detach()).eq(0).all()


def test_a_list_that_does_not_fit_is_refused():
    coords = torch.tensor([[0, 0, 0], [1, 2, 3]])
    for wrong, text in (
        (coords.float(), "coords must be int64 or .*, got float32"),
        (coords[:, :2], r"coords must have shape \(N, 3\), got \(2, 2\)"),
        (coords + 3, r"coords must lie in a grid of \(4, 4, 4\), batch None, got \[4, 5, 6\]"),
        (coords[[0, 1, 0]], "coords must be all different"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            ops.VoxelIndex(wrong, 4)
    index, points = ops.VoxelIndex(coords, 4), torch.zeros(1, 3)
    with pytest.raises(ValueError, match=r"features must have shape \(2, C\), got \(3, 1\)"):
        ops.sample_voxels(torch.zeros(3, 1), index, points)
    with pytest.raises(ValueError, match="missing must be one of"):
        ops.sample_voxels(torch.zeros(2, 1), index, points, missing="nearest")
    with pytest.raises(TypeError, match="index must be a VoxelIndex, got Tensor"):
        ops.sample_voxels(torch.zeros(2, 1), coords, points)


def test_sparse_grids_and_back(device):
    coords, features = voxels(device, torch.float32, size=(20, 30, 7))
    box = torch.tensor([[0.0, 0.0, 0.0], [2.0, 3.0, 0.7]], device=device)
    index = ops.VoxelIndex(coords, (20, 30, 7))
    grid = SparseGrid.from_voxels(features, index, box)
    points = torch.rand(3000, 3, device=device)
    unit = (points * box[1] - grid.aabb[0]) / (grid.aabb[1] - grid.aabb[0])
    read = ops.sample_trilinear(grid.features, grid.atlas_positions(unit))
    # Positions in an atlas keep a thousandth of a cell away from the faces of blocks.
    torch.testing.assert_close(read, ops.sample_voxels(features, index, points), rtol=0, atol=1e-2)
    vertices, found = grid.voxels()
    again = ops.VoxelIndex(vertices, grid.resolution)
    torch.testing.assert_close(ops.sample_voxels(found, again, unit, align_corners=True), read, rtol=0, atol=1e-2)
    order = [((c[:, 0] * 99 + c[:, 1]) * 99 + c[:, 2]).sort().indices for c in (vertices - 1, coords)]
    assert torch.equal((vertices - 1)[order[0]], coords[order[1]])
    assert torch.equal(found[order[0]], features[order[1]])
    with pytest.raises(ValueError, match="index must have no batch"):
        SparseGrid.from_voxels(features, ops.VoxelIndex(torch.nn.functional.pad(coords, (1, 0)), (20, 30, 7)), box)
