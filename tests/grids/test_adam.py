"""GridAdam, the ops that it is made of, and the lists of tiles that they visit."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from op_testing import OpRecorder, threads
from tolerances import assert_matches

from voxelfield import VoxelGrid, _library
from voxelfield.grids.adam import GridAdam
from voxelfield.ops import sample_trilinear
from voxelfield.ops._internal.optim import (
    active_tiles,
    grid_adam_,
    grid_total_variation_grad_,
    tiles_along,
    touched_vertices,
)

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
# One value; odd sizes; tiles cut by every face; several vectors a vertex; more vectors than a warp has lanes.
SHAPES = [(1, 1, 1, 1), (3, 2, 5, 3), (9, 6, 20, 4), (5, 4, 8, 28), (4, 5, 9, 6), (2, 3, 9, 33), (2, 2, 9, 140)]
CUT_SHAPES = [(9, 6, 20, 4), (13, 9, 17, 1), (5, 8, 9, 33)]  # cut by the grid's faces
TILE = (4, 4, 8)  # vertices along x, y, z
STEPS = 24


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


def train(optimizer, param, steps=range(STEPS), sparse=False):
    for step in steps:
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        grad = gradients(param.shape, step, sparse)
        if param.grad is None:
            param.grad = grad.to(param.device, param.dtype)
        else:
            param.grad.copy_(grad)
        optimizer.step()


def reference(kind, shape, steps=range(STEPS), **options):
    """The parameter and its moments, by torch's optimizer in float64."""
    param = torch.nn.Parameter(parameter(shape, "cpu").detach().double())
    optimizer = kind([param], **options)
    train(optimizer, param, steps)
    state = optimizer.state[param]
    return param.detach(), state["exp_avg"], state["exp_avg_sq"]


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


# --- the same steps as torch's


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_are_those_of_torch_adam(device, shape):
    param = parameter(shape, device)
    optimizer = GridAdam([param], betas=(0.8, 0.97), eps=1e-6)
    train(optimizer, param)
    assert_all_match(results(optimizer, param), reference(torch.optim.Adam, shape, betas=(0.8, 0.97), eps=1e-6))
    assert optimizer.state[param]["step"].item() == STEPS


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        ({"weight_decay": 0.3}, {"weight_decay": 0.3}, torch.optim.AdamW),
        ({"l2_penalty": 0.3}, {"weight_decay": 0.3}, torch.optim.Adam),
        ({"betas": (0.0, 0.999), "eps": 1e-15}, {"betas": (0.0, 0.999), "eps": 1e-15}, torch.optim.Adam),
    ],
    ids=str,
)
def test_options_are_those_of_torch(device, ours, theirs, kind):
    shape = (5, 6, 9, 4)
    param = parameter(shape, device)
    optimizer = GridAdam([param], **ours)
    train(optimizer, param)
    assert_all_match(results(optimizer, param), reference(kind, shape, **theirs))


def test_the_first_steps_are_exact_for_betas_close_to_one(device):
    shape, betas = (4, 4, 8, 4), (0.9999, 0.999999)
    param = parameter(shape, device)
    optimizer = GridAdam([param], betas=betas)
    train(optimizer, param, range(2))
    assert_all_match(results(optimizer, param), reference(torch.optim.Adam, shape, range(2), betas=betas))


def test_groups_have_rates_of_their_own_and_share_a_pass(device):
    grids = [parameter((n, n, n, 4), device) for n in (3, 5, 9)]
    before = [grid.detach().clone() for grid in grids]
    optimizer = GridAdam([{"params": [grid], "lr": 0.1 * (i + 1)} for i, grid in enumerate(grids)], betas=(0.9, 0.99))
    for grid in grids:
        grid.grad = torch.ones_like(grid)
    with OpRecorder() as recorder:
        optimizer.step()
    assert recorder.names == ["grid_adam_"]
    for i, (grid, old) in enumerate(zip(grids, before, strict=True)):
        torch.testing.assert_close(grid.detach(), old - 0.1 * (i + 1))


def test_more_grids_than_a_launch_takes(device):
    grids = [parameter((2, 3, 4, 1 + i % 5), device) for i in range(40)]
    optimizer = GridAdam(grids, lr=0.1)
    before = [grid.detach().clone() for grid in grids]
    for grid in grids:
        grid.grad = torch.ones_like(grid)
    optimizer.step()
    for grid, old in zip(grids, before, strict=True):
        torch.testing.assert_close(grid.detach(), old - 0.1)


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


