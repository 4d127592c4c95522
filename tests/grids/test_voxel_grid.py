"""VoxelGrid against F.grid_sample in float64, and as a module and parameter in the hands of its users."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_matches
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from voxelfield import VoxelGrid, VoxelPyramid, ops, processes
from voxelfield.foundation import checks
from voxelfield.grids.resampling import sample_vertices
from voxelfield.ops._grids import PADDINGS
from voxelfield.rendering.occupancy import OccupancyGrid

BOX = ((-1.0, 0.5, -3.0), (2.0, 1.0, 1.0))
SIXTEEN_BIT = [torch.float16, torch.bfloat16]
ALL_DTYPES = [torch.float32, torch.float64, *SIXTEEN_BIT]


def make_grid(resolution=(4, 6, 5), channels=3, aabb=BOX, **options) -> VoxelGrid:
    return VoxelGrid(resolution, channels, aabb, **{"init_std": 1.0, **options})


def points_around(count: int, device: torch.device | str = "cpu", margin: float = 0.5) -> Tensor:
    """World positions in BOX and up to ``margin`` of its size beyond."""
    low, high = torch.tensor(BOX, device=device)
    unit = torch.rand(count, 3, device=device) * (1 + 2 * margin) - margin
    return low + unit * (high - low)


def reference(features: Tensor, aabb: Tensor, points: Tensor, padding: str = "border") -> Tensor:
    """Trilinear interpolation of (X, Y, Z, C) features by F.grid_sample, in float64; points (N, 3)."""
    low, high = aabb.double()
    coordinates = 2 * (points.double() - low) / (high - low) - 1
    volume = features.double().permute(3, 2, 1, 0)[None]
    sampled = F.grid_sample(
        volume, coordinates[None, :, None, None], mode="bilinear", padding_mode=padding, align_corners=True
    )
    return sampled[0, :, :, 0, 0].T


# --------------------------------------------------------------------------------------------- construction


def test_construction(device):
    grid = VoxelGrid(resolution=(2, 3, 4), channels=5, aabb=BOX, device=device)
    assert grid.features.shape == (2, 3, 4, 5)
    assert grid.features.dtype == grid.aabb.dtype == torch.float32
    assert grid.features.device.type == grid.aabb.device.type == device.type
    assert grid.resolution == (2, 3, 4)
    assert grid.channels == 5
    assert grid.features.eq(0).all()
    assert grid.aabb.tolist() == [list(corner) for corner in BOX]
    assert set(grid.state_dict()) == {"features", "aabb"}
    assert VoxelGrid(resolution=3, channels=1, aabb=BOX).resolution == (3, 3, 3)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_initial_values(dtype):
    grid = VoxelGrid(16, 4, BOX, fill=2.0, dtype=dtype)
    assert grid.features.dtype == dtype
    assert grid.features.eq(2).all()
    noisy = VoxelGrid(16, 4, BOX, fill=2.0, init_std=0.5, dtype=dtype).features.float()
    assert noisy.mean().item() == pytest.approx(2, abs=0.05)
    assert noisy.std().item() == pytest.approx(0.5, abs=0.05)


def test_the_box_is_copied():
    box = torch.tensor(BOX)
    grid = VoxelGrid(4, 1, box)
    box.zero_()
    assert grid.aabb.tolist() == [list(corner) for corner in BOX]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"resolution": 0}, ValueError, "resolution must be at least 1, got 0"),
        ({"resolution": (4, -1, 4)}, ValueError, "resolution must be at least 1, got -1"),
        ({"resolution": (4, 4)}, ValueError, "three for x, y and z"),
        ({"resolution": (4, 4, 4.0)}, TypeError, "resolution must be integer, got 4.0"),
        ({"resolution": "444"}, TypeError, "resolution must be integer"),
        ({"resolution": True}, ValueError, "resolution must be at least 1, got True"),
        ({"channels": 0}, ValueError, "channels must be at least 1, got 0"),
        ({"channels": 1.5}, TypeError, "channels must be integer, got 1.5"),
        ({"dtype": torch.int32}, TypeError, "dtype must be float32.*int32"),
        (
            {"padding": "reflect"},
            ValueError,
            r"padding must be one of \['border', 'zeros', 'reflection', 'periodic'\], got 'reflect'",
        ),
        ({"init_std": -1.0}, ValueError, "init_std"),
        ({"aabb": ((0, 0, 0), (1, 0, 1))}, ValueError, "low < high"),
        ({"aabb": ((0, 0, 0), (1, math.inf, 1))}, ValueError, "finite"),
        ({"aabb": ((0, 0, 0), (1, math.nan, 1))}, ValueError, "finite"),
        # Different in float64 but one and the same in float32, in which the box is kept.
        ({"aabb": ((0, 0, 1), (1, 1, 1 + 1e-9))}, ValueError, "low < high"),
        ({"aabb": (0, 0, 0, 1, 1, 1)}, ValueError, r"shape \(2, 3\)"),
        ({"aabb": ((0, 0, 0), (1, 1))}, ValueError, "aabb must be two corners"),
        ({"aabb": "unit"}, ValueError, "aabb must be two corners"),
    ],
)
def test_construction_errors(options, error, message):
    with pytest.raises(error, match=message):
        VoxelGrid(**{"resolution": 4, "channels": 2, "aabb": BOX, **options})


def test_resolution_from_integer_like_values():
    assert VoxelGrid(torch.tensor([2, 3, 4]), 1, BOX).resolution == (2, 3, 4)
    assert VoxelGrid(torch.Size([2, 3, 4]), 1, BOX).resolution == (2, 3, 4)
    assert VoxelGrid(torch.tensor(3), 1, BOX).resolution == (3, 3, 3)


# ------------------------------------------------------------------------------------------------- geometry


def test_unit_coordinates_are_exact_on_the_faces(device):
    grid = VoxelGrid(5, 1, ((-0.1, 0.3, 1e-3), (0.7, 0.9, 17.3)), device=device)
    unit = grid.to_unit(grid.aabb)
    assert unit.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert grid.to_unit(grid.aabb.double()).dtype == torch.float64


def test_contains(device):
    grid = make_grid(device=device)
    low, high = grid.aabb
    assert grid.contains(grid.aabb).all()
    assert grid.contains(grid.vertices()).all()
    for axis in range(3):
        step = torch.zeros(3, device=device)
        step[axis] = 1e-3
        assert not grid.contains(low - step)
        assert not grid.contains(high + step)
    assert not grid.contains(torch.full((3,), math.nan, device=device))
    assert grid.contains(torch.zeros(2, 0, 3, device=device)).shape == (2, 0)


def test_vertices_and_voxel_size(device):
    grid = make_grid(resolution=(4, 1, 5), device=device)
    vertices = grid.vertices()
    assert vertices.shape == (4, 1, 5, 3)
    assert vertices.dtype == torch.float32
    torch.testing.assert_close(grid.voxel_size.cpu(), torch.tensor([1.0, 0.5, 1.0]))
    torch.testing.assert_close(vertices[1, 0, 2].cpu(), torch.tensor([0.0, 0.75, -1.0]))
    assert torch.equal(vertices[0, 0, 0, 0::2], grid.aabb[0, 0::2])
    assert torch.equal(vertices[-1, 0, -1, 0::2], grid.aabb[1, 0::2])


@pytest.mark.parametrize("resolution", [(4, 6, 5), (1, 3, 2)])
def test_vertices_read_their_features(device, resolution):
    grid = make_grid(resolution, device=device)
    torch.testing.assert_close(grid(grid.vertices()), grid.features, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------- sampling


@pytest.mark.covering
@pytest.mark.parametrize("padding", ["border", "zeros"])
@pytest.mark.parametrize("resolution", [(4, 6, 5), (2, 2, 2), (1, 4, 1), (17, 3, 9)])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_forward_matches_grid_sample(device, dtype, resolution, padding):
    grid = make_grid(resolution, channels=5, dtype=dtype, padding=padding, device=device)
    points = points_around(500, device)
    values = grid(points)
    assert values.dtype == dtype
    assert values.shape == (500, 5)
    expected = reference(grid.features, grid.aabb, points, padding)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(values.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("padding", ["border", "zeros", "reflection"])
def test_with_gradient_is_the_derivative_in_world_units(device, dtype, padding):
    grid = make_grid(dtype=dtype, padding=padding, device=device)
    points = points_around(6, device).view(2, 3, 3)
    points = points.double().requires_grad_() if dtype == torch.float64 else points.requires_grad_()
    values, slopes = grid(points, with_gradient=True)
    torch.testing.assert_close(values, grid(points))
    assert (slopes.shape, slopes.dtype) == ((2, 3, grid.channels, 3), dtype)
    for channel in range(grid.channels):
        (expected,) = torch.autograd.grad(values[..., channel].sum(), points, retain_graph=True)
        rounding = {"rtol": 2e-3, "atol": 1e-2} if dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(slopes[..., channel, :], expected.to(dtype), **rounding)


def test_with_gradient_trains_the_features(device):
    grid = make_grid(dtype=torch.float64, device=device)
    points = points_around(50, device).double()
    _, slopes = grid(points, with_gradient=True)
    (fused,) = torch.autograd.grad((slopes.norm(dim=-1) - 1).square().mean(), grid.features)
    points.requires_grad_()
    values = grid(points)
    by_autograd = torch.stack(
        [torch.autograd.grad(values[:, c].sum(), points, create_graph=True)[0] for c in range(grid.channels)], dim=1
    )
    (expected,) = torch.autograd.grad((by_autograd.norm(dim=-1) - 1).square().mean(), grid.features)
    torch.testing.assert_close(fused, expected)


@pytest.mark.parametrize("padding", ["border", "zeros", "reflection"])
def test_gradients_match_grid_sample(device, padding):
    grid = make_grid(padding=padding, device=device)
    points = points_around(200, device).requires_grad_()
    weights = torch.randn(200, 3, device=device)
    (grid(points) * weights).sum().backward()
    features = grid.features.detach().double().requires_grad_()
    expected_points = points.detach().double().requires_grad_()
    (reference(features, grid.aabb, expected_points, padding) * weights).sum().backward()
    assert grid.features.grad.dtype == points.grad.dtype == torch.float32
    torch.testing.assert_close(grid.features.grad.double(), features.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(points.grad.double(), expected_points.grad, atol=1e-4, rtol=1e-4)


def test_first_and_second_derivatives(device):
    grid = make_grid((3, 4, 2), channels=2, device=device).double()
    # Away from the vertices, where the field has no derivative.
    cells = torch.tensor([[0.3, 1.6, 0.4], [1.7, 0.4, 0.5], [0.6, 2.3, 0.7]], dtype=torch.float64)
    points = grid.aabb[0] + cells.to(device) * grid.voxel_size
    points = points.detach().requires_grad_()

    def field(features: Tensor, points: Tensor) -> Tensor:
        return torch.func.functional_call(grid, {"features": features}, (points,))

    features = grid.features.detach().requires_grad_()
    assert torch.autograd.gradcheck(field, (features, points), nondet_tol=1e-10)
    assert torch.autograd.gradgradcheck(field, (features, points), nondet_tol=1e-10)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (7, 3), (2, 5, 4, 3), (0, 3), (4, 0, 3)])
def test_leading_shapes(device, shape):
    grid = make_grid(device=device)
    count = math.prod(shape[:-1])
    points = points_around(max(count, 1), device)[:count].reshape(shape).requires_grad_()
    values = grid(points)
    assert values.shape == (*shape[:-1], 3)
    torch.testing.assert_close(values.reshape(-1, 3), grid(points.reshape(-1, 3)))
    values.sum().backward()
    assert points.grad.shape == shape
    assert grid.features.grad.shape == grid.features.shape


@pytest.mark.covering
@pytest.mark.parametrize("shape", [(3,), (7, 3), (2, 5, 3), (0, 3)], ids=str)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_calls_equal_sampling_in_the_unit_cube_bit_for_bit(device, dtype, padding, shape):
    """They take a shorter way there, which leaves out most checks."""
    grid = make_grid(dtype=dtype, padding=padding, device=device)
    points = points_around(max(math.prod(shape[:-1]), 1), device)[: math.prod(shape[:-1])].reshape(shape)
    unit = grid.to_unit(points.double() if dtype == torch.float64 else points).reshape(-1, 3)
    expected = ops.sample_trilinear(grid.features, unit, padding=padding).reshape(*shape[:-1], 3)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            values = grid(points)
        assert values.requires_grad == enabled
        assert torch.equal(values, expected)
    grad = torch.randn_like(expected)
    of_call, of_op = (torch.autograd.grad(x, grid.features, grad)[0] for x in (grid(points), expected))
    torch.testing.assert_close(of_call, of_op)


def test_gradients_of_calls_have_gradients(device):
    grid, points = make_grid(device=device), points_around(50, device)
    values = grid(points)
    seed = torch.randn_like(values, requires_grad=True)
    (gradient,) = torch.autograd.grad(values, grid.features, seed, create_graph=True)
    # The gradient is linear in what arrives: its own gradient is a sample of the direction in which it is asked for.
    direction = torch.randn_like(gradient)
    (second,) = torch.autograd.grad(gradient, seed, direction)
    unit = grid.to_unit(points)
    torch.testing.assert_close(second, ops.sample_trilinear(direction, unit, padding=grid.padding))


def test_calls_follow_the_box_and_the_features_however_these_change():
    """Nothing of the box is kept from call to call."""
    grid, points, new_box = make_grid(), points_around(50), torch.tensor(((-1.0, 0.0, -3.0), (1.0, 2.0, 1.0)))

    def check(module: VoxelGrid) -> None:
        torch.testing.assert_close(module(points), reference(module.features, module.aabb, points).float())

    def parametrize() -> None:
        nn.utils.parametrize.register_parametrization(grid, "features", nn.Softplus())

    changes = (
        lambda: grid.aabb.copy_(new_box),
        grid.reset_parameters,
        lambda: setattr(grid.aabb, "data", new_box.clone()),
        lambda: grid.aabb.data.mul_(1.5),
        lambda: grid.aabb.detach().numpy().__imul__(0.5),
        lambda: setattr(grid, "aabb", new_box + 0.25),
        lambda: grid.load_state_dict(make_grid((3, 8, 2), aabb=new_box - 0.25).state_dict()),
        lambda: grid.load_state_dict(make_grid(aabb=new_box).state_dict(), assign=True),
        lambda: grid.to_empty(device="cpu").reset_parameters(),
        lambda: grid.to("meta").to_empty(device="cpu").reset_parameters(),
        lambda: setattr(grid, "padding", "border"),
        grid.share_memory,
        parametrize,
    )
    check(grid)
    for change in changes:
        before = copy.deepcopy(grid)
        change()
        check(grid)
        check(before)


def test_calls_are_differentiable_in_a_box_that_replaces_the_own():
    grid, points = make_grid(), points_around(50, margin=-0.1)
    box = grid.aabb.clone().requires_grad_()
    torch.func.functional_call(grid, {"aabb": box}, (points,)).sum().backward()
    low, high = grid.aabb.double().requires_grad_().unbind()
    low.retain_grad()
    high.retain_grad()
    reference(grid.features, torch.stack((low, high)), points).sum().backward()
    torch.testing.assert_close(box.grad, torch.stack((low.grad, high.grad)).float(), atol=1e-3, rtol=1e-3)


def test_calls_are_mapped_and_compiled():
    grid, points = make_grid(), points_around(40).reshape(4, 10, 3)
    torch.testing.assert_close(torch.vmap(grid)(points), grid(points))
    torch._dynamo.reset()
    compiled = torch.compile(grid, fullgraph=True, backend="aot_eager")
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(compiled(points), grid(points))


@pytest.mark.parametrize("last", [1, 2, 4])
def test_points_of_other_widths_are_refused(device, last):
    """One of 1 would do for arithmetic."""
    with pytest.raises(ValueError, match=r"points must have shape \(\.\.\., 3\)"):
        make_grid(device=device)(torch.zeros(5, last, device=device))


def test_strided_points_read_as_contiguous_ones(device):
    grid = make_grid(device=device)
    points = points_around(60, device).reshape(3, 20, 3).permute(1, 0, 2)
    assert not points.is_contiguous()
    torch.testing.assert_close(grid(points), grid(points.contiguous()))


def test_point_and_grid_dtypes_mix(device):
    points = points_around(300, device).double()
    points += 1e-3 * torch.rand_like(points)
    single = make_grid(device=device)
    assert single(points).dtype == torch.float32
    torch.testing.assert_close(single(points), single(points.float()), atol=1e-5, rtol=1e-5)
    double = copy.deepcopy(single).double()
    values = double(points.float())
    assert values.dtype == torch.float64
    # Exactly: the coordinates are widened before the mapping to the unit cube, not after.
    expected = reference(double.features, double.aabb, points.float())
    torch.testing.assert_close(values, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_points_that_are_not_finite_read_zeros(device, dtype):
    grid = make_grid(dtype=dtype, fill=5.0, device=device)
    points = points_around(5, device)
    points[1, 0], points[2, 1], points[3, 2] = math.nan, math.inf, -math.inf
    points.requires_grad_()
    values = grid(points)
    assert values[1:4].eq(0).all()
    assert values[[0, 4]].ne(0).all()
    values.sum().backward()
    assert points.grad[1:4].eq(0).all()
    assert grid.features.grad.isfinite().all()
    # Each point at hand spreads a gradient of one per channel.
    assert grid.features.grad.double().sum().item() == pytest.approx(2 * 3, rel=1e-2)


@pytest.mark.parametrize("method", ["forward", "to_unit", "contains"])
@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        ([[0.0, 0.0, 0.0]], TypeError, "points must be a torch.Tensor, got list"),
        (torch.zeros(4, 3, dtype=torch.int64), TypeError, "float32 or float64, got torch.int64"),
        (torch.zeros(4, 2), ValueError, r"points must have shape \(\.\.\., 3\), got \(4, 2\)"),
        (torch.tensor(1.0), ValueError, r"got \(\)"),
        (torch.zeros(4, 3, device="meta"), ValueError, "points must be on the grid's device cpu, got meta"),
    ],
)
def test_point_errors(method, points, error, message):
    for dtype in ALL_DTYPES:
        grid = make_grid(dtype=dtype)
        with pytest.raises(error, match=message):
            getattr(grid, method)(points)
        with pytest.raises(RuntimeError, match=message):  # as torch's own functions raise it
            getattr(grid, method)(points)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_16_bit_positions_are_widened_and_warned_of_once(device, dtype, monkeypatch):
    monkeypatch.setattr(checks, "_warned_of_narrow_positions", False)
    grid = make_grid().to(device)
    points = points_around(6, device).to(dtype)
    with pytest.warns(UserWarning, match=r"points is b?float16 and is widened"):
        values = grid(points)
    assert torch.equal(values, grid(points.float()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(grid.to_unit(points), grid.to_unit(points.float()))


# ------------------------------------------------------------------------------------------------- upsample


def test_upsample_keeps_the_field(device):
    grid = make_grid(device=device)
    points = points_around(500, device)
    before = grid(points)
    grid.upsample((7, 16, 9))
    torch.testing.assert_close(grid(points), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("resolution", [(9, 8, 7), (5, 3, 11), (2, 2, 2), (3, 4, 2)])
def test_upsample_reads_the_old_field_at_the_new_vertices(device, dtype, resolution):
    grid = make_grid(dtype=dtype, device=device)
    old, aabb = grid.features.detach().clone(), grid.aabb
    grid.upsample(resolution)
    assert grid.resolution == resolution
    expected = reference(old, aabb, grid.vertices().reshape(-1, 3)).reshape(*resolution, 3)
    # 16-bit grids round once, on storing: half a unit in the last place.
    tolerance = 1e-5 if dtype.itemsize > 2 else torch.finfo(dtype).eps / 2 + 1e-5
    torch.testing.assert_close(grid.features.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("slab_elements", [1, 500])
def test_resampling_slab_by_slab_changes_nothing(device, slab_elements, monkeypatch):
    values = torch.randn(9, 6, 5, 3, device=device)
    corners = torch.tensor([[0.1, 0.0, 0.2], [0.7, 1.0, 0.9]], device=device)
    refitted = sample_vertices(values, corners, (13, 11, 7))
    monkeypatch.setattr(processes, "SLAB_ELEMENTS", slab_elements)
    assert torch.equal(sample_vertices(values, corners, (13, 11, 7)), refitted)


def test_axes_of_one_vertex():
    grid = make_grid((1, 3, 1))
    before = grid.features.detach().clone()
    grid.upsample((4, 3, 2))
    assert torch.equal(grid.features, before.expand(4, 3, 2, 3))
    grid = make_grid((3, 4, 2))
    before = grid.features.detach().clone()
    grid.upsample((1, 1, 1))
    expected = (before[1, 1] + before[1, 2])[0] / 4 + (before[1, 1] + before[1, 2])[1] / 4
    torch.testing.assert_close(grid.features[0, 0, 0], expected)


def test_upsample_drops_the_gradient_and_keeps_the_parameter():
    grid = make_grid()
    parameter = grid.features
    parameter.requires_grad_(False)
    grid.upsample(3)
    assert grid.features is parameter
    assert not parameter.requires_grad
    parameter.requires_grad_()
    grid(points_around(4)).sum().backward()
    grid.upsample(7)
    assert parameter.grad is None
    assert dict(grid.named_parameters()) == {"features": parameter}


def test_a_graph_kept_from_before_does_not_break_the_next_step(device):
    """A loss kept for logging holds the parameter's gradient accumulator, which remembers the old shape."""
    grid = make_grid(device=device)
    seen = []
    grid.features.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.shape))
    points = points_around(10, device)
    kept = grid(points).sum()
    kept.backward()
    grid.upsample(8)
    grid(points).sum().backward()
    assert seen == [(4, 6, 5, 3), (8, 8, 8, 3)]
    assert grid.features.grad.sum().item() == pytest.approx(30, rel=1e-4)


