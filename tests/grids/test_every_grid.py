"""What every kind of grid promises, with and without working copies: each test runs for all kinds in ``grid_models``.

``docs/use_in_your_model.md`` has a table of torch's own training tools. References are torch's operations on the same
features.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import two_ranks
from grid_models import (
    BOX,
    GRIDS,
    KINDS,
    WITH,
    WITHOUT,
    allocate,
    build,
    by_torch,
    grid_adam,
    somewhere,
    without_blocks,
)
from op_testing import never_synchronising
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import (
    clip_grad_norm_,
    parameters_to_vector,
    parametrizations,
    parametrize,
    prune,
    vector_to_parameters,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from warm_python import warm_python

from voxelfield import VoxelGrid, VoxelPyramid
from voxelfield.grids.adam import GridAdam
from voxelfield.grids.sparse_grid import SparseGrid
from voxelfield.rendering.occupancy import OccupancyGrid

SPARSE = ("sparse", "sparse with copies")
DENSE = tuple(kind for kind in KINDS if kind not in SPARSE)
REPLACED = r"^features must be the parameters that enable_copies copied, got others \(fully_shard, functional_call, "
RULE = {"lr": 0.1, "eps": 1e-2}


pytestmark = pytest.mark.usefixtures("one_thread")
every_kind = pytest.mark.parametrize("kind", KINDS)


def rounding_of(model):
    """How far samples may be from the reference: levels are rounded one by one, and so is their sum."""
    copies = model.working_copies
    eps = {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(copies.dtype if copies is not None else None, 5e-6)
    return {"rtol": eps, "atol": 4 * eps}


def assert_reads_its_features(model, points):
    """Values and gradients are those of the features as they are now."""
    values, expected = model(points).float(), by_torch(model, points)
    torch.testing.assert_close(values, expected, **rounding_of(model))
    weights = torch.randint(-4, 5, values.shape, device=points.device).float()
    parameters = list(model.parameters())
    model.zero_grad()
    values.backward(weights, retain_graph=True)  # features may be computed once, by a hook
    gradients = torch.autograd.grad(expected, parameters, weights, allow_unused=True)
    for parameter, wanted in zip(parameters, gradients, strict=True):
        if wanted is None:  # a level that is off
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-4)
    model.zero_grad()


def squared_error(values, targets):
    return (values.float() - targets).square().sum()


def torch_trains(model, points, targets, make, steps=4, **options):
    """The levels after training with torch's operations only."""
    twin = copy.deepcopy(model)
    optimizer = make(twin.levels, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        squared_error(by_torch(twin, points), targets).backward()
        optimizer.step()
    return [level.detach() for level in twin.levels]


def assert_levels(model, expected):
    tolerance = {"rtol": 0, "atol": 1e-2 if model.working_copies is not None else 1e-4}
    for level, wanted in zip(model.levels, expected, strict=True):
        torch.testing.assert_close(level.detach(), wanted, **tolerance)


# --- values and derivatives


@pytest.mark.parametrize("shape", [(3,), (7, 3), (2, 5, 4, 3), (0, 3), (4, 0, 3)], ids=str)
@pytest.mark.parametrize("active", ["all levels", "fewer"])
@pytest.mark.parametrize("copies", [None, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", WITHOUT)
def test_values_and_derivatives(device, kind, copies, active, shape):
    """Levels that are off read zero, or add nothing, and learn nothing."""
    model = build(kind, device)
    if active == "fewer":
        model.resize(4)
    if copies is not None:
        assert len(model.enable_copies(copies)) == model.active
    points = somewhere(max(math.prod(shape[:-1]), 1), device)[: math.prod(shape[:-1])]
    spread = points.repeat_interleave(2, 0)[::2].reshape(shape).requires_grad_()
    leaf = points.clone().requires_grad_()
    values, expected = model(spread), by_torch(model, leaf)
    assert values.dtype == (copies or torch.float32)
    assert values.shape == (*shape[:-1], model.channels)
    torch.testing.assert_close(values.float().view(len(points), model.channels), expected, **rounding_of(model))
    weights, levels = torch.randint(-4, 5, expected.shape, device=device).float(), model.levels
    wanted = torch.autograd.grad(expected, [leaf, *levels[: model.active]], weights)
    for repeat in (1, 2):  # gradients are added up
        model(spread).backward(weights.view(values.shape).to(values.dtype))
        for level, grad in zip(levels, wanted[1:], strict=False):
            torch.testing.assert_close(level.grad, repeat * grad, rtol=1e-4, atol=1e-4)
    assert all(level.grad is None for level in levels[model.active :])
    if spread.requires_grad:
        scale = 20 * rounding_of(model)["atol"]
        torch.testing.assert_close(spread.grad.view(-1, 3), 2 * wanted[0], rtol=1e-3, atol=scale)
        # Where only the points are wanted, the sums stay.
        sums = [level.grad.clone() for level in levels[: model.active]]
        model.requires_grad_(False)
        model(spread).backward(weights.view(values.shape).to(values.dtype))
        torch.testing.assert_close(spread.grad.view(-1, 3), 3 * wanted[0], rtol=1e-3, atol=1.5 * scale)
        assert all(torch.equal(level.grad, total) for level, total in zip(levels, sums, strict=False))


@every_kind
def test_points_that_are_not_finite_read_zeros_and_move_nothing(device, kind):
    model, points = build(kind, device), somewhere(5, device).clamp(-0.9, 0.9)
    points[1, 0], points[2, 1], points[3, 2] = math.nan, math.inf, -math.inf
    points.requires_grad_()
    values = model(points)
    assert values[1:4].eq(0).all()
    model.zero_grad()
    values.float().sum().backward()
    expected = torch.autograd.grad(by_torch(model, points.detach()[[0, 4]]).sum(), model.levels)
    for level, wanted in zip(model.levels, expected, strict=True):
        torch.testing.assert_close(level.grad, wanted, rtol=1e-4, atol=1e-4)
    assert points.grad[1:4].eq(0).all()
    assert points.grad[[0, 4]].ne(0).all()


POINTS = [
    ([[0.0, 0.0, 0.0]], TypeError, "points must be a torch.Tensor, got list"),
    (torch.zeros(4, 3, dtype=torch.int64), TypeError, "float32 or float64, got torch.int64"),
    *((torch.zeros(4, n), ValueError, rf"points must have shape \(\.\.\., 3\), got \(4, {n}\)") for n in (1, 2, 4)),
    (torch.tensor(1.0), ValueError, r"got \(\)"),
    (
        torch.zeros(4, 3, device="meta"),
        ValueError,
        r"points must be on the (grid's device cpu, got|device of grid, cpu, but it is on) meta",
    ),
]


@pytest.mark.parametrize(("points", "error", "message"), POINTS)
@every_kind
def test_points_that_do_not_fit_are_refused(kind, points, error, message):
    model = build(kind)
    calls = [model] if "grid" not in kind else [model, model.to_unit, model.contains]
    for call in calls:
        for kind_of_error in (error, RuntimeError):  # as torch's own functions raise it
            with pytest.raises(kind_of_error, match=message):
                call(points)
    if "grid" not in kind:
        with pytest.raises(TypeError, match="points must be float32"):
            model(torch.zeros(2, 3, dtype=torch.float64))


# --- optimizers


OPTIMIZERS = {
    "GridAdam": (grid_adam, torch.optim.Adam, RULE),
    "GridAdam without the copies": (lambda model, **rule: GridAdam(model.levels, **rule), torch.optim.Adam, RULE),
    "Adam": (lambda model, **rule: torch.optim.Adam(model.parameters(), **rule), torch.optim.Adam, RULE),
    # It does not advance the parameters' version counters.
    "fused": (lambda model, **rule: torch.optim.Adam(model.parameters(), fused=True, **rule), torch.optim.Adam, RULE),
    "amsgrad": (lambda model, **rule: torch.optim.Adam(model.levels, amsgrad=True, **rule), torch.optim.Adam, RULE),
    "foreach": (lambda model, **rule: torch.optim.Adam(model.levels, foreach=True, **rule), torch.optim.Adam, RULE),
    "AdamW": (lambda model, **rule: torch.optim.AdamW(model.levels, **rule), torch.optim.AdamW, RULE),
    "RMSprop": (
        lambda model, **rule: torch.optim.RMSprop(model.levels, **rule),
        torch.optim.RMSprop,
        {"lr": 0.01, "momentum": 0.5, "eps": 1e-2},
    ),
    "SGD": (
        lambda model, **rule: torch.optim.SGD(model.parameters(), **rule),
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.5},
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@every_kind
def test_optimizers_train(device, kind, name):
    model, points = build(kind, device), somewhere(50, device)
    targets = torch.rand(50, model.channels, device=device)
    make, twin, rule = OPTIMIZERS[name]
    expected = torch_trains(model, points, targets, twin, **rule)
    optimizer = make(model, **rule)
    for _ in range(4):
        for part in range(2):  # gradients are accumulated
            half = slice(25 * part, 25 * part + 25)
            squared_error(model(points[half]), targets[half]).backward()
        optimizer.step()
        if not isinstance(optimizer, GridAdam):
            optimizer.zero_grad(set_to_none=name != "SGD")
    assert_levels(model, expected)
    assert_reads_its_features(model, points)


@every_kind
def test_a_line_search_sees_the_parameters_that_it_tries(device, kind):
    model, points = build(kind, device), somewhere(50, device)
    targets = by_torch(build(kind, device), points).detach()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=30, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        error = squared_error(model(points), targets)
        error.backward()
        return error

    before = loss().item()
    optimizer.step(loss)
    assert loss().item() < 1e-2 * before
    assert_reads_its_features(model, points)


@pytest.mark.parametrize("unscale", [False, True])
@every_kind
def test_grad_scaler_skips_an_overflow_and_goes_on(device, kind, unscale):
    model, points = build(kind, device), somewhere(50, device)
    targets = torch.rand(50, model.channels, device=device)
    expected = torch_trains(model, points, targets, torch.optim.Adam, **RULE)
    optimizer = grid_adam(model, **RULE)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**14 if "copies" in kind else 2.0**127)
    for repeat in range(5):
        error = squared_error(model(points), targets)
        # Of copies, the gradient of a float16 output overflows; otherwise the sum of gradients does.
        scaler.scale(error * 1000 if repeat == 0 else error).backward()
        if unscale:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.levels, 1e6)
        before = scaler.get_scale()
        with never_synchronising() if device.type == "cuda" else nullcontext():
            scaler.step(optimizer)
        scaler.update()
        if repeat == 0:
            assert scaler.get_scale() < before, "the first step was to overflow"
            scaler.update(2.0**4)
        assert all(level.grad.eq(0).all() for level in model.levels)
    assert all(optimizer.state[level]["step"].item() == 4 for level in model.levels)
    assert_levels(model, expected)
    assert_reads_its_features(model, points)


# --- construction

SIZES = {VoxelGrid: {"resolution": 4, "channels": 2}, VoxelPyramid: {"resolutions": (2, 4), "channels": 3}}
SIZES[SparseGrid] = {"cells_along": (4, 4, 4), "channels": 1}
FLAT, WIDE = {"aabb": ((0, 0, 0), (1, 0, 1))}, {"aabb": ((0, 0, 0), (1, math.inf, 1))}
NOT_A_BOX = [
    (FLAT, "low < high"),
    (WIDE, "finite"),
    ({"aabb": ((0, 0, 0), (1, math.nan, 1))}, "finite"),
    # Different in float64 but one and the same in float32, in which the box is kept.
    ({"aabb": ((0, 0, 1), (1, 1, 1 + 1e-9))}, "low < high"),
    ({"aabb": (0, 0, 0, 1, 1, 1)}, r"shape \(2, 3\)"),
    ({"aabb": ((0, 0, 0), (1, 1))}, "aabb must be two corners"),
    ({"aabb": "unit"}, "aabb must be two corners"),
]


def stored(*each, reduce="sum"):
    return {"level_channels": [*each], "reduce": reduce}


def sparse(*resolutions, **options):
    return {"sparse_resolutions": resolutions, **options}


SEQUENCES = r"^level_channels must be a sequence of None and sequences of ints, got "
NOT_FINITE = "must be finite and not negative, got "
REFUSED = {
    (VoxelGrid, ValueError): [
        *NOT_A_BOX,
        ({"resolution": 0}, "resolution must be at least 1, got 0"),
        ({"resolution": (4, -1, 4)}, "resolution must be at least 1, got -1"),
        ({"resolution": (4, 4)}, "three for x, y and z"),
        ({"resolution": True}, "resolution must be at least 1, got True"),
        ({"channels": 0}, "channels must be at least 1, got 0"),
        (
            {"padding": "reflect"},
            r"padding must be one of \['border', 'zeros', 'reflection', 'periodic'\], got 'reflect'",
        ),
        ({"init_std": -1.0}, "init_std"),
    ],
    (VoxelGrid, TypeError): [
        ({"resolution": (4, 4, 4.0)}, r"resolution must be integer, got 4\.0"),
        ({"resolution": "444"}, "resolution must be integer"),
        ({"channels": 1.5}, r"channels must be integer, got 1\.5"),
        ({"dtype": torch.int32}, r"dtype must be float32.*int32"),
    ],
    (VoxelPyramid, ValueError): [
        *NOT_A_BOX,
        ({"reduce": "mean"}, r"reduce must be one of .*concat.*sum.* got 'mean'"),
        ({"padding": torch.zeros(2, 3)}, "padding must be one of"),
        ({"padding": "periodic"}, "padding must not be 'periodic'"),
        ({"resolutions": (8, 8)}, r"resolutions must rise from at least 2, got \[8, 8\]"),
        ({"resolutions": ()}, "resolutions must rise"),
        ({"resolutions": (4, 8, 12), "reduce": "sum"}, r"each be a whole multiple of the one before, got \[4, 8, 12\]"),
        ({"init_range": -1}, "init_range " + NOT_FINITE + "-1"),
        ({"init_range": math.inf}, "init_range " + NOT_FINITE + "inf"),
        ({"init_range": [1.0]}, r"init_range must be one number or 2, got \[1\.0\]"),
        (sparse(4), r"sparse_resolutions must rise from above 4, the finest of resolutions, got \[4\]"),
        (sparse(30, 20), r"sparse_resolutions must rise from above 4"),
        (sparse(16, reduce="sum"), "must be \"concat\" and \"border\" with sparse_resolutions, got 'sum' and 'border'"),
        (sparse(16, padding="zeros"), "got 'concat' and 'zeros'"),
        (stored(None, (0,), reduce="concat"), r'^level_channels must be None where reduce is not "sum", got \[None, '),
        (stored(None), r"^level_channels must be one for each of 2 levels, None for the first, got \[None\]"),
        (stored((0,), None), r"^level_channels must be one for each of 2 levels, None for the first, got \[\(0,\), "),
        *(
            (stored(None, each), r"^level_channels must be rising numbers from 0 to 2, got \[")
            for each in ((), (1, 0), (0, 0), (-1, 2), (0, 3))
        ),
    ],
    (VoxelPyramid, TypeError): [
        ({"resolutions": 4}, "resolutions must be a sequence of ints"),
        ({"level_channels": 3, "reduce": "sum"}, SEQUENCES + "3$"),
        *((stored(None, each), SEQUENCES) for each in (3, "ab", {0, 2}, (0.0, 1.0), (True,), torch.ones(1))),
    ],
    (SparseGrid, ValueError): [*NOT_A_BOX, ({"channels": 0}, "cells_along and channels must be at least 1")],
}


@pytest.mark.parametrize(
    ("kind", "error", "options", "message"),
    [(*key, options, message) for key, rows in REFUSED.items() for options, message in rows],
)
def test_settings_that_do_not_fit_are_refused(kind, error, options, message):
    with pytest.raises(error, match=message):
        kind(**{"aabb": BOX, **SIZES[kind], **options})


@pytest.mark.parametrize("kind", WITHOUT)
def test_copies_of_another_dtype_are_refused(kind):
    with pytest.raises(TypeError, match=r"dtype must be float16, bfloat16 or float32, got torch\.float64"):
        build(kind).enable_copies(torch.float64)


# --- resizing, and states

SMALLER = ((-0.5, -0.5, 0.25), (0.5, 1.0, 0.75))
RESIZED = {
    "grid, upsampled": lambda model, optimizer=None: model.upsample((9, 11, 13), optimizer),
    "grid, refitted": lambda model, optimizer=None: model.refit(SMALLER, 5, optimizer),
    "sparse, with other blocks": lambda model, optimizer=None: allocate(model, 1, optimizer),
} | {
    f"{kind}, resized": lambda model, optimizer=None: model.resize(8, optimizer, aabb=SMALLER) for kind in WITHOUT[:-1]
}


def of_kind(change):
    return change.partition(",")[0]


NARROW = {
    "GridAdam, 16 bits": (lambda model, **rule: GridAdam(model.levels, bfloat16_moments=True, **rule), None, RULE)
}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *NARROW])
@pytest.mark.parametrize("change", RESIZED)
def test_the_state_of_an_optimizer_follows_its_grid(device, change, name):
    """It is resampled as features of these values are; counts of steps stay, and training goes on."""
    model = build(of_kind(change), device)
    make, _, rule = (OPTIMIZERS | NARROW)[name]
    optimizer = make(model, **rule | ({"betas": (0.9, 0.99)} if name in NARROW else {}))

    def train(steps):
        low, high = model.aabb
        points = low + torch.rand(100, 3, device=device) * (high - low)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(squared_error(model(points), points.sum(-1, keepdim=True)))
            losses[-1].backward()
            optimizer.step()
        return losses

    train(3)
    levels, shapes = model.levels, [level.shape for level in model.levels]
    states = [copy.deepcopy(optimizer.state[level]) for level in levels]
    keys = {key for state in states for key, value in state.items() if torch.is_tensor(value) and value.dim() == 4}
    assert keys
    expected = {}
    for key in keys:
        twin = copy.deepcopy(model)
        for level, state in zip(twin.levels, states, strict=True):
            level.data = state[key].float()
        RESIZED[change](twin)
        expected[key] = [level.detach() for level in twin.levels]
    RESIZED[change](model, optimizer)
    for index, (level, own, state) in enumerate(zip(model.levels, levels, states, strict=True)):
        assert level is own, "the parameter is replaced"
        assert level.grad is None or level.shape == shapes[index]
        assert optimizer.state[level].keys() == state.keys()
        for key, value in optimizer.state[level].items():
            if key in keys:
                assert (value.shape, value.dtype) == (level.shape, state[key].dtype)
                torch.testing.assert_close(value, expected[key][index].to(value.dtype), rtol=1e-5, atol=1e-7)
                assert key not in ("exp_avg_sq", "max_exp_avg_sq", "square_avg") or value.min() >= 0
            else:
                assert value == state[key], key
    losses = train(8)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("change", RESIZED)
