"""march_rays and the two ops beneath it."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from march_testing import assert_same_samples, slanted_rays
from op_testing import never_synchronising

from voxelfield import _library
from voxelfield.ops import PackedSamples, march_rays, pack_occupancy
from voxelfield.rendering.rays import intersect_aabb

BOX = torch.tensor([[-1.0, 0.5, -3.0], [2.0, 1.5, 1.0]])
STEP = 0.07
NAMES = ("origins", "directions", "near", "far", "occupied", "aabb")


def make_rays(count):
    """Rays of all kinds, some of no length."""
    origins, directions = slanted_rays(BOX, count, 2.0)
    near = 0.3 * torch.rand(count)
    far = near + 3.0 * torch.rand(count)
    far[::11] = near[::11]
    far[1::11] = near[1::11] - 1.0
    return origins, directions, near, far


def make_scene(count=60, resolution=(6, 5, 7), fraction=0.4):
    occupied = torch.rand(resolution) < fraction
    rays = make_rays(count)
    return dict(zip(NAMES, (*rays, occupied, BOX), strict=True))


def on(device, arguments):
    return {name: value.to(device) for name, value in arguments.items()}


def assert_packed(samples, scene, offset=None, step=STEP):
    """Fails unless the samples are sorted, packed consistently, on their rays' lattices and between near and far."""
    positions, t, dt, ray_index, ray_offsets, rays_kept = (x.cpu() for x in samples)
    rays, count = len(scene["near"]), len(t)
    assert positions.shape == (count, 3)
    assert torch.equal(dt, torch.full((count,), step))
    assert rays_kept.tolist() == [rays]
    assert ray_index.shape == (count,)
    assert ray_offsets.shape == (rays + 1,)
    assert positions.dtype == t.dtype == torch.float32
    assert ray_index.dtype == ray_offsets.dtype == torch.int64
    assert ray_offsets[0] == 0
    assert ray_offsets[-1] == count
    assert torch.equal(ray_index, torch.repeat_interleave(torch.arange(rays), ray_offsets.diff()))
    assert (t < scene["far"][ray_index]).all()
    assert (t >= scene["near"][ray_index]).all()
    same_ray = ray_index.diff() == 0
    assert (t.diff()[same_ray] > 0.99 * step).all()
    expected = scene["origins"][ray_index].double() + t[:, None].double() * scene["directions"][ray_index].double()
    torch.testing.assert_close(positions.double(), expected, rtol=1e-6, atol=1e-6)
    if offset is None:
        offset = torch.full((rays,), 0.5)
    k = (t.double() - scene["near"][ray_index].double()) / step - offset[ray_index].double()
    torch.testing.assert_close(k, k.round(), rtol=0, atol=1e-3)


def by_reference(scene, offset, step=STEP):
    doubles = {name: value if value.dtype == torch.bool else value.double() for name, value in scene.items()}
    positions, t, ray_index, ray_offsets = reference.march(**doubles, step=step, offset=offset.double())
    return PackedSamples(positions, t, torch.full_like(t, step), ray_index, ray_offsets, torch.tensor([len(offset)]))


# --- values


@pytest.mark.parametrize(
    ("resolution", "fraction"),
    [((6, 5, 7), 0.4), ((6, 5, 7), 0.03), ((1, 1, 1), 1.1), ((1, 40, 2), 0.3), ((31, 17, 45), 0.1), ((8, 8, 8), 1.1)],
    ids=str,
)
def test_samples_match_reference(device, resolution, fraction):
    scene = make_scene(resolution=resolution, fraction=fraction)
    offset = torch.rand(60)
    samples = march_rays(**on(device, scene), step=STEP, offset=offset.to(device))
    assert len(samples[1]) > 10
    assert_packed(samples, scene, offset)
    assert_same_samples(samples, by_reference(scene, offset), scene, offset, STEP)