@pytest.mark.parametrize("resolution", [0, (3, 3), 4.5])
def test_upsample_errors(resolution):
    grid = make_grid()
    with pytest.raises((TypeError, ValueError), match="resolution must be"):
        grid.upsample(resolution)
    assert grid.resolution == (4, 6, 5)


# ------------------------------------------------------------------------------------------ optimizer state


def linear_field(points: Tensor) -> Tensor:
    return torch.stack([points.sum(-1), points[..., 0] - points[..., 2], 2 * points[..., 1]], dim=-1)


def train(grid: VoxelGrid, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        points = points_around(400, grid.aabb.device, margin=0.0)
        loss = F.mse_loss(grid(points), linear_field(points))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.05, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.02, momentum=0.5),
    "sgd": lambda p: torch.optim.SGD(p, lr=5.0, momentum=0.9),
}


@pytest.mark.parametrize("change", ["upsample", "refit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_after_a_change(device, name, change):
    grid = make_grid((5, 4, 6), device=device)
    optimizer = OPTIMIZERS[name]([grid.features])
    before = train(grid, optimizer, 60)
    if change == "upsample":
        grid.upsample((9, 7, 11), optimizer=optimizer)
    else:
        grid.refit(((-0.9, 0.6, -1.5), (1.9, 0.7, 0.9)), (9, 7, 11), optimizer=optimizer)
    state = optimizer.state[grid.features]
    tensors = {key: value for key, value in state.items() if torch.is_tensor(value) and value.dim() > 0}
    assert tensors
    assert all(value.shape == grid.features.shape for value in tensors.values())
    after = train(grid, optimizer, 150)
    assert before[-1] < before[0]
    assert sum(after[-5:]) < 0.7 * sum(after[:5])


def test_adam_moments_follow_the_features():
    grid = make_grid((4, 6, 5))
    optimizer = torch.optim.Adam([grid.features], amsgrad=True)
    train(grid, optimizer, 7)
    old = {key: value.clone() for key, value in optimizer.state[grid.features].items()}
    grid.upsample((7, 16, 5), optimizer=optimizer)
    new = optimizer.state[grid.features]
    assert set(new) == set(old) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert new["step"] == old["step"] == 7
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        expected = reference(old[key], grid.aabb, grid.vertices().reshape(-1, 3)).reshape(7, 16, 5, 3)
        torch.testing.assert_close(new[key].double(), expected, atol=1e-6, rtol=1e-4)
    assert new["exp_avg_sq"].min() >= 0
    old, old_box = {key: value.clone() for key, value in new.items()}, grid.aabb.clone()
    grid.refit(((-1.0, 0.6, -3.0), (0.1, 1.0, 1.0)), (4, 6, 5), optimizer=optimizer)
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        expected = reference(old[key], old_box, grid.vertices().reshape(-1, 3)).reshape(4, 6, 5, 3)
        torch.testing.assert_close(new[key].double(), expected, atol=1e-6, rtol=1e-4)


def test_other_parameters_and_groups_are_left_alone():
    grid, mlp = make_grid(), nn.Linear(3, 3)
    optimizer = torch.optim.Adam([{"params": mlp.parameters(), "lr": 1e-3}, {"params": [grid.features], "lr": 0.1}])
    mlp(grid(points_around(10))).sum().backward()
    optimizer.step()
    moments = optimizer.state[mlp.weight]["exp_avg"].clone()
    grid.upsample(8, optimizer=optimizer)
    assert optimizer.param_groups[1]["params"][0] is grid.features
    assert torch.equal(optimizer.state[mlp.weight]["exp_avg"], moments)
    assert mlp.weight.grad is not None


def test_the_wrong_optimizer_is_refused():
    grid, other = make_grid(), make_grid()
    optimizer = torch.optim.Adam([other.features])
    with pytest.raises(ValueError, match="optimizer must have this grid's features"):
        grid.upsample(7, optimizer=optimizer)
    with pytest.raises(ValueError, match="optimizer must have this grid's features"):
        grid.refit(BOX, 3, optimizer=optimizer)
    assert grid.resolution == (4, 6, 5)


def test_state_that_cannot_follow_is_refused():
    grid = make_grid()
    optimizer = torch.optim.Adafactor([grid.features])
    train(grid, optimizer, 1)
    before = grid.features.detach().clone()
    with pytest.raises(ValueError, match=r"Adafactor stores 'row_var' as torch\.float32 of shape"):
        grid.upsample(7, optimizer=optimizer)
    assert torch.equal(grid.features, before)
    del optimizer.state[grid.features]
    grid.upsample(7, optimizer=optimizer)
    train(grid, optimizer, 1)


# --------------------------------------------------------------------------------------------- state dicts


def model_with_grid(resolution, channels=3, aabb=BOX, **options) -> nn.Module:
    model = nn.Module()
    model.field = nn.Sequential(make_grid(resolution, channels, aabb, **options), nn.Linear(channels, 2))
    return model


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("resolution", [(4, 6, 5), 2, (9, 1, 3)])
def test_state_dict_brings_resolution_and_box(device, resolution, assign):
    saved = model_with_grid((4, 6, 5), device=device)
    buffer = io.BytesIO()
    torch.save(saved.state_dict(), buffer)
    buffer.seek(0)
    model = model_with_grid(resolution, aabb=((0, 0, 0), (1, 1, 1)), device=device)
    parameter = model.field[0].features
    result = model.load_state_dict(torch.load(buffer, weights_only=True), assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(model.field[0].features, saved.field[0].features)
    assert torch.equal(model.field[0].aabb, saved.field[0].aabb)
    assert (model.field[0].features is parameter) != assign
    assert isinstance(model.field[0].features, nn.Parameter)
    # The values are the model's own, not views on the saved ones.
    points = points_around(20, device)
    torch.testing.assert_close(model.field[0](points), saved.field[0](points))


def test_loading_drops_a_gradient_of_another_shape_and_training_goes_on():
    grid = make_grid(3)
    kept = grid(points_around(10)).sum()
    kept.backward()
    grid.load_state_dict(make_grid((4, 6, 5)).state_dict())
    assert grid.features.grad is None
    grid(points_around(10)).sum().backward()
    assert grid.features.grad.shape == (4, 6, 5, 3)


def test_optimizer_resumes_at_the_saved_resolution():
    grid = make_grid(3)
    optimizer = torch.optim.Adam([grid.features], lr=0.05)
    train(grid, optimizer, 5)
    grid.upsample((4, 6, 5), optimizer=optimizer)
    train(grid, optimizer, 5)
    saved = copy.deepcopy((grid.state_dict(), optimizer.state_dict()))
    torch.manual_seed(1)
    expected = train(grid, optimizer, 5)
    resumed = make_grid(3)
    optimizer = torch.optim.Adam([resumed.features], lr=0.05)
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.manual_seed(1)
    assert train(resumed, optimizer, 5) == pytest.approx(expected, rel=1e-5)


def test_state_dict_across_dtypes():
    saved = make_grid((4, 6, 5))
    grid = make_grid(2, dtype=torch.float16)
    grid.load_state_dict(saved.state_dict())
    assert grid.features.dtype == torch.float16
    assert torch.equal(grid.features, saved.features.half())
    # Someone may have halved a whole checkpoint; assigned as it is, the geometry is still float32.
    halved = {key: value.half() for key, value in saved.state_dict().items()}
    grid.load_state_dict(halved, assign=True)
    assert grid.aabb.dtype == torch.float32


def test_other_channels_are_refused_with_a_reason():
    model = model_with_grid(4, channels=3)
    saved = model_with_grid(4, channels=5).state_dict()
    with pytest.raises(RuntimeError, match=r"field\.0\.features: the checkpoint has 5 channels, this grid 3"):
        model.load_state_dict(saved)


def test_loading_onto_the_meta_device_by_assignment():
    saved = make_grid((4, 6, 5))
    grid = VoxelGrid(2, 3, BOX, device="meta")
    grid.load_state_dict(saved.state_dict(), assign=True)
    points = points_around(5)
    torch.testing.assert_close(grid(points), saved(points))


# ------------------------------------------------------------------------------------------ as an nn.Module


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "float"])
def test_conversions_leave_the_geometry_alone(device, convert):
    # Neither corner is representable in 16 bits, so a box that went through half precision would differ.
    box = ((-0.1, 0.3, 1e-3), (0.7, 0.9, 17.3))
    grid = make_grid(aabb=box, device=device)
    expected, parameter = grid.aabb.clone(), grid.features
    model = nn.Sequential(grid)
    getattr(model, convert)()
    assert grid.features is parameter
    assert grid.features.dtype == getattr(torch, {"half": "float16"}.get(convert, convert))
    assert grid.aabb.dtype == torch.float32
    assert torch.equal(grid.aabb, expected)
    points = torch.rand(20, 3, device=device)
    assert model(points).dtype == grid.features.dtype
    model.to(torch.float32)
    assert grid.features.dtype == grid.aabb.dtype == torch.float32
    assert torch.equal(grid.aabb, expected)


def test_to_moves_features_and_geometry(device):
    grid = make_grid().to(device, torch.bfloat16)
    assert grid.features.device.type == grid.aabb.device.type == device.type
    assert (grid.features.dtype, grid.aabb.dtype) == (torch.bfloat16, torch.float32)
    meta = make_grid().to("meta")
    assert meta.features.is_meta
    assert meta.aabb.is_meta
    assert "(4, 6, 5)" in repr(meta)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda grid: pickle.loads(pickle.dumps(grid))])
