"""What is particular to VoxelPyramid: its levels, their activation and their collapse; test_every_grid has more."""

from __future__ import annotations

import pytest
import torch
from grid_models import STORED
from torch.func import functional_call

from voxelfield import VoxelGrid
from voxelfield.grids.adam import GridAdam
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.ops import sample_trilinear

BOX = ((-1.0, -2.0, 0.0), (1.0, 2.0, 1.0))
SMALLER = ((-0.5, -1.0, 0.25), (0.5, 1.0, 0.75))


def make(device="cpu", resolutions=(3, 6, 12), channels=3, reduce="concat", **options) -> VoxelPyramid:
    return VoxelPyramid(resolutions, channels, BOX, reduce=reduce, init_range=1.0, device=device, **options)


def inside(count, device, box=BOX):
    low, high = torch.tensor(box, device=device)
    return low + torch.rand(count, 3, device=device) * (high - low)


def test_voxels_are_nearly_cubes_and_as_many_as_asked():
    pyramid = VoxelPyramid((16, 200), 2, BOX)
    for resolution, grid in zip((16, 200), pyramid.grids, strict=True):
        x, y, z = grid.resolution
        assert x * y * z == pytest.approx(resolution**3, rel=0.15)
        assert grid.voxel_size.max() / grid.voxel_size.min() < 1.25
    assert pyramid.grids[1].resolution[2] % 8 == 0


def test_levels_are_activated_and_moved(device):
    pyramid = make(device)
    assert "reduce='concat', active=3" in repr(pyramid)
    for finest, active in ((7, 2), (1, 1), (12, 3)):
        pyramid.activate(finest)
        assert pyramid.active == active
        torch.testing.assert_close(pyramid.voxel_size, pyramid.grids[active - 1].voxel_size)
    size = pyramid.voxel_size
    pyramid.refit(SMALLER)
    torch.testing.assert_close(pyramid.voxel_size, size / 2)


def test_active_levels_are_the_copies_where_there_are_any(device):
    pyramid = make(device)
    pyramid.activate(7)
    for dtype in (torch.float16, torch.float32):
        levels = pyramid.active_levels(dtype)
        assert [level.shape for level in levels] == [level.shape for level in pyramid.levels[:2]]
        for level, own in zip(levels, pyramid.levels, strict=False):
            assert not level.requires_grad
            assert torch.equal(level, own.detach().to(dtype))
    copies = pyramid.enable_copies(torch.float16)
    for level, copy in zip(pyramid.active_levels(torch.float16), copies, strict=True):
        assert level.data_ptr() == copy.data_ptr()
    for level, own in zip(pyramid.active_levels(torch.float32), pyramid.levels, strict=False):
        assert level.data_ptr() == own.data_ptr()


