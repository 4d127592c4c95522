"""march_rays and the two ops beneath it."""

from __future__ import annotations

import itertools
import math

import pytest
import reference
import torch
from op_testing import LAYOUTS, threads
from torch.nn import functional as F

from voxelfield import _library
from voxelfield.ops import march_rays

BOX = torch.tensor([[-1.0, 0.5, -3.0], [2.0, 1.5, 1.0]])
STEP = 0.07
NAMES = ("origins", "directions", "near", "far", "occupied", "aabb")

# A float32 position may fall into the neighbouring cell, or on the other side of `far`, this close to the border.
CELL_TOLERANCE = 1e-4
FAR_TOLERANCE = 1e-5


def make_rays(count):
    """Oblique, axis-parallel and plane-parallel rays: through the box, from inside it, past it, and of no length."""
    low, high = BOX
    inside = low + (high - low) * torch.rand(count, 3)
    directions = torch.randn(count, 3)
    directions[::5, 0] = 0.0
    directions[::3, 2] = -0.0
    directions[::15, 1] = 1.0 - 2.0 * (torch.arange(0, count, 15) % 2)
    directions = F.normalize(directions, dim=-1)
    back = 2.0 * torch.rand(count, 1)
    back[::4] = 0.0  # start inside
    origins = inside - back * directions
    origins[::7] += 10.0  # miss: all positions belong to cells at the border
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


def lattice_keys(samples, scene, offset, step):
    """(ray, k) of every sample; k is the number of its lattice position."""
    _, t, ray_index, _ = (x.cpu() for x in samples)
    k = (t.double() - scene["near"][ray_index].double()) / step - offset[ray_index].double()
    assert (k - k.round()).abs().max() < 1e-3
    return set(zip(ray_index.tolist(), k.round().long().tolist(), strict=True))


def is_borderline(scene, offset, step, ray, k):
    t = scene["near"][ray].double() + (k + offset[ray].double()) * step
    low, high = scene["aabb"].double()
    position = scene["origins"][ray].double() + t * scene["directions"][ray].double()
    cell = (position - low) / (high - low) * torch.tensor(scene["occupied"].shape)
    at_face = (cell - cell.round()).abs().min() < CELL_TOLERANCE
    return bool(at_face) or abs(t - scene["far"][ray].double()) < FAR_TOLERANCE


def assert_same_samples(one, two, scene, offset, step=STEP):
    """Fails if two marches differ by more than a few positions on the border of a cell or of a ray."""
    keys, other_keys = (lattice_keys(samples, scene, offset, step) for samples in (one, two))
    differing = keys ^ other_keys
    assert len(differing) <= 0.01 * len(other_keys) + 1
    assert all(is_borderline(scene, offset, step, ray, k) for ray, k in differing)


def assert_packed(samples, scene, offset=None, step=STEP):
    """Fails unless the samples are sorted, packed consistently, on their rays' lattices and between near and far."""
    positions, t, ray_index, ray_offsets = (x.cpu() for x in samples)
    rays, count = len(scene["near"]), len(t)
    assert positions.shape == (count, 3)
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
    return reference.march(**doubles, step=step, offset=offset.double())


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
    assert_same_samples(samples, by_reference(scene, offset), scene, offset)


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
    positions, t, ray_index, ray_offsets = march_rays(**on(device, scene), step=0.25)
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
    *_, ray_offsets = march_rays(origins, directions, near, far, occupied, aabb, 0.5)
    assert ray_offsets.tolist() == [0, 8, 8, 8]


def test_rays_without_length_have_no_samples(device):
    scene = on(device, make_scene(fraction=1.1))
    for far in (scene["near"], scene["near"] - 1, torch.full_like(scene["near"], -math.inf)):
        positions, t, ray_index, ray_offsets = march_rays(**{**scene, "far": far}, step=STEP)
        assert len(positions) == len(t) == len(ray_index) == 0
        assert not ray_offsets.any()