def test_copies_are_equal_and_independent(clone):
    grid = make_grid(padding="zeros")
    other = clone(grid)
    points = points_around(50)
    torch.testing.assert_close(other(points), grid(points))
    other.upsample(8)
    other.refit(((0, 0.6, 0), (0.1, 0.7, 0.1)), 3)
    assert grid.resolution == (4, 6, 5)
    assert grid.aabb.tolist() == [list(corner) for corner in BOX]


def test_works_with_replaced_tensors(device):
    """As under DataParallel and torch.func, where the features are plain tensors, not the Parameter."""
    grid, other = make_grid(device=device), make_grid((3, 8, 2), device=device)
    points = points_around(50, device)
    tensors = {"features": other.features.detach(), "aabb": other.aabb}
    torch.testing.assert_close(torch.func.functional_call(grid, tensors, (points,)), other(points))
    rays = points[:5], points[5:10], torch.rand(5, 4, device=device)
    tensors = {f"grid.{name}": tensor for name, tensor in tensors.items()}
    torch.testing.assert_close(torch.func.functional_call(Rendering(grid), tensors, rays), Rendering(other)(*rays))


class Rendering(nn.Module):
    """The grid in somebody's model: rays in, a number out."""

    def __init__(self, grid: VoxelGrid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, origins: Tensor, directions: Tensor, t: Tensor) -> Tensor:
        points = origins[:, None] + t[..., None] * directions[:, None]
        features, inside = self.grid(points), self.grid.contains(points)
        return (features.float().square() * inside[..., None]).sum() + self.grid.total_variation((1, 2, 3))


