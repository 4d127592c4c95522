"""The derivative of samples in their rays, and of what is rendered in the cameras, against float64 and autograd."""

from __future__ import annotations

import pytest
import reference
import torch
from pyramid_scene import exact_network
from torch import Tensor
from torch.nn import functional as F

from voxelfield.fields.decoders import FusedMLPDecoder, spherical_harmonics
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.field import RadianceField
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.ops import PackedSamples
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import Capacity, RenderSettings, march
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays, intersect_aabb
from voxelfield.rendering.render import positions_on_rays, render
from voxelfield.rendering.rigid import compose, exp_se3
from voxelfield.warps.nested_boxes import NestedBoxes

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
NESTED = NestedBoxes(BOX, 3, near=0.1)


def some_rays(count: int, device) -> Rays:
    box = torch.tensor(BOX)
    directions = F.normalize(torch.randn(count, 3), dim=-1)
    origins = 0.5 * torch.randn(count, 3) - 3 * directions
    return Rays(origins, directions, *intersect_aabb(origins, directions, box)).to(device)


def some_samples(rays: Rays, boxes: NestedBoxes | None = None, capacity: int | None = None) -> PackedSamples:
    occupancy = OccupancyGrid(8, BOX if boxes is None else boxes.warped_aabb)
    occupancy.occupied.copy_(torch.rand(8, 8, 8) < 0.5)
    return march(rays, occupancy.to(rays.origins.device), 0.2, True, capacity, boxes)


def widened(samples: PackedSamples) -> PackedSamples:
    return samples._replace(positions=samples.positions.double(), t=samples.t.double())


