"""Nested boxes: rays cut into pieces, against the straight rays they come from, and kernels against separate steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from warp_fields import field_over, general, in_the_world, placed

from voxelfield import _library
from voxelfield.fields.decoders import FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.field import RadianceField
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import Capacity, RenderSettings, march, visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays, intersect_aabb
from voxelfield.rendering.render import render_view
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.warps.nested_boxes import MAX_BOXES, NestedBoxes

CUBE = NestedBoxes(((-0.5, -0.25, 1.0), (1.5, 1.75, 3.0)), 4, near=0.1)
FLAT = NestedBoxes(((-2.0, 0.0, -1.0), (2.0, 1.0, 2.0)), 3, ratio=3.0)
CELLS = (30, 9, 9)
boxes = pytest.mark.parametrize("boxes", [CUBE, FLAT, NestedBoxes(CUBE.aabb, 1)], ids=["cube", "flat", "one"])


def make_rays(boxes: NestedBoxes, count: int, device="cpu") -> Rays:
    """Rays from within, from the border of, and from outside of the boxes, some along an axis or past all."""
    low, high = torch.tensor(boxes.outermost)
    origins = low + (high - low) * torch.rand(count, 3)
    origins[::5] = torch.tensor(boxes.aabb).mean(dim=0) + 0.1 * torch.rand(origins[::5].shape)
    origins[1::7] *= 3
    targets = low + (high - low) * (0.5 + 0.3 * torch.randn(count, 3))
    directions = F.normalize(targets - origins, dim=-1)
    directions[::9] = torch.tensor([0.0, -1.0, 0.0])
    near = torch.where(torch.rand(count) < 0.5, 0.0, torch.rand(count))
    far = torch.where(torch.rand(count) < 0.5, math.inf, 4 * torch.rand(count) * (high - low).max())
    return Rays(*(x.to(device) for x in (origins, directions, near, far)))


def expected_stretch(boxes: NestedBoxes, rays: Rays) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rays enter and leave the largest box, no nearer than the boxes allow, float64."""
    enter, leave = intersect_aabb(
        rays.origins.double(), rays.directions.double(), torch.tensor(boxes.outermost).double()
    )
    hit = leave > enter
    near = torch.maximum(torch.maximum(rays.near.double(), enter), torch.tensor(boxes.near))
    far = torch.minimum(rays.far.double(), leave)
    return near, torch.where(hit & (far > near), far, near)