def check_compiled(model: Rendering, device: torch.device, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for rays in (7, 12):
        origins = points_around(rays, device, margin=1.0)
        arguments = origins, torch.randn(rays, 3, device=device), torch.rand(rays, 9, device=device)
        gradients = []
        for call in (model, compiled):
            model.zero_grad()
            value = call(*arguments)
            value.backward()
            gradients.append((value.detach(), model.grid.features.grad.clone()))
        torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in (torch.float64, torch.bfloat16))) for each in ALL_DTYPES],
)
def test_compiles_without_graph_breaks(device, dtype):
    check_compiled(Rendering(make_grid(dtype=torch.float32, device=device).to(dtype)), device, "aot_eager")


@pytest.mark.sweep
def test_compiles_with_inductor(device):
    model = Rendering(make_grid(device=device))
    check_compiled(model, device, "inductor")
    model.grid.upsample(8)
    check_compiled(model, device, "inductor")


# ------------------------------------------------------------------------------------------ regularisation


def plain_total_variation(features: Tensor, weights=(1.0, 1.0, 1.0)) -> Tensor:
    features = features.double()
    x = (features[1:] - features[:-1]).square().mean() * weights[0]
    y = (features[:, 1:] - features[:, :-1]).square().mean() * weights[1]
    z = (features[:, :, 1:] - features[:, :, :-1]).square().mean() * weights[2]
    return x + y + z


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("weights", [None, (0.5, 3.0, 7.0), (0.0, 0.0, 1.0)])
def test_total_variation(device, dtype, weights):
    grid = make_grid(dtype=dtype, device=device)
    loss = grid.total_variation() if weights is None else grid.total_variation(weights)
    assert loss.shape == ()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward()
    features = grid.features.detach().double().requires_grad_()
    expected = plain_total_variation(features, weights or (1, 1, 1))
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-5)
    tolerance = max(torch.finfo(dtype).eps * 4, 1e-6)
    assert grid.features.grad.dtype == dtype
    torch.testing.assert_close(grid.features.grad.double(), features.grad, atol=tolerance, rtol=tolerance)