def test_the_wrong_optimizer_and_a_state_that_cannot_follow_change_nothing(change):
    model = build(of_kind(change))
    before = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
    wrong, unfit = torch.optim.Adam([torch.ones(1)]), torch.optim.Adafactor(model.levels)
    model(somewhere(10)).sum().backward()
    unfit.step()
    stepped = [level.detach().clone() for level in model.levels]
    for optimizer, message in (
        (wrong, "optimizer must have this grid's features in one of its parameter groups"),
        (unfit, r"Adafactor stores 'row_var' as torch\.float32 of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            RESIZED[change](model, optimizer)
        assert all(torch.equal(level, old) for level, old in zip(model.levels, stepped, strict=True))
        assert torch.equal(model.aabb, torch.tensor(BOX))
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize("kept", [False, True], ids=["alone", "with a loss that is kept"])
@pytest.mark.parametrize("change", [*RESIZED, "load_state_dict"])
def test_a_gradient_of_another_shape_is_dropped_and_the_next_step_works(device, change, kept):
    """A loss that is kept holds the parameter's gradient accumulator, which remembers the old shape."""
    model, points = build(of_kind(change) if change in RESIZED else "grid", device), somewhere(30, device)
    seen = []
    model.levels[0].register_post_accumulate_grad_hook(lambda level: seen.append(level.grad.shape))
    loss = model(points).sum()
    loss.backward()
    old = model.levels[0].shape
    if not kept:
        del loss
    if change == "load_state_dict":
        model.load_state_dict(VoxelGrid((4, 6, 5), 2, BOX).state_dict())
    else:
        RESIZED[change](model)
    assert model.levels[0].grad is None or "sparse" in change
    model(points).sum().backward()
    assert seen == [old, model.levels[0].shape]


@pytest.mark.parametrize("way", ["in place", "assign", "from the meta device"])
@pytest.mark.parametrize(
    ("kind", "change"),
    [(kind, None) for kind in KINDS]
    + [(of_kind(change) + copies, change) for change in RESIZED for copies in ("", " with copies")],
)
def test_a_state_brings_resolutions_box_levels_and_blocks(device, kind, change, way):
    name = kind.removesuffix(" with copies")
    saved = nn.Sequential(build(name, device))
    if change is not None:
        RESIZED[change](saved[0])
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    model = nn.Sequential(build(kind, device))
    if way == "from the meta device":
        model = nn.Sequential((without_blocks if name == "sparse" else GRIDS[name])("meta"))
    levels = model[0].levels
    state = torch.load(file, weights_only=True)
    result = model.load_state_dict(state, assign=way != "in place")
    assert not result.missing_keys
    assert not result.unexpected_keys
    for key, value in saved.state_dict().items():
        assert (
            torch.equal(model.state_dict()[key], value) if torch.is_tensor(value) else model.state_dict()[key] == value
        )
    assert [a is b for a, b in zip(levels, model[0].levels, strict=True)] == [way == "in place"] * len(levels)
    assert model[0].working_copies is None
    low, high = saved[0].aabb
    points = low + torch.rand(40, 3, device=device) * (high - low)
    assert torch.equal(model[0](points), saved[0](points))
    assert_reads_its_features(model[0], points)


# --- conversions, construction without memory


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "float"])
@pytest.mark.parametrize("kind", WITHOUT)
def test_conversions_leave_the_box_alone(device, kind, convert):
    # Neither corner is representable in 16 bits, so a box that went through half precision would differ.
    model, points = build(kind, device), somewhere(20, device)
    parameters = model.levels
    for name, buffer in model.named_buffers():
        if name.endswith("aabb"):
            buffer += 1e-3
    box = model.aabb.clone()
    getattr(nn.Sequential(model), convert)()
    assert all(level is own for level, own in zip(model.levels, parameters, strict=True))
    dtype = getattr(torch, {"half": "float16"}.get(convert, convert))
    assert all(level.dtype == dtype for level in model.levels)
    assert torch.equal(model.aabb, box)
    if kind == "grid" or convert != "double":
        assert model(points).dtype == dtype
        torch.testing.assert_close(model(points).float(), by_torch(model, points), rtol=1e-2, atol=4e-2)
    model.to(torch.float32)
    assert torch.equal(model.aabb, box)
    assert_reads_its_features(model, points)