@pytest.mark.parametrize("counter", [torch.float32, torch.int64], ids=str)
def test_the_op_takes_numbers_and_tensors(device, counter):
    made = []
    for lr, step in ((0.1, 3), (torch.tensor([0.1], device=device), torch.tensor([3], device=device, dtype=counter))):
        param, grad = parameter((4, 3, 9, 4), device), gradients((4, 3, 9, 4), 0).to(device)
        moments = torch.full_like(param, 0.5), torch.full_like(param, 0.25)
        grid_adam_([param], [moments[0]], [moments[1]], [grad], [lr], [step], betas=(0.9, 0.99))
        made.append([param.detach(), *moments])
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("by_channel", [False, True])
def test_memory_that_no_vector_fits(device, by_channel):
    shape = (3, 4, 9, 4)
    storage = torch.zeros(4 * 9 * 48 + 5, device=device)
    arrays = [storage[i * 432 + i : (i + 1) * 432 + i].view(shape) for i in range(4)]
    arrays[0].copy_(parameter(shape, device).detach())
    arrays[3].copy_(gradients(shape, 0))
    rates = [torch.ones(5, device=device)[1:]] if by_channel else None
    grid_adam_(*([x] for x in arrays), [learning_rate(0)], [1], channel_rates=rates)
    expected = reference(torch.optim.Adam, shape, range(1))
    assert_all_match([x.cpu() for x in arrays[:3]], expected)


# --- moments in 16 bits


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("restriction", ["none", "untouched", "tiles"])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_computes_in_float32_and_rounds_moments(device, shape, offset, restriction, by_channel):
    ids, count = random_tiles(shape[:3], device) if restriction == "tiles" else (None, None)
    made = []
    for dtype in (torch.bfloat16, torch.float32):
        grad = gradients(shape, 0, sparse=True).to(device)
        moments = []
        for seed in (3, 4):
            values = gradients(shape, seed).abs().bfloat16().to(device, dtype)
            storage = torch.zeros(values.numel() + offset, dtype=dtype, device=device)
            moments.append(storage[offset:].view(shape).copy_(values))
        arrays = [parameter(shape, device).detach(), *moments, grad]
        grid_adam_(
            *([array] for array in arrays),
            [0.1],
            [5],
            tiles=[ids],
            tile_counts=[count],
            channel_rates=[shares(shape[3], device)] if by_channel else None,
            skip_untouched=restriction == "untouched",
            clear_grad=True,
        )
        made.append([arrays[0], *(moment.bfloat16() for moment in moments), grad])
    for name, narrow, wide in zip(("parameter", "first", "second", "gradient"), *made, strict=True):
        assert torch.equal(narrow, wide), name


def test_moments_of_two_dtypes_are_refused(device):
    arrays = [torch.zeros(2, 2, 2, 4, device=device) for _ in range(4)]
    arrays[1] = arrays[1].bfloat16()
    with pytest.raises(RuntimeError, match="exp_avg_sqs must"):
        grid_adam_(*([array] for array in arrays), [0.1], [1])


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


@pytest.mark.parametrize("change", ["upsample", "refit"])
def test_moments_in_16_bits_follow_a_resized_grid(device, change):
    found = []
    for moments in (torch.float32, torch.bfloat16):
        grid = VoxelGrid((5, 6, 7), 4, BOX, init_std=0.0, device=device)
        optimizer = GridAdam([grid.features], lr=0.05, betas=(0.9, 0.99), bfloat16_moments=moments == torch.bfloat16)
        grid.features.grad = gradients(grid.features.shape, 0).to(device)
        optimizer.step()
        if change == "upsample":
            grid.upsample((9, 11, 13), optimizer)
        else:
            grid.refit(((-0.4, -0.4, -0.4), (0.6, 0.6, 0.6)), 5, optimizer)
        state = optimizer.state[grid.features]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == moments
        found.append([state["exp_avg"].float(), state["exp_avg_sq"].float()])
    for narrow, wide in zip(*found, strict=True):
        torch.testing.assert_close(narrow, wide, rtol=0.01, atol=0.01 * float(wide.abs().max()))


# --- channels that do not learn alike


def shares(channels, device="cpu"):
    """A factor for each channel; the last learns nothing."""
    rates = torch.rand(channels, generator=torch.Generator().manual_seed(7)) * 2
    rates[-1] = 0
    return rates.to(device)