def test_total_variation_does_not_overflow_16_bits(device):
    grid = VoxelGrid(4, 1, BOX, dtype=torch.float16, device=device)
    with torch.no_grad():
        grid.features[::2] = 1000.0
    assert grid.total_variation().item() == pytest.approx(1e6)


def test_total_variation_of_channels():
    grid = make_grid(channels=4)
    loss = grid.total_variation(channels=slice(0, 1))
    torch.testing.assert_close(loss.double(), plain_total_variation(grid.features[..., :1]))
    loss.backward()
    assert grid.features.grad[..., 1:].eq(0).all()
    assert grid.features.grad[..., 0].ne(0).all()


def test_total_variation_of_single_vertices():
    grid = make_grid((1, 5, 1))
    features = grid.features.detach().double()
    expected = (features[:, 1:] - features[:, :-1]).square().mean()
    torch.testing.assert_close(grid.total_variation().double(), expected)
    point = make_grid(1)
    point.total_variation().backward()
    assert point.features.grad.eq(0).all()


def test_total_variation_derivatives():
    grid = make_grid((3, 2, 4), channels=2).double()

    class Smoothness(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = grid

        def forward(self) -> Tensor:
            return self.grid.total_variation((0.5, 2.0, 3.0))

    def loss(features: Tensor) -> Tensor:
        return torch.func.functional_call(Smoothness(), {"grid.features": features}, ())

    features = grid.features.detach().requires_grad_()
    assert torch.autograd.gradcheck(loss, (features,))
    assert torch.autograd.gradgradcheck(loss, (features,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": (1.0, 2.0)}, "three finite numbers"),
        ({"weights": (1.0, 2.0, math.nan)}, "three finite numbers"),
        ({"channels": slice(3, None)}, "channels must select at least one of 3"),
    ],
)
def test_total_variation_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_grid().total_variation(**arguments)


# ------------------------------------------------------------------------- vertices inside the box, periodic grids


@pytest.mark.parametrize("padding", PADDINGS)
def test_vertices_at_the_centres_of_voxels(device, padding):
    grid = make_grid(padding=padding, align_corners=False, dtype=torch.float64, device=device)
    low, high = grid.aabb
    torch.testing.assert_close(grid.voxel_size, (high - low) / torch.tensor(grid.resolution, device=device))
    torch.testing.assert_close(grid.vertices()[0, 0, 0], low + grid.voxel_size / 2)
    torch.testing.assert_close(grid(grid.vertices().double()), grid.features, atol=1e-5, rtol=1e-5)
    points = points_around(50, device).double().requires_grad_()
    values, slopes = grid(points, with_gradient=True)
    torch.testing.assert_close(values, grid(points))
    for channel in range(3):
        torch.testing.assert_close(
            slopes[:, channel], torch.autograd.grad(values[:, channel].sum(), points, retain_graph=True)[0]
        )
    with pytest.raises(ValueError, match=r"align_corners must be True for enable_copies, got False"):
        grid.enable_copies(torch.float16)
    before = grid.features.detach().clone()
    other = copy.deepcopy(grid)
    other.refit(((-0.5, 0.6, -1), (1, 0.9, 0.5)), (3, 5, 4))
    grid.upsample((7, 3, 9))
    if padding == "periodic":
        expected = make_grid(padding=padding, align_corners=False, dtype=torch.float64, device=device)
        with torch.no_grad():
            expected.features.copy_(before)
            for changed in (grid, other):
                read = expected(changed.vertices().double())
                torch.testing.assert_close(changed.features, read, atol=1e-5, rtol=1e-5)
        return
    expected = F.interpolate(before.movedim(-1, 0)[None], size=(7, 3, 9), mode="trilinear", align_corners=False)
    torch.testing.assert_close(grid.features, expected[0].movedim(0, -1))


@pytest.mark.parametrize("align_corners", [True, False])
def test_periodic_grids_repeat_themselves(device, align_corners):
    grid = make_grid(padding="periodic", align_corners=align_corners, dtype=torch.float64, device=device)
    points = points_around(60, device).double()
    extent, size = grid.aabb[1] - grid.aabb[0], torch.tensor(grid.resolution, device=device)
    period = grid.voxel_size * size
    torch.testing.assert_close(period, extent if not align_corners else extent * size / (size - 1))
    values = grid(points)
    torch.testing.assert_close(grid(points + 3 * period.double()), values, atol=1e-5, rtol=1e-5)
    grads = [torch.autograd.grad(grid(p).sin().sum(), grid.features)[0] for p in (points, points - period.double())]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


def test_working_copies_of_periodic_grids(device):
    grid, points = make_grid(padding="periodic", device=device), points_around(60, device)
    (expected,) = torch.autograd.grad(grid(points).square().sum(), grid.features)
    grid.enable_copies(torch.float32)
    grid(points).square().sum().backward()
    torch.testing.assert_close(grid.features.grad, expected)


# --------------------------------------------------------------------------------------- grid_sample layout


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("padding", ["border", "zeros"])
def test_grid_sample_layout(device, padding, align_corners):
    volume = torch.randn(1, 3, 5, 6, 4, device=device)
    grid = make_grid((4, 6, 5), padding=padding, align_corners=align_corners, device=device)
    with torch.no_grad():
        grid.features.copy_(volume[0].permute(3, 2, 1, 0))
    points = points_around(100, device)
    coordinates = (2 * grid.to_unit(points) - 1)[None, :, None, None]
    sampled = F.grid_sample(volume, coordinates, padding_mode=padding, align_corners=align_corners)
    torch.testing.assert_close(grid(points), sampled[0, :, :, 0, 0].T, atol=1e-5, rtol=1e-5)
    unaligned = "" if align_corners else ", align_corners=False"
    assert repr(grid).endswith(f"padding={padding!r}{unaligned})")


# ------------------------------------------------------------------------------------ tracing, deferred building


def test_a_traced_grid_can_be_saved(device, tmp_path):
    grid = make_grid().to(device)
    points = points_around(5, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # the checks of arguments are not part of the trace
        traced = torch.jit.trace(grid, points)
    torch.jit.save(traced, tmp_path / "grid.pt")
    loaded = torch.jit.load(tmp_path / "grid.pt")
    others = points_around(9, device)
    assert torch.equal(loaded(others), grid(others))
    for module in (loaded, grid):
        module(others).square().sum().backward()
    assert_matches(loaded.features.grad, grid.features.grad.double())
    assert grid.features.grad.any()


def restore(module):
    """What FSDP and other users of deferred initialisation do."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.full_like(tensor, 7))
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return module


MODULES = {
    "grid": lambda: VoxelGrid((3, 4, 5), 2, ((-1, -2, 0), (1, 1, 1)), init_std=1.0),
    "pyramid": lambda: VoxelPyramid((4, 8), 3, ((-1, -2, 0), (1, 1, 1)), init_range=0.5),
    "sum": lambda: VoxelPyramid((4, 8), 3, ((-1, -2, 0), (1, 1, 1)), reduce="sum", init_range=0.5),
    "occupancy": lambda: OccupancyGrid((3, 4, 5), ((-1, -2, 0), (1, 1, 1))),
}

every_module = pytest.mark.parametrize("make_module", MODULES.values(), ids=MODULES)


@every_module
def test_deferred_initialisation_gives_what_construction_gives(make_module):
    with torch.device("meta"):
        deferred = make_module()
    assert all(tensor.is_meta for tensor in (*deferred.parameters(), *deferred.buffers()))
    torch.manual_seed(3)
    built = make_module()
    torch.manual_seed(3)
    restored = restore(deferred)
    assert restored.state_dict().keys() == built.state_dict().keys()
    for actual, expected in zip(
        (*restored.parameters(), *restored.buffers()), (*built.parameters(), *built.buffers()), strict=True
    ):
        assert torch.equal(actual, expected)


def test_reset_parameters_keeps_the_box_that_training_or_a_checkpoint_has_set():
    grid = make_grid()
    grid.refit(((-0.5, 0.6, 0.1), (0.25, 0.9, 0.5)), 6)
    moved = grid.aabb.clone()
    grid.reset_parameters()
    assert torch.equal(grid.aabb, moved)
    other = make_grid()
    other.load_state_dict(grid.state_dict())
    other.reset_parameters()
    assert torch.equal(other.aabb, moved)
    grid.refit(((-0.4, 0.7, 0.2), (0.0, 0.8, 0.4)), 3)
    refitted = grid.aabb.clone()
    grid.reset_parameters()
    assert torch.equal(grid.aabb, refitted)
    assert not torch.equal(refitted, moved)


@every_module
def test_building_without_memory(make_module):
    with FakeTensorMode():
        module = make_module()
        if not isinstance(module, OccupancyGrid):
            points = torch.rand(6, 3)
            assert module(points).shape == (6, module.channels)
            module(points).sum().backward()
            assert all(parameter.grad is not None for parameter in module.parameters())
