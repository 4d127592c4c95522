"""One of two processes that train together: ``python two_ranks.py RANK STORE``; fails unless all is as if alone."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from grid_models import BOX, build, by_torch, grid_adam, somewhere
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from voxelfield import Model, OccupancyGrid, RadianceField, Rays, RenderSettings, VoxelPyramid, render
from voxelfield.fields.decoders import FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.grids.adam import GridAdam

STEPS = 3
RULE = {"lr": 0.1, "eps": 1e-2}
OPTIONS = ({}, {"static_graph": True}, {"find_unused_parameters": True})
OUTDATED = r"^DistributedDataParallel must be a new one after features are resized"
SHARDED = r"^features must be whole for {}, got those of a grid that fully_shard manages: use DistributedDataParallel"


def alone(model, points, targets, clip=None):
    """The levels after training on the points of both processes, by torch's operations only."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.Adam(twin.levels, **RULE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = [(by_torch(twin, p) - t).square().sum() for p, t in zip(points, targets, strict=True)]
        (sum(losses) / 2).backward()
        if clip is not None:
            clip_grad_norm_(twin.levels, clip)
        optimizer.step()
    return [level.detach() for level in twin.levels]


def squared(model, points):
    return model(points).float().square().sum()


def assert_reduced(rank, parallel, module, twin, inputs, loss_of=squared, after=lambda module: None):
    """The gradients in both processes are those of the mean of their losses in one."""
    twin.zero_grad()
    (sum(loss_of(twin, each) for each in inputs) / 2).backward()
    module.zero_grad()
    loss_of(parallel, inputs[rank]).backward()
    for each in (module, twin):
        after(each)
    gradients = [[parameter.grad for parameter in each.parameters()] for each in (module, twin)]
    for found, wanted in zip(*gradients, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            assert wanted.ne(0).any()
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


# --- DistributedDataParallel


def check_data_parallel(rank, kind, optimizer_of, pieces, **options):
    torch.manual_seed(0)
    first = build(kind)
    points, targets = somewhere(40).view(2, 20, 3), torch.rand(2, 20, first.channels)
    torch.manual_seed(rank)
    model = build(kind)
    optimizer = optimizer_of(model)
    parallel = DistributedDataParallel(model, **options)
    for step in range(STEPS):
        # A static graph is recorded in the first step, which torch does not support under no_sync.
        parts = 1 if step == 0 and "static_graph" in options else pieces
        for piece, part in enumerate(points[rank].chunk(parts)):
            with nullcontext() if piece == parts - 1 else parallel.no_sync():
                (parallel(part).float() - targets[rank].chunk(parts)[piece]).square().sum().backward()
        optimizer.step()
        if not isinstance(optimizer, GridAdam):
            optimizer.zero_grad(set_to_none=False)
    tolerance = {"rtol": 0, "atol": 1e-2 if "copies" in kind else 1e-5}
    for level, expected in zip(model.levels, alone(first, points, targets), strict=True):
        torch.testing.assert_close(level.detach(), expected, **tolerance)
    torch.testing.assert_close(model(points[0]).float(), by_torch(model, points[0]), rtol=0, atol=5e-3)


def optimizers(rank):
    for kind in ("grid", "pyramid", "grid with copies", "pyramid with copies"):
        for options in (*OPTIONS, {"gradient_as_bucket_view": True}):
            check_data_parallel(rank, kind, lambda model: grid_adam(model, **RULE), 2, **options)
        check_data_parallel(rank, kind, lambda model: torch.optim.Adam(model.parameters(), fused=True, **RULE), 2)


def scaled_gradients(rank):
    """GradScaler and active tiles: an overflow in one process makes both skip the step."""
    points = somewhere(40).view(2, 20, 3)
    occupied = torch.zeros(8, 8, 8, dtype=torch.bool)
    occupied[:4] = True
    model = build("pyramid with copies")
    twin = copy.deepcopy(model)
    parallel = DistributedDataParallel(model)
    trained = []
    for each in (model, twin):
        optimizer = grid_adam(each, **RULE)
        optimizer.set_active(each.levels[1], occupied)
        trained.append((optimizer, torch.amp.GradScaler("cpu", init_scale=16.0)))
    for step in range(STEPS):
        overflow = float("inf") if step == 1 else 1.0
        weights = (1.0, overflow)
        losses = (
            weights[rank] * squared(parallel, points[rank]),
            sum(weight * squared(twin, each) for weight, each in zip(weights, points, strict=True)) / 2,
        )
        for each, loss, (optimizer, scaler) in zip((model, twin), losses, trained, strict=True):
            scaler.scale(loss).backward()
            optimizer.add_total_variation(each.levels[0], 0.1 * scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
    assert {scaler.get_scale() for _, scaler in trained} == {8.0}
    for found, wanted in zip(model.levels, twin.levels, strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found.detach(), wanted.detach(), rtol=0, atol=1e-3)


def resized_grids(rank):
    points = somewhere(40).view(2, 20, 3)
    changes = (
        lambda grid: grid.upsample(9),
        lambda grid: grid.refit(((-1, -1, -1), (0.5, 0.5, 0.5)), 5),
        lambda grid: grid.load_state_dict(build("grid").state_dict() | {"features": torch.ones(4, 4, 4, 2)}),
    )
    for kind in ("grid", "grid with copies"):
        model = build(kind)
        twin = copy.deepcopy(model)
        parallel = DistributedDataParallel(model)
        assert_reduced(rank, parallel, model, twin, points)
        for change in changes:
            unused, other = DistributedDataParallel(nn.Sequential(model)), DistributedDataParallel(copy.deepcopy(model))
            for grid in (model, twin):
                change(grid)
            for outdated in (parallel, unused):
                with pytest.raises(RuntimeError, match=OUTDATED):
                    outdated(points[rank])
            other(points[rank])
            parallel = DistributedDataParallel(model)
            assert_reduced(rank, parallel, model, twin, points)


def sparse_levels(rank):
    points = somewhere(400).view(2, 200, 3)
    cells = torch.zeros(8, 8, 8, dtype=torch.bool)
    cells[3:6, 2:5, 4:6] = True

    def share(pyramid):
        for grid in pyramid.sparse_grids:
            grid.share_gradient()

    for copies in (False, True):
        pyramid = VoxelPyramid((4, 8), 2, BOX, init_range=1.0, sparse_resolutions=(16,))
        twin = copy.deepcopy(pyramid)
        parallel = DistributedDataParallel(pyramid, find_unused_parameters=True)
        for resolution in (4, 8, 16):
            for each in (pyramid, twin):
                if resolution == 16:
                    each.allocate(16, cells, each.aabb)
                    torch.manual_seed(0)
                    nn.init.normal_(each.levels[-1])
                each.activate(resolution)
                if copies:
                    each.enable_copies(torch.float16)
            if resolution == 16:
                with pytest.raises(RuntimeError, match=OUTDATED):
                    parallel(points[rank])
                parallel = DistributedDataParallel(pyramid, find_unused_parameters=True)
            assert_reduced(rank, parallel, pyramid, twin, points, after=share)


class Pixels(nn.Module):
    """Renders rays through a field, as a module of which torch wraps forward()."""

    def __init__(self) -> None:
        super().__init__()
        pyramid = VoxelPyramid((4, 8), 4, BOX, init_range=1.0)
        self.field = RadianceField(pyramid, FusedMLPDecoder(8, 16, 15, 1, 2, ExponentialDensity(1.0)))
        self.occupancy = OccupancyGrid(4, BOX)

    def forward(self, rays):
        return render(self.field, rays, self.occupancy, RenderSettings(step=0.1))


def some_rays():
    """Rays for each process, from one side."""
    origins = torch.rand(2, 20, 3) - torch.tensor([0.5, 0.5, 3.0])
    directions = nn.functional.normalize(torch.rand(2, 20, 3) - 0.5 - origins, dim=-1)
    near, far = torch.full((2, 20), 1.0), torch.full((2, 20), 6.0)
    return [Rays(*each) for each in zip(origins, directions, near, far, strict=True)]


def of_pixels(model, rays):
    return model(rays).rgb.square().mean()


def fields(rank):
    batches = some_rays()
    for options in OPTIONS:
        model = Pixels()
        twin = copy.deepcopy(model)
        parallel = DistributedDataParallel(model, **options)
        assert_reduced(rank, parallel, model, twin, batches, of_pixels)
        twin.occupancy.occupied[:2] = False
        if rank == 0:  # the other process receives the cells
            model.occupancy.occupied[:2] = False
        assert_reduced(rank, parallel, model, twin, batches, of_pixels)
        assert torch.equal(model.occupancy.bits.words, twin.occupancy.bits.words)
        assert torch.equal(model.occupancy.empty_distance, twin.occupancy.empty_distance)
    with pytest.raises(TypeError, match=r"^field must not be a DistributedDataParallel, which has forward\(\) alone"):
        render(DistributedDataParallel(model.field), batches[0], model.occupancy, RenderSettings(step=0.1))


def compiled(rank):
    points = somewhere(40).view(2, 20, 3)
    for kind in ("pyramid", "pyramid with copies"):
        model = build(kind)
        twin = copy.deepcopy(model)
        around = torch.compile(DistributedDataParallel(model), backend="aot_eager")
        assert_reduced(rank, around, model, twin, points)
        inside = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
        assert_reduced(rank, inside, model, twin, points)


# --- fully_shard


def sharded(rank):
    model = build("pyramid")
    points, targets = somewhere(40).view(2, 20, 3), torch.rand(2, 20, model.channels)
    expected = alone(model, points, targets, clip=1.0)
    single = build("pyramid")
    fully_shard(single.grids[0])
    with pytest.raises(
        TypeError, match=r"^grids\[0\] must be a whole tensor, got a DTensor: fully_shard gathers parameters"
    ):
        single(points[rank])
    fully_shard(model)
    with pytest.raises(ValueError, match=r"^params must be whole, got a DTensor of shape \(4, 4, 4, 2\): for a grid"):
        GridAdam(model.levels)
    optimizer = torch.optim.Adam(model.parameters(), **RULE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(points[rank]) - targets[rank]).square().sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for level, wanted in zip(model.levels, expected, strict=True):
        torch.testing.assert_close(level.full_tensor(), wanted, rtol=0, atol=1e-5)
    late = VoxelPyramid((4, 8), 2, BOX)
    late.enable_copies(torch.float16)
    fully_shard(late)
    with pytest.raises(ValueError, match=r"^features must be the parameters that enable_copies copied, got others"):
        late(points[rank])


def sharded_fields(rank):
    model, batches = Pixels(), some_rays()
    twin = copy.deepcopy(model)
    (sum(of_pixels(twin, rays) for rays in batches) / 2).backward()
    fully_shard(model)
    of_pixels(model, batches[rank]).backward()
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-6)


def sharded_models(rank):
    """A model is sharded as a whole, trains as one that is not, and its whole state is that of one."""
    batches, settings = some_rays(), RenderSettings(step=0.1)

    def new_model():
        pyramid = VoxelPyramid((4, 8), 4, BOX, init_range=1.0)
        decoder = FusedMLPDecoder(8, 16, 15, 1, 2, ExponentialDensity(1.0))
        return Model(RadianceField(pyramid, decoder), OccupancyGrid(4, BOX))

    model = new_model()
    twin = copy.deepcopy(model)
    (sum(twin(rays, settings).rgb.square().mean() for rays in batches) / 2).backward()
    fully_shard(model)
    model(batches[rank], settings).rgb.square().mean().backward()
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-6)
    whole = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=whole)
    assert state.keys() == twin.state_dict().keys()
    again = new_model()
    again.load_state_dict(state)
    assert torch.equal(again(batches[rank], settings).rgb, twin(batches[rank], settings).rgb)