@pytest.mark.parametrize("step", [0.011, 0.9])
def test_fine_and_coarse_steps_match_reference(device, step):
    scene = make_scene(count=20)
    offset = torch.full((20,), 0.5)
    samples = march_rays(**on(device, scene), step=step)
    assert_packed(samples, scene, offset, step)
    assert_same_samples(samples, by_reference(scene, offset, step), scene, offset, step)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_ray_along_an_axis_finds_the_occupied_cells(device, axis, sign):
    occupied = torch.zeros(8, 8, 8, dtype=torch.bool)
    index = [3, 3, 3]
    for cell in (0, 3, 4, 7):
        index[axis] = cell
        occupied[tuple(index)] = True
    # Unit cells, four positions in each: at 1/8, 3/8, 5/8 and 7/8 of the cell. All of it is exact in float32.
    origin, direction = torch.full((1, 3), 3.5), torch.zeros(1, 3)
    origin[0, axis] = -2.0 if sign > 0 else 10.0
    direction[0, axis] = sign
    scene = {
        "origins": origin,
        "directions": direction,
        "near": torch.tensor([2.0]),
        "far": torch.tensor([10.0]),
        "occupied": occupied,
        "aabb": torch.tensor([[0.0] * 3, [8.0] * 3]),
    }
    positions, t, _, ray_index, ray_offsets, _ = march_rays(**on(device, scene), step=0.25)
    cells = torch.tensor([0.0, 3.0, 4.0, 7.0])
    expected = 2.0 + (cells[:, None] + torch.tensor([1.0, 3.0, 5.0, 7.0]) / 8).flatten()
    assert torch.equal(t.cpu(), expected)
    assert torch.equal(positions[:, axis].cpu(), origin[0, axis] + sign * expected)
    others = [a for a in range(3) if a != axis]
    assert (positions[:, others] == 3.5).all()
    assert ray_offsets.tolist() == [0, 16]
    assert not ray_index.any()


def test_a_ray_in_a_face_stays_in_one_layer_of_cells(device):
    # The lower face of a cell belongs to it, and a ray parallel to the face never leaves.
    occupied = torch.zeros(4, 4, 4, dtype=torch.bool, device=device)
    occupied[:, 2, 1] = True
    aabb = torch.tensor([[0.0] * 3, [4.0] * 3], device=device)
    origins = torch.tensor([[-1.0, 2.0, 1.0], [-1.0, 1.9, 1.0], [-1.0, 2.0, 2.0]], device=device)
    directions = torch.tensor([[1.0, 0.0, -0.0]], device=device).expand(3, 3)
    near, far = torch.ones(3, device=device), torch.full((3,), 5.0, device=device)
    ray_offsets = march_rays(origins, directions, near, far, occupied, aabb, 0.5).ray_offsets
    assert ray_offsets.tolist() == [0, 8, 8, 8]


def boxed_in(scene):
    """The same scene with a box that holds all rays."""
    return scene | {"aabb": torch.tensor([[-50.0] * 3, [50.0] * 3], device=scene["aabb"].device)}


def test_a_ray_shorter_than_half_a_step_has_no_midpoint(device):
    scene = boxed_in(on(device, make_scene(count=3, fraction=1.1)))
    for length, count in ((0.4, 0), (0.6, 1), (1.4, 1), (1.6, 2)):
        ray_offsets = march_rays(**{**scene, "far": scene["near"] + length * STEP}, step=STEP).ray_offsets
        assert ray_offsets.diff().tolist() == [count] * 3


def test_far_itself_is_excluded_and_near_included(device):
    scene = boxed_in(on(device, make_scene(count=2, fraction=1.1)))
    scene |= {"near": torch.ones(2, device=device), "far": torch.tensor([2.0, 2.0 + 2**-20], device=device)}
    _, t, _, _, ray_offsets, _ = march_rays(**scene, step=0.25, offset=torch.zeros(2, device=device))
    assert ray_offsets.tolist() == [0, 4, 9]
    assert t.tolist() == [1, 1.25, 1.5, 1.75, 1, 1.25, 1.5, 1.75, 2]


