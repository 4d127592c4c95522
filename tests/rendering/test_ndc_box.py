"""Normalised device coordinates: the projection against its matrix; rays, samples and images in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from warp_fields import field_over, general, in_the_world, placed

from voxelfield.fields.decoders import Decoder
from voxelfield.fields.field import RadianceField
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import Capacity, RenderSettings, march, visible_cells, visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays, intersect_aabb
from voxelfield.rendering.render import positions_on_rays, render, render_view
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.rendering.rigid import exp_se3
from voxelfield.warps.ndc_box import NdcBox

POSE = exp_se3(torch.tensor([[0.3, -0.2, 0.5, 0.4, -0.3, 0.2]], dtype=torch.float64))[0]
BOX = NdcBox(
    ((-3.0, -3.0, -9.0), (3.0, 3.0, -2.0)),
    tuple(tuple(row) for row in POSE[:3].tolist()),
    near=1.5,
    window=((-0.5, -0.4), (0.7, 0.3)),
    depth=0.25,
)


def in_world(local: Tensor | Sequence[Sequence[float]]) -> Tensor:
    """World positions (M, 3) of points in the axes of the reference camera, float64."""
    return POSE[:3, 3] + torch.as_tensor(local, dtype=torch.float64) @ POSE[:3, :3].T


def in_reference(points: Tensor) -> Tensor:
    """World positions (M, 3) in warped coordinates of the reference camera, float64."""
    return (points.double() - POSE[:3, 3]) @ POSE[:3, :3]


def projected(points: Tensor) -> Tensor:
    """Positions (M, 3) in warped coordinates by a homogeneous matrix, float64."""
    (x0, y0), (x1, y1) = BOX.window
    unit = max(x1 - x0, y1 - y0) / 2
    matrix = torch.tensor(
        [
            [1 / unit, 0, (x0 + x1) / 2 / unit, 0],
            [0, 1 / unit, (y0 + y1) / 2 / unit, 0],
            [0, 0, 0, BOX.depth / unit * BOX.near],
            [0, 0, -1, 0],
        ],
        dtype=torch.float64,
    )
    here = F.pad(in_reference(points), (0, 1), value=1.0) @ matrix.T
    return here[:, :3] / here[:, 3:]


def seen_points(count: int, deepest: float = 60.0) -> Tensor:
    """World positions within the window, from the near plane on, denser in depth the nearer; float32."""
    low, high = (torch.tensor(ends, dtype=torch.float64) for ends in BOX.window)
    slopes = low + (high - low) * (0.02 + 0.96 * torch.rand(count, 2, dtype=torch.float64))
    nearest, farthest = 1 / (1.01 * BOX.near), 1 / deepest
    depth = 1 / (nearest + (farthest - nearest) * torch.rand(count, dtype=torch.float64))
    return in_world(torch.cat((slopes * depth[:, None], -depth[:, None]), dim=-1)).float()


def make_rays(count: int, device="cpu") -> Rays:
    """Rays that end at points within the window, from beside the reference camera; far is infinite for half of them."""
    beside = 0.4 * torch.randn(count, 3, dtype=torch.float64) * torch.tensor([1.0, 1.0, 0.3])
    origins = in_world(beside).float()
    directions = F.normalize(seen_points(count) - origins, dim=-1)
    near = torch.where(torch.rand(count) < 0.5, 0.0, 3 * torch.rand(count))
    far = torch.where(torch.rand(count) < 0.5, 1e5, 30 * torch.rand(count))
    return Rays(*(x.to(device) for x in (origins, directions, near, torch.maximum(far, near))))


def test_warped_coordinates_are_those_of_the_projection_matrix():
    points = seen_points(2000)
    warped, unit = BOX.from_world(points)
    torch.testing.assert_close(warped.double(), projected(points), atol=2e-6, rtol=0)
    low, high = torch.tensor(BOX.warped_aabb)
    assert ((warped >= low) & (warped <= high)).all()
    assert torch.equal(BOX.from_world_near(points, warped), warped)
    # The length of a unit is a derivative along the reference camera's optical axis.
    ahead = (points.double() - 1e-4 * POSE[:3, 2]).float().double()
    moved = (ahead - points.double()).norm(dim=-1)
    slope = (projected(ahead) - projected(points))[:, 2].abs() / moved
    torch.testing.assert_close(unit.double() * slope, torch.ones_like(slope), atol=1e-3, rtol=0)


def test_mapping_back_gives_world_positions():
    points = seen_points(2000)
    warped, _ = BOX.from_world(points)
    world, box, used = BOX.to_world(warped)
    assert ((world - points).norm(dim=-1) / (points - POSE[:3, 3].float()).norm(dim=-1)).max() < 1e-4
    assert not box.any()
    assert used.all()
    assert torch.tensor(BOX.warped_aabb[0]).tolist()[2] == 0.0
    assert not BOX.to_world(torch.tensor([[0.0, 0.0, -0.1], [1.01, 0.0, 0.1]]))[2].any()


def test_positions_that_are_not_covered_become_infinite():
    behind_before_and_beside = in_world([(0.0, 0.0, 3.0), (0.0, 0.0, -1.4), (3.0, 0.0, -4.0)])
    warped, unit = BOX.from_world(behind_before_and_beside.float())
    assert warped.isinf().all()
    assert unit.isfinite().all()


def test_all_that_is_covered_lies_in_the_outermost_box():
    points = seen_points(2000, deepest=900 * BOX.near)
    low, high = torch.tensor(BOX.outermost)
    assert ((points >= low) & (points <= high)).all()


def test_rays_are_mapped_like_their_points():
    rays = make_rays(500)
    origins, directions, near, far = BOX.map_rays(rays.origins, rays.directions, rays.near, rays.far)
    assert (near == 0).all()
    torch.testing.assert_close(directions.norm(dim=-1), torch.ones(500))
    for share in (0.001, 0.3, 0.7, 0.999):
        warped = origins + share * far[:, None] * directions
        world, _, _ = BOX.to_world(warped)
        away = world - rays.origins
        t = (away * rays.directions).sum(dim=-1)
        off = (away - t[:, None] * rays.directions).norm(dim=-1) / t
        some = far > 1e-3
        assert some.float().mean() > 0.7
        assert off[some].max() < 1e-4
        assert (t[some] > rays.near[some] * (1 - 1e-4)).all()
        assert (t[some] < rays.far[some] * (1 + 1e-4)).all()
        assert (-in_reference(world)[some, 2] > BOX.near * (1 - 1e-5)).all()


def test_rays_towards_the_cameras_and_across_are_mapped_too():
    local = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    origins, directions = in_world([[0.0, 0.0, -8.0]] * 3).float(), (local @ POSE[:3, :3].T).float()
    near, far = torch.zeros(3), torch.full((3,), 100.0)
    mapped, along, _, length = BOX.map_rays(origins, directions, near, far)
    reach = BOX.warped_aabb[1][2]
    start_z, end_z = mapped[:, 2], (mapped + length[:, None] * along)[:, 2]
    torch.testing.assert_close(start_z, torch.full((3,), reach * 1.5 / 8), atol=1e-5, rtol=0)
    torch.testing.assert_close(end_z, torch.tensor([reach, reach * 1.5 / 8, reach * 1.5 / 108]), atol=1e-5, rtol=0)


def test_rays_that_never_get_there_are_empty():
    behind = in_world([[0.0, 0.0, 1.0]] * 4).float()
    local = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    directions = (local @ POSE[:3, :3].T).float()
    near, far = torch.zeros(4), torch.tensor([1e5, 1e5, 2.4, 0.0])
    mapped = BOX.map_rays(behind, directions, near, far)
    assert (mapped[3] == 0).all()
    assert all(part.isfinite().all() for part in mapped)


def make_field(device) -> tuple[RadianceField, OccupancyGrid]:
    return field_over(BOX, (20, 12, 6), device)


def test_one_kernel_keeps_what_the_general_path_keeps(device):
    field, occupancy = make_field(device)
    rays = make_rays(400, device)
    settings = RenderSettings(0.02, min_weight=1e-3)
    fused, _ = visible_samples(field, rays, occupancy, settings)
    steps, _ = visible_samples(general(field), rays, occupancy, settings)
    assert len(fused.t) > 500
    one, two = (set(placed(samples)) for samples in (fused, steps))
    assert len(one & two) > 0.98 * max(len(one), len(two))  # weights near the limit come and go with rounding


def test_samples_lie_on_their_rays_and_know_their_distances(device):
    rays = make_rays(300, device)
    _, occupancy = make_field(device)
    samples = march(rays, occupancy, 0.02, jitter=True, warp=BOX)
    assert len(samples.t) > 1000
    points, distances = in_the_world(BOX, samples, rays)
    torch.testing.assert_close(BOX.from_world_near(points, samples.positions), samples.positions, atol=1e-5, rtol=0)
    rises = samples.ray_index[1:] == samples.ray_index[:-1]
    assert (distances.diff()[rises] > 0).all()


def test_a_field_refuses_anything_else_as_its_warp():
    field, occupancy = make_field(torch.device("cpu"))
    field.warp = 3  # such as the number of a video's frame
    with pytest.raises(TypeError, match=r"RadianceField\.warp must be a Warp or None, got 3"):
        render(field, make_rays(4), occupancy, RenderSettings(0.02))


def test_samples_know_their_lengths_in_the_world():
    rays = make_rays(100)
    _, occupancy = make_field(torch.device("cpu"))
    occupancy.occupied.fill_(True)
    samples = march(rays, occupancy, 0.002, warp=BOX)
    lengths = BOX.world_lengths(samples, rays.origins, rays.directions).double()
    distances = BOX.world_distances(samples, rays.origins, rays.directions).double()
    follows = (samples.ray_index[1:] == samples.ray_index[:-1]) & (samples.positions[1:, 2] > 0.02)
    spacing = distances.diff()
    middle = 0.5 * (lengths[1:] + lengths[:-1])
    assert follows.sum() > 1000
    torch.testing.assert_close(middle[follows], spacing[follows], rtol=2e-2, atol=1e-4)


def test_the_world_sees_the_density_that_rays_see():
    field, occupancy = make_field(torch.device("cpu"))
    rays = make_rays(50)
    samples = march(rays, occupancy, 0.02, warp=BOX)
    points, _ = in_the_world(BOX, samples, rays)
    local, rgb = field.sample(samples, rays.directions)
    density, color = field(points, rays.directions[samples.ray_index])
    near_border = field.density(points) == 0  # within rounding of the window's border
    assert near_border.float().mean() < 0.01
    unit = BOX.from_world(points)[1]
    torch.testing.assert_close((density * unit)[~near_border], local[~near_border], atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(color[~near_border], rgb[~near_border], atol=1e-2, rtol=0)
    assert field.density(POSE[:3, 3].float()[None]) == 0


def test_images_are_rendered_by_the_general_path_in_world_units(device):
    field, occupancy = make_field(device)
    settings, background = RenderSettings(0.02, min_weight=1e-3), torch.tensor([1.0, 0.5, 0.2], device=device)
    cameras = Cameras(POSE[None].float(), torch.tensor([[30.0, 30.0, 16.0, 12.0]]), 32, 24).to(device)
    renderer = FieldRenderer(field, occupancy, settings, background)
    assert renderer.backend == "render_view"
    view = renderer.view(cameras, 0)
    rays = cameras.image_rays(0, field.aabb)
    whole = render(field, rays, occupancy, settings)
    torch.testing.assert_close(view.rgb.view(-1, 3), whole.over(background), atol=1e-5, rtol=0)
    seen = view.opacity > 0.5
    assert seen.any()
    depth = view.depth[seen]
    assert depth.min() > BOX.near * 0.99
    assert depth.max() > 3 * BOX.near
    again = render_view(general(field), cameras, 0, occupancy, settings, background, 1 << 12)
    torch.testing.assert_close(again.depth[seen], depth, atol=0, rtol=2e-2)


class Fog(Decoder):
    """A decoder with one density everywhere in warped coordinates."""

    channels = 1

    def density(self, features: Tensor) -> Tensor:
        return torch.full(features.shape[:1], 2.0)

    def forward(self, features: Tensor, directions: Tensor, ray_index: Tensor) -> tuple[Tensor, Tensor]:
        return self.density(features), torch.ones(len(features), 3)


def test_the_optical_depth_of_fog_is_its_length_in_warped_coordinates():
    field = RadianceField(VoxelGrid(4, 1, BOX.warped_aabb), Fog(), BOX)
    occupancy = OccupancyGrid(4, BOX.warped_aabb)
    rays = make_rays(100)
    found = render(field, rays, occupancy, RenderSettings(1e-3, min_transmittance=0.0, min_weight=0.0))
    # The ends of the rays between the near plane and the far end, projected in float64 and clipped to the box.
    start, slope = (-in_reference(x)[:, 2] for x in (rays.origins, rays.origins + rays.directions))
    slope = slope - start
    begin = torch.maximum(rays.near.double(), (BOX.near - start) / slope)
    end = torch.minimum(rays.far.double(), (1000 * BOX.near - start) / slope)
    first, last = (projected(rays.origins.double() + t[:, None] * rays.directions.double()) for t in (begin, end))
    length = (last - first).norm(dim=-1)
    enter, leave = intersect_aabb(first, (last - first) / length[:, None], torch.tensor(BOX.warped_aabb).double())
    inside = (torch.minimum(leave, length) - enter).clamp(min=0) * (end > begin)
    assert (inside > 0.1).sum() > 30
    torch.testing.assert_close(found.opacity.double(), 1 - torch.exp(-2 * inside), atol=3e-3, rtol=0)


@pytest.mark.parametrize("capacity", [None, 20_000], ids=["as many as needed", "room for more"])
def test_positions_are_those_of_marching(device, capacity):
    rays = make_rays(60, device)
    _, occupancy = make_field(device)
    samples = march(rays, occupancy, 0.05, True, capacity, BOX)
    found = positions_on_rays(samples, rays.origins, rays.directions, BOX)
    assert bool(found.isnan().any()) == (capacity is not None)
    torch.testing.assert_close(found, samples.positions, rtol=0, atol=1e-5, equal_nan=True)


def test_derivative_of_positions_in_origins_and_directions():
    rays = make_rays(6)
    _, occupancy = make_field(torch.device("cpu"))
    samples = march(rays, occupancy, 0.05, warp=BOX)
    samples = samples._replace(positions=samples.positions.double(), t=samples.t.double())
    distances = BOX.world_distances(samples, rays.origins.double(), rays.directions.double())
    inputs = (rays.origins.double().requires_grad_(), rays.directions.double().requires_grad_())

    def at_these_distances(origins: Tensor, directions: Tensor) -> Tensor:
        points = origins[samples.ray_index] + distances[:, None] * directions[samples.ray_index]
        return projected(points)

    upstream = torch.randn(len(samples.t), 3, dtype=torch.float64)
    found = torch.autograd.grad((positions_on_rays(samples, *inputs, BOX) * upstream).sum(), inputs)
    expected = torch.autograd.grad((at_these_distances(*inputs) * upstream).sum(), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_gradients_reach_the_grid_at_every_depth(device):
    field, occupancy = make_field(device)
    rays = make_rays(2000, device)
    settings = RenderSettings(0.02, min_weight=0.0)
    samples, _ = visible_samples(field, rays, occupancy, settings, capacity=Capacity(1 << 17, 1 << 17))
    density, rgb = field.sample(samples, rays.directions)
    (density.sum() + rgb.sum()).backward()
    gradient = field.grid.levels[-1].grad.abs().sum(dim=(0, 1, 3))
    assert (gradient > 0).all()


def test_cells_that_rays_pass_are_seen(device):
    field, occupancy = make_field(device)
    settings = RenderSettings(0.02, min_weight=1e-3)
    # Not the reference camera, whose rays run exactly along the faces of cells.
    c2w = POSE[None].float()
    c2w[0, :3, 3] += 0.1
    cameras = Cameras(c2w, torch.tensor([[180.0, 180.0, 48.0, 36.0]]), 96, 72).to(device)
    seen = visible_cells(field, occupancy, settings, cameras)
    samples, _ = visible_samples(field, cameras.image_rays(0, field.aabb), occupancy, settings)
    low, high = occupancy.aabb
    cells = ((samples.positions - low) / (high - low) * torch.tensor(seen.shape, device=low.device)).long()
    assert seen[cells.unbind(-1)].all()
    assert 0 < float(seen.float().mean()) < 0.99 * occupancy.fraction(), "the image shows a part"


def test_rays_of_neighbouring_pixels_are_never_farther_apart_than_stated():
    cameras = Cameras(POSE[None].float(), torch.tensor([[30.0, 30.0, 16.0, 12.0]]), 32, 24)
    spacing = BOX.ray_spacing(cameras.c2w[:, :3, 3], torch.tensor([1 / 30]))
    rays = cameras.image_rays(0, torch.tensor(BOX.outermost))
    ends = BOX.from_world_near(rays.origins + 50 * rays.directions, rays.origins).view(24, 32, 3)
    inside = (ends[..., :2].abs() <= torch.tensor(BOX.warped_aabb[1][:2])).all(dim=-1)
    across = (ends[:, 1:] - ends[:, :-1]).norm(dim=-1)[inside[:, 1:] & inside[:, :-1]]
    assert 0.3 * spacing < across.max() < spacing


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"near": 0.0}, "near must be finite and positive, got 0.0"),
        ({"near": math.inf}, "near must be finite and positive, got inf"),
        ({"depth": -1.0}, "depth must be finite and positive, got -1.0"),
        ({"window": ((0.0, 0.0), (0.0, 1.0))}, "window must be finite, with lower limits below upper ones, got"),
        ({"camera": ((2.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0))}, "camera must be a rotation"),
        ({"aabb": ((0, 0, 0), (1, 1, 0))}, "aabb must be finite with low < high"),
        ({"aabb": ((-1, -1, 3), (1, 1, 5))}, "aabb must have its centre beyond the near plane at depth 1.5, got"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BOX, **changes)


def test_warps_that_differ_by_rounding_agree():
    assert BOX.agrees_with(replace(BOX, near=BOX.near * (1 + 1e-9), depth=BOX.depth * (1 - 1e-9)))
    assert not BOX.agrees_with(replace(BOX, depth=BOX.depth * 1.001))
    assert not BOX.agrees_with(None)


def test_it_has_one_box():
    assert BOX.count == 1
    assert BOX.world_box(1) == BOX.aabb
    with pytest.raises(ValueError, match="number must be 1, got 2"):
        BOX.world_box(2)
