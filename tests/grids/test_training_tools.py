"""Torch's own training tools on grids, pyramids, their working copies and GridAdam: what works, and what is refused.

``docs/use_in_your_model.md`` has the table. References are torch's operations on the same features.
"""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import two_ranks
from grid_models import KINDS, build, by_torch, grid_adam, somewhere
from op_testing import never_synchronising
from reference import sample_grid
from torch import nn
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

from voxelfield import ops
from voxelfield.grids.adam import GridAdam

WITHOUT = KINDS[:2]
WITH = KINDS[2:]
REPLACED = r"^features must be the parameters that enable_copies copied, got others \(fully_shard, functional_call, "
RULE = {"lr": 0.1, "eps": 1e-2}


def assert_reads_its_features(model, points):
    """Values and gradients are those of the features as they are now."""
    values, expected = model(points).float(), by_torch(model, points)
    rounding = {"rtol": 1e-3, "atol": 4e-3} if model.working_copies is not None else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(values, expected, **rounding)
    weights = torch.randint(-4, 5, values.shape, device=points.device).float()
    parameters = list(model.parameters())
    model.zero_grad()
    values.backward(weights, retain_graph=True)  # features may be computed once, by a hook
    for parameter, wanted in zip(parameters, torch.autograd.grad(expected, parameters, weights), strict=True):
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
    tolerance = {"rtol": 0, "atol": 1e-2 if model.working_copies is not None else 1e-5}
    for level, wanted in zip(model.levels, expected, strict=True):
        torch.testing.assert_close(level.detach(), wanted, **tolerance)


# --- optimizers


OPTIMIZERS = {
    "GridAdam": (grid_adam, torch.optim.Adam, RULE),
    "GridAdam without the copies": (lambda model, **rule: GridAdam(model.levels, **rule), torch.optim.Adam, RULE),
    "Adam": (lambda model, **rule: torch.optim.Adam(model.parameters(), **rule), torch.optim.Adam, RULE),
    # It does not advance the parameters' version counters.
    "fused": (lambda model, **rule: torch.optim.Adam(model.parameters(), fused=True, **rule), torch.optim.Adam, RULE),
    "SGD": (
        lambda model, **rule: torch.optim.SGD(model.parameters(), **rule),
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.5},
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
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
@pytest.mark.parametrize("kind", KINDS)
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
@pytest.mark.parametrize("kind", KINDS)
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
        for level, old in zip(model.levels, original, strict=True):
            assert torch.equal(level, old)
    assert_reads_its_features(model, points)


@pytest.mark.parametrize("kind", KINDS)
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
@pytest.mark.parametrize("kind", KINDS)
def test_computed_features(device, kind, replace):
    model, points = build(kind, device), somewhere(50, device)
    replace(getattr(model, "grids", [model])[-1])
    if kind in WITHOUT:
        assert_reads_its_features(model, points)
        with pytest.raises(TypeError, match=r"^grids\[\d\] must be a parameter, got a tensor computed from others"):
            model.enable_copies(torch.float16)
    else:
        with pytest.raises(ValueError, match=REPLACED):
            model(points)


@pytest.mark.parametrize("kind", KINDS)
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
    for found, wanted in zip(gradients.values(), expected, strict=True):
        torch.testing.assert_close(found, wanted, **rounding)
    torch.testing.assert_close(torch.func.vmap(model)(points[:, None])[:, 0], model(points))
    directions = torch.randn_like(points)
    tangent = torch.func.jvp(model, (points,), (directions,))[1]
    wanted = torch.func.jvp(
        lambda p: torch.cat([sample_grid(level, (p + 1) / 2) for level in model.levels], dim=-1),
        (points,),
        (directions,),
    )[1]
    inside = (points.abs() < 1).all(dim=-1)
    torch.testing.assert_close(tangent.float()[inside], wanted[inside], **rounding)
    assert_reads_its_features(model, points)


# --- backward passes


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", ["pyramid", "pyramid with copies"])
def test_a_frozen_level_has_no_gradient(device, kind):
    model, points = build(kind, device), somewhere(50, device)
    model.levels[0].requires_grad_(False)
    model.zero_grad(set_to_none=True)
    model(points).float().sum().backward()
    assert model.levels[0].grad is None
    torch.testing.assert_close(
        model.levels[1].grad, torch.autograd.grad(by_torch(model, points).sum(), model.levels[1])[0]
    )


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", WITH)
def test_points_of_changed_copies_have_no_gradient(device, kind):
    model, points = build(kind, device), somewhere(50, device).requires_grad_()
    optimizer = grid_adam(model, lr=0.1)
    early = model(points).float().sum()
    model(points.detach()).float().sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing(device, kind, reentrant):
    model, points = build(kind, device), somewhere(50, device)
    twin = copy.deepcopy(model)
    positions = points.clone().requires_grad_(reentrant)  # which reentrant checkpoints require of an input
    squared_error(checkpoint(model, positions, use_reentrant=reentrant), 0).backward()
    squared_error(twin(points), 0).backward()
    for level, wanted in zip(model.levels, twin.levels, strict=True):
        torch.testing.assert_close(level.grad, wanted.grad)


OFFSETS = torch.tensor([0, 3, 3, 10])
OPS = {
    "sample_trilinear": lambda x: ops.sample_trilinear(x.view(3, 4, 5, 2), somewhere(10, x.device)),
    "sample_pyramid": lambda x: ops.sample_pyramid(
        [x[:16].view(2, 2, 2, 2), x[16:70].view(3, 3, 3, 2)], somewhere(10, x.device)
    ),
    "trilinear_interpolate": lambda x: ops.trilinear_interpolate(x[:96].view(6, 8, 2), somewhere(6, x.device)),
    "composite": lambda x: ops.composite(
        x[:10].abs(), x[10:40].view(10, 3), torch.rand(10, device=x.device), torch.rand(10, device=x.device),
        OFFSETS.to(x.device),
    ).rgb,
    "ray_weights": lambda x: ops.ray_weights(x[:10].abs(), torch.rand(10, device=x.device), OFFSETS.to(x.device)),
    "sum_along_rays": lambda x: ops.sum_along_rays(x[:20].view(10, 2), OFFSETS.to(x.device)),
    "mlp": lambda x: ops.mlp(
        torch.ones(4, 8, device=x.device).half(), [x[:40].half().view(5, 8), x[40:60].half().view(4, 5)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_ops_are_checkpointed(device, name):
    values = torch.randn(120, device=device)
    found, expected = (values.clone().requires_grad_() for _ in range(2))
    for x, wrapped in ((found, True), (expected, False)):
        torch.manual_seed(1)
        (checkpoint(OPS[name], x, use_reentrant=False) if wrapped else OPS[name](x)).square().sum().backward()
    assert expected.grad.ne(0).any()
    torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_leaves_the_dtype_alone(device, kind):
    model, points = build(kind, device), somewhere(50, device)
    with torch.autocast(device.type, torch.bfloat16):
        assert model(points).dtype == (torch.float16 if kind in WITH else torch.float32)
        assert_reads_its_features(model, points)


# --- compilers and several processes


@pytest.mark.parametrize("kind", KINDS)
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
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
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