def restore(module):
    """What FSDP and other users of deferred initialisation do."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.full_like(tensor, 7))
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return module


MODULES = {kind: GRIDS[kind] for kind in WITHOUT[:-1]}
MODULES["occupancy"] = lambda device: OccupancyGrid((3, 4, 5), BOX).to(device)


@pytest.mark.parametrize("name", MODULES)
def test_deferred_initialisation_gives_what_construction_gives(name):
    with torch.device("meta"):
        deferred = MODULES[name]("meta")
    assert all(tensor.is_meta for tensor in (*deferred.parameters(), *deferred.buffers()))
    torch.manual_seed(3)
    built = MODULES[name]("cpu")
    torch.manual_seed(3)
    restored = restore(deferred)
    assert restored.state_dict().keys() == built.state_dict().keys()
    for actual, expected in zip(
        (*restored.parameters(), *restored.buffers()), (*built.parameters(), *built.buffers()), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", WITHOUT[:-1])
def test_building_without_memory(kind):
    with FakeTensorMode():
        model, points = GRIDS[kind]("cpu"), torch.rand(6, 3)
        assert model(points).shape == (6, model.channels)
        model(points).sum().backward()
        assert all(level.grad is not None for level in model.levels)


# --- parameters changed from outside


def average(model):
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for factor in (1.0, 3.0, 5.0):
        with torch.no_grad():
            for level in model.levels:
                level.copy_(level.detach().sign() * factor)
        averaged.update_parameters(model)
    return averaged.module


def twice_from_vectors(model):
    for factor in (2.0, 1.5):  # the second vector may lie where the features were
        vector_to_parameters(parameters_to_vector(model.parameters()) * factor, model.parameters())
    return model


def doubled(model):
    with torch.no_grad():
        for level in model.levels:
            level.mul_(2)
    return model


def swapped(model):
    for level in model.levels:
        torch.utils.swap_tensors(level, nn.Parameter(2 * level.detach()))
    return model


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return doubled(torch.load(file, weights_only=False))


def loaded(model):
    for grid in getattr(model, "grids", [model]):
        grid.load_state_dict(
            {name: 2 * value if name == "features" else value for name, value in grid.state_dict().items()}
        )
    return model


CHANGES = {
    "in place": doubled,
    "vector_to_parameters": twice_from_vectors,
    "swap_tensors": swapped,
    "load_state_dict of each grid": loaded,
    "deepcopy": lambda model: doubled(copy.deepcopy(model)),
    "pickle": lambda model: doubled(pickle.loads(pickle.dumps(model))),
    "torch.save": saved,
    "AveragedModel": average,
    "upsample": lambda model: getattr(model, "grids", [model])[0].upsample(9) or model,
}


@pytest.mark.parametrize("name", CHANGES)
@every_kind
def test_changes_from_outside_are_read(device, kind, name):
    model, points = build(kind, device), somewhere(50, device)
    original = [level.detach().clone() for level in model.levels]
    with torch.no_grad():
        before = model(points).float()
    changed = CHANGES[name](model)
    if name != "upsample":
        assert (changed(points).float() - before).abs().max() > 0.1
    assert_reads_its_features(changed, points)
    if changed is not model and name != "AveragedModel":
        torch.testing.assert_close(model.levels, original, rtol=0, atol=0)
    assert_reads_its_features(model, points)


@every_kind
def test_a_change_of_data_in_place_needs_refresh_copies(device, kind):
    model, points = build(kind, device), somewhere(50, device)
    for level in model.levels:
        level.data.mul_(2)
    if "copies" in kind:
        model.refresh_copies()
    assert_reads_its_features(model, points)


# --- modules changed from outside


def weight_normed(module):
    parametrizations.weight_norm(module, "features", dim=3)


def spectral_normed(module):
    parametrizations.spectral_norm(module, "features")
    module.eval()


def parametrized(module):
    parametrize.register_parametrization(module, "features", nn.Softplus())


def pruned(module):
    prune.l1_unstructured(module, "features", 0.5)


REPLACEMENTS = [weight_normed, spectral_normed, parametrized, pruned]


@pytest.mark.parametrize("replace", REPLACEMENTS)
@every_kind
def test_computed_features(device, kind, replace):
    model, points = build(kind, device), somewhere(50, device)
    replace(getattr(model, "grids", [model])[-1])
    before, resize = model.levels[-1].clone(), [change for change in RESIZED if of_kind(change) == kind]
    for change in resize if kind != "sparse" else []:
        with pytest.raises(ValueError, match=r"^features must be a parameter for (upsample|refit), got"):
            RESIZED[change](model)
        assert torch.equal(model.levels[-1], before)
        assert torch.equal(model.aabb, torch.tensor(BOX, device=device))
    if kind in WITHOUT:
        assert_reads_its_features(model, points)
        with pytest.raises(TypeError, match=r"^grids\[\d\] must be a parameter, got a tensor computed from others"):
            model.enable_copies(torch.float16)
    else:
        with pytest.raises(ValueError, match=REPLACED):
            model(points)


@every_kind
def test_functional_calls(device, kind):
    model, points = build(kind, device), somewhere(50, device)
    others = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}

    def call(parameters):
        return torch.func.functional_call(model, parameters, (points,))

    if kind in WITH:  # functions that torch.func transforms read the features
        with pytest.raises(ValueError, match=REPLACED):
            call(others)
    else:
        torch.testing.assert_close(call(others), 2 * by_torch(model, points), rtol=1e-5, atol=1e-5)
    rounding = {"rtol": 1e-2, "atol": 1e-2} if kind in WITH else {"rtol": 1e-4, "atol": 1e-4}
    gradients = torch.func.grad(lambda parameters: call(parameters).float().square().sum())(others)
    expected = torch.autograd.grad(2 * by_torch(model, points).square().sum(), list(model.parameters()))
    torch.testing.assert_close(list(gradients.values()), expected, **rounding)
    assert_reads_its_features(model, points)
    if kind in SPARSE:
        with pytest.raises(NotImplementedError, match="cannot be mapped by"):
            torch.func.vmap(model)(points[:, None])
    else:
        torch.testing.assert_close(torch.func.vmap(model)(points[:, None])[:, 0], model(points), **rounding)
    directions = torch.randn_like(points)
    tangent = torch.func.jvp(model, (points,), (directions,))[1]
    leaf = points.clone().requires_grad_()
    slopes = [torch.autograd.grad(values.sum(), leaf, retain_graph=True)[0] for values in by_torch(model, leaf).mT]
    torch.testing.assert_close(tangent.float(), (torch.stack(slopes, 1) * directions[:, None]).sum(-1), **rounding)


# --- backward passes


@every_kind
def test_only_gradients_that_are_asked_for_are_accumulated(device, kind):
    model, points = build(kind, device), somewhere(50, device).clamp(-0.9, 0.9)
    model.zero_grad(set_to_none=True)
    positions, gain = points.clone().requires_grad_(), torch.ones((), device=device, requires_grad=True)

    def loss():
        return (gain * model(positions).float()).square().sum()

    (found,) = torch.autograd.grad(loss(), positions)
    reference = points.clone().requires_grad_()
    by_torch(model, reference).square().sum().backward()
    torch.testing.assert_close(found, reference.grad, rtol=1e-2, atol=0.1)
    model.zero_grad(set_to_none=True)
    loss().backward(inputs=[gain])
    assert all(level.grad is None for level in model.levels)
    if kind in WITH:
        with pytest.raises(
            NotImplementedError, match=r"^torch\.autograd\.grad cannot return gradients of features with"
        ):
            torch.autograd.grad(loss(), model.levels, allow_unused=True)
    else:
        assert len(torch.autograd.grad(loss(), model.levels)) == len(model.levels)
    assert all(level.grad is None for level in model.levels)


@pytest.mark.parametrize("frozen", [0, -1])
@every_kind
def test_a_frozen_level_has_no_gradient(device, kind, frozen):
    model, points = build(kind, device), somewhere(50, device)
    levels = model.levels
    levels.pop(frozen).requires_grad_(False)
    model.zero_grad(set_to_none=True)
    points.requires_grad_(not levels)  # so that something is trained
    model(points).float().sum().backward()
    assert model.levels[frozen].grad is None
    expected = torch.autograd.grad(by_torch(model, points).sum(), levels) if levels else []
    for level, wanted in zip(levels, expected, strict=True):
        torch.testing.assert_close(level.grad, wanted, rtol=1e-4, atol=1e-4)


@every_kind
def test_hooks(device, kind):
    model, points = build(kind, device), somewhere(50, device)
    seen = []
    handle = model.levels[0].register_post_accumulate_grad_hook(lambda level: seen.append(level.grad.clone()))
    model(points).float().sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], torch.autograd.grad(by_torch(model, points).sum(), model.levels[0])[0])
    handle.remove()
    model.levels[0].register_hook(lambda grad: 2 * grad)
    model.zero_grad()
    if kind in WITH:
        with pytest.raises(
            NotImplementedError, match=r"^features with copies \(enable_copies\) must have no tensor hooks"
        ):
            model(points).float().sum().backward()
    else:
        model(points).sum().backward()
        torch.testing.assert_close(model.levels[0].grad, 2 * seen[0])


@pytest.mark.parametrize("kind", WITH[:-1])
def test_points_of_changed_copies_have_no_gradient(device, kind):
    model, points = build(kind, device), somewhere(50, device).requires_grad_()
    optimizer = grid_adam(model, lr=0.1)
    early = model(points).float().sum()
    model(points.detach()).float().sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


@pytest.mark.parametrize(("kind", "reentrant"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in DENSE)])
def test_activation_checkpointing(device, kind, reentrant):
    model, points = build(kind, device), somewhere(50, device)
    twin = copy.deepcopy(model)
    positions = points.clone().requires_grad_(reentrant)  # which reentrant checkpoints require of an input
    squared_error(checkpoint(model, positions, use_reentrant=reentrant), 0).backward()
    squared_error(twin(points), 0).backward()
    for level, wanted in zip(model.levels, twin.levels, strict=True):
        torch.testing.assert_close(level.grad, wanted.grad)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_leaves_the_dtype_alone(device, kind, dtype):
    model, points = build(kind, device), somewhere(50, device)
    with torch.autocast(device.type, dtype):
        assert model(points).dtype == (torch.float16 if kind in WITH else torch.float32)
        assert_reads_its_features(model, points)


# --- compilers and several processes


@every_kind
def test_compiled(device, kind):
    torch.compiler.reset()
    model, points = build(kind, device), somewhere(50, device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.Adam(model.parameters(), fused=True, **RULE)
    for _ in range(2):
        torch.testing.assert_close(compiled(points), model(points), rtol=1e-3, atol=1e-3)
        gradients = []
        for version in (model, compiled):
            model.zero_grad()
            version(points).float().square().sum().backward()
            gradients.append([level.grad.clone() for level in model.levels])
        # Sums over 16-bit values in another order.
        torch.testing.assert_close(*gradients, rtol=5e-3, atol=5e-3)
        optimizer.step()
        assert_reads_its_features(model, points)


@pytest.mark.cuda
def test_stale_copies_are_not_refreshed_by_a_graph():
    model, points = build("pyramid with copies", "cuda"), somewhere(50, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        model(points)
        doubled(model)
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(
                RuntimeError, match=r"^copies must be up to date while a graph is captured, got features that"
            ),
            torch.cuda.graph(graph, stream=stream),
        ):
            model(points)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            model.refresh_copies()
            values = model(points)
        doubled(model)
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(values.float(), by_torch(model, points), rtol=1e-3, atol=1e-2)


@pytest.mark.cuda
def test_a_captured_step_keeps_copies_up_to_date():
    model, points = build("pyramid with copies", "cuda"), somewhere(50, "cuda")
    targets = torch.rand(50, model.channels, device="cuda")
    expected = torch_trains(model, points, targets, torch.optim.Adam, steps=6, **RULE)
    optimizer = grid_adam(model, **RULE)

    def step():
        squared_error(model(points), targets).backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        for _ in range(4):
            graph.replay()
    torch.cuda.synchronize()
    assert_levels(model, expected)
    assert_reads_its_features(model, points)
    doubled(model)
    assert_reads_its_features(model, points)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    program = Path(two_ranks.__file__)
    running = [warm_python.start(str(program), str(rank), str(tmp_path / "store"), merged=True) for rank in range(2)]
    for done in [process.wait(300) for process in running]:
        assert done.returncode == 0, done.stdout