def test_each_ray_has_its_own_offset(device):
    scene = boxed_in(on(device, make_scene(fraction=1.1)))
    offset = torch.linspace(0, 0.99, 60, device=device)
    _, t, _, _, ray_offsets, _ = march_rays(**scene, step=STEP, offset=offset)
    filled = ray_offsets.diff() > 0
    assert filled.sum() > 30
    first = t[ray_offsets[:-1][filled]]
    torch.testing.assert_close(first, (scene["near"] + offset * STEP)[filled], rtol=1e-6, atol=1e-6)


def test_an_infinite_far_ends_at_the_box(device):
    scene = on(device, make_scene(count=300))
    bounded = march_rays(**{**scene, "far": torch.full_like(scene["far"], 50.0)}, step=STEP)
    endless = march_rays(**{**scene, "far": torch.full_like(scene["far"], math.inf)}, step=STEP)
    assert len(bounded.t) > 1000
    torch.testing.assert_close(bounded, endless, rtol=0, atol=0)


def test_infinite_rays_that_never_leave_have_no_samples(device):
    scene = on(device, make_scene(count=3, fraction=1.1))
    scene |= {"directions": torch.zeros(3, 3, device=device), "far": torch.full((3,), math.inf, device=device)}
    assert len(march_rays(**scene, step=STEP).t) == 0
    near = torch.full((3,), -math.inf, device=device)
    assert len(march_rays(**on(device, make_scene(count=3, fraction=1.1)) | {"near": near}, step=STEP).t) == 0


@pytest.mark.parametrize("start", [0.0, 5.0, 1e3])
def test_faces_of_the_box_belong_to_it(device, start):
    # Rays whose near and far were found from the same box, and whose first and last samples lie on its faces.
    low, high = BOX.to(device)
    directions = torch.eye(3, device=device).repeat(2, 1) * torch.tensor([1.0] * 3 + [-1.0] * 3, device=device)[:, None]
    origins = (low + high) / 2 - directions * start
    near, far = intersect_aabb(origins, directions, BOX.to(device))
    occupied = torch.ones(4, 5, 6, dtype=torch.bool, device=device)
    step = 0.01
    found = march_rays(origins, directions, near, far, occupied, BOX.to(device), step, torch.zeros_like(near))
    expected = ((far - near) / step).ceil()
    assert ((found.ray_offsets.diff() - expected).abs() <= 1 + 1e-6 * start / step).all()
    assert torch.equal(found.t[found.ray_offsets[:-1]], near)


@pytest.mark.cuda
def test_cpu_and_cuda_agree():
    scene = make_scene(count=4000, resolution=(32, 24, 40))
    offset = torch.rand(4000)
    ours = march_rays(**scene, step=STEP, offset=offset)
    theirs = march_rays(**on("cuda", scene), step=STEP, offset=offset.cuda())
    assert_packed(theirs, scene, offset)
    # Every product and sum that decides is rounded alike, however the rays are walked.
    for one, two in zip(theirs, ours, strict=True):
        assert torch.equal(one.cpu(), two)


# --- packed occupancy


def test_packed_and_unpacked_cells_give_the_same_samples(device):
    scene = on(device, make_scene())
    expected = march_rays(**scene, step=STEP)
    packed = march_rays(**{**scene, "occupied": pack_occupancy(scene["occupied"])}, step=STEP)
    torch.testing.assert_close(packed, expected, rtol=0, atol=0)


