"""GridAdam, the ops that it is made of, and the lists of tiles that they visit."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from grid_models import BOX
from op_testing import OpRecorder
from reference import adam_step

from voxelfield import VoxelGrid
from voxelfield.grids.adam import GridAdam
from voxelfield.ops import sample_trilinear
from voxelfield.ops._internal.optim import active_tiles, grid_adam_, tiles_along, touched_vertices

# One value; odd sizes; tiles cut by every face; several vectors a vertex; more vectors than a warp has lanes.
SHAPES = [(1, 1, 1, 1), (3, 2, 5, 3), (9, 6, 20, 4), (5, 4, 8, 28), (4, 5, 9, 6), (2, 3, 9, 33), (2, 2, 9, 140)]
TILED_SHAPES = [(13, 9, 17, 1), (5, 8, 9, 33), (6, 7, 30, 6), (5, 8, 9, 140)]  # several tiles along several axes
TILE = (4, 4, 8)  # vertices along x, y, z
STEPS = 24
INT = torch.int32

by_channel_or_not = pytest.mark.parametrize("by_channel", [False, True])


def learning_rate(step: int) -> float:
    return 0.02 * 0.9**step


def gradients(shape, step: int, sparse: bool = False):
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (step % 5 - 2)
    if sparse:
        grad *= torch.rand(shape[:3], generator=generator)[..., None] < 0.3
    return grad.float()


def parameter(shape, device):
    generator = torch.Generator().manual_seed(99)
    return torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))


def shares(channels, device="cpu"):
    """A factor for each channel; the last learns nothing."""
    rates = torch.rand(channels, generator=torch.Generator().manual_seed(7)) * 2
    rates[-1] = 0
    return rates.to(device)


def train(optimizer, param, steps=range(STEPS), sparse=False):
    for step in steps:
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        grad = gradients(param.shape, step, sparse)
        if param.grad is None:
            param.grad = grad.to(param.device, param.dtype)
        else:
            param.grad.copy_(grad)
        optimizer.step()


def by_torch(kind, shape, steps=range(STEPS), rates=None, **options):
    """The parameter and its moments, by torch's optimizer in float64; with rates, each channel in its own group."""
    whole = parameter(shape, "cpu").detach().double()
    factors = [1.0] if rates is None else rates.tolist()
    parts = [torch.nn.Parameter(part.clone()) for part in whole.view(-1, shape[-1]).split(shape[-1] // len(factors), 1)]
    optimizer = kind([{"params": [part]} for part in parts], **options)
    for step in steps:
        grads = gradients(shape, step).double().view(-1, shape[-1]).split(shape[-1] // len(factors), 1)
        for part, group, factor, grad in zip(parts, optimizer.param_groups, factors, grads, strict=True):
            group["lr"], part.grad = learning_rate(step) * factor, grad.clone()
        optimizer.step()
    states = [{"param": part.detach(), **optimizer.state[part]} for part in parts]
    return [torch.cat([state[name] for state in states], 1).view(shape) for name in ("param", "exp_avg", "exp_avg_sq")]


def results(optimizer, param):
    state = optimizer.state[param]
    return [x.detach().cpu() for x in (param, state["exp_avg"], state["exp_avg_sq"])]


def assert_all_match(actual, expected):
    for name, a, e in zip(("parameter", "first moment", "second moment"), actual, expected, strict=True):
        # Rounding adds up over the steps.
        torch.testing.assert_close(
            a.double(), e, rtol=1e-5, atol=1e-6 * e.abs().max().item(), msg=lambda t, name=name: f"{name}: {t}"
        )


def tile_id(x, y, z):
    return (x << 20) + (y << 10) + z


def every_tile(resolution):
    return [tile_id(*tile) for tile in itertools.product(*map(range, tiles_along(resolution)))]


def listed(ids, count):
    return ids[: int(count)].tolist()


def tile_mask(ids, count, resolution):
    """Which vertices lie in the listed tiles, (X, Y, Z) bool."""
    mask = torch.zeros([n * side for n, side in zip(tiles_along(resolution), TILE, strict=True)], dtype=torch.bool)
    for tile in listed(ids, count):
        x, y, z = tile >> 20, tile >> 10 & 1023, tile & 1023
        mask[x * TILE[0] :, y * TILE[1] :, z * TILE[2] :][: TILE[0], : TILE[1], : TILE[2]] = True
    return mask[: resolution[0], : resolution[1], : resolution[2]]


def random_tiles(resolution, device, fraction=0.5):
    tiles = torch.tensor(every_tile(resolution), dtype=torch.int32)
    count = torch.tensor([int(len(tiles) * fraction)], dtype=torch.int32)
    return tiles[torch.randperm(len(tiles))].to(device), count.to(device)


# --- a step of every form


def arrays_of(shape, device, moments=torch.float32, offset=0, copies=()):
    """A parameter, its moments, a gradient of few vertices, and copies, in memory that begins some elements late."""
    values = [parameter(shape, "cpu").detach(), *(gradients(shape, seed).abs().bfloat16() for seed in (3, 4))]
    values += [gradients(shape, 0, sparse=True), *(torch.full(shape, 7.0) for _ in copies)]
    made = []
    for value, dtype in zip(values, [torch.float32, moments, moments, torch.float32, *copies], strict=True):
        storage = torch.zeros(value.numel() + offset, dtype=dtype, device=device)
        made.append(storage[offset:].view(shape).copy_(value))
    return made


# Several copies of a grid follow each other; gradients are cleared or kept.
EXTRAS = [((), True), ((torch.float16,), False), ((torch.bfloat16,), True)]
EXTRAS += [((torch.float16,) * count, True) for count in (3, 8)]


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@by_channel_or_not
@pytest.mark.parametrize(
    "restriction", ["none", "untouched", "table", "tiles", "tiles, untouched", "tiles, table"], ids=str
)
@pytest.mark.parametrize("shape", [*SHAPES, *TILED_SHAPES], ids=str)
def test_a_step_of_any_form_is_the_formula_where_it_applies_and_nothing_elsewhere(
    device, shape, restriction, by_channel, offset, moments
):
    """On a CPU it is bit for bit the step of whole grids with float32 moments, rounded.

    On CUDA each form is a kernel of its own, in which a compiler fuses other products with sums.
    """
    ids, count = random_tiles(shape[:3], device) if "tiles" in restriction else (None, None)
    rule = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "l2_penalty": 0.2}
    rates, lr, step = shares(shape[3], device) if by_channel else None, 0.1, 5
    options = {"channel_rates": [rates], "skip_untouched": restriction not in ("none", "tiles"), **rule}
    start = arrays_of(shape, device)
    mask = torch.ones(shape[:3], dtype=torch.bool) if ids is None else tile_mask(ids, count, shape[:3])
    if options["skip_untouched"]:
        mask &= (start[3] != 0).any(-1).cpu()
    table = None
    if "table" in restriction:
        table = torch.empty(math.ceil(math.prod(shape[:3]) / 128) if ids is None else len(ids), 5, dtype=INT)
        table = table.to(device)
        touched_vertices(start[3], table, ids)
    plain = arrays_of(shape, device, offset=offset)
    grid_adam_(*([array] for array in plain), [lr], [step], **options)
    rates = None if rates is None else rates.double().cpu()
    expected = adam_step(*(array.double().cpu() for array in start), lr=lr, step=step, rates=rates, **rule)
    for found, wanted in zip(plain, expected, strict=False):
        torch.testing.assert_close(found.double().cpu()[mask], wanted[mask], rtol=1e-5, atol=1e-6)
    for copies, clear_grad in EXTRAS:
        arrays = arrays_of(shape, device, moments, offset, copies)
        grid_adam_(
            *([array] for array in arrays[:4]),
            [lr],
            [step],
            working=arrays[4:] or None,
            tiles=[ids],
            tile_counts=[count],
            touched=None if table is None else [table],
            clear_grad=clear_grad,
            **options,
        )
        after = [*plain[:3], torch.zeros_like(start[3]) if clear_grad else start[3], *([plain[0]] * len(copies))]
        before = [*start, *(torch.full_like(start[0], 7.0) for _ in copies)]
        for found, new, old in zip(arrays, after, before, strict=True):
            here, unit = mask.to(device), torch.finfo(found.dtype).eps if device.type == "cuda" else 0.0
            torch.testing.assert_close(found[here], new[here].to(found.dtype), rtol=2 * unit, atol=1e-6 * (unit > 0))
            assert torch.equal(found[~here], old[~here].to(found.dtype))


@pytest.mark.parametrize("counter", [torch.float32, torch.int64], ids=str)
def test_the_op_takes_numbers_and_tensors(device, counter):
    made = []
    for lr, step in ((0.1, 3), (torch.tensor([0.1], device=device), torch.tensor([3], device=device, dtype=counter))):
        made.append(arrays_of((4, 3, 9, 4), device))
        grid_adam_(*([array] for array in made[-1]), [lr], [step], betas=(0.9, 0.99))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_several_grids_have_their_own_copies(device):
    grids = [arrays_of(shape, device, copies=(torch.float16,) * 3) for shape in ((5, 5, 5, 4), (7, 3, 3, 1))]
    rates = [shares(4, device), shares(1, device)]
    lists = [list(arrays) for arrays in zip(*(grid[:4] for grid in grids), strict=True)]
    grid_adam_(*lists, [0.1] * 2, [5] * 2, working=[copy for grid in grids for copy in grid[4:]], channel_rates=rates)
    for param, *_, first, second, third in grids:
        assert all(torch.equal(copy, param.half()) for copy in (first, second, third))


def test_the_op_takes_no_grids_and_empty_grids(device):
    grid_adam_([], [], [], [], [], [])
    grid_adam_(*([torch.zeros(0, 3, 3, 2, device=device)] for _ in range(4)), [0.1], [1])


# --- the same steps as torch's

RULES = {
    "Adam": ({}, torch.optim.Adam, {}),
    "betas and eps": ({"betas": (0.8, 0.97), "eps": 1e-6}, torch.optim.Adam, {"betas": (0.8, 0.97), "eps": 1e-6}),
    "no first moment": ({"betas": (0.0, 0.999), "eps": 1e-15}, torch.optim.Adam, {"betas": (0.0, 0.999), "eps": 1e-15}),
    "weight decay": ({"weight_decay": 0.3}, torch.optim.AdamW, {"weight_decay": 0.3}),
    "L2 penalty": ({"l2_penalty": 0.3}, torch.optim.Adam, {"weight_decay": 0.3}),
}


@by_channel_or_not
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_are_those_of_torch(device, shape, rule, by_channel):
    """Channels with rates learn as groups of their own."""
    (ours, kind, theirs), param = RULES[rule], parameter(shape, device)
    rates = shares(shape[3]) if by_channel else None
    optimizer = GridAdam([param], channel_rates=rates if rates is None else rates.to(device), **ours)
    train(optimizer, param)
    assert_all_match(results(optimizer, param), by_torch(kind, shape, rates=rates, **theirs))
    assert optimizer.state[param]["step"].item() == STEPS


def test_the_first_steps_are_exact_for_betas_close_to_one(device):
    shape, betas = (4, 4, 8, 4), (0.9999, 0.999999)
    param = parameter(shape, device)
    optimizer = GridAdam([param], betas=betas)
    train(optimizer, param, range(2))
    assert_all_match(results(optimizer, param), by_torch(torch.optim.Adam, shape, range(2), betas=betas))


@by_channel_or_not
def test_grids_of_all_kinds_share_a_pass(device, by_channel):
    """More grids than a launch takes, with rates of their own, of which some are restricted."""
    grids = [parameter((2 + 5 * (i % 3), 3 + i % 4, 9 + i % 3, 1 + i % 5), device) for i in range(40)]
    before = [grid.detach().clone() for grid in grids]
    rates = [shares(grid.shape[3], device) if by_channel and i % 2 else None for i, grid in enumerate(grids)]
    groups = [
        {"params": [grid], "lr": 0.1 * (1 + i % 3), "channel_rates": own}
        for i, (grid, own) in enumerate(zip(grids, rates, strict=True))
    ]
    optimizer = GridAdam(groups)
    occupied = torch.zeros(4, 4, 4, dtype=torch.bool, device=device)
    occupied[1, 2, 0] = True
    for grid in grids:
        grid.grad = torch.ones_like(grid)
    for grid in grids[::3]:
        optimizer.set_active(grid, occupied)
    with OpRecorder() as recorder:
        optimizer.step()
    assert recorder.names == ["grid_adam_"]
    for group, old, own in zip(groups, before, rates, strict=True):
        (grid,) = group["params"]
        tiles = optimizer.active_tiles(grid)
        mask = torch.ones(grid.shape[:3], dtype=torch.bool) if tiles is None else tile_mask(*tiles, grid.shape[:3])
        change = group["lr"] * (torch.ones(grid.shape[3]) if own is None else own.cpu()) * mask[..., None]
        torch.testing.assert_close(grid.detach().cpu(), old.cpu() - change)
        assert torch.equal(grid.grad.cpu(), (~mask)[..., None].expand(grid.shape).float())


def test_parameters_without_gradient_are_left_alone(device):
    param = parameter((3, 3, 3, 2), device)
    before = param.detach().clone()
    optimizer = GridAdam([param])
    optimizer.step()
    assert torch.equal(param.detach(), before)
    assert not optimizer.state


def test_a_closure_is_run_and_its_loss_returned(device):
    param = parameter((3, 3, 3, 2), device)
    before = param.detach().clone()

    def closure():
        loss = param.square().sum()
        loss.backward()
        return loss

    loss = GridAdam([param], lr=0.1).step(closure)
    torch.testing.assert_close(loss, before.square().sum())
    torch.testing.assert_close(param.detach(), before - 0.1 * before.sign(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_torch_schedulers_drive_the_rate(device, as_tensor):
    ours, theirs = parameter((3, 4, 9, 4), device), torch.nn.Parameter(parameter((3, 4, 9, 4), "cpu").detach().double())
    rate = torch.tensor([0.1], device=device) if as_tensor else 0.1
    optimizers = [(GridAdam([ours], lr=rate), ours), (torch.optim.Adam([theirs], lr=0.1), theirs)]
    for optimizer, param in optimizers:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for step in range(6):
            param.grad = gradients(param.shape, step).to(param.device, param.dtype)
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(ours.detach().cpu().double(), theirs.detach(), rtol=1e-5, atol=1e-5)


def test_training_with_moments_in_16_bits_is_close(device):
    shape, target = (6, 5, 9, 4), parameter((6, 5, 9, 4), device).detach()
    reached = {}
    for moments in (torch.float32, torch.bfloat16):
        param = torch.nn.Parameter(torch.zeros(shape, device=device))
        optimizer = GridAdam([param], lr=0.05, betas=(0.9, 0.99), bfloat16_moments=moments == torch.bfloat16)
        for step in range(200):
            optimizer.param_groups[0]["lr"] = 0.05 * 0.98**step
            param.grad = param.detach() - target + 0.5 * gradients(shape, 5 * step + 2).to(device)
            optimizer.step()
        assert optimizer.state[param]["exp_avg_sq"].dtype == moments
        reached[moments] = (param.detach() - target).norm() / target.norm()
    assert reached[torch.bfloat16] < 1.05 * reached[torch.float32] < 0.2


def test_one_channel_with_a_gradient_touches_the_vertex(device):
    param = parameter((4, 4, 8, 12), device)
    optimizer = GridAdam([param], skip_untouched=True)
    train(optimizer, param, range(1))
    before = optimizer.state[param]["exp_avg"].clone()
    param.grad.zero_()
    param.grad[1, 2, 3, 11] = 1.0
    param.grad[0, 0, 0] = -0.0
    optimizer.step()
    moved = (optimizer.state[param]["exp_avg"] != before).nonzero().cpu()
    assert moved.tolist() == [[1, 2, 3, c] for c in range(12)]


def test_a_gradient_that_is_not_a_number_counts_as_touched(device):
    param = parameter((2, 2, 2, 4), device)
    param.grad = torch.zeros_like(param)
    param.grad[1, 1, 1, 2] = float("nan")
    GridAdam([param], skip_untouched=True).step()
    assert param.detach().isnan().nonzero().tolist() == [[1, 1, 1, 2]]


def test_vertices_that_are_not_in_the_table_stay(device):
    param = parameter((3, 5, 20, 4), device)
    before = param.detach().clone()
    table = torch.zeros(3, 5, dtype=torch.int32, device=device)
    table[0, 0], table[1, 2], table[2, 0] = 1 << 4, 1 << 30, -(2**31)
    grad, moments = torch.ones_like(param), [torch.zeros_like(param) for _ in range(2)]
    options = {"touched": [table], "skip_untouched": True, "clear_grad": True}
    grid_adam_([param], [moments[0]], [moments[1]], [grad], [0.1], [1], **options)
    moved = torch.zeros(300, dtype=torch.bool)
    moved[[4, 128 + 2 * 32 + 30, 256 + 31]] = True
    assert torch.equal((param.detach() != before).all(-1).view(-1).cpu(), moved)
    assert torch.equal((grad == 0).all(-1).view(-1).cpu(), moved)


# --- active tiles


BEYOND = [-1, tile_id(3, 0, 0), tile_id(0, 3, 0), tile_id(0, 0, 2), 2**31 - 1, -(2**31)]


@pytest.mark.parametrize(
    ("ids", "count", "moved"),
    [([0, tile_id(2, 2, 1)], count, min(max(count, 0), 2)) for count in (-3, 0, 1000)] + [(BEYOND, len(BEYOND), 0)],
    ids=["a negative count", "none", "a count beyond the list", "ids beyond the grid"],
)
def test_lists_are_read_within_bounds_and_reach_the_grid_only(device, ids, count, moved):
    param, *others = (array for array in arrays_of((9, 9, 9, 4), device))
    before = param.clone()
    ids, counts = torch.tensor(ids, dtype=INT, device=device), torch.tensor([count], dtype=INT, device=device)
    grid_adam_([param], *([other] for other in others), [0.1], [1], tiles=[ids], tile_counts=[counts])
    assert torch.equal((param != before).all(-1).cpu(), tile_mask(ids, moved, (9, 9, 9)))


@pytest.mark.parametrize(
    ("cells", "resolution"),
    [((4, 4, 4), (9, 17, 33)), ((5, 3, 7), (13, 29, 9)), ((50, 60, 70), (9, 9, 30)), ((2, 2, 2), (1, 2, 40))],
    ids=str,
)
def test_every_vertex_that_a_sample_can_touch_is_listed(device, cells, resolution):
    occupied = torch.rand(cells, device=device) < 0.08
    occupied.view(-1)[-1] = True
    ids, count = active_tiles(occupied, resolution)
    mask = tile_mask(ids, count, resolution)
    # Samples in occupied cells, many of them on faces and corners.
    which = occupied.nonzero().repeat_interleave(300, dim=0)
    fraction = torch.rand(which.shape, device=device)
    fraction = torch.where(torch.rand_like(fraction) < 0.3, fraction.round(), fraction)
    points = (which + fraction) / torch.tensor(cells, device=device)
    grid = torch.zeros(*resolution, 1, device=device, requires_grad=True)
    sample_trilinear(grid, points).sum().backward()
    touched = (grid.grad != 0).any(-1).cpu()
    assert touched.any()
    assert not (touched & ~mask).any()


def test_lists_are_exact_for_cells_of_whole_tiles(device):
    # 33 vertices: 32 intervals, of which a cell of a quarter has 8; a tile has 8 vertices along z, 4 along x and y.
    occupied = torch.zeros(4, 4, 4, dtype=torch.bool, device=device)
    occupied[1, 0, 2] = True
    ids, count = active_tiles(occupied, (33, 33, 33))
    # Vertices 8..16, 0..8 and 16..24, one more on each side for the faces.
    expected = [tile_id(*tile) for tile in itertools.product(range(1, 5), range(0, 3), range(1, 4))]
    assert listed(ids, count) == expected


@pytest.mark.parametrize(
    ("cells", "resolution"), [((9, 8, 7), (30, 40, 50)), ((64, 64, 64), (300, 290, 310)), ((3, 3, 3), (4, 4, 8))]
)
def test_lists_ascend_and_are_the_same_in_every_run(device, cells, resolution):
    occupied = torch.rand(cells, device=device) < 0.02
    ids, count = active_tiles(occupied, resolution)
    first = listed(ids, count)
    assert first == sorted(set(first))
    assert set(first) == set(listed(*(x.cpu() for x in active_tiles(occupied.cpu(), resolution))))
    for _ in range(3):
        assert listed(*active_tiles(occupied, resolution)) == first


@pytest.mark.parametrize("cells", [(3, 3, 3), (200, 1, 90)], ids=str)
def test_no_cell_and_every_cell(device, cells):
    for value in (False, True):
        ids, count = active_tiles(torch.full(cells, value, device=device), (10, 10, 10))
        assert listed(ids, count) == (every_tile((10, 10, 10)) if value else [])


def test_lists_are_written_into_the_buffers_given(device):
    buffers = active_tiles(torch.ones(2, 2, 2, dtype=torch.bool, device=device), (20, 20, 20))
    occupied = torch.zeros(2, 2, 2, dtype=torch.bool, device=device)
    occupied[1, 1, 1] = True
    fresh = active_tiles(occupied, (20, 20, 20))
    written = active_tiles(occupied, (20, 20, 20), out=buffers)
    assert all(a is b for a, b in zip(written, buffers, strict=True))
    assert listed(*written) == listed(*fresh)


# --- working copies, state


@pytest.mark.parametrize("way", ["load_state_dict", "deepcopy"])
@by_channel_or_not
@pytest.mark.parametrize("narrow", [False, True])
def test_training_goes_on_with_a_saved_state_and_with_a_copy(device, narrow, by_channel, way):
    shape = (5, 4, 9, 4)
    param, rates = parameter(shape, device), shares(4, device) if by_channel else None
    optimizer = GridAdam(
        [param], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, channel_rates=rates, bfloat16_moments=narrow
    )
    train(optimizer, param, range(5))
    if way == "deepcopy":
        other = copy.deepcopy(optimizer)
        (resumed,) = other.param_groups[0]["params"]
    else:
        resumed, present = torch.nn.Parameter(param.detach().clone()), torch.ones(4, device=device)
        other = GridAdam([resumed], lr=3.0, channel_rates=present if by_channel else None)
        state = copy.deepcopy(optimizer.state_dict())
        if by_channel:  # as from a checkpoint that was loaded on the CPU
            state["param_groups"][0]["channel_rates"] = state["param_groups"][0]["channel_rates"].cpu()
        other.load_state_dict(state)
        # Captured graphs read the tensor that there was.
        assert not by_channel or other.param_groups[0]["channel_rates"] is present
    for one, p in ((optimizer, param), (other, resumed)):
        train(one, p, range(5, 8))
    assert other.param_groups[0]["weight_decay"] == 0.1
    assert other.state[resumed]["exp_avg"].dtype == (torch.bfloat16 if narrow else torch.float32)
    assert other.state[resumed]["step"].device.type == device.type
    assert all(torch.equal(a, b) for a, b in zip(results(optimizer, param), results(other, resumed), strict=True))
    fresh = GridAdam([parameter(shape, device)])
    fresh.load_state_dict(optimizer.state_dict())
    assert by_channel == (fresh.param_groups[0]["channel_rates"] is not None)


def test_tiles_and_copies_of_a_resized_grid_must_be_set_again(device):
    grid = VoxelGrid((5, 6, 7), 4, BOX, fill=1.0, device=device)
    cells = torch.ones(2, 2, 2, dtype=torch.bool, device=device)
    optimizer = GridAdam([grid.features])
    optimizer.set_working(grid.features, torch.zeros_like(grid.features, dtype=torch.float16))
    optimizer.set_active(grid.features, cells)
    grid.upsample((9, 11, 13), optimizer)
    grid.features.grad = torch.ones_like(grid.features)
    with pytest.raises(ValueError, match="call set_active again"):
        optimizer.step()
    optimizer.set_active(grid.features, cells)
    with pytest.raises(ValueError, match="call set_working again"):
        optimizer.step()
    working = torch.zeros_like(grid.features, dtype=torch.float16)
    optimizer.set_working(grid.features, working)
    assert torch.equal(working, grid.features.detach().half())
    optimizer.step()
    assert torch.equal(working, grid.features.detach().half())
    assert working.ne(0).all()


@pytest.mark.parametrize("options", [{}, {"skip_untouched": True}, {"clear_grad": False}], ids=str)
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_scale_is_divided_out_and_an_overflow_only_clears_gradients(device, options, by_channel):
    shape = (9, 6, 20, 3)
    rates = torch.rand(shape[-1], device=device) if by_channel else None
    found = []
    for scale in (None, 1024.0):
        param = parameter(shape, device)
        optimizer = GridAdam([param], lr=0.1, l2_penalty=0.1, channel_rates=rates, **options)
        optimizer.set_active(param, torch.arange(8, device=device).view(2, 2, 2) == 5)
        working = torch.empty_like(param, dtype=torch.float16)
        optimizer.set_working(param, working)
        for step in range(3):
            param.grad = gradients(shape, step, sparse=True).to(device)
            if scale is not None:
                param.grad *= scale
                optimizer.grad_scale = torch.tensor(scale, device=device)
                optimizer.found_inf = torch.tensor(float(step == 1), device=device)
                if step == 1:  # also outside of the active tiles
                    param.grad[:, 0] = float("inf")
            elif step == 1:
                continue
            optimizer.step()
            if step == 1:
                assert param.grad.eq(0).all() == (optimizer.defaults["clear_grad"])
        found.append([*results(optimizer, param), working, optimizer.state[param]["step"]])
    torch.testing.assert_close(*found, rtol=0, atol=0)


# --- CPU and CUDA, graphs, compilers


@pytest.mark.cuda
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_captured_step_follows_rates_shares_and_tiles(by_channel):
    shape, resolution = (17, 18, 33, 4), (17, 18, 33)
    made = []
    for captured in (False, True):
        param = parameter(shape, "cuda")
        param.grad = torch.zeros_like(param)
        rates = torch.ones(4, device="cuda")
        lr = torch.tensor(0.5, device="cuda")
        optimizer = GridAdam([param], lr=lr, channel_rates=rates if by_channel else None)
        working = torch.zeros_like(param, dtype=torch.float16)
        optimizer.set_working(param, working)
        occupied = torch.ones(4, 4, 4, dtype=torch.bool, device="cuda")
        optimizer.set_active(param, occupied)
        weights = torch.ones(3, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            optimizer.step()

            def step(optimizer=optimizer, param=param, weights=weights):
                optimizer.add_total_variation(param, weights)
                optimizer.step()

            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    step()
                step = graph.replay
            for i in range(8):
                lr.fill_(learning_rate(i))
                weights.fill_(0.1 * i)
                rates[1:].fill_(0.2 * i)
                if i % 3 == 1:
                    generator = torch.Generator().manual_seed(i)
                    optimizer.set_active(param, (torch.rand(4, 4, 4, generator=generator) < 0.2).cuda())
                    mask = tile_mask(*optimizer.active_tiles(param), resolution)
                    assert mask.any()
                    assert not mask.all()
                param.grad.copy_(gradients(shape, i))
                step()
        stream.synchronize()
        assert optimizer.state[param]["step"].item() == 9
        made.append([*results(optimizer, param), working.cpu()])
    torch.testing.assert_close(*made, rtol=0, atol=0)


@pytest.mark.cuda
def test_tiles_are_listed_under_capture():
    occupied = torch.zeros(8, 8, 8, dtype=torch.bool, device="cuda")
    buffers = active_tiles(occupied, (20, 21, 40))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        active_tiles(occupied, (20, 21, 40), out=buffers)
    occupied[2, 3, 4] = True
    graph.replay()
    assert listed(*buffers) == listed(*active_tiles(occupied, (20, 21, 40)))
    assert int(buffers[1]) > 0


@pytest.mark.cuda
def test_state_is_not_made_during_capture():
    param = parameter((4, 4, 4, 4), "cuda")
    param.grad = torch.zeros_like(param)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="must have taken a step"), torch.cuda.graph(graph):
        GridAdam([param], lr=torch.full((1,), 0.1, device="cuda")).step()


# --- refusals


def made(values=None, **options):
    """A GridAdam of one parameter."""
    values = torch.ones(2, 2, 2, 1) if values is None else values
    return GridAdam([torch.nn.Parameter(values)], **options)


def use(method, *arguments):
    optimizer = made()
    getattr(optimizer, method)(optimizer.param_groups[0]["params"][0], *arguments)


def op(device, shape=(3, 5, 20, 4), grids=1, **options):
    """Calls the op with one thing that does not fit."""
    arrays = [[torch.ones(shape, device=device) for _ in range(grids)] for _ in range(4)]
    if options.pop("narrow_first_moment", False):
        arrays[1] = [array.bfloat16() for array in arrays[1]]
    grid_adam_(*arrays, [0.1] * grids, [1] * grids, **options)


def half_copies(device, *dtypes):
    return [torch.zeros(3, 5, 20, 4, dtype=dtype, device=device) for dtype in dtypes]


NAN, HALF = float("nan"), torch.float16
TWO_SHARES = GridAdam([torch.ones(2, 2, 2, 2)], channel_rates=torch.ones(2)).state_dict()
CELLS = torch.ones(2, 2, 2, dtype=torch.bool)
TABLE, COUNT = torch.zeros(3, 5, dtype=INT), torch.zeros(1, dtype=INT)
REFUSED = {
    ValueError: [
        (lambda _: made(betas=(0.9, 1.0)), "betas must be two numbers in"),
        (lambda _: made(betas=(0.9, 0.999), bfloat16_moments=True), r"betas must be at most 0.99 .* \(0.9, 0.999\)"),
        (lambda _: made(eps=-1.0), "eps must be finite and not negative, got -1.0"),
        (lambda _: made(weight_decay=NAN), "weight_decay must be finite and not negative"),
        (lambda _: made(l2_penalty=-0.5), "l2_penalty must be finite and not negative, got -0.5"),
        (lambda _: made(lr=-1.0), "lr must be finite and not negative, got -1.0"),
        (lambda _: made(lr=torch.zeros(2)), r"lr must be a number or a tensor of one element, got shape \(2,\)"),
        (lambda _: made(lr=torch.zeros(1, device="meta")), "lr must be on the device of params"),
        (lambda _: made(channel_rates=-torch.ones(1)), r"channel_rates must be finite and not negative, got \[-1.0\]"),
        (lambda _: made(channel_rates=torch.tensor([math.inf])), "channel_rates must be finite"),
        (lambda _: made(channel_rates=torch.ones(2)), r"channel_rates must have shape \(1\) for params of shape"),
        (lambda _: made().load_state_dict(TWO_SHARES), r"channel_rates must have shape \(1\)"),
        (lambda _: made(torch.zeros(2, 2)), r"params must have shape \(X, Y, Z, C\), got \(2, 2\)"),
        (lambda _: made(torch.zeros(2, 3, 4, 5).permute(3, 2, 1, 0)), "params must be contiguous"),
        (lambda _: made().set_active(torch.zeros(2, 2, 2, 1), CELLS), "param must be a parameter of this optimizer"),
        (lambda _: use("add_total_variation", 1.0), "param must have a gradient"),
    ],
    TypeError: [
        (lambda _: made(torch.zeros(2, 2, 2, 1, dtype=HALF)), "params must be float32"),
        (lambda _: use("set_working", torch.ones(2, 2, 2, 1)), "working must be float16 or bfloat16"),
    ],
    RuntimeError: [
        (lambda d: op(d, narrow_first_moment=True), "exp_avg_sqs must"),
        (lambda d: op(d, touched=[TABLE[:2].to(d)], skip_untouched=True), r"must have shape \(3, 5\), got \(2, 5\)"),
        (lambda d: op(d, touched=[TABLE.to(d)]), "given with skip_untouched"),
        (lambda d: op(d, grids=2, working=half_copies(d, *[HALF] * 3)), "as many tensors for each of 2 params"),
        (lambda d: op(d, grids=2, working=half_copies(d, *[HALF] * 18)), "at most 8, got 18"),
        (lambda d: op(d, working=half_copies(d, HALF, torch.bfloat16)), "one dtype"),
        (lambda _: active_tiles(CELLS, (4, 4097, 9), (torch.zeros(2050, dtype=INT), COUNT)), "1 to 4096, got 4097"),
        (lambda _: active_tiles(CELLS, (4, 4, 9), (torch.zeros(3, dtype=INT), COUNT)), r"shape \(2\), got \(3\)"),
    ],
}


@pytest.mark.parametrize(
    ("call", "error", "message"), [(call, error, text) for error, rows in REFUSED.items() for call, text in rows]
)
def test_refusals(device, call, error, message):
    with pytest.raises(error, match=message):
        call(device)