@boxes
def test_mapping_to_warped_coordinates_and_back_are_inverse(boxes):
    low, high = torch.tensor(boxes.outermost)
    points = low + (high - low) * torch.rand(5000, 3)
    points[: len(points) // 2] = torch.tensor(boxes.aabb).mean(dim=0) + torch.randn(len(points) // 2, 3)
    inside = ((points > low) & (points < high)).all(dim=-1)
    warped, unit = boxes.from_world(points)
    assert warped[~inside].isinf().all()
    back, number, used = boxes.to_world(warped[inside])
    torch.testing.assert_close(back, points[inside], atol=1e-5, rtol=1e-5)
    assert used.all()
    torch.testing.assert_close(unit[inside], boxes.unit * boxes.ratio ** number.float())
    # A point is mapped into the smallest box that contains it.
    centre, half = torch.tensor(boxes.aabb).mean(dim=0), torch.tensor(boxes.aabb).diff(dim=0)[0] / 2
    far = ((points[inside] - centre).abs() / half).amax(dim=-1)
    smallest = torch.stack([far <= boxes.ratio**k for k in range(boxes.count)]).int().argmax(dim=0)
    assert torch.equal(number, smallest)


@boxes
def test_cells_in_use_hold_all_positions(boxes):
    resolution = (37, 9, 11)
    cells = boxes.cells_in_use(resolution, torch.device("cpu"))
    low, high = torch.tensor(boxes.warped_aabb)
    warped = low + (high - low) * torch.rand(40000, 3)
    used = boxes.to_world(warped)[2]
    index = ((warped - low) / (high - low) * torch.tensor(resolution)).long()
    held = cells[index.unbind(-1)]
    assert (held | ~used).all()
    assert boxes.count == 1 or not cells.all()
    # A cell is in use only if some position in it is; each cell has a hundred of so many positions.
    seen = torch.zeros_like(cells)
    seen[index[used].unbind(-1)] = True
    assert (seen != cells).float().mean() < 0.02


@boxes
def test_pieces_are_the_ray(device, boxes):
    rays = make_rays(boxes, 300)
    step = 0.07
    offset = torch.rand(300)
    on_device = (x.to(device) for x in (rays.origins, rays.directions, rays.near, rays.far, offset))
    _library.ensure_loaded(device.type)
    cut = torch.ops.voxelfield.cut_rays(*on_device, boxes.op_arguments, step)
    pieces = 2 * boxes.count - 1
    origins, directions, near, far = (x.cpu().double().unflatten(0, (300, pieces)) for x in cut)
    first, last = expected_stretch(boxes, rays)
    filled = far > near
    assert filled.any(dim=1).float().mean() > 0.5
    passed = torch.zeros(300, dtype=torch.float64)
    for piece in range(pieces):
        there = filled[:, piece]
        if piece > 0:
            assert (filled[:, piece - 1] | ~there).all()  # those that there are not come last
        # Positions along a piece lie on the ray, in front of it, no farther than its end, in the piece's own box.
        for share in (0.0, 0.5, 1.0):
            begin = torch.maximum(near[:, piece], passed)
            way = begin + share * (far[:, piece] - begin)
            warped = (origins[:, piece] + way[:, None] * directions[:, piece])[there].float()
            world, number, used = boxes.to_world(warped)
            if share == 0.5:
                assert used.all(), "a piece leaves its box"
            offsets = world.double() - rays.origins[there].double()
            t = (offsets * rays.directions[there].double()).sum(dim=-1)
            tolerance = 2e-5 * boxes.unit * boxes.ratio**boxes.count + 1e-5 * rays.origins[there].abs().amax(dim=-1)
            assert ((offsets - t[:, None] * rays.directions[there].double()).norm(dim=-1) < tolerance).all()
            slack = step * boxes.unit * boxes.ratio ** number.double() + tolerance
            assert (t >= first[there] - slack).all()
            assert (t <= last[there] + slack).all()
        passed = torch.where(there, far[:, piece], passed)
    # The lengths of all pieces, each in units of its box, are as far as the ray goes.
    length = torch.zeros(300, dtype=torch.float64)
    for share in (torch.arange(500, dtype=torch.float64) + 0.5) / 500:
        points = rays.origins.double() + (first + share * (last - first))[:, None] * rays.directions.double()
        unit = boxes.from_world(points.float())[1].double()
        length += torch.where(last > first, (last - first) / 500 / unit, 0)
    torch.testing.assert_close(passed, length, atol=2 * step, rtol=5e-3)


@boxes
def test_samples_lie_one_step_apart_on_the_whole_way(device, boxes):
    rays = make_rays(boxes, 300, device)
    step = 0.05
    occupancy = OccupancyGrid((40, 12, 12), boxes.warped_aabb).to(device)
    samples = march(rays, occupancy, step, jitter=True, warp=boxes)
    same_ray = samples.ray_index.diff() == 0
    torch.testing.assert_close(
        samples.t.diff()[same_ray], torch.full_like(samples.t[1:][same_ray], step), atol=1e-4, rtol=0
    )
    assert (samples.dt == torch.tensor(step)).all()
    distances = boxes.world_distances(samples, rays.origins, rays.directions)
    assert (distances.diff()[same_ray] > 0).all()
    first, last = (x.to(device) for x in expected_stretch(boxes, rays.to("cpu")))
    hit = last > first
    sampled = samples.ray_offsets.diff() > 0
    assert not sampled[~hit].any()
    # A stretch shorter than a step may have no sample.
    assert sampled[hit].float().mean() > 0.98


def test_a_ray_from_the_face_of_the_smallest_box_goes_through_it(device):
    rays = make_rays(CUBE, 20000, device)
    inner = torch.tensor(CUBE.aabb, device=device)
    near, far = intersect_aabb(rays.origins, rays.directions, inner)
    through = (far - near > 0.5) & (near > 0.1)
    clipped = Rays(rays.origins, rays.directions, near, far)[through]
    occupancy = OccupancyGrid((40, 12, 12), CUBE.warped_aabb).to(device)
    samples = march(clipped, occupancy, 0.05, warp=CUBE)
    _, number, _ = CUBE.to_world(samples.positions)
    assert through.sum() > 500
    assert (number == 0).float().mean() > 0.999  # rounding may put the last one beyond the face


def test_limits_that_are_nan_leave_nothing(device):
    rays, occupancy = make_rays(CUBE, 50, device), OccupancyGrid((40, 12, 12), CUBE.warped_aabb).to(device)
    nan = torch.full_like(rays.near, math.nan)
    for near, far in ((rays.near, nan), (nan, rays.far), (rays.near + 1, rays.near)):
        assert len(march(Rays(rays.origins, rays.directions, near, far), occupancy, 0.05, warp=CUBE).t) == 0


def test_rays_that_do_not_fit_whole_are_dropped(device):
    rays, occupancy = make_rays(CUBE, 200, device), OccupancyGrid((40, 12, 12), CUBE.warped_aabb).to(device)
    every = march(rays, occupancy, 0.05, warp=CUBE)
    room = int(every.ray_offsets[100]) + 1
    some = march(rays, occupancy, 0.05, capacity=room, warp=CUBE)
    kept = int(some.rays_kept)
    assert 90 <= kept <= 101
    assert torch.equal(some.ray_offsets[: kept + 1], every.ray_offsets[: kept + 1])
    assert torch.equal(some.positions[: every.ray_offsets[kept]], every.positions[: every.ray_offsets[kept]])
    assert (some.ray_offsets[kept:] == every.ray_offsets[kept]).all()
    assert some.positions[some.ray_offsets[-1] :].isnan().all()
    assert (some.ray_index[some.ray_offsets[-1] :] == 199).all()


@boxes
def test_one_kernel_keeps_what_the_general_path_keeps(device, boxes):
    field, occupancy = field_over(boxes, CELLS, device)
    rays = make_rays(boxes, 400, device)
    settings = RenderSettings(0.06, min_weight=1e-3)
    fused, _ = visible_samples(field, rays, occupancy, settings)
    steps, _ = visible_samples(general(field), rays, occupancy, settings)
    assert len(fused.t) > 500
    one, two = (placed(samples) for samples in (fused, steps))
    shared = one.keys() & two.keys()
    assert len(shared) > 0.98 * max(len(one), len(two))  # weights near the limit come and go with rounding
    own, other = (torch.tensor([samples[key] for key in shared]) for samples in (one, two))
    torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-5)