def test_a_ray_shorter_than_half_a_step_has_no_midpoint(device):
    scene = on(device, make_scene(count=3, fraction=1.1))
    for length, count in ((0.4, 0), (0.6, 1), (1.4, 1), (1.6, 2)):
        *_, ray_offsets = march_rays(**{**scene, "far": scene["near"] + length * STEP}, step=STEP)
        assert ray_offsets.diff().tolist() == [count] * 3


def test_far_itself_is_excluded_and_near_included(device):
    scene = on(device, make_scene(count=2, fraction=1.1))
    scene |= {"near": torch.ones(2, device=device), "far": torch.tensor([2.0, 2.0 + 2**-20], device=device)}
    _, t, _, ray_offsets = march_rays(**scene, step=0.25, offset=torch.zeros(2, device=device))
    assert ray_offsets.tolist() == [0, 4, 9]
    assert t.tolist() == [1, 1.25, 1.5, 1.75, 1, 1.25, 1.5, 1.75, 2]


def test_midpoints_are_the_default(device):
    scene = on(device, make_scene())
    explicit = march_rays(**scene, step=STEP, offset=torch.full((60,), 0.5, device=device))
    for one, two in zip(march_rays(**scene, step=STEP), explicit, strict=True):
        assert torch.equal(one, two)


def test_each_ray_has_its_own_offset(device):
    scene = on(device, make_scene(fraction=1.1))
    offset = torch.linspace(0, 0.99, 60, device=device)
    _, t, _, ray_offsets = march_rays(**scene, step=STEP, offset=offset)
    filled = ray_offsets.diff() > 0
    assert filled.sum() > 30
    first = t[ray_offsets[:-1][filled]]
    torch.testing.assert_close(first, (scene["near"] + offset * STEP)[filled], rtol=1e-6, atol=1e-6)


def test_nothing_occupied(device):
    positions, t, ray_index, ray_offsets = march_rays(**on(device, make_scene(fraction=-1.0)), step=STEP)
    assert positions.shape == (0, 3)
    assert len(t) == len(ray_index) == 0
    assert ray_offsets.tolist() == [0] * 61


def test_no_rays(device):
    positions, t, ray_index, ray_offsets = march_rays(**on(device, make_scene(count=0)), step=STEP)
    assert positions.shape == (0, 3)
    assert len(t) == len(ray_index) == 0
    assert ray_offsets.tolist() == [0]


def test_rays_do_not_depend_on_their_neighbours(device):
    scene = on(device, make_scene(count=300))
    _, t, _, ray_offsets = march_rays(**scene, step=STEP)
    order = torch.randperm(300).to(device)
    shuffled = {name: value[order] if len(value) == 300 else value for name, value in scene.items()}
    _, t_shuffled, _, offsets_shuffled = march_rays(**shuffled, step=STEP)
    for place, ray in enumerate(order.tolist()):
        here = t_shuffled[offsets_shuffled[place] : offsets_shuffled[place + 1]]
        assert torch.equal(here, t[ray_offsets[ray] : ray_offsets[ray + 1]])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *itertools.product(["origins", "directions", "near", "aabb"], LAYOUTS),
        # The other layouts put NaN around the values.
        ("occupied", "reversed strides"),
        ("occupied", "every other row"),
    ],
)
def test_any_memory_layout(device, name, layout):
    scene = on(device, make_scene())
    expected = march_rays(**scene, step=STEP)
    for one, two in zip(march_rays(**{**scene, name: LAYOUTS[layout](scene[name])}, step=STEP), expected, strict=True):
        assert torch.equal(one, two)


