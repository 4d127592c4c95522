"""Fields made of plain functions: the same pictures, gradients and occupancy as the field that the functions wrap."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from voxelfield import CallbackField, FieldRenderer, OccupancyGrid, RadianceField, RenderSettings, VoxelGrid
from voxelfield.fields.decoders import ColorMLPDecoder, FusedMLPDecoder, SHDecoder
from voxelfield.fields.density import DensityActivation, ExponentialDensity
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.ops import PackedSamples
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import Capacity
from voxelfield.rendering.rays import Rays, intersect_aabb
from voxelfield.rendering.render import render, render_view

BOX = ((-1.0, -0.9, -1.1), (1.0, 1.1, 0.9))
SETTINGS = RenderSettings(step=0.05, min_weight=1e-3)
THRESHOLD = 0.1


def make_field(kind, device):
    density = DensityActivation(scale=20.0, initial=2.0)
    if kind == "pyramid":
        pyramid = VoxelPyramid((3, 6, 9), 4, BOX, init_range=1.0)
        return RadianceField(pyramid, FusedMLPDecoder(12, 16, 4, 1, 2, ExponentialDensity(2.0))).to(device)
    decoder = SHDecoder(1, density) if kind == "sh" else ColorMLPDecoder(6, 16, 1, 1, density)
    return RadianceField(VoxelGrid(8, decoder.channels, BOX, init_std=1.0), decoder).to(device)


def wrap(field):
    return CallbackField(field.density, lambda points, directions: field(points, directions)[1], field.aabb)


def some_rays(device, count=64):
    origins = 4 * nn.functional.normalize(torch.randn(count, 3), dim=-1)
    directions = nn.functional.normalize(1.4 * torch.rand(count, 3) - 0.7 - origins, dim=-1)
    return Rays(origins, directions, *intersect_aabb(origins, directions, torch.tensor(BOX))).to(device)


def some_cameras(device):
    pose = torch.eye(4)
    pose[2, 3] = 3.5
    return Cameras(pose[None], torch.tensor([[20.0, 20.0, 8.0, 6.0]]), width=16, height=12).to(device)


def everywhere(device):
    return OccupancyGrid(8, BOX).to(device)


def network(device):
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)


def of_network(net, aabb):
    def density(points):
        return nn.functional.softplus(net(points)[:, 0])

    def color(points, directions):
        return torch.sigmoid(net(points)[:, 1:] + directions)

    return CallbackField(density, color, aabb)


def tolerance(kind, device):
    """One kernel marches through the pyramid on CUDA, in 16 bits, where the wrapped one is sampled."""
    return {"rtol": 2e-2, "atol": 2e-2} if kind == "pyramid" and device.type == "cuda" else {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("kind", ["sh", "dense", "pyramid"])
@pytest.mark.parametrize("min_weight", [0.0, 1e-3])
def test_rays_look_the_same_and_teach_the_same(device, kind, min_weight):
    field = make_field(kind, device)
    settings = RenderSettings(step=SETTINGS.step, min_weight=min_weight)
    rays, occupancy = some_rays(device), everywhere(device)
    results = []
    for drawn in (field, wrap(field)):
        field.zero_grad()
        rendering = render(drawn, rays, occupancy, settings, distortion=True)
        loss = rendering.rgb.square().sum() + rendering.depth_sum.sum() + rendering.distortion.sum()
        loss.backward()
        results.append((rendering, [parameter.grad.clone() for parameter in field.parameters()]))
    (expected, expected_grads), (actual, actual_grads) = results
    assert 0 < len(actual.samples.positions) == len(expected.samples.positions)
    close = tolerance(kind, device)
    for name in ("rgb", "opacity", "depth_sum", "density", "weights", "sample_rgb", "distortion"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), **close, msg=lambda m, n=name: n + m)
    for mine, whole in zip(actual_grads, expected_grads, strict=True):
        assert whole.ne(0).any()
        torch.testing.assert_close(mine, whole, rtol=close["rtol"], atol=close["atol"] * float(whole.abs().max()) * 10)


@pytest.mark.parametrize("min_weight", [0.0, 1e-3])
def test_functions_are_called_no_more_than_needed(device, min_weight):
    net, calls = network(device), []

    def density(points):
        calls.append(("density", len(points), torch.is_grad_enabled()))
        return 30 * torch.sigmoid(net(points)[:, 0])

    def color(points, directions):
        calls.append(("color", len(points), torch.is_grad_enabled()))
        torch.testing.assert_close(directions.norm(dim=-1), torch.ones_like(directions[:, 0]))
        return torch.sigmoid(net(points)[:, 1:])

    field = CallbackField(density, color, BOX, device=device)
    settings = RenderSettings(step=SETTINGS.step, min_weight=min_weight)
    rendering = render(field, some_rays(device), everywhere(device), settings)
    candidates, visible = int(rendering.candidates), len(rendering.samples.positions)
    evaluated = [("density", candidates, False)] if min_weight > 0 else []
    assert calls == [*evaluated, ("density", visible, True), ("color", visible, True)]
    assert visible < candidates if min_weight > 0 else visible == candidates


@pytest.mark.parametrize("kind", ["sh", "dense", "pyramid"])
def test_images_look_the_same(device, kind):
    field = make_field(kind, device)
    background = torch.ones(3, device=device)
    cameras, occupancy = some_cameras(device), everywhere(device)
    expected = render_view(field, cameras, 0, occupancy, SETTINGS, background, chunk=50)
    renderer = FieldRenderer(wrap(field), occupancy, SETTINGS, background, chunk=50)
    assert renderer.backend == "render_view"
    view = renderer.view(cameras, 0)
    assert view.opacity.max() > 0.5
    close = tolerance(kind, device)
    torch.testing.assert_close(view.rgb, expected.rgb, **close)
    torch.testing.assert_close(view.depth, expected.depth, **close)


def test_the_same_cells_are_occupied(device):
    field = make_field("sh", device)
    grids = []
    for drawn in (field, wrap(field)):
        occupancy = everywhere(device)
        torch.manual_seed(3)
        for _ in range(3):
            occupancy.update_from_samples(drawn.density, SETTINGS.step, THRESHOLD)
        grids.append(occupancy)
    assert 0 < grids[0].fraction() < 1
    assert torch.equal(grids[0].occupied, grids[1].occupied)


@pytest.mark.parametrize("room", [Capacity(4096, 2048), Capacity(1 << 14, 1 << 14)], ids=["some", "all"])
def test_unused_rows_of_a_fixed_capacity_teach_nothing(device, room):
    net = network(device)
    field = of_network(net, torch.tensor(BOX, device=device))
    rays, occupancy = some_rays(device), everywhere(device)
    rendering = render(field, rays, occupancy, SETTINGS, capacity=room)
    kept = int(rendering.rays_kept)
    rows = len(rendering.samples.positions)
    assert rows > int(rendering.samples.ray_offsets[-1]), "no row is unused, so nothing is tested"
    low, high = field.aabb
    assert ((rendering.samples.positions >= low - 1e-5) & (rendering.samples.positions <= high + 1e-5)).all()
    rendering.rgb.sum().backward()
    grads = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    expected = render(field, rays[:kept], occupancy, SETTINGS)
    expected.rgb.sum().backward()
    # Products of matrices of other sizes may be summed in another order.
    torch.testing.assert_close(rendering.rgb[:kept], expected.rgb, rtol=1e-4, atol=1e-5)
    for grad, parameter in zip(grads, net.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-3, atol=1e-3)


def test_unused_rows_of_a_grid_access_no_memory(device):
    occupancy, rays = everywhere(device), some_rays(device)
    for field in (make_field("sh", device), make_field("pyramid", device)):
        samples = render(field, rays, occupancy, SETTINGS, capacity=Capacity(1 << 14, 1 << 14)).samples
        assert samples.positions[int(samples.ray_offsets[-1]) :].isnan().all()


def test_empty_space_gives_zeros_and_gradients_of_zero(device):
    net = network(device)
    occupancy = everywhere(device)
    occupancy.occupied.zero_()
    rendering = render(of_network(net, torch.tensor(BOX, device=device)), some_rays(device), occupancy, SETTINGS)
    assert len(rendering.samples.positions) == 0
    assert rendering.rgb.eq(0).all()
    rendering.rgb.sum().backward()
    assert all(parameter.grad.eq(0).all() for parameter in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_results_are_widened(device, dtype):
    field = CallbackField(
        lambda points: torch.full_like(points[:, 0], 3.0, dtype=dtype),
        lambda points, directions: torch.full_like(points, 0.25, dtype=dtype),
        BOX,
        device=device,
    )
    rendering = render(field, some_rays(device), everywhere(device), SETTINGS)
    assert rendering.density.dtype == rendering.sample_rgb.dtype == rendering.rgb.dtype == torch.float32
    torch.testing.assert_close(rendering.rgb, 0.25 * rendering.opacity[:, None].expand(-1, 3))
    occupancy = everywhere(device)
    occupancy.update_from_samples(field.density, SETTINGS.step, THRESHOLD)
    assert occupancy.fraction() == 1


def test_a_diverged_function_does_not_look_like_background(device):
    field = CallbackField(
        lambda points: torch.full_like(points[:, 0], float("nan")),
        lambda points, directions: torch.ones_like(points),
        BOX,
        device=device,
    )
    occupancy = everywhere(device)
    occupancy.update_from_samples(field.density, SETTINGS.step, THRESHOLD)
    assert occupancy.fraction() == 1
    assert render(field, some_rays(device), occupancy, SETTINGS).rgb.isnan().all()


def rgb(points, directions):
    return torch.ones_like(points)


def sigma(points):
    return torch.ones_like(points[:, 0])


def five_samples():
    ray_index, ray_offsets = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 3, 5])
    return PackedSamples(torch.rand(5, 3), torch.rand(5), torch.rand(5), ray_index, ray_offsets, torch.tensor([2]))


DENSITY, COLOR = r"density\(points\)", r"color\(points, directions\)"


@pytest.mark.parametrize(
    ("density", "color", "message"),
    [
        (lambda p: sigma(p)[:, None], rgb, rf"{DENSITY} must have shape \(5\) for 5 points, got \(5, 1\)"),
        (lambda p: sigma(p)[1:], rgb, rf"{DENSITY} must have shape \(5\) for 5 points, got \(4,\)"),
        (lambda p: sigma(p).double(), rgb, rf"{DENSITY} must be float32 or float16 or bfloat16, got float64"),
        (lambda p: (sigma(p), p), rgb, rf"{DENSITY} must be a torch\.Tensor, got tuple"),
        (lambda p: sigma(p).to("meta"), rgb, rf"{DENSITY} must be on the device of points, cpu, but it is on meta"),
        (sigma, lambda p, d: d[:, :1], rf"{COLOR} must have shape \(5, 3\) for 5 points, got \(5, 1\)"),
        (sigma, lambda p, d: (255 * p).long(), rf"{COLOR} must be float32 or float16 or bfloat16, got int64"),
        (sigma, lambda p, d: None, rf"{COLOR} must be a torch\.Tensor, got NoneType"),
    ],
    ids=["column", "short", "double", "tuple", "elsewhere", "grey", "integer", "none"],
)
def test_results_that_do_not_fit_are_refused_by_name(density, color, message):
    field = CallbackField(density, color, BOX)
    calls = [lambda: field.sample(five_samples(), torch.rand(2, 3)), lambda: field.density(torch.rand(5, 3))]
    for evaluate in calls if color is rgb else calls[:1]:
        with pytest.raises((TypeError, ValueError), match=rf"^{message}$"):
            evaluate()


def test_points_that_do_not_fit_are_refused_by_name():
    field = CallbackField(sigma, rgb, BOX)
    with pytest.raises(ValueError, match=r"^points must have shape \(M, 3\), got \(5, 2\)$"):
        field.density(torch.rand(5, 2))
    with pytest.raises(TypeError, match=r"^points must be float32, got float64$"):
        field.density(torch.rand(5, 3).double())


@pytest.mark.parametrize(
    ("density", "color", "aabb", "message"),
    [
        (3, rgb, BOX, r"^density must be a function that returns a tensor, got 3$"),
        (sigma, None, BOX, r"^color must be a function that returns a tensor, got None$"),
        (sigma, rgb, ((0, 0, 0), (1, 1, 0)), r"^aabb must be finite with low < high"),
    ],
)
def test_what_cannot_be_called_or_is_no_box_is_refused(density, color, aabb, message):
    with pytest.raises((TypeError, ValueError), match=message):
        CallbackField(density, color, aabb)


def test_occupancy_refuses_a_density_of_another_shape():
    occupancy = OccupancyGrid(3, BOX)
    message = r"^density\(points\) must have shape \(27\) for 27 points, got \(27, 1\)$"
    with pytest.raises(ValueError, match=message):
        occupancy.update_from_samples(lambda points: points[:, :1].abs(), SETTINGS.step, THRESHOLD)
    assert occupancy.occupied.all()