@boxes
def test_an_image_in_one_kernel_is_that_of_the_general_path(device, boxes):
    field, occupancy = field_over(boxes, CELLS, device)
    settings, background = RenderSettings(0.06, min_weight=1e-3), torch.tensor([1.0, 0.5, 0.2], device=device)
    c2w = torch.eye(4)
    c2w[:3, 3] = torch.tensor(boxes.aabb).mean(dim=0) + 2.5 * boxes.unit * torch.tensor([0.1, 0.05, 1.0])
    cameras = Cameras(c2w[None], torch.tensor([[30.0, 30.0, 16.0, 12.0]]), 32, 24).to(device)
    renderer = FieldRenderer(field, occupancy, settings, background)
    assert renderer.backend == "render_pyramid_image"
    view = renderer.view(cameras, 0)
    expected = render_view(general(field), cameras, 0, occupancy, settings, background, 1 << 12)
    for name, tolerance in (("rgb", 5e-3), ("opacity", 5e-3)):
        difference = (getattr(view, name) - getattr(expected, name)).abs()
        assert difference.mean() < tolerance / 5, name
        assert difference.flatten().quantile(0.98) < tolerance, name
    seen = expected.opacity > 0.5
    assert seen.any()
    relative = ((view.depth - expected.depth).abs() / expected.depth)[seen]
    assert relative.mean() < 2e-3
    assert expected.depth[seen].max() > 1.5 * boxes.unit  # world units