@pytest.mark.parametrize("boxes", [None, NESTED], ids=["one box", "nested boxes"])
@pytest.mark.parametrize("capacity", [None, 300], ids=["all", "room for some"])
def test_positions_are_those_of_marching(device, boxes, capacity):
    rays = some_rays(40, device)
    samples = some_samples(rays, boxes, capacity)
    found = positions_on_rays(samples, rays.origins, rays.directions, boxes)
    assert bool(found.isnan().any()) == (capacity is not None)
    torch.testing.assert_close(found, samples.positions, rtol=0, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("boxes", [None, NESTED], ids=["one box", "nested boxes"])
def test_derivative_in_origins_and_directions(boxes):
    rays = some_rays(5, "cpu")
    samples = widened(some_samples(rays, boxes))

    def positions(origins: Tensor, directions: Tensor) -> Tensor:
        return positions_on_rays(samples, origins, directions, boxes)

    inputs = (rays.origins.double().requires_grad_(), rays.directions.double().requires_grad_())
    if boxes is None:
        assert torch.autograd.gradcheck(positions, inputs)
        return
    # Distances in the world are found from the rays themselves, and are constants: differences cannot tell that.
    found = positions(*inputs)
    grad = torch.randn_like(found)
    found.backward(grad)
    world, _, _ = boxes.to_world(samples.positions)
    distances = (world - inputs[0][samples.ray_index]).norm(dim=-1).detach()
    scale = boxes.unit * boxes.ratio ** torch.round(samples.positions[:, 0] / boxes._pitch)
    expected = torch.zeros(2, 5, 3, dtype=torch.float64)
    expected[0].index_add_(0, samples.ray_index, grad / scale[:, None])
    expected[1].index_add_(0, samples.ray_index, grad * (distances / scale)[:, None])
    torch.testing.assert_close(torch.stack([x.grad for x in inputs]), expected, rtol=1e-6, atol=1e-6)


def test_rows_of_no_ray_neither_send_nor_receive(device):
    rays = some_rays(40, device)
    samples = some_samples(rays, capacity=300)
    origins, directions = rays.origins.requires_grad_(), rays.directions.requires_grad_()
    positions = positions_on_rays(samples, origins, directions)
    unused = positions.isnan().any(dim=-1)
    (positions.nan_to_num() * torch.where(unused, 1e6, 1.0)[:, None]).sum().backward()
    counts = samples.ray_offsets.diff()
    assert torch.equal(origins.grad, counts[:, None].float().expand(-1, 3))
    assert bool((directions.grad[counts == 0] == 0).all())


# ------------------------------------------------------------------------------------------ from cameras to colours


def some_cameras(device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Poses (3, 4, 4) that look at the box from all sides, and intrinsics (3, 4)."""
    twists = torch.cat((2 * torch.randn(3, 3), torch.zeros(3, 3)), dim=1)
    outwards = exp_se3(torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 3.0]]))
    c2w = compose(exp_se3(twists), outwards.expand(3, 4, 4))
    intrinsics = torch.tensor([[20.0, 21.0, 8.0, 6.0]]).repeat(3, 1)
    return c2w.to(device, dtype), intrinsics.to(device, dtype)


def cast(c2w: Tensor, intrinsics: Tensor, index: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Origins and directions from the textbook formulas."""
    (fx, fy, cx, cy), pose = intrinsics[index].unbind(-1), c2w[index]
    x, y = (pixels[:, 0] - cx) / fx, (pixels[:, 1] - cy) / fy
    local = torch.stack((x, -y, -torch.ones_like(x)), dim=-1)
    return pose[:, :3, 3], F.normalize(torch.einsum("rij,rj->ri", pose[:, :3, :3], local), dim=-1)


def marchable_field(device) -> RadianceField:
    pyramid = VoxelPyramid((3, 5, 7), 4, BOX, init_range=1.0)
    field = RadianceField(pyramid, FusedMLPDecoder(12, 16, 4, 1, 2, ExponentialDensity(1.5)))
    return field.to(device)


def exact_colors(field: RadianceField, samples: PackedSamples, positions: Tensor, directions: Tensor) -> Tensor:
    """Colours (R, 3) and opacities, side by side, float64."""
    levels = [level.detach().double().cpu() for level in field.grid.levels]
    low, high = torch.tensor(BOX, dtype=torch.float64)
    features = torch.cat([reference.sample_grid(level, (positions - low) / (high - low)) for level in levels], dim=1)
    networks = (field.decoder.density_network, field.decoder.color_network)
    of_density, of_color = ([weight.detach().double().cpu() for weight in weights] for weights in networks)
    geometry = exact_network(features, of_density)
    view = spherical_harmonics(directions, 2)[samples.ray_index]
    rgb = torch.sigmoid(exact_network(torch.cat((geometry, view), dim=1), of_color))
    density = 1.5 * geometry[:, 0].exp()
    color, opacity, _, _ = reference.composite(
        density, rgb, samples.t.double(), samples.dt.double(), samples.ray_offsets
    )
    return torch.cat((color, opacity[:, None]), dim=1)


@pytest.mark.parametrize("read", ["features", "copies"])
def test_what_is_rendered_has_the_derivative_in_poses_and_focal_lengths(device, read):
    half = device.type == "cuda"
    field = marchable_field(device)
    if read == "copies" or half:
        field.grid.enable_copies(torch.float16 if half else torch.float32)
    c2w, intrinsics = some_cameras(device, torch.float32)
    twists = torch.zeros(3, 6, device=device, requires_grad=True)
    log_focal = torch.zeros((), device=device, requires_grad=True)
    index = torch.arange(3, device=device).repeat_interleave(4)
    pixels = torch.tensor([16.0, 12.0], device=device) * torch.rand(12, 2, device=device)
    focal = torch.cat((intrinsics[:, :2] * log_focal.exp(), intrinsics[:, 2:]), dim=1)
    cameras = Cameras(compose(exp_se3(twists), c2w), focal, 16, 12)
    rays = cameras.rays(index, pixels, torch.tensor(BOX, device=device))
    assert not rays.near.requires_grad
    occupancy = OccupancyGrid(8, BOX).to(device)
    settings = RenderSettings(step=0.1, min_transmittance=0.0, min_weight=1e-9)
    room = Capacity(1000, 1000) if half else None
    rendering = render(field, rays, occupancy, settings, jitter=True, capacity=room)
    found = torch.cat((rendering.rgb, rendering.opacity[:, None]), dim=1)
    grad = torch.randn(12, 4)
    found.backward(grad.to(found))

    samples = PackedSamples(*(part.cpu() for part in rendering.samples))
    used = int(samples.ray_offsets[-1])
    assert used > 100
    samples = PackedSamples(*(part[:used] for part in samples[:4]), samples.ray_offsets, samples.rays_kept)

    def exact(exact_twists: Tensor, exact_log_focal: Tensor) -> Tensor:
        poses = compose(exp_se3(exact_twists), c2w.double().cpu())
        pinholes = intrinsics.double().cpu()
        pinholes = torch.cat((pinholes[:, :2] * exact_log_focal.exp(), pinholes[:, 2:]), dim=1)
        origins, directions = cast(poses, pinholes, index.cpu(), pixels.double().cpu())
        positions = origins[samples.ray_index] + samples.t.double()[:, None] * directions[samples.ray_index]
        return exact_colors(field, samples, positions, directions)

    inputs = (twists.detach().double().cpu().requires_grad_(), log_focal.detach().double().cpu().requires_grad_())
    expected = exact(*inputs)
    expected.backward(grad.double())
    tolerance = 5e-2 if half else 1e-3
    torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    for name, value, want in zip(("twists", "log_focal"), (twists, log_focal), inputs, strict=True):
        error = (value.grad.double().cpu() - want.grad).norm() / want.grad.norm()
        assert error < tolerance, f"{name}: {error}"


def test_rays_of_cameras_have_derivatives_in_poses_and_intrinsics():
    c2w, intrinsics = some_cameras("cpu", torch.float32)
    index, pixels = torch.arange(3).repeat_interleave(3), 10 * torch.rand(9, 2)
    grads = torch.randn(2, 9, 3)
    found, exact = [], []
    for poses, pinholes, into in ((c2w, intrinsics, found), (c2w.double(), intrinsics.double(), exact)):
        poses, pinholes = poses.clone().requires_grad_(), pinholes.clone().requires_grad_()
        if into is found:
            rays = Cameras(poses, pinholes, 16, 12).rays(index, pixels, torch.tensor(BOX))
            results = (rays.origins, rays.directions)
        else:
            results = cast(poses, pinholes, index, pixels.double())
        torch.autograd.backward(results, tuple(grads.to(poses.dtype)))
        into += [poses.grad.double(), pinholes.grad.double()]
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_rays_without_gradient_render_as_before(device):
    """The same bits, and positions that marching placed."""
    field, rays = marchable_field(device), some_rays(20, device)
    occupancy = OccupancyGrid(8, BOX).to(device)
    settings = RenderSettings(step=0.1, min_weight=1e-3)
    plain = render(field, rays, occupancy, settings)
    assert not plain.samples.positions.requires_grad
    moved = Rays(rays.origins.clone().requires_grad_(), rays.directions, rays.near, rays.far)
    with torch.no_grad():
        held = render(field, moved, occupancy, settings)
    assert torch.equal(held.rgb, plain.rgb)
    assert torch.equal(held.samples.positions, plain.samples.positions)
    assert render(field, moved, occupancy, settings).samples.positions.requires_grad
