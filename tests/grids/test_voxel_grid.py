"""What is particular to VoxelGrid: geometry, dtypes and paddings, its place in a model; test_every_grid has more."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from op_testing import DTYPES
from reference import sample_grid, sample_grid_with_gradient, sample_separable
from tolerances import assert_matches
from torch import Tensor, nn

from voxelfield import RadianceField, VoxelGrid, ops, processes
from voxelfield.foundation import checks
from voxelfield.grids.resampling import sample_vertices
from voxelfield.ops._grids import PADDINGS

BOX = ((-1.0, 0.5, -3.0), (2.0, 1.0, 1.0))


def make_grid(resolution=(4, 6, 5), channels=3, aabb=BOX, **options) -> VoxelGrid:
    return VoxelGrid(resolution, channels, aabb, **{"init_std": 1.0, **options})


def points_around(count: int, device: torch.device | str = "cpu", margin: float = 0.5) -> Tensor:
    """World positions in BOX and up to ``margin`` of its size beyond."""
    low, high = torch.tensor(BOX, device=device)
    unit = torch.rand(count, 3, device=device) * (1 + 2 * margin) - margin
    return low + unit * (high - low)


def reference(features: Tensor, aabb: Tensor, points: Tensor, *options) -> Tensor:
    """Samples (X, Y, Z, C) features at points (N, 3) in float64."""
    low, high = aabb.double()
    return sample_grid(features.double(), (points.double() - low) / (high - low), *options)


# --- construction, geometry


def test_construction(device):
    box = torch.tensor(BOX)
    grid = VoxelGrid(resolution=(2, 3, 4), channels=5, aabb=box, device=device)
    box.zero_()  # the grid has a copy
    assert grid.features.shape == (2, 3, 4, 5)
    assert grid.features.dtype == grid.aabb.dtype == torch.float32
    assert grid.features.device.type == grid.aabb.device.type == device.type
    assert (grid.resolution, grid.channels) == ((2, 3, 4), 5)
    assert grid.features.eq(0).all()
    assert grid.aabb.tolist() == [list(corner) for corner in BOX]
    assert set(grid.state_dict()) == {"features", "aabb"}
    for same in (3, torch.tensor(3), torch.tensor([3, 3, 3]), torch.Size([3, 3, 3])):
        assert VoxelGrid(same, 1, BOX).resolution == (3, 3, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_initial_values(dtype):
    grid = VoxelGrid(16, 4, BOX, fill=2.0, dtype=dtype)
    assert grid.features.dtype == dtype
    assert grid.features.eq(2).all()
    noisy = VoxelGrid(16, 4, BOX, fill=2.0, init_std=0.5, dtype=dtype).features.float()
    assert noisy.mean().item() == pytest.approx(2, abs=0.05)
    assert noisy.std().item() == pytest.approx(0.5, abs=0.05)


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


# --- sampling


@pytest.mark.covering("dtype padding")
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("resolution", [(4, 6, 5), (2, 2, 2), (1, 4, 1), (17, 3, 9)], ids=str)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_derivatives_are_the_references(device, dtype, padding, resolution, align_corners):
    grid = make_grid(resolution, dtype=dtype, padding=padding, align_corners=align_corners, device=device)
    points = points_around(200, device).double()
    points[0, 0], points[1, 1], points[2, 2] = math.nan, math.inf, -math.inf  # they read zeros and move nothing
    points = (points if dtype == torch.float64 else points.float()).requires_grad_()
    values, slopes = grid(points, with_gradient=True)
    assert (values.dtype, values.shape, slopes.dtype, slopes.shape) == (dtype, (200, 3), dtype, (200, 3, 3))
    features = grid.features.detach().double().requires_grad_()
    low, high = grid.aabb.double()
    # In float32, so that the reference finds each point in the same cell.
    unit = grid.to_unit(points.detach()).double().requires_grad_()
    expected, expected_slopes = sample_grid_with_gradient(features, unit, padding, align_corners)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(values.double(), expected, atol=tolerance, rtol=tolerance)
    rounding = {"rtol": 20 * tolerance, "atol": 100 * tolerance}
    torch.testing.assert_close(slopes.double(), expected_slopes / (high - low), **rounding)
    weights = torch.randint(-4, 5, (200, 3), device=device)
    of_features, of_points = torch.autograd.grad(grid(points), [grid.features, points], weights.to(dtype))
    wanted = torch.autograd.grad(expected, [features, unit], weights.double())
    assert (of_features.dtype, of_points.dtype) == (dtype, points.dtype)
    torch.testing.assert_close(of_features.double(), wanted[0], **rounding)
    torch.testing.assert_close(of_points.double(), wanted[1] / (high - low), **rounding)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
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


# --- resampling


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("resolution", [0, (3, 3), 4.5])
def test_upsample_errors(resolution):
    grid = make_grid()
    with pytest.raises((TypeError, ValueError), match="resolution must be"):
        grid.upsample(resolution)
    assert grid.resolution == (4, 6, 5)


def test_other_parameters_and_groups_are_left_alone():
    grid, mlp = make_grid(), nn.Linear(3, 3)
    optimizer = torch.optim.Adam([{"params": mlp.parameters(), "lr": 1e-3}, {"params": [grid.features], "lr": 0.1}])
    mlp(grid(points_around(10))).sum().backward()
    optimizer.step()
    moments, parameter = optimizer.state[mlp.weight]["exp_avg"].clone(), grid.features.requires_grad_(False)
    grid.upsample(8, optimizer=optimizer)
    assert dict(grid.named_parameters()) == {"features": parameter}
    assert optimizer.param_groups[1]["params"][0] is parameter
    assert not parameter.requires_grad
    assert torch.equal(optimizer.state[mlp.weight]["exp_avg"], moments)
    assert mlp.weight.grad is not None


# --- state dicts


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
    model, saved = (nn.Sequential(make_grid(4, channels)) for channels in (3, 5))
    with pytest.raises(RuntimeError, match=r"0\.features: the checkpoint has 5 channels, this grid 3"):
        model.load_state_dict(saved.state_dict())


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


# --- as an nn.Module


def test_to_moves_features_and_geometry(device):
    grid = make_grid().to(device, torch.bfloat16)
    assert grid.features.device.type == grid.aabb.device.type == device.type
    assert (grid.features.dtype, grid.aabb.dtype) == (torch.bfloat16, torch.float32)
    meta = make_grid().to("meta")
    assert meta.features.is_meta
    assert meta.aabb.is_meta
    assert "(4, 6, 5)" in repr(meta)


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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in (torch.float64, torch.bfloat16))) for each in DTYPES],
)
def test_compiles_without_graph_breaks(device, dtype, backend):
    torch._dynamo.reset()
    model = Rendering(make_grid(dtype=torch.float32, device=device).to(dtype))
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
        model.grid.upsample(8)


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


# --- vertices inside the box, periodic grids


@pytest.mark.parametrize("padding", PADDINGS)
def test_vertices_at_the_centres_of_voxels(device, padding):
    grid = make_grid(padding=padding, align_corners=False, dtype=torch.float64, device=device)
    low, high = grid.aabb
    torch.testing.assert_close(grid.voxel_size, (high - low) / torch.tensor(grid.resolution, device=device))
    torch.testing.assert_close(grid.vertices()[0, 0, 0], low + grid.voxel_size / 2)
    torch.testing.assert_close(grid(grid.vertices().double()), grid.features, atol=1e-5, rtol=1e-5)
    assert repr(grid).endswith(f"padding={padding!r}, align_corners=False)")
    with pytest.raises(ValueError, match=r"align_corners must be True for enable_copies, got False"):
        grid.enable_copies(torch.float16)
    before, other = copy.deepcopy(grid), copy.deepcopy(grid)
    other.refit(((-0.5, 0.6, -1), (1, 0.9, 0.5)), (3, 5, 4))
    grid.upsample((7, 3, 9))
    # Beyond the old vertices the outermost values are repeated, or the grid.
    before.padding = "periodic" if padding == "periodic" else "border"
    for changed in (grid, other):
        torch.testing.assert_close(changed.features, before(changed.vertices().double()), atol=1e-5, rtol=1e-5)


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


# --- other kernels, and fewer axes


@pytest.mark.parametrize("mode", ["linear", "nearest", "bspline", "convolution"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_modes_and_axes(device, mode, axes):
    """Values are those of the ops, slopes those per world unit; 16-bit features stay so."""
    box = [[*corner[:axes]] for corner in BOX]
    grid = VoxelGrid((4, 6, 5)[:axes], 3, box, mode=mode, init_std=1.0, padding="reflection", device=device)
    points = points_around(50, device)[:, :axes]
    assert grid.resolution == (4, 6, 5)[:axes]
    low, high = grid.aabb
    unit = ((points - low) / (high - low)).cpu().double()
    expected = sample_separable(grid.features.cpu().double(), unit, mode, "reflection")
    assert_matches(grid(points).cpu(), expected)
    assert grid(points[:48].view(2, 24, axes)).shape == (2, 24, 3)
    if mode != "nearest":
        value, slopes = grid(points, with_gradient=True)
        each = points.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(grid(each)[:, 0].sum(), each)
        torch.testing.assert_close(value, grid(points))
        torch.testing.assert_close(slopes[:, 0], wanted, atol=1e-4, rtol=1e-4)
    assert ("mode=" in repr(grid)) == (mode != "linear")
    assert grid.half()(points).dtype == torch.float16
    assert grid.vertices().shape == (*grid.resolution, axes)
    assert bool(grid.contains(grid.vertices()).all())


def test_grids_of_two_axes_are_resampled_and_loaded():
    grid = VoxelGrid((4, 6), 2, ((0, 0), (1, 2)), init_std=1.0)
    points = torch.rand(20, 2)
    before = grid(points)
    grid.upsample((7, 11))
    torch.testing.assert_close(grid(points), before)
    grid.resize(12)
    assert grid.resolution == (8, 17)
    other = VoxelGrid(3, 2, ((0, 0), (1, 1)))
    other.load_state_dict(grid.state_dict())
    assert torch.equal(other(points), grid(points))
    assert grid.total_variation((1.0, 2.0)) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda grid: grid.upsample(9), "mode must be 'linear' for resampling, got 'bspline'"),
        (lambda grid: grid.enable_copies(torch.float16), "mode must be 'linear' for enable_copies, got 'bspline'"),
        (lambda grid: RadianceField(grid, nn.Identity()), "mode must be 'linear' for a radiance field, got 'bspline'"),
        (lambda grid: grid(torch.zeros(2, 3)), r"points must have shape \(..., 2\)"),
        (lambda grid: VoxelGrid((3, 3, 3), 1, grid.aabb), "resolution must be one int, or two for x and y"),
        (lambda grid: VoxelGrid(3, 1, grid.aabb, mode="cubic"), "mode must be one of"),
        (
            lambda grid: RadianceField(VoxelGrid(3, 4, grid.aabb), nn.Identity()),
            "aabb must have 3 axes for a radiance field, got 2",
        ),
    ],
)
def test_what_needs_linear_interpolation_along_three_axes(call, message):
    grid = VoxelGrid((3, 4), 4, ((0, 0), (1, 1)), mode="bspline")
    with pytest.raises(ValueError, match=message):
        call(grid)