def sharded_sparse_levels(rank):
    pyramid = VoxelPyramid((4, 8), 2, BOX, init_range=1.0, sparse_resolutions=(16,))
    cells = torch.ones(1, 1, 1, dtype=torch.bool)
    pyramid.allocate(16, cells, pyramid.aabb)
    pyramid.activate(16)
    state = copy.deepcopy(pyramid.state_dict())
    (level,) = pyramid.sparse_grids
    level.allocate(torch.arange(8).view(2, 2, 2) == rank, pyramid.aabb, max_blocks=1)
    fully_shard(pyramid)
    pyramid(somewhere(9)).sum().backward()
    with pytest.raises(ValueError, match=SHARDED.format("share_gradient")):
        level.share_gradient()
    with pytest.raises(ValueError, match=SHARDED.format("allocate")):
        pyramid.allocate(16, cells, pyramid.aabb)
    with pytest.raises(ValueError, match=SHARDED.format("load_state_dict of other blocks")):
        pyramid.load_state_dict(state)


def ignored_grids(rank):
    """The remedy that messages give for fully_shard: ignored features, whose gradient is reduced by hand."""
    points = somewhere(40).view(2, 20, 3)
    model = nn.Sequential(build("grid"), nn.Linear(2, 3))
    twin = copy.deepcopy(model)
    grid = model[0]
    fully_shard(model, ignored_params={grid.features})
    optimizer, expected = GridAdam([grid.features], **RULE), torch.optim.Adam([twin[0].features], **RULE)
    for _ in range(STEPS):
        (sum(squared(twin, each) for each in points) / 2).backward()
        squared(model, points[rank]).backward()
        dist.all_reduce(grid.features.grad)
        grid.features.grad.div_(2)
        optimizer.step()
        expected.step()
        expected.zero_grad()
    torch.testing.assert_close(grid.features.detach(), twin[0].features.detach(), rtol=0, atol=1e-5)


