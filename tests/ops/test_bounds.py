"""What no op may do, whatever it is given: read or write outside its tensors.

Contents that do not fit are errors on the CPU. On CUDA, which is not synchronised to check them, and in the raw ops,
they give a defined result. Sizes, dtypes and devices that do not fit are errors that name the argument.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from op_contracts import BOXES, one_call_of_each, tensors
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from voxelfield import _library, ops
from voxelfield.fields.decoders import spherical_harmonics
from voxelfield.ops._internal.cameras import pixel_rays
from voxelfield.ops._internal.color import append_view, sample_color_error
from voxelfield.ops._table import TABLE

LOWEST, HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
SAMPLES = 90

# Offsets of 90 samples, and the rows that each ray has then.
BAD_OFFSETS = {
    "past the end": ([0, 20, 91, HIGHEST], [(0, 20), (20, 90), (90, 90)]),
    "negative": ([LOWEST, -5, 20, 60], [(0, 0), (0, 20), (20, 60)]),
    "all past the end": ([100, 200, HIGHEST], [(90, 90), (90, 90)]),
    "all negative": ([LOWEST, -1, -7], [(0, 0), (0, 0)]),
    "falling": ([10, 50, 30, 70, 0, HIGHEST], [(10, 50), (50, 50), (30, 70), (70, 70), (0, 90)]),
    "falling past both ends": ([HIGHEST, LOWEST, HIGHEST, -1], [(90, 90), (0, 90), (90, 90)]),
}
bad_offsets = pytest.mark.parametrize("case", BAD_OFFSETS)
BAD_INDEX = [0, -1, 4, LOWEST, HIGHEST, 3, 5, 2]


@pytest.fixture(autouse=True)
def kernels(request):
    if "device" in request.fixturenames:
        _library.ensure_loaded(request.getfixturevalue("device").type)
    return torch.ops.voxelfield


def make_samples(device, dtype=torch.float64, count=SAMPLES):
    dt = 0.02 + 0.06 * torch.rand(count, dtype=dtype)
    values = {"density": 0.1 * torch.rand(count, dtype=dtype) / dt, "rgb": torch.rand(count, 3, dtype=dtype)}
    values |= {"t": torch.rand(count, dtype=dtype).sort().values, "dt": dt}
    return {name: x.to(device) for name, x in values.items()}


def offsets_of(case, device):
    given, spans = BAD_OFFSETS[case]
    return torch.tensor(given, device=device), spans


def shares_no_sample(offsets, spans):
    first, last = offsets[[0, -1]].clamp(0, SAMPLES).tolist()
    rows = list(itertools.chain(range(first), range(last, SAMPLES), *(range(*span) for span in spans)))
    return len(rows) == len(set(rows))


def assert_any_of(actual, candidates):
    """Fails unless each row is one of the candidates' (K, M, ...), up to the order of summation."""
    off = (actual - candidates).abs().flatten(2) if actual.dim() > 1 else (actual - candidates).abs()[..., None]
    assert (off.amax(dim=-1).amin(dim=0) < 1e-12).all()


# --- offsets