@boxes
def test_the_world_sees_the_density_that_rays_see(boxes):
    field, occupancy = field_over(boxes, CELLS, torch.device("cpu"))
    rays = make_rays(boxes, 50)
    samples = march(rays, occupancy, 0.05, warp=boxes)
    points, _ = in_the_world(boxes, samples, rays)
    local, rgb = field.sample(samples, rays.directions)
    unit = boxes.from_world(points)[1]
    density, color = field(points, rays.directions[samples.ray_index])
    # Places within rounding of a face have neighbours in two boxes.
    agree = ((density * unit - local).abs() < 1e-2 * local).float().mean()
    assert agree > 0.99
    assert ((color - rgb).abs().amax(dim=-1) < 1e-2).float().mean() > 0.99
    assert torch.equal(field.density(points), density)
    assert field.density(torch.full((1, 3), 1e6)) == 0


def test_gradients_reach_the_grid_through_every_box(device):
    field, occupancy = field_over(CUBE, CELLS, device)
    rays = make_rays(CUBE, 2000, device)
    settings = RenderSettings(0.05, min_weight=0.0)
    samples, _ = visible_samples(field, rays, occupancy, settings, capacity=Capacity(1 << 17, 1 << 17))
    density, rgb = field.sample(samples, rays.directions)
    (density.sum() + rgb.sum()).backward()
    finest = field.grid.levels[-1]
    gradient = finest.grad.abs().sum(dim=-1)
    row = torch.linspace(CUBE.warped_aabb[0][0], CUBE.warped_aabb[1][0], finest.shape[0])
    pitch = CUBE.op_arguments[8]
    for box in range(CUBE.count):
        own = ((row - box * pitch).abs() < 0.8).to(device)
        assert gradient[own].sum() > 0, box


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count must be 1 to 12 boxes, got 0"),
        ({"count": 2.5}, "count must be 1 to 12 boxes, got 2.5"),
        ({"count": MAX_BOXES + 1}, "count must be 1 to 12 boxes, got 13"),
        ({"ratio": 1.0}, "ratio must be finite and above 1, got 1.0"),
        ({"ratio": 1e30, "count": 12}, "ratio must leave the largest of 12 boxes within the range of float32, got 1e"),
        ({"near": -1.0}, "near must be finite and not negative, got -1.0"),
        ({"aabb": ((0, 0, 0), (1, 1, 0))}, "aabb must be finite with low < high"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        NestedBoxes(**{"aabb": CUBE.aabb, "count": 2, **changes})


def test_a_field_refuses_a_grid_of_the_world():
    grid = VoxelPyramid((8,), 4, CUBE.aabb)
    decoder = FusedMLPDecoder(4, 32, 16, 2, 2, ExponentialDensity(2.0))
    with pytest.raises(ValueError, match=r"grid\.aabb must be warp\.warped_aabb"):
        RadianceField(grid, decoder, CUBE)


def test_ops_refuse_numbers_that_are_no_boxes():
    rays = make_rays(CUBE, 3)
    walk = (rays.origins, rays.directions, rays.near, rays.far, rays.near)
    _library.ensure_loaded("cpu")
    with pytest.raises(RuntimeError, match="boxes must be 10 numbers, got 2"):
        torch.ops.voxelfield.cut_rays(*walk, [1.0, 2.0], 0.1)
    for position, number in ((7, 40.0), (6, 1.0), (3, 0.0), (0, math.nan)):
        numbers = list(CUBE.op_arguments)
        numbers[position] = number
        if position == 3:
            numbers[4] = numbers[5] = 0.0
        with pytest.raises(RuntimeError, match="boxes must"):
            torch.ops.voxelfield.cut_rays(*walk, numbers, 0.1)


def test_pieces_can_be_traced():
    rays = make_rays(CUBE, 3)
    walk = (rays.origins, rays.directions, rays.near, rays.far, torch.rand(3))
    _library.ensure_loaded("cpu")
    torch.library.opcheck(torch.ops.voxelfield.cut_rays.default, (*walk, CUBE.op_arguments, 0.1))