# --- state dicts


def states(rank):
    """A model and its optimizer are saved and restored by torch.distributed.checkpoint, wrapped in either way."""
    points = somewhere(40).view(2, 20, 3)
    whole = StateDictOptions(full_state_dict=True)

    def start(wrapped, optimizer_of):
        model = build("pyramid")
        parallel = DistributedDataParallel(model) if wrapped == "DDP" else fully_shard(model)
        return model, parallel, optimizer_of(model.levels, **RULE)

    def step(parallel, optimizer):
        optimizer.zero_grad()
        squared(parallel, points[rank]).backward()
        optimizer.step()

    def levels(model):
        return [getattr(level, "full_tensor", level.detach)().clone() for level in model.levels]

    ways = (("DDP", "DDP", GridAdam), ("DDP", "FSDP", torch.optim.Adam), ("FSDP", "DDP", torch.optim.Adam))
    for before, after, optimizer_of in ways:
        model, parallel, optimizer = start(before, optimizer_of)
        for _ in range(2):
            step(parallel, optimizer)
        saved = copy.deepcopy(get_state_dict(parallel, optimizer, options=whole))
        step(parallel, optimizer)
        restored, wrapper, its_optimizer = start(after, optimizer_of)
        set_state_dict(wrapper, its_optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=whole)
        step(wrapper, its_optimizer)
        for found, wanted in zip(levels(restored), levels(model), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


CHECKS = (
    optimizers,
    scaled_gradients,
    resized_grids,
    sparse_levels,
    fields,
    compiled,
    sharded,
    sharded_fields,
    sharded_models,
    sharded_sparse_levels,
    ignored_grids,
    states,
)


def main(rank: int, store: str) -> None:
    """Runs every check."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for check in CHECKS:
        torch.manual_seed(0)
        check(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