def test_non_finite_rays_do_not_disturb_the_others(device):
    scene = on(device, make_scene())
    broken = {name: value.clone() for name, value in scene.items()}
    broken["origins"][0] = math.nan
    broken["directions"][2, 1] = math.nan
    broken["near"][3] = math.nan
    broken["far"][5] = math.nan
    _, t, ray_index, _ = march_rays(**scene, step=STEP)
    _, t_broken, index_broken, offsets_broken = march_rays(**broken, step=STEP)
    assert offsets_broken.diff()[[3, 5]].tolist() == [0, 0]
    for ray in (1, 4, *range(6, 60)):
        assert torch.equal(t_broken[index_broken == ray], t[ray_index == ray])


@pytest.mark.cuda
def test_cpu_and_cuda_agree():
    scene = make_scene(count=4000, resolution=(32, 24, 40))
    offset = torch.rand(4000)
    ours = march_rays(**scene, step=STEP, offset=offset)
    theirs = march_rays(**on("cuda", scene), step=STEP, offset=offset.cuda())
    assert_packed(theirs, scene, offset)
    assert_same_samples(theirs, ours, scene, offset)


def test_any_number_of_threads_gives_the_same_bits():
    scene = make_scene(count=1000)
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(march_rays(**scene, step=STEP))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


# --- errors and registration


WRONG = {
    "dimensions": (lambda x: x[:, None], ValueError, r"{} must have shape \("),
    "size": (lambda x: torch.cat([x, x]), ValueError, r"{} must have shape \("),
    "int": (lambda x: x.to(torch.int32), TypeError, "{} must be (float32|bool), got int32"),
    "double": (lambda x: x.double(), TypeError, "{} must be (float32|bool), got float64"),
    "list": (lambda x: x.tolist(), TypeError, r"{} must be a torch\.Tensor, got list"),
    "device": (lambda x: x.to("meta"), ValueError, "{} must be on the device of origins"),
}


@pytest.mark.parametrize("name", [*NAMES, "offset"])
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_are_named(name, kind):
    change, error, message = WRONG[kind]
    scene = {**make_scene(count=4), "offset": torch.zeros(4)}
    scene[name] = change(scene[name])
    # The first argument sets the number of rays and the device; any number of cells will do.
    blamed = "directions" if name == "origins" and kind in ("size", "device") else name
    if (name, kind) == ("occupied", "size"):
        march_rays(**scene, step=STEP)
        return
    with pytest.raises(error, match=message.format(blamed)):
        march_rays(**scene, step=STEP)


@pytest.mark.parametrize("step", [0.0, -0.1, math.nan, math.inf])
def test_step_must_be_a_distance(step):
    with pytest.raises(ValueError, match=f"step must be a positive, finite distance, got {step}"):
        march_rays(**make_scene(count=2), step=step)


@pytest.mark.parametrize("step", [1e-60, 1e60])
def test_step_must_be_a_distance_in_float32_too(step):
    # The kernels march in float32: a step that rounds to zero there would never arrive. These rays have no length.
    scene = make_scene(count=2)
    with pytest.raises(ValueError, match="step must be a positive, finite distance"):
        march_rays(**{**scene, "far": scene["near"]}, step=step)


def test_a_grid_without_cells_is_refused():
    # Kernels look up the nearest cell of every position, so there must be one. These rays have no length.
    scene = make_scene(count=2)
    occupied = torch.zeros(4, 0, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="occupied"):
        march_rays(**{**scene, "far": scene["near"], "occupied": occupied}, step=STEP)


@pytest.mark.parametrize("count", [0, 5])
def test_opcheck(device, count):
    _library.ensure_loaded(device.type)
    scene = on(device, make_scene(count=count))
    offset = torch.full((count,), 0.5, device=device)
    walk = (*(scene[name] for name in NAMES[:4]), offset, scene["occupied"], scene["aabb"], STEP)
    torch.library.opcheck(torch.ops.voxelfield.count_ray_samples.default, walk)
    *_, ray_offsets = march_rays(**scene, step=STEP)
    place = (*walk, ray_offsets, int(ray_offsets[-1]))
    torch.library.opcheck(torch.ops.voxelfield.place_ray_samples.default, place)