@bad_offsets
def test_composite_within_bounds(device, kernels, case):
    samples = make_samples(device)
    offsets, spans = offsets_of(case, device)
    rays = len(spans)
    results = kernels.composite(*samples.values(), offsets, 1e-4, True)
    grads = [torch.randn_like(x) for x in results]
    gradients = kernels.composite_backward(*grads, *samples.values(), offsets, *results[:3], results[4], 1e-4, True)

    # The same of each ray alone. A sample of several rays may have what it is in any, and one of none has nothing.
    alone = [kernels.composite(*samples.values(), offsets.new_tensor(span), 1e-4, True) for span in spans]
    for which in (0, 1, 2, 4):
        torch.testing.assert_close(results[which], torch.cat([x[which] for x in alone]), rtol=1e-9, atol=1e-12)
    assert_any_of(results[3], torch.stack([x[3] for x in alone] + [torch.zeros_like(results[3])]))
    ray_grads = [[g[ray : ray + 1] for g in (*grads[:3], grads[4])] for ray in range(rays)]
    of_alone = [
        kernels.composite_backward(
            *of[:3], grads[3], of[3], *samples.values(), offsets.new_tensor(span), *one[:3], one[4], 1e-4, True
        )
        for of, one, span in zip(ray_grads, alone, spans, strict=True)
    ]
    for which, gradient in enumerate(gradients):
        of_one = [x[which] for x in (*of_alone, (torch.zeros_like(gradients[0]), torch.zeros_like(gradients[1])))]
        candidates = torch.stack(of_one)
        assert_any_of(*((gradient, candidates) if which else (gradient.T, candidates.mT)))  # one row per sample
        if shares_no_sample(offsets, spans):
            expected = sum(x[which] for x in of_alone)
            torch.testing.assert_close(gradient, expected + torch.zeros_like(gradient), rtol=1e-9, atol=1e-12)


@bad_offsets
def test_weights_within_bounds(device, kernels, case):
    samples = make_samples(device)
    offsets, spans = offsets_of(case, device)
    weights = kernels.ray_light(samples["density"], samples["dt"], offsets, 1e-4, False)
    alone = [
        kernels.ray_light(samples["density"], samples["dt"], offsets.new_tensor(span), 1e-4, False) for span in spans
    ]
    assert_any_of(weights, torch.stack([*alone, torch.zeros_like(weights)]))
    if shares_no_sample(offsets, spans):
        torch.testing.assert_close(weights, sum(alone))


@bad_offsets
def test_selection_within_bounds(device, kernels, case):
    samples = make_samples(device, torch.float32)
    offsets, spans = offsets_of(case, device)
    positions = torch.randn(SAMPLES, 3, device=device)
    limits = 0.3, 0.01
    counted = kernels.count_visible_samples(samples["density"], samples["dt"], offsets, *limits)
    alone = [
        kernels.ray_light(samples["density"], samples["dt"], offsets.new_tensor(span), limits[0], False) > limits[1]
        for span in spans
    ]
    counts = [int(x.sum()) for x in alone]
    assert counted[1].tolist() == counts
    assert int(counted[2].sum()) == sum(counts)
    for capacity in (sum(counts) // 2, sum(counts), sum(counts) + 9):
        inputs = positions, samples["t"], samples["dt"], offsets
        found, t, _, ray_index, ray_offsets, rays_kept = kernels.pack_visible_samples(*inputs, *counted, capacity)
        used = int(ray_offsets[-1])
        fitting = next((ray for ray in range(len(counts)) if sum(counts[: ray + 1]) > capacity), len(counts))
        assert int(rays_kept) == fitting
        assert used == sum(counts[:fitting])
        rows = torch.cat([torch.zeros(0, dtype=torch.int64, device=device)] + [x.nonzero()[:, 0] for x in alone])[:used]
        if shares_no_sample(offsets, spans):
            assert torch.equal(t[:used], samples["t"][rows])
        assert torch.isin(t[:used], samples["t"]).all()
        assert torch.isin(found[:used], positions).all()
        assert ray_index[:used].tolist() == [ray for ray in range(fitting) for _ in range(counts[ray])]
        assert found[used:].isnan().all()


def assert_refused_where_looking_is_free(device, call, message):
    if device.type == "cpu":
        with pytest.raises(ValueError, match=message):
            call()
    else:
        call()
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 20, 91], r"ray_offsets must lie in 0\.\.90, as density has rows, got 0\.\.91"),
        ([-1, 20, 90], r"ray_offsets must lie in 0\.\.90, as density has rows, got -1\.\.90"),
        ([0, 50, 30, 90], "ray_offsets must not decrease, got 50 followed by 30 at ray 1"),
        ([0, HIGHEST, LOWEST, 90], f"ray_offsets must not decrease, got {HIGHEST} followed by {LOWEST} at ray 1"),
    ],
    ids=["past the end", "negative", "falling", "far"],
)
def test_bad_offsets_are_errors_where_looking_is_free(device, offsets, message):
    samples = make_samples(device, torch.float32)
    density, rgb, t, dt = samples.values()
    offsets = torch.tensor(offsets, device=device)
    calls = (
        lambda: ops.composite(density, rgb, t, dt, offsets),
        lambda: ops.ray_weights(density, dt, offsets),
        lambda: ops.select_samples(density, rgb, t, dt, offsets),
    )
    for call in calls:
        assert_refused_where_looking_is_free(device, call, message)