def reference_by_channel(kind, shape, rates, **options):
    """As :func:`reference`, each channel in a group of its own."""
    whole = parameter(shape, "cpu").detach().double()
    channels = [torch.nn.Parameter(values.contiguous()) for values in whole.unbind(-1)]
    optimizer = kind([{"params": [channel]} for channel in channels], **options)
    for step in range(STEPS):
        grad = gradients(shape, step).double()
        for c, (channel, group) in enumerate(zip(channels, optimizer.param_groups, strict=True)):
            group["lr"] = learning_rate(step) * float(rates[c])
            channel.grad = grad[..., c].contiguous()
        optimizer.step()
    states = [optimizer.state[channel] for channel in channels]
    moments = [torch.stack([state[name] for state in states], dim=-1) for name in ("exp_avg", "exp_avg_sq")]
    return torch.stack([channel.detach() for channel in channels], dim=-1), *moments


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        ({}, {}, torch.optim.Adam),
        ({"weight_decay": 0.3}, {"weight_decay": 0.3}, torch.optim.AdamW),
        ({"l2_penalty": 0.3}, {"weight_decay": 0.3}, torch.optim.Adam),
    ],
    ids=str,
)
def test_channels_learn_as_groups_of_their_own(device, shape, ours, theirs, kind):
    rates, param = shares(shape[3]), parameter(shape, device)
    optimizer = GridAdam([param], channel_rates=rates.to(device), **ours)
    train(optimizer, param)
    assert_all_match(results(optimizer, param), reference_by_channel(kind, shape, rates, **theirs))
    assert torch.equal(param.detach()[..., -1].cpu(), parameter(shape, "cpu").detach()[..., -1])


@pytest.mark.parametrize("restriction", ["none", "untouched", "tiles"])
@pytest.mark.parametrize("shape", [(9, 6, 20, 4), (5, 4, 8, 28), (4, 5, 9, 6), (2, 2, 9, 140)], ids=str)
def test_shares_of_one_change_nothing(device, shape, restriction):
    made = []
    occupied = torch.zeros(2, 2, 2, dtype=torch.bool, device=device)
    occupied[0, 1, 0] = True
    for rates in (None, torch.ones(shape[3], device=device)):
        param = parameter(shape, device)
        options = {"weight_decay": 0.1, "skip_untouched": restriction == "untouched"}
        optimizer = GridAdam([param], channel_rates=rates, **options)
        working = torch.zeros_like(param, dtype=torch.float16)
        optimizer.set_working(param, working)
        if restriction == "tiles":
            optimizer.set_active(param, occupied)
        train(optimizer, param, range(3), sparse=True)
        assert torch.equal(working, param.detach().half())
        made.append([*results(optimizer, param), param.grad.cpu()])
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_grids_with_and_without_shares_in_one_pass(device):
    shapes = [(5, 5, 5, 4), (9, 6, 20, 28), (4, 4, 4, 3)]
    grids = [parameter(shape, device) for shape in shapes]
    before = [grid.detach().clone() for grid in grids]
    rates = [None, shares(28, device), shares(3, device)]
    groups = [{"params": [grid], "channel_rates": own} for grid, own in zip(grids, rates, strict=True)]
    optimizer = GridAdam(groups, lr=0.1)
    for grid in grids:
        grid.grad = torch.ones_like(grid)
    with OpRecorder() as recorder:
        optimizer.step()
    assert recorder.names == ["grid_adam_"]
    for grid, old, own in zip(grids, before, rates, strict=True):
        torch.testing.assert_close(grid.detach(), old - 0.1 * (1 if own is None else own))


def test_shares_are_part_of_the_state(device):
    shape = (5, 4, 9, 4)
    params = [parameter(shape, device) for _ in range(2)]
    optimizers = [GridAdam([params[0]], channel_rates=shares(4, device)), GridAdam([params[1]])]
    train(optimizers[0], params[0], range(3))
    with torch.no_grad():
        params[1].copy_(params[0])
    state = copy.deepcopy(optimizers[0].state_dict())
    # from a checkpoint that was loaded on the CPU
    state["param_groups"][0]["channel_rates"] = state["param_groups"][0]["channel_rates"].cpu()
    optimizers[1].load_state_dict(state)
    for optimizer, param in zip(optimizers, params, strict=True):
        train(optimizer, param, range(3, 6))
    for a, b in zip(results(optimizers[0], params[0]), results(optimizers[1], params[1]), strict=True):
        assert torch.equal(a, b)
    twin = copy.deepcopy(optimizers[0])
    assert torch.equal(twin.param_groups[0]["channel_rates"], shares(4, device))


def test_loading_writes_into_the_shares_that_there_are(device):
    param, own = parameter((3, 3, 3, 4), device), torch.ones(4, device=device)
    optimizer = GridAdam([param], lr=0.1, channel_rates=own)
    optimizer.load_state_dict(GridAdam([parameter((3, 3, 3, 4), "cpu")], channel_rates=shares(4)).state_dict())
    assert optimizer.param_groups[0]["channel_rates"] is own
    assert torch.equal(own.cpu(), shares(4))


def test_shares_that_fit_no_grid_are_not_loaded():
    state = GridAdam([parameter((3, 3, 3, 4), "cpu")], channel_rates=shares(4)).state_dict()
    with pytest.raises(ValueError, match=r"channel_rates must have shape \(2\)"):
        GridAdam([parameter((3, 3, 3, 2), "cpu")]).load_state_dict(state)