@pytest.mark.parametrize("segments", [2, 8, 32])
def test_samples_do_not_depend_on_how_rays_are_cut(device, segments):
    _library.ensure_loaded(device.type)
    # Half of the cells, singly: more step_ranges than the first pass remembers.
    scene = on(device, make_scene(count=500, resolution=(40, 50, 60), fraction=0.5))
    bits = pack_occupancy(scene["occupied"])
    ops = torch.ops.voxelfield

    def march(segments):
        offset = torch.full((500,), 0.5, device=device)
        rays = (*(scene[name] for name in NAMES[:4]), offset)
        walk = (*rays, bits.words, list(bits.resolution), scene["aabb"], STEP / 4, segments)
        counted = ops.count_ray_samples(*walk)
        return ops.place_ray_samples(*walk, *counted, int(counted[0].sum()))

    whole = march(1)
    assert len(whole[1]) > 5000
    assert_packed(PackedSamples(*whole), {n: x.cpu() for n, x in scene.items()}, step=STEP / 4)
    torch.testing.assert_close(march(segments), whole, rtol=0, atol=0)


# --- capacity


def assert_truncated(samples, whole, capacity):
    """Fails unless ``samples`` are the first of ``whole`` whose rays fit, and the rows after them are empty."""
    rays = len(whole.ray_offsets) - 1
    rays_kept = int((whole.ray_offsets[1:] <= capacity).sum())
    used = int(whole.ray_offsets[rays_kept])
    assert samples.rays_kept.tolist() == [rays_kept]
    assert torch.equal(samples.ray_offsets, whole.ray_offsets.clamp(max=used))
    for name in ("positions", "t", "dt", "ray_index"):
        value = getattr(samples, name)
        assert len(value) == capacity
        assert torch.equal(value[:used], getattr(whole, name)[:used]), name
    assert samples.positions[used:].isnan().all()
    assert not samples.t[used:].any()
    assert not samples.dt[used:].any()
    assert (samples.ray_index[used:] == max(rays - 1, 0)).all()
    return rays_kept


@pytest.mark.parametrize("count", [3, 60, 2000])
def test_rays_are_taken_whole_while_they_fit(device, count):
    scene = boxed_in(on(device, make_scene(count=count, fraction=0.7)))
    whole = march_rays(**scene, step=STEP)
    total = len(whole.t)
    bounds = whole.ray_offsets.tolist()
    takes = []
    for capacity in {0, 1, bounds[count // 3], bounds[count // 2] + 1, max(total - 1, 0), total, total + 1, 3 * total}:
        samples = march_rays(**scene, step=STEP, capacity=capacity)
        takes.append(assert_truncated(samples, whole, capacity))
    assert max(takes) == count
    assert min(takes) < count


def test_capacity_with_more_rays_than_parts(device):
    # Sums of parts of several hundred rays, most of which have no sample.
    count = 300_000
    scene = on(device, make_scene(count=count, fraction=0.02))
    whole = march_rays(**scene, step=STEP)
    for capacity in (len(whole.t) // 3, len(whole.t) + 5):
        assert_truncated(march_rays(**scene, step=STEP, capacity=capacity), whole, capacity)


@pytest.mark.cuda
def test_a_captured_march_follows_its_inputs():
    scene = on("cuda", make_scene(count=500))
    scene["occupied"] = pack_occupancy(scene["occupied"])
    offset = torch.rand(500, device="cuda")
    march_rays(**scene, step=STEP, offset=offset, capacity=2000)  # loads the extension
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = march_rays(**scene, step=STEP, offset=offset, capacity=2000)
    takes = []
    for fraction in (0.1, 0.9, 0.4, -1.0):
        other = on("cuda", make_scene(count=500, fraction=fraction))
        for name in ("origins", "directions", "near", "far"):
            scene[name].copy_(other[name])
        scene["occupied"].words.copy_(pack_occupancy(other["occupied"]).words)
        offset.uniform_()
        graph.replay()
        whole = march_rays(**scene, step=STEP, offset=offset)
        takes.append(assert_truncated(captured, whole, 2000))
    assert takes[0] == takes[3] == 500
    assert takes[1] < 500


@pytest.mark.cuda
def test_a_march_into_a_capacity_never_synchronises():
    scene = on("cuda", make_scene(count=500))
    for occupied in (scene["occupied"], pack_occupancy(scene["occupied"])):
        with never_synchronising():
            march_rays(**{**scene, "occupied": occupied}, step=STEP, capacity=3000)