@pytest.mark.parametrize("offsets", [[0, 0, 90], [10, 50, 50, 80], [90], [90, 90], [0]], ids=str)
def test_rows_of_no_ray_are_no_error(device, offsets):
    samples = make_samples(device)
    result = ops.composite(*samples.values(), torch.tensor(offsets, device=device), min_transmittance=0.0)
    assert (result.weights != 0).nonzero()[:, 0].tolist() == list(range(offsets[0], offsets[-1]))


# --- what a counting op might have returned, but did not


@pytest.mark.parametrize("counts", [[LOWEST] * 4, [-1, 2, -3, 4], [HIGHEST] * 4, [0, 3, HIGHEST, 1]], ids=str)
@pytest.mark.parametrize("total", [LOWEST, -7, 0, 5, 40, HIGHEST])
def test_packing_within_bounds_whatever_was_counted(device, kernels, counts, total):
    counts = torch.tensor(counts).clamp(-(2**31), 2**31 - 1).int().to(device)
    sums = torch.tensor([total], device=device)
    rays, capacity = len(counts), 50
    samples = make_samples(device, torch.float32)
    positions = torch.randn(SAMPLES, 3, device=device)
    offsets = torch.tensor([0, 20, 40, 60, 90], device=device)
    kept = torch.tensor([LOWEST, HIGHEST, 5], device=device).clamp(-(2**31), 2**31 - 1).int().repeat(SAMPLES // 3)
    walk, slots = make_walk(device, rays), torch.rand(rays, 6, device=device)
    step_ranges = kept.repeat(2)[:64].view(8, rays, 2)
    packed = [
        kernels.pack_visible_samples(positions, samples["t"], samples["dt"], offsets, kept, counts, sums, capacity),
        *(
            kernels.pack_slots(*walk[:5], slots, counts, sums, 0.1, boxes, capacity, lengths)
            for boxes in ([], BOXES)
            for lengths in (slots, slots[:, :0])
        ),
        kernels.place_ray_samples(*walk, 0.1, 1, counts, step_ranges.contiguous(), sums, capacity),
    ]
    for *_, ray_offsets, rays_kept in packed:
        assert ((ray_offsets >= 0) & (ray_offsets <= capacity)).all()
        assert 0 <= int(rays_kept) <= rays


# --- indices


@pytest.mark.parametrize("degree", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_a_row_of_no_ray_is_seen_from_nowhere(device, kernels, dtype, degree):
    index = torch.tensor(BAD_INDEX, device=device)
    geometry = torch.randn(len(index), 16, device=device).to(dtype)
    directions = F.normalize(torch.randn(4, 3, device=device), dim=-1).to(torch.float64 if dtype.itemsize > 4 else None)
    inputs, raw = kernels.append_view(geometry, directions, index, degree)
    known = (index >= 0) & (index < 4)
    seen_along = torch.where(known[:, None], directions[index.clamp(0, 3)], 0.0)
    expected = spherical_harmonics(seen_along.double(), degree)
    torch.testing.assert_close(inputs[:, 16:].double(), expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(inputs[:, :16], geometry)
    assert torch.equal(raw, geometry[:, 0].to(raw.dtype))


def test_samples_of_no_ray_have_no_error(device, kernels):
    index = torch.tensor(BAD_INDEX, device=device)
    known = (index >= 0) & (index < 4)
    colors, truth, weights = (torch.randn(n, device=device) for n in ((8, 3), (2, 3), 8))
    for rays_kept, rays in ((HIGHEST, 4), (4, 4), (3, 3), (0, 1), (LOWEST, 1)):
        count = torch.tensor(rays_kept, device=device)
        pixel = index[known] // 2
        expected = (weights[known, None] * (colors[known] - truth[pixel]).square()).sum() / rays
        torch.testing.assert_close(kernels.color_error(colors, truth, weights, index, 2, count), expected)
        gradient = kernels.color_error_backward(weights[0], colors, truth, weights, index, 2, count)
        off = 2 / rays * weights[0] * weights[known, None] * (colors[known] - truth[pixel])
        torch.testing.assert_close(gradient[known], off)
        assert not gradient[~known].any()
        counted = min(max(rays_kept, 0), 4) // 2
        expected = (colors[:2] - truth).square()[:counted].sum() / (3 * max(counted, 1))
        torch.testing.assert_close(kernels.color_error(colors[:2], truth, None, None, 2, count), expected)


def test_rows_without_rays_are_no_error(device):
    # As rays that were marched into a capacity have them.
    geometry, directions = torch.randn(5, 4, device=device), torch.zeros(0, 3, device=device)
    inputs, _ = append_view(geometry, directions, torch.zeros(5, dtype=torch.int64, device=device), 2)
    expected = spherical_harmonics(torch.zeros(5, 3), 2)
    torch.testing.assert_close(inputs[:, 4:].cpu(), expected)


def make_images(device, count=2, height=3, width=4):
    images = torch.randint(256, (count, height, width, 4), dtype=torch.uint8, device=device)
    c2w = torch.eye(4, device=device).repeat(count, 1, 1)
    aabb = torch.tensor([[-1.0] * 3, [1.0] * 3], device=device)
    return images, c2w, torch.full((count, 4), 2.0, device=device), aabb


def through_lenses(c2w, intrinsics, aabb):
    """Cameras as the raw op takes them."""
    return c2w, intrinsics, torch.zeros(len(c2w), 14, device=c2w.device), aabb


def test_a_pixel_beyond_the_images_is_the_nearest(device, kernels):
    images, *camera = make_images(device)
    camera = through_lenses(*camera)
    index = torch.tensor([0, -1, 24, LOWEST, HIGHEST, 23], device=device)
    actual = kernels.pixel_rays(images, index, *camera, 1)
    expected = kernels.pixel_rays(images, torch.tensor([0, 0, 23, 0, 23, 23], device=device), *camera, 1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("index", "found"), [([3, 4], r"3\.\.4"), ([-1, 2], r"-1\.\.2")], ids=str)
def test_bad_indices_are_errors_where_looking_is_free(device, index, found):
    index = torch.tensor(index, device=device)
    images, *camera = make_images(device, count=1, height=2, width=2)
    directions = torch.randn(4, 3, device=device)
    calls = {
        rf"ray_index must lie in 0\.\.3, for 4 directions, got {found}": lambda: append_view(
            torch.randn(2, 5, device=device), directions, index, 1
        ),
        rf"ray_index must lie in 0\.\.3, for 2 pixels of 2 rays, got {found}": lambda: sample_color_error(
            directions[:2, 0], directions[:2], index, directions[:2], 2
        ),
        rf"index must lie in 0\.\.3, for images of shape \(1, 2, 2, 4\), got {found}": lambda: pixel_rays(
            images, index, *camera
        ),
    }
    for message, call in calls.items():
        assert_refused_where_looking_is_free(device, call, message)


def test_images_without_a_pixel_have_no_ray(device):
    images, *camera = make_images(device, height=0)
    assert len(pixel_rays(images, torch.zeros(0, dtype=torch.int64, device=device), *camera).near) == 0
    with pytest.raises(RuntimeError, match="images must have at least one pixel, got none"):
        pixel_rays(images, torch.zeros(1, dtype=torch.int64, device=device), *camera)


# --- sizes, dtypes and devices of the raw ops


def make_walk(device, rays):
    """What all ops that walk rays begin with."""
    box = torch.tensor([[-1.0] * 3, [1.0] * 3], device=device)
    directions = F.normalize(torch.randn(rays, 3, device=device), dim=-1)
    ends = torch.zeros(rays, device=device), torch.ones(rays, device=device)
    bits = torch.ops.voxelfield.pack_occupancy(torch.ones(5, 6, 7, dtype=torch.bool, device=device))
    origins = torch.rand(rays, 3, device=device)
    return origins, directions, *ends, torch.full((rays,), 0.5, device=device), bits, [5, 6, 7], box


# Another length of these is another valid call, or one whose contents alone are in doubt; or they are single numbers.
FREE = {
    (op, argument)
    for argument, ops_of_it in {
        "points": "atlas_coordinates lens_rays place_in_box sample_in_box sample_separable sample_trilinear",
        "grid": "first_crossing integrate_rays line_gradient point_gradient_separable render_grid render_grid_backward "
        "render_grid_image sample_in_box sample_separable pack_vertices_ touched_vertices_ unpack_vertices_",
        "occupied": "active_tiles_ empty_distance pack_occupancy",
        "ray_offsets": "composite count_visible_samples ray_light ray_light_backward scan_along_rays sum_along_rays",
        "values": "render_baked_image scan_along_rays sum_along_rays",
        "blocks": "atlas_coordinates render_baked_image",
        "truth": "color_error color_error_backward",
        "rays_kept": "color_error color_error_backward",
        "grad": "color_error_backward pack_vertices_ touched_vertices_ unpack_vertices_",
        "table": "pack_vertices_ touched_vertices_ unpack_vertices_",
        "packed": "pack_vertices_ touched_vertices_ unpack_vertices_",
        "tiles": "active_tiles_",
        "count": "active_tiles_",
        "sums": "sum_duplicates_",
        "copies": "sum_duplicates_",
        "begins": "sum_duplicates_",
        "directions": "append_view",
        "index": "pixel_rays",
        "factors": "scan_along_rays",
        "input": "mlp",
        "rays": "lens_points",
    }.items()
    for op in ops_of_it.split()
}

# Numbers in tensors, a tensor that stands for its device, and one of any shape.
UNCHECKED = {("grid_adam_", "lrs"), ("grid_adam_", "steps"), ("pyramid_image_fits", "like")}

# Ops of which no argument has to be as long as another.
WITHOUT_LENGTHS = {
    *("pack_occupancy", "empty_distance", "sum_along_rays", "place_in_box"),
    *("atlas_coordinates", "sum_duplicates_", "sample_trilinear", "scan_along_rays", "mlp", "grid_adam_"),
    *("active_tiles_", "touched_vertices_", "pack_vertices_", "unpack_vertices_", "sample_separable"),
}

# Ops that run on the device of their only tensor, whichever that is.
OF_ONE_TENSOR = {"pack_occupancy", "empty_distance", "pyramid_image_fits"}

WRONG = {
    "dimensions": lambda x: x[None],
    "length": lambda x: torch.cat([x, x]),
    "dtype": lambda x: x.to(torch.complex64),
    "device": lambda x: x.cpu(),
}


def assert_refused(device, name, kind):
    op = getattr(torch.ops.voxelfield, name).default
    valid = one_call_of_each(device)[name]
    op(*valid)
    names = [argument.name for argument in op._schema.arguments]
    changed = 0
    for place, value in enumerate(valid):
        several = isinstance(value, list) and len(value) > 0 and isinstance(value[0], torch.Tensor)
        if not (several or isinstance(value, torch.Tensor)):
            continue
        if (kind == "length" and (several or (name, names[place]) in FREE)) or (name, names[place]) in UNCHECKED:
            continue
        wrong = [*value[:-1], WRONG[kind](value[-1])] if several else WRONG[kind](value)
        # An argument that others are evaluated by may pass as right, and they as wrong.
        either = (
            kind in ("length", "device")
            or place == 0
            or any(word in name for word in ("_trilinear", "_cells", "_separable", "project_rays", "line_"))
        )
        blamed = ".*" if either else rf"(\b{names[place]}\b.*|{names[place]}\[.*)"
        with pytest.raises(RuntimeError, match=rf"{blamed}(must|expected)"):
            op(*valid[:place], wrong, *valid[place + 1 :])
        changed += 1
    assert changed > 0 or name in WITHOUT_LENGTHS or (name, names[0]) in UNCHECKED


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("kind", ["dimensions", "length", "dtype"])
def test_raw_ops_refuse_what_does_not_fit(device, name, kind):
    assert_refused(device, name, kind)


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in TABLE if name not in OF_ONE_TENSOR])
def test_raw_ops_refuse_another_device(name):
    _library.ensure_loaded("cuda")
    assert_refused(torch.device("cuda"), name, "device")


def test_only_ops_of_one_tensor_have_no_other_device_to_refuse():
    _library.ensure_loaded("cpu")
    found = {name: tensors([*arguments]) for name, arguments in one_call_of_each(torch.device("cpu")).items()}
    assert {name for name in TABLE if len(found[name]) == 1} == OF_ONE_TENSOR


# The numbers of raw ops, and values that they refuse.
NUMBERS = {
    "min_transmittance": (-0.1, 1.1, math.nan),
    "min_weight": (-1e-9, 1.1, math.nan),
    "step": (0.0, -0.1, math.inf, math.nan),
    "density_scale": (-1.0, math.inf, math.nan),
    "density_shift": (math.inf, math.nan),
}


WITH_NUMBERS = [
    *("count_ray_samples", "place_ray_samples", "count_visible_samples", "ray_light", "ray_light_backward"),
    *("composite", "composite_backward", "render_grid", "render_grid_backward", "render_grid_image"),
]


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_raw_ops_refuse_numbers_out_of_range(device, kernels, name):
    op = getattr(torch.ops.voxelfield, name).default
    valid = one_call_of_each(device)[name]
    changed = 0
    for place, argument in enumerate(op._schema.arguments):
        for value in NUMBERS.get(argument.name, ()):
            with pytest.raises(RuntimeError, match=rf"{argument.name} must"):
                op(*valid[:place], value, *valid[place + 1 :])
            changed += 1
    assert changed > 0


def test_counting_leaves_no_slot_unwritten(device, kernels):
    arguments = one_call_of_each(device)["count_ray_samples"]
    first = kernels.count_ray_samples(*arguments)
    torch.full((100_000,), 7, dtype=torch.int32, device=device)  # memory that the next call may be given
    torch.testing.assert_close(first, kernels.count_ray_samples(*arguments), rtol=0, atol=0)
    # A ray with few ranges has empty ones after them.
    assert (first[1][-1] == 0).any()


# --- other devices than the current one

# Results that the ops leave partly unwritten.
PARTLY_WRITTEN = {"count_ray_samples": 1, "count_visible_samples": 0, "march_to_slots": 0}


@pytest.mark.cuda
def test_every_op_runs_on_the_device_of_its_arguments():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    _library.ensure_loaded("cuda")
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    with torch.cuda.device(first):
        for name, arguments in one_call_of_each(first).items():
            results = []
            for device in (first, second):
                given = tree_map_only(torch.Tensor, lambda x, device=device: x.to(device, copy=True), arguments)
                returned = getattr(torch.ops.voxelfield, name)(*given)
                returned = list(returned) if isinstance(returned, (list, tuple)) else [returned]
                if name in PARTLY_WRITTEN:
                    del returned[PARTLY_WRITTEN[name]]
                results.append(tensors([returned, given]))
                assert all(x.device == device for x in results[-1]), name
            torch.cuda.synchronize(second)
            for expected, actual in zip(*results, strict=True):
                torch.testing.assert_close(
                    actual.cpu(), expected.cpu(), equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
                )