# --- untouched vertices


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_untouched_vertices_are_skipped_moments_and_all(device, shape):
    param = parameter(shape, device)
    optimizer = GridAdam([param], skip_untouched=True, weight_decay=0.1)
    train(optimizer, param, range(3))
    before = results(optimizer, param)
    train(optimizer, param, range(3, 4), sparse=True)
    touched = (gradients(shape, 3, sparse=True) != 0).any(-1)
    expected = reference(torch.optim.AdamW, shape, range(4), weight_decay=0.1)
    for name, now, old, full in zip(("p", "m", "v"), results(optimizer, param), before, expected, strict=True):
        assert torch.equal(now[~touched], old[~touched]), name
        torch.testing.assert_close(now[touched].double(), full[touched], rtol=1e-5, atol=1e-5)


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


def test_momentum_goes_on_without_skipping(device):
    param = parameter((4, 4, 8, 4), device)
    optimizer = GridAdam([param])
    train(optimizer, param, range(2))
    before = param.detach().clone()
    param.grad.zero_()
    optimizer.step()
    assert (param.detach() != before).all()


def test_a_gradient_that_is_not_a_number_counts_as_touched(device):
    param = parameter((2, 2, 2, 4), device)
    param.grad = torch.zeros_like(param)
    param.grad[1, 1, 1, 2] = float("nan")
    GridAdam([param], skip_untouched=True).step()
    assert param.detach().isnan().nonzero().tolist() == [[1, 1, 1, 2]]


# --- active tiles


def random_tiles(resolution, device, fraction=0.5):
    tiles = torch.tensor(every_tile(resolution), dtype=torch.int32)
    count = torch.tensor([int(len(tiles) * fraction)], dtype=torch.int32)
    return tiles[torch.randperm(len(tiles))].to(device), count.to(device)


@pytest.mark.covering
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("skip_untouched", [False, True])
@pytest.mark.parametrize("shape", [*CUT_SHAPES, (6, 7, 30, 6), (5, 8, 9, 140)], ids=str)
def test_only_listed_tiles_move(device, shape, skip_untouched, by_channel):
    ids, count = random_tiles(shape[:3], device)
    mask = tile_mask(ids, count, shape[:3])
    assert mask.any()
    assert not mask.all()
    param = parameter(shape, device)
    state = [torch.full_like(param, 0.1), torch.full_like(param, 0.2)]
    working = torch.full_like(param, 7.0, dtype=torch.float16)
    grad = gradients(shape, 0, sparse=skip_untouched).to(device)
    before = [x.detach().clone() for x in (param, *state, working, grad)]
    everywhere = [x.clone() for x in before]
    options = {"betas": (0.9, 0.99), "clear_grad": True, "skip_untouched": skip_untouched}
    options["channel_rates"] = [shares(shape[3], device)] if by_channel else None
    for (p, m, v, w, g), tiles in ((everywhere, (None, None)), ((param, *state, working, grad), (ids, count))):
        grid_adam_([p], [m], [v], [g], [0.1], [5], working=[w], tiles=[tiles[0]], tile_counts=[tiles[1]], **options)
    for now, old, full in zip((param, *state, working, grad), before, everywhere, strict=True):
        assert torch.equal(now.detach().cpu()[~mask], old.cpu()[~mask])
        assert torch.equal(now.detach().cpu()[mask], full.cpu()[mask])


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *CUT_SHAPES], ids=str)
def test_a_table_of_touched_vertices_replaces_a_look_at_all_gradients(device, shape, lists, by_channel):
    ids, count = random_tiles(shape[:3], device) if lists else (None, None)
    grad = gradients(shape, 0, sparse=True).to(device)
    table = torch.empty(math.ceil(math.prod(shape[:3]) / 128) if ids is None else len(ids), 5, dtype=torch.int32)
    table = table.to(device)
    touched_vertices(grad, table, ids)
    made = []
    for touched in (None, [table]):
        arrays = [parameter(shape, device).detach(), torch.full_like(grad, 0.1), torch.full_like(grad, 0.2)]
        arrays += [grad.clone(), torch.full_like(grad, 7.0, dtype=torch.float16)]
        grid_adam_(
            *([array] for array in arrays[:4]),
            [0.1],
            [5],
            working=[arrays[4]],
            tiles=[ids],
            tile_counts=[count],
            touched=touched,
            channel_rates=[shares(shape[3], device)] if by_channel else None,
            skip_untouched=True,
            clear_grad=True,
        )
        made.append(arrays)
    for with_table, without in zip(*made, strict=True):
        assert torch.equal(with_table, without)


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


