"""VoxelPyramid: levels read side by side or added up, switched on singly, moved to another box, trained in place."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from voxelfield import VoxelGrid
from voxelfield.grids.adam import GridAdam
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.ops import sample_trilinear

BOX = ((-1.0, -2.0, 0.0), (1.0, 2.0, 1.0))

both_reductions = pytest.mark.parametrize("reduce", ["concat", "sum"])


def make(device="cpu", resolutions=(3, 6, 12), channels=3, reduce="concat", box=BOX) -> VoxelPyramid:
    torch.manual_seed(0)
    pyramid = VoxelPyramid(resolutions, channels, box, reduce=reduce, init_range=1.0)
    return pyramid.to(device)


def inside(count, device, box=BOX):
    low, high = torch.tensor(box, device=device)
    return low + torch.rand(count, 3, device=device) * (high - low)


def by_level(pyramid, points):
    low, high = pyramid.aabb
    rows = [sample_trilinear(level, (points - low) / (high - low)) for level in pyramid.levels]
    return torch.cat(rows, dim=-1) if pyramid.reduce == "concat" else sum(rows[: pyramid.active])


def test_reads_all_levels_side_by_side(device):
    pyramid, points = make(device), inside(50, device)
    torch.testing.assert_close(pyramid(points.view(5, 10, 3)), by_level(pyramid, points).view(5, 10, 9))
    assert pyramid.channels == 9


def test_adds_all_levels_up(device):
    pyramid, points = make(device, reduce="sum"), inside(50, device)
    torch.testing.assert_close(pyramid(points.view(5, 10, 3)), by_level(pyramid, points).view(5, 10, 3))
    assert pyramid.channels == 3
    assert "reduce='sum'" in repr(pyramid)


def test_voxels_are_nearly_cubes_and_as_many_as_asked():
    pyramid = VoxelPyramid((16, 200), 2, BOX)
    for resolution, grid in zip((16, 200), pyramid.grids, strict=True):
        x, y, z = grid.resolution
        assert x * y * z == pytest.approx(resolution**3, rel=0.15)
        assert grid.voxel_size.max() / grid.voxel_size.min() < 1.25
    assert pyramid.grids[1].resolution[2] % 8 == 0


def test_levels_that_are_off_read_zero_and_learn_nothing(device):
    pyramid, points = make(device), inside(20, device)
    pyramid.activate(7)
    assert pyramid.active == 2
    features = pyramid(points)
    torch.testing.assert_close(features[:, :6], by_level(pyramid, points)[:, :6])
    assert features[:, 6:].abs().max() == 0
    features.sum().backward()
    assert [level.grad is not None for level in pyramid.levels] == [True, True, False]
    pyramid.activate(1)
    assert pyramid.active == 1
    torch.testing.assert_close(pyramid.voxel_size, pyramid.grids[0].voxel_size)


def test_levels_that_are_off_add_nothing_to_a_sum_and_learn_nothing(device):
    pyramid, points = make(device, reduce="sum"), inside(20, device)
    whole = pyramid(points)
    pyramid.activate(7)
    features = pyramid(points)
    torch.testing.assert_close(features, by_level(pyramid, points))
    assert (features - whole).abs().max() > 0.1
    features.sum().backward()
    assert [level.grad is not None for level in pyramid.levels] == [True, True, False]


@both_reductions
@pytest.mark.parametrize("active", [1, 3])
def test_fused_gradients_are_autograds(device, active, reduce):
    pyramid, points = make(device, reduce=reduce), inside(200, device)
    pyramid.active = active
    grad = torch.randn(200, pyramid.channels, device=device)
    pyramid(points).backward(grad)
    expected = [level.grad.clone() for level in pyramid.levels[:active]]
    copies = pyramid.enable_copies(torch.float32)
    assert len(copies) == active
    for repeat in (1, 2):
        pyramid(points).backward(grad)
        for level, want in zip(pyramid.levels[:active], expected, strict=True):
            torch.testing.assert_close(level.grad, repeat * want, rtol=1e-4, atol=1e-5)
    assert all(level.grad is None for level in pyramid.levels[active:])


@both_reductions
@pytest.mark.parametrize("active", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_points_of_copies_have_a_gradient(device, active, reduce, dtype):
    pyramid, points = make(device, reduce=reduce), inside(200, device)
    pyramid.active = active
    # What float16 has exactly, so that only the gradient itself is rounded.
    for level in pyramid.levels:
        level.data.copy_(level.detach().half())
    grad = torch.randn(200, pyramid.channels, device=device).half()
    exact = points.clone().requires_grad_()
    pyramid(exact).backward(grad.float())
    pyramid.zero_grad()
    pyramid.enable_copies(dtype)
    found = points.clone().requires_grad_()
    pyramid(found).backward(grad.to(dtype))
    assert found.grad.dtype == torch.float32
    torch.testing.assert_close(found.grad, exact.grad, rtol=1e-3, atol=1e-3)
    sums = [level.grad.clone() for level in pyramid.levels[:active]]
    assert all(bool((total != 0).any()) for total in sums)
    # Where only the points are wanted, the sums stay.
    pyramid.requires_grad_(False)
    again = points.clone().requires_grad_()
    pyramid(again).backward(grad.to(dtype))
    assert torch.equal(again.grad, found.grad)
    assert all(torch.equal(level.grad, total) for level, total in zip(pyramid.levels, sums, strict=False))


@both_reductions
def test_sixteen_bit_copies_are_read_and_sums_stay_float32(device, reduce):
    pyramid, points = make(device, reduce=reduce), inside(200, device)
    grad = torch.randn(200, pyramid.channels, device=device).half()
    exact = pyramid(points)
    exact.backward(grad.float())
    expected = [level.grad.clone() for level in pyramid.levels]
    pyramid.enable_copies(torch.float16)
    features = pyramid(points)
    assert features.dtype == torch.float16
    torch.testing.assert_close(features.float(), exact, rtol=2e-3, atol=2e-3)
    features.backward(grad)
    for level, want in zip(pyramid.levels, expected, strict=True):
        assert level.grad.dtype == torch.float32
        torch.testing.assert_close(level.grad, want, rtol=1e-4, atol=1e-5)


@both_reductions
def test_copies_follow_the_optimizer_and_refresh(device, reduce):
    pyramid, points = make(device, reduce=reduce), inside(100, device)
    copies = pyramid.enable_copies(torch.float16)
    optimizer = GridAdam(pyramid.levels, lr=0.1)
    for level, copy in zip(pyramid.levels, copies, strict=True):
        optimizer.set_working(level, copy)
    before = pyramid(points).detach()
    pyramid(points).float().sum().backward()
    optimizer.step()
    assert all(level.grad.abs().max() == 0 for level in pyramid.levels)
    assert all(torch.equal(copy, level.half()) for level, copy in zip(pyramid.levels, copies, strict=True))
    assert (pyramid(points) - before).mean() < -0.05
    with torch.no_grad():
        pyramid.levels[0].add_(1)
    pyramid.refresh_copies()
    torch.testing.assert_close(copies[0], pyramid.levels[0].detach().half())


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


def test_loading_ends_a_grids_copies(device):
    grid = VoxelGrid(5, 2, BOX, init_std=1.0).to(device)
    state = {name: value + 1 if name == "features" else value for name, value in grid.state_dict().items()}
    points = inside(20, device)
    before = grid(points).detach()
    grid.enable_copies(torch.float16)
    grid.load_state_dict(state)
    torch.testing.assert_close(grid(points), before + 1)


def test_copies_of_another_dtype_are_refused(device):
    pyramid = make(device)
    with pytest.raises(TypeError, match=r"dtype must be float16, bfloat16 or float32, got torch\.float64"):
        pyramid.enable_copies(torch.float64)


def test_a_grid_can_be_fused_alone(device):
    grid = VoxelGrid(9, 5, BOX, init_std=1.0).to(device)
    points = inside(100, device)
    grid(points).square().sum().backward()
    expected = grid.features.grad.clone()
    grid.enable_copies(torch.float32)
    grid(points).square().sum().backward()
    torch.testing.assert_close(grid.features.grad, expected, rtol=1e-4, atol=1e-4)
    grid.upsample(17)
    assert grid(points).requires_grad
    assert grid.features.grad is None


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


def test_refit_carries_moments_and_halves_voxels(device):
    pyramid = make(device)
    optimizer = GridAdam(pyramid.levels, lr=0.1)
    pyramid(inside(50, device)).sum().backward()
    optimizer.step()
    size = pyramid.voxel_size
    pyramid.refit(((-0.5, -1.0, 0.25), (0.5, 1.0, 0.75)), optimizer)
    torch.testing.assert_close(pyramid.voxel_size, size / 2)
    for level in pyramid.levels:
        assert optimizer.state[level]["exp_avg"].shape == level.shape
        assert optimizer.state[level]["exp_avg"].abs().max() > 0


SMALLER = ((-0.5, -1.0, 0.25), (0.5, 1.0, 0.75))


def test_each_level_may_start_within_a_range_of_its_own(device):
    pyramid = VoxelPyramid((3, 6, 12), 3, BOX, init_range=(0.5, 0.0, 2.0), device=device)
    coarse, middle, fine = pyramid.levels
    assert 0.4 < coarse.abs().max() <= 0.5
    assert not middle.any()
    assert 1.9 < fine.abs().max() <= 2
    pyramid.resize(12, aabb=SMALLER)
    assert not pyramid.levels[1].any()
    with pytest.raises(ValueError, match=r"init_range must be one number or 3, got \[1.0\]"):
        VoxelPyramid((3, 6, 12), 3, BOX, init_range=[1.0])


@both_reductions
def test_state_dict_restores_box_resolutions_and_active(device, reduce):
    pyramid = make(device, reduce=reduce)
    pyramid.refit(((-0.5, -1.0, 0.25), (0.5, 1.0, 0.75)))
    pyramid.activate(7)
    other = VoxelPyramid((3, 6, 12), 3, BOX, reduce=reduce).to(device)
    other.load_state_dict(pyramid.state_dict())
    assert other.active == 2
    points = inside(30, device)
    assert torch.equal(other(points), pyramid(points))


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


@pytest.mark.parametrize("resolutions", [(3, 6, 12), (2, 6, 30), (4, 20), (7,)], ids=str)
def test_a_collapsed_sum_reads_as_the_sum_everywhere(device, resolutions):
    pyramid = make(device, resolutions, reduce="sum")
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


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"reduce must be one of .*concat.*sum.* got 'mean'"):
        VoxelPyramid((4, 8), 2, BOX, reduce="mean")
    with pytest.raises(ValueError, match="reduce must be \"sum\" for levels that are to be collapsed, got 'concat'"):
        make().collapse(torch.float32)
    with pytest.raises(ValueError, match=r"resolutions must rise from at least 2, got \[8, 8\]"):
        VoxelPyramid((8, 8), 2, BOX)
    with pytest.raises(ValueError, match="resolutions must rise"):
        VoxelPyramid((), 2, BOX)
    with pytest.raises(ValueError, match=r"each be a whole multiple of the one before, got \[4, 8, 12\]"):
        VoxelPyramid((4, 8, 12), 2, BOX, reduce="sum")
    with pytest.raises(ValueError, match="init_range must be finite and not negative, got -1"):
        VoxelPyramid((4,), 2, BOX, init_range=-1)
    with pytest.raises(ValueError, match="init_range must be finite and not negative, got inf"):
        VoxelPyramid((4,), 2, BOX, init_range=float("inf"))
    with pytest.raises(TypeError, match="points must be float32"):
        make()(torch.zeros(2, 3, dtype=torch.float64))


# ------------------------------------------------------------------- sums of levels that store some features only

STORED = (None, (0, 2, 3), (3,), None)


def make_narrow(device) -> tuple[VoxelPyramid, VoxelPyramid]:
    """A sum of four features of which some levels store few, and one whose levels store zeros for the others."""
    torch.manual_seed(0)
    options = {"reduce": "sum", "init_range": 1.0, "device": device}
    narrow = VoxelPyramid((2, 4, 8, 16), 4, BOX, level_channels=STORED, **options)
    whole = VoxelPyramid((2, 4, 8, 16), 4, BOX, **options)
    with torch.no_grad():
        for stored, own, full in zip(STORED, narrow.levels, whole.levels, strict=True):
            full.zero_()[..., all_or(stored)] = own
    return narrow, whole


def all_or(stored):
    return slice(None) if stored is None else list(stored)


@pytest.mark.parametrize("active", [2, 3, 4])
@pytest.mark.parametrize("copies", [None, torch.float32, torch.float16])
def test_levels_may_store_some_features_only(device, active, copies):
    narrow, whole = make_narrow(device)
    assert [level.shape[3] for level in narrow.levels] == [4, 3, 1, 4]
    points, weights = inside(200, device), torch.rand(200, 4, device=device)
    of_points = []
    for pyramid in (narrow, whole):
        pyramid.activate(pyramid.resolutions[active - 1])
        if copies is not None:
            pyramid.enable_copies(copies)
        pyramid.zero_grad(set_to_none=False)
        own = points.clone().requires_grad_()
        (weights * pyramid(own)).sum().backward()
        of_points.append(own.grad)
    tolerance = {"atol": 2e-2, "rtol": 0} if copies == torch.float16 else {"atol": 1e-4, "rtol": 1e-5}
    torch.testing.assert_close(narrow(points), whole(points), **tolerance)
    torch.testing.assert_close(of_points[0], of_points[1], **{**tolerance, "atol": 20 * tolerance["atol"]})
    for stored, own, full in list(zip(STORED, narrow.levels, whole.levels, strict=True))[:active]:
        torch.testing.assert_close(own.grad, full.grad[..., all_or(stored)], **tolerance)
    torch.testing.assert_close(narrow.collapse(torch.float32), whole.collapse(torch.float32), **tolerance)


def test_levels_with_some_features_are_trained_and_moved_like_others(device):
    narrow, whole = make_narrow(device)
    moved = ((-0.5, -1.0, 0.0), (0.5, 1.0, 1.0))
    points = inside(200, device, moved)
    for pyramid in (narrow, whole):
        optimizer = GridAdam(pyramid.levels, lr=0.1)
        for box in (BOX, moved):
            pyramid.refit(box, optimizer)
            before = pyramid(points)[:, 3].detach()
            (pyramid(points)[:, 3] - 5).square().sum().backward()
            optimizer.step()
            assert (pyramid(points)[:, 3] - before).abs().min() > 0.05
    # The only feature that all levels store.
    torch.testing.assert_close(narrow(points)[:, 3], whole(points)[:, 3])
    state = narrow.state_dict()
    again, _ = make_narrow(device)
    again.refit(moved)
    again.load_state_dict(state)
    assert torch.equal(again(points), narrow(points))


@pytest.mark.parametrize("frozen", range(4))
def test_any_level_with_some_features_may_be_frozen_or_transformed(device, frozen):
    narrow, whole = make_narrow(device)
    points, weights = inside(50, device), torch.rand(50, 4, device=device)
    for pyramid in (narrow, whole):
        pyramid.levels[frozen].requires_grad_(False)
        (weights * pyramid(points)).sum().backward()
    for level, (stored, own, full) in enumerate(zip(STORED, narrow.levels, whole.levels, strict=True)):
        if level == frozen:
            assert own.grad is None
        else:
            torch.testing.assert_close(own.grad, full.grad[..., all_or(stored)])
    name = f"_grids.{frozen}.features"
    several = torch.stack([narrow.levels[frozen].detach(), 2 * narrow.levels[frozen].detach()])

    def loss(features):
        return (weights * functional_call(narrow, {name: features}, (points,))).square().sum()

    found = torch.vmap(torch.func.grad(loss))(several)
    for features, gradient in zip(several, found, strict=True):
        torch.testing.assert_close(gradient, torch.func.grad(loss)(features))
        own = features.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(own), own)
        torch.testing.assert_close(gradient, wanted)


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


def test_stored_features_must_be_some_of_those_of_the_sum():
    def refused(stored, message, reduce="sum", error=ValueError):
        with pytest.raises(error, match=message):
            VoxelPyramid((2, 4), 3, BOX, reduce=reduce, level_channels=stored)

    refused([None, (0,)], r'^level_channels must be None where reduce is not "sum", got \[None, \(0,\)\]', "concat")
    refused([None], r"^level_channels must be one for each of 2 levels, None for the first, got \[None\]")
    refused([(0,), None], r"^level_channels must be one for each of 2 levels, None for the first, got \[\(0,\), None\]")
    for wrong in ((), (1, 0), (0, 0), (-1, 2), (0, 3)):
        refused([None, wrong], r"^level_channels must be rising numbers from 0 to 2, got \[")
    for wrong in (
        3,
        [None, 3],
        [None, "ab"],
        [None, {0, 2}],
        [None, (0.0, 1.0)],
        [None, (True,)],
        [None, torch.ones(1)],
    ):
        refused(wrong, r"^level_channels must be a sequence of None and sequences of ints, got ", error=TypeError)
    refused(3, r"^level_channels must be a sequence of None and sequences of ints, got 3$", error=TypeError)