@pytest.mark.parametrize("when", ["before sampling", "after sampling"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_is_harmless(device, when, set_to_none):
    pyramid, points = make(device), inside(100, device)
    pyramid.enable_copies(torch.float32)
    optimizer = GridAdam(pyramid.levels, lr=0.1)
    for _ in range(2):
        if when == "before sampling":
            optimizer.zero_grad(set_to_none=set_to_none)
        loss = pyramid(points).square().sum()
        if when == "after sampling":
            optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        optimizer.step()
    assert pyramid(points).square().sum() < 0.8 * loss


def test_refit_keeps_the_field_where_a_finer_grid_can(device):
    torch.manual_seed(0)
    grid = VoxelGrid(5, 2, ((0, 0, 0), (1, 1, 1)), init_std=1.0).to(device)
    # the new vertices of this box lie on the old ones, and on the middles between them
    box = ((0.25, 0.0, 0.5), (0.75, 1.0, 1.0))
    points = torch.rand(200, 3, device=device) * torch.tensor([0.5, 1, 0.5], device=device)
    points += torch.tensor([0.25, 0, 0.5], device=device)
    before = grid(points).detach()
    grid.refit(box, (5, 9, 3))
    assert grid.resolution == (5, 9, 3)
    torch.testing.assert_close(grid(points), before)


def test_each_level_may_start_within_a_range_of_its_own(device):
    pyramid = VoxelPyramid((3, 6, 12), 3, BOX, init_range=(0.5, 0.0, 2.0), device=device)
    coarse, middle, fine = pyramid.levels
    assert 0.4 < coarse.abs().max() <= 0.5
    assert not middle.any()
    assert 1.9 < fine.abs().max() <= 2
    pyramid.resize(12, aabb=SMALLER)
    assert not pyramid.levels[1].any()


def test_a_state_is_loaded_by_what_puts_levels_together_alike():
    state = make(reduce="sum").state_dict()
    other = make(reduce="concat")
    before = [level.detach().clone() for level in other.levels]
    with pytest.raises(ValueError, match="reduce must be 'sum', as in the loaded state, got 'concat'"):
        other.load_state_dict(state)
    assert all(torch.equal(level, old) for level, old in zip(other.levels, before, strict=True))


def test_vertices_of_levels_that_are_added_up_are_among_those_of_the_next():
    pyramid = VoxelPyramid((6, 12, 36), 1, BOX, reduce="sum")
    assert [grid.resolution for grid in pyramid.grids] == [(7, 13, 4), (13, 25, 7), (37, 73, 19)]
    pyramid.refit(((-1, -1, 0), (1, 1, 1)))
    assert [grid.resolution for grid in pyramid.grids] == [(9, 9, 5), (17, 17, 9), (49, 49, 25)]


@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_collapsed_sum_is_exact_at_the_vertices_of_the_finest_active_level(device, active, dtype):
    pyramid = make(device, reduce="sum")
    pyramid.activate(pyramid.resolutions[active - 1])
    collapsed = pyramid.collapse(dtype)
    assert collapsed.shape == (*pyramid.resolution, 3)
    assert collapsed.dtype == dtype
    assert not collapsed.requires_grad
    vertices = pyramid.grids[active - 1].vertices()
    torch.testing.assert_close(
        collapsed, pyramid(vertices).to(dtype), atol=2e-3 if dtype == torch.float16 else 1e-5, rtol=0
    )


@pytest.mark.parametrize(
    ("resolutions", "stored"), [(r, None) for r in ((3, 6, 12), (2, 6, 30), (4, 20), (7,))] + [((2, 4, 8, 16), STORED)]
)
def test_a_collapsed_sum_reads_as_the_sum_everywhere(device, resolutions, stored):
    pyramid = make(device, resolutions, 4, reduce="sum", level_channels=stored)
    for box in (BOX, ((-0.9, -0.3, 0.1), (1.0, 0.8, 0.7))):
        pyramid.refit(box)
        points = inside(2000, device, box)
        low, high = pyramid.aabb
        for finest in resolutions:
            pyramid.activate(finest)
            collapsed = pyramid.collapse(torch.float32)
            assert collapsed.shape[:3] == pyramid.resolution
            read = sample_trilinear(collapsed, (points - low) / (high - low))
            torch.testing.assert_close(read, pyramid(points), atol=1e-5, rtol=0)


def test_a_sum_is_collapsed_from_what_it_is_read_from(device):
    pyramid = make(device, reduce="sum")
    pyramid.enable_copies(torch.float16)[1].add_(1)
    vertices = pyramid.grids[-1].vertices()
    torch.testing.assert_close(pyramid.collapse(torch.float32), pyramid(vertices).float(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("level", range(4))
def test_any_level_of_some_features_may_be_transformed(device, level):
    pyramid = make(device, (2, 4, 8, 16), 4, reduce="sum", level_channels=STORED)
    points, weights = inside(50, device), torch.rand(50, 4, device=device)
    several = torch.stack([factor * pyramid.levels[level].detach() for factor in (1, 2)])

    def loss(features):
        return (weights * functional_call(pyramid, {f"_grids.{level}.features": features}, (points,))).square().sum()

    for features, gradient in zip(several, torch.vmap(torch.func.grad(loss))(several), strict=True):
        torch.testing.assert_close(gradient, torch.func.grad(loss)(features))
        own = features.clone().requires_grad_()
        torch.testing.assert_close(gradient, torch.autograd.grad(loss(own), own)[0])


def test_a_state_of_other_stored_features_is_refused():
    def make_sum(*stored):
        return VoxelPyramid((2, 4), 4, BOX, reduce="sum", level_channels=stored or None)

    message = r"^level_channels must be \(None, \(0, 2\)\), as in the loaded state, got "
    for other in (make_sum(None, (1, 3)), make_sum(None, (0, 3))):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(make_sum(None, (0, 2)).state_dict())
    make_sum(None, range(4)).load_state_dict(make_sum().state_dict())  # one way to say the same


def test_levels_of_a_sum_have_one_dtype():
    narrow = VoxelPyramid((2, 4), 4, BOX, reduce="sum", level_channels=[None, (0,)])
    narrow.grids[1].half()
    with pytest.raises(TypeError, match=r"^levels must be of one dtype, got torch\.float32 and torch\.float16$"):
        narrow(torch.zeros(1, 3))