def test_a_table_for_another_grid_or_rule_is_refused(device):
    arrays = [[torch.ones(3, 5, 20, 4, device=device)] for _ in range(4)]
    for rows, skips, message in (
        (2, True, r"touched must have shape \(3, 5\), got \(2, 5\)"),
        (3, False, "given with skip_untouched"),
    ):
        table = torch.zeros(rows, 5, dtype=torch.int32, device=device)
        with pytest.raises(RuntimeError, match=message):
            grid_adam_(*arrays, [0.1], [1], touched=[table], skip_untouched=skips)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("copies", [1, 3, 8])
def test_all_copies_of_a_grid_are_written(device, copies, by_channel):
    shapes = [(5, 5, 5, 4), (7, 3, 3, 1), (4, 6, 9, 3)]
    params = [parameter(shape, device).detach() for shape in shapes]
    moments = [[torch.full_like(param, value) for param in params] for value in (0.1, 0.2)]
    working = [torch.zeros_like(param, dtype=torch.float16) for param in params for _ in range(copies)]
    rates = [shares(shape[3], device) for shape in shapes] if by_channel else None
    grads = [gradients(shape, 0).to(device) for shape in shapes]
    grid_adam_(params, *moments, grads, [0.1] * 3, [5] * 3, working=working, channel_rates=rates)
    for index, values in enumerate(working):
        assert torch.equal(values, params[index // copies].half())


@pytest.mark.parametrize(
    ("copies", "message"), [(3, "as many tensors for each of 2 params"), (18, "at most 8, got 18")]
)
def test_another_number_of_copies_is_refused(device, copies, message):
    arrays = [[torch.ones(3, 3, 3, 4, device=device) for _ in range(2)] for _ in range(4)]
    working = [torch.zeros(3, 3, 3, 4, dtype=torch.float16, device=device) for _ in range(copies)]
    with pytest.raises(RuntimeError, match=message):
        grid_adam_(*arrays, [0.1] * 2, [1] * 2, working=working)


def test_copies_of_two_dtypes_are_refused(device):
    arrays = [[torch.ones(3, 3, 3, 4, device=device)] for _ in range(4)]
    working = [torch.zeros(3, 3, 3, 4, dtype=dtype, device=device) for dtype in (torch.float16, torch.bfloat16)]
    with pytest.raises(RuntimeError, match="one dtype"):
        grid_adam_(*arrays, [0.1], [1], working=working)


@pytest.mark.parametrize("count", [-3, 0, 1000])
def test_counts_are_kept_within_the_list(device, count):
    param = parameter((9, 9, 9, 4), device)
    before = param.detach().clone()
    ids = torch.tensor([0, tile_id(2, 2, 1)], dtype=torch.int32, device=device)
    counts = torch.tensor([count], dtype=torch.int32, device=device)
    ones, zeros = torch.ones_like(param), [torch.zeros_like(param) for _ in range(2)]
    grid_adam_([param], [zeros[0]], [zeros[1]], [ones], [0.1], [1], tiles=[ids], tile_counts=[counts])
    expected = tile_mask(ids, min(max(count, 0), 2), (9, 9, 9))
    assert torch.equal((param.detach() != before).all(-1).cpu(), expected)


def test_ids_beyond_the_grid_reach_nothing(device):
    param = parameter((9, 9, 9, 4), device)
    before = param.detach().clone()
    beyond = [-1, tile_id(3, 0, 0), tile_id(0, 3, 0), tile_id(0, 0, 2), 2**31 - 1, -(2**31)]
    ids = torch.tensor(beyond, dtype=torch.int32, device=device)
    count = torch.tensor([len(beyond)], dtype=torch.int32, device=device)
    ones, zeros = torch.ones_like(param), [torch.zeros_like(param) for _ in range(2)]
    grid_adam_([param], [zeros[0]], [zeros[1]], [ones], [0.1], [1], tiles=[ids], tile_counts=[count])
    assert torch.equal(param.detach(), before)


def test_dense_and_restricted_grids_in_one_pass(device):
    shapes = [(5, 5, 5, 4), (12, 9, 20, 4), (17, 13, 33, 4)]
    grids = [parameter(shape, device) for shape in shapes]
    before = [grid.detach().clone() for grid in grids]
    optimizer = GridAdam(grids, lr=0.1)
    occupied = torch.zeros(4, 4, 4, dtype=torch.bool, device=device)
    occupied[1, 2, 0] = True
    for grid in grids[1:]:
        optimizer.set_active(grid, occupied)
    for grid in grids:
        grid.grad = torch.ones_like(grid)
    with OpRecorder() as recorder:
        optimizer.step()
    assert recorder.names == ["grid_adam_"]
    for grid, old in zip(grids, before, strict=True):
        tiles = optimizer.active_tiles(grid)
        mask = torch.ones(grid.shape[:3], dtype=torch.bool) if tiles is None else tile_mask(*tiles, grid.shape[:3])
        torch.testing.assert_close(grid.detach().cpu(), old.cpu() - 0.1 * mask[..., None])
        assert torch.equal(grid.grad.cpu(), (~mask)[..., None].expand(grid.shape).float())


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


# --- working copies and gradients


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_working_copy_is_the_rounded_parameter(device, shape, dtype):
    param = parameter(shape, device)
    with torch.no_grad():
        param[..., 0] *= 1e-6  # subnormal in float16
    optimizer = GridAdam([param])
    working = torch.zeros_like(param, dtype=dtype)
    optimizer.set_working(param, working)
    assert torch.equal(working, param.detach().to(dtype))
    train(optimizer, param, range(3))
    assert torch.equal(working, param.detach().to(dtype))


@pytest.mark.parametrize("clear_grad", [True, False])
@pytest.mark.parametrize("skip_untouched", [True, False])
def test_gradients_are_cleared_on_demand(device, clear_grad, skip_untouched):
    param = parameter((5, 4, 9, 6), device)
    optimizer = GridAdam([param], clear_grad=clear_grad, skip_untouched=skip_untouched)
    grad = gradients(param.shape, 0, sparse=True).to(device)
    param.grad = grad.clone()
    optimizer.step()
    assert torch.equal(param.grad, torch.zeros_like(grad) if clear_grad else grad)


# --- total variation


def objective(grid, weights, delta):
    total = 0
    for axis, weight in enumerate(weights):
        difference = grid.diff(dim=axis)
        if difference.numel():
            cost = difference.square()
            if delta is not None:
                cost = torch.where(difference.abs() > delta, 2 * delta * difference.abs() - delta**2, cost)
            total = total + weight * cost.mean()
    return total


@pytest.mark.parametrize("delta", [None, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_total_variation_is_the_gradient_of_its_formula(device, shape, delta):
    weights = (0.5, 2.0, 3.0)
    leaf = parameter(shape, "cpu").detach().double().requires_grad_()
    value = objective(leaf, weights, delta)
    expected = torch.autograd.grad(value, leaf)[0] if torch.is_tensor(value) else torch.zeros_like(leaf)
    start = gradients(shape, 1)
    grad = start.to(device, copy=True)
    grid_total_variation_grad_(grad, parameter(shape, device), weights, delta=delta)
    assert_matches(grad.cpu(), start.double() + expected)


def test_total_variation_is_that_of_voxel_grid(device):
    grid = VoxelGrid((5, 6, 9), 4, BOX, init_std=1.0, device=device)
    (expected,) = torch.autograd.grad(grid.total_variation((1.0, 2.0, 3.0)), grid.features)
    grad = torch.zeros_like(grid.features)
    grid_total_variation_grad_(grad, grid.features, torch.tensor([1.0, 2.0, 3.0], device=device))
    assert_matches(grad, expected.double())


@pytest.mark.parametrize("shape", CUT_SHAPES, ids=str)
def test_total_variation_in_listed_tiles_only(device, shape):
    ids, count = random_tiles(shape[:3], device)
    mask = tile_mask(ids, count, shape[:3])
    param, start = parameter(shape, device), gradients(shape, 1)
    everywhere, listed = start.to(device, copy=True), start.to(device, copy=True)
    grid_total_variation_grad_(everywhere, param, 2.0)
    grid_total_variation_grad_(listed, param, 2.0, tiles=ids, tile_count=count)
    assert torch.equal(listed.cpu()[~mask], start[~mask])
    torch.testing.assert_close(listed.cpu()[mask], everywhere.cpu()[mask])
    assert not torch.equal(everywhere.cpu()[mask], start[mask])


def test_the_optimizer_adds_total_variation_where_it_is_active(device):
    param = parameter((9, 9, 17, 4), device)
    optimizer = GridAdam([param])
    with pytest.raises(ValueError, match="param must have a gradient"):
        optimizer.add_total_variation(param, 1.0)
    occupied = torch.zeros(2, 2, 2, dtype=torch.bool, device=device)
    occupied[0, 0, 0] = True
    optimizer.set_active(param, occupied)
    param.grad = torch.zeros_like(param)
    optimizer.add_total_variation(param, (1.0, 2.0, 3.0), delta=0.3)
    mask = tile_mask(*optimizer.active_tiles(param), (9, 9, 17))
    expected = torch.zeros_like(param)
    grid_total_variation_grad_(expected, param, (1.0, 2.0, 3.0), delta=0.3)
    torch.testing.assert_close(param.grad.cpu(), expected.cpu() * mask[..., None])


# --- state


@pytest.mark.parametrize("narrow", [False, True])
def test_state_survives_saving_and_loading(device, narrow):
    shape = (5, 4, 9, 4)
    param, resumed = parameter(shape, device), parameter(shape, device)
    optimizer = GridAdam([param], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, bfloat16_moments=narrow)
    train(optimizer, param, range(5))
    other = GridAdam([resumed], lr=3.0)
    with torch.no_grad():
        resumed.copy_(param)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, p in ((optimizer, param), (other, resumed)):
        train(one, p, range(5, 8))
    assert other.param_groups[0]["weight_decay"] == 0.1
    assert other.state[resumed]["exp_avg"].dtype == (torch.bfloat16 if narrow else torch.float32)
    assert other.state[resumed]["step"].device.type == device.type
    for a, b in zip(results(optimizer, param), results(other, resumed), strict=True):
        assert torch.equal(a, b)


def test_a_copied_optimizer_works(device):
    param = parameter((3, 3, 3, 4), device)
    optimizer = GridAdam([param], lr=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    other.grad = torch.ones_like(other)
    before = other.detach().clone()
    twin.step()
    torch.testing.assert_close(other.detach(), before - 0.1)


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
    for scaled, plain in zip(*found, strict=True):
        assert torch.equal(scaled, plain)


@pytest.mark.parametrize("change", ["upsample", "refit"])
def test_state_follows_a_resized_grid(device, change):
    grids = [VoxelGrid((5, 6, 7), 4, BOX, init_std=1.0, device=device) for _ in range(2)]
    with torch.no_grad():
        grids[1].features.copy_(grids[0].features)
    makers = [lambda p: GridAdam(p, lr=0.05), lambda p: torch.optim.Adam(p, lr=0.05)]
    optimizers = [maker([grid.features]) for maker, grid in zip(makers, grids, strict=True)]
    working = torch.zeros_like(grids[0].features, dtype=torch.float16)
    optimizers[0].set_working(grids[0].features, working)
    optimizers[0].set_active(grids[0].features, torch.ones(2, 2, 2, dtype=torch.bool, device=device))
    for step in range(6):
        if step == 3:
            for grid, optimizer in zip(grids, optimizers, strict=True):
                if change == "upsample":
                    grid.upsample((9, 11, 13), optimizer)
                else:
                    grid.refit(((-0.4, -0.4, -0.4), (0.6, 0.6, 0.6)), 5, optimizer)
            features = grids[0].features
            features.grad = torch.zeros_like(features)
            with pytest.raises(ValueError, match="call set_active again"):
                optimizers[0].step()
            optimizers[0].set_active(features, torch.ones(2, 2, 2, dtype=torch.bool, device=device))
            with pytest.raises(ValueError, match="call set_working again"):
                optimizers[0].step()
            working = torch.zeros_like(features, dtype=torch.float16)
            optimizers[0].set_working(features, working)
        for grid, optimizer in zip(grids, optimizers, strict=True):
            grid.features.grad = gradients(grid.features.shape, step).to(device)
            optimizer.step()
    assert optimizers[0].state[grids[0].features]["step"].item() == 6
    torch.testing.assert_close(grids[0].features, grids[1].features, rtol=1e-5, atol=1e-5)
    assert torch.equal(working, grids[0].features.detach().half())


# --- CPU and CUDA, graphs, compilers


def test_threads_do_not_change_a_bit():
    made = []
    for count in (1, 4):
        with threads(count):
            param = parameter((40, 30, 33, 4), "cpu")
            optimizer = GridAdam([param])
            train(optimizer, param, range(2))
            optimizer.add_total_variation(param, 1.0)
            made.append([*results(optimizer, param), param.grad])
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)


@pytest.mark.cuda
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("skip_untouched", [False, True])
def test_cpu_and_cuda_agree(skip_untouched, by_channel, narrow):
    made = []
    for device in ("cpu", "cuda"):
        param = parameter((33, 30, 41, 4), device)
        rates = shares(4, device) if by_channel else None
        optimizer = GridAdam(
            [param],
            betas=(0.9, 0.99),
            skip_untouched=skip_untouched,
            channel_rates=rates,
            bfloat16_moments=narrow,
        )
        occupied = torch.rand(8, 8, 8, generator=torch.Generator().manual_seed(1)) < 0.2
        optimizer.set_active(param, occupied.to(device))
        train(optimizer, param, range(6), sparse=True)
        optimizer.add_total_variation(param, 1.0, delta=0.1)
        made.append([*results(optimizer, param), param.grad.cpu()])
    # Where a moment lies between two numbers, devices may round it to either.
    tolerances = {"rtol": 1e-5, "atol": 1e-6} if not narrow else {"rtol": 0.01, "atol": 1e-3}
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, **tolerances, check_dtype=True)


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
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)


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


def test_registration(device):
    shape = (4, 4, 9, 4)
    _library.ensure_loaded(device.type)
    arrays = [torch.rand(shape, device=device) for _ in range(4)]
    ids, count = random_tiles(shape[:3], device)
    one = torch.ones(1, device=device)
    working = torch.zeros(shape, device=device, dtype=torch.float16)
    lists, rule = [[x] for x in arrays], (0.9, 0.99, 1e-8, 0.1, 0.1, False, True)
    for rates in (None, torch.ones(4, device=device)):
        torch.library.opcheck(
            torch.ops.voxelfield.grid_adam_.default,
            (*lists, [working], [one], [one], [ids], [count], [None], [rates], one, None, *rule),
        )
    occupied = torch.ones(2, 2, 2, dtype=torch.bool, device=device)
    torch.library.opcheck(torch.ops.voxelfield.active_tiles_.default, (occupied, shape[:3], ids.clone(), count.clone()))
    torch.library.opcheck(
        torch.ops.voxelfield.grid_total_variation_grad_.default,
        (arrays[0], arrays[1], torch.ones(3, device=device), 1.0, ids, count),
    )


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.9, 1.0)}, "betas must be two numbers in"),
        (
            {"betas": (0.9, 0.999), "bfloat16_moments": True},
            r"betas must be at most 0.99 with .* got \(0.9, 0.999\)",
        ),
        ({"eps": -1.0}, "eps must be finite and not negative, got -1.0"),
        ({"weight_decay": float("nan")}, "weight_decay must be finite and not negative"),
        ({"l2_penalty": -0.5}, "l2_penalty must be finite and not negative, got -0.5"),
        ({"lr": -1.0}, "lr must be finite and not negative, got -1.0"),
        ({"lr": torch.zeros(2)}, r"lr must be a number or a tensor of one element, got shape \(2,\)"),
        ({"lr": torch.zeros(1, device="meta")}, "lr must be on the device of params"),
        ({"channel_rates": torch.tensor([-0.5])}, r"channel_rates must be finite and not negative, got \[-0.5\]"),
        ({"channel_rates": torch.tensor([float("inf")])}, "channel_rates must be finite"),
        ({"channel_rates": torch.ones(2)}, r"channel_rates must have shape \(1\) for params of shape"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GridAdam([parameter((2, 2, 2, 1), "cpu")], **options)


def test_unfit_parameters_are_refused():
    with pytest.raises(TypeError, match="params must be float32"):
        GridAdam([torch.nn.Parameter(torch.zeros(2, 2, 2, 1, dtype=torch.float16))])
    with pytest.raises(ValueError, match=r"params must have shape \(X, Y, Z, C\), got \(2, 2\)"):
        GridAdam([torch.nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ValueError, match="params must be contiguous"):
        GridAdam([torch.nn.Parameter(torch.zeros(2, 3, 4, 5).permute(3, 2, 1, 0))])


INT = torch.int32


def test_the_op_takes_no_grids_and_empty_grids():
    grid_adam_([], [], [], [], [], [])
    empty = [[torch.zeros(0, 3, 3, 2)] for _ in range(4)]
    grid_adam_(*empty, [0.1], [1])


def test_unfit_arguments_of_the_other_functions_are_refused():
    param, cells = torch.zeros(4, 4, 9, 2), torch.ones(2, 2, 2, dtype=torch.bool)
    with pytest.raises(RuntimeError, match=r"resolution\[1\] must be 1 to 4096, got 4097"):
        active_tiles(cells, (4, 4097, 9), out=(torch.zeros(2050, dtype=INT), torch.zeros(1, dtype=INT)))
    with pytest.raises(RuntimeError, match=r"ids must have shape \(2\), got \(3\)"):
        active_tiles(cells, (4, 4, 9), out=(torch.zeros(3, dtype=INT), torch.zeros(1, dtype=INT)))
    with pytest.raises(ValueError, match="delta must be positive, got 0"):
        grid_total_variation_grad_(param, param, 1.0, delta=0.0)
    memory = torch.zeros(2 * param.numel())
    halves = memory[: param.numel()].view_as(param), memory[param.numel() :].view_as(param)
    shifted = memory[4 : param.numel() + 4].view_as(param)
    for grad, other in ((param, param), (halves[0], shifted), (shifted, halves[0])):
        with pytest.raises(RuntimeError, match="grad must not share memory with param"):
            grid_total_variation_grad_(grad, other, 1.0)
    grid_total_variation_grad_(*halves, 1.0)
    optimizer = GridAdam([torch.nn.Parameter(param)])
    with pytest.raises(ValueError, match="param must be a parameter of this optimizer"):
        optimizer.set_active(param, cells)
    with pytest.raises(TypeError, match="working must be float16 or bfloat16"):
        optimizer.set_working(optimizer.param_groups[0]["params"][0], param)
