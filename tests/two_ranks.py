"""One of two processes that train together: ``python two_ranks.py RANK STORE``; fails unless all is as if alone."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from grid_models import KINDS, build, by_torch, grid_adam, somewhere
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from voxelfield import VoxelPyramid
from voxelfield.grids.adam import GridAdam

STEPS = 3


def alone(model, points, targets, clip=None):
    """The levels after training on the points of both processes, by torch's operations only."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.Adam(twin.levels, lr=0.1, eps=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = [(by_torch(twin, p) - t).square().sum() for p, t in zip(points, targets, strict=True)]
        (sum(losses) / 2).backward()
        if clip is not None:
            clip_grad_norm_(twin.levels, clip)
        optimizer.step()
    return [level.detach() for level in twin.levels]


def check_data_parallel(rank, kind, optimizer_of, as_view, pieces):
    torch.manual_seed(0)
    first = build(kind)
    points, targets = somewhere(40).view(2, 20, 3), torch.rand(2, 20, first.channels)
    torch.manual_seed(rank)
    model = build(kind)
    optimizer = optimizer_of(model)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    for _ in range(STEPS):
        for piece, part in enumerate(points[rank].chunk(pieces)):
            last = piece == pieces - 1
            with nullcontext() if last else parallel.no_sync():
                (parallel(part).float() - targets[rank].chunk(pieces)[piece]).square().sum().backward()
        optimizer.step()
        if not isinstance(optimizer, GridAdam):
            optimizer.zero_grad(set_to_none=False)
    tolerance = {"rtol": 0, "atol": 1e-2 if "copies" in kind else 1e-5}
    for level, expected in zip(model.levels, alone(first, points, targets), strict=True):
        torch.testing.assert_close(level.detach(), expected, **tolerance)
    torch.testing.assert_close(model(points[0]).float(), by_torch(model, points[0]), rtol=0, atol=5e-3)


def check_sharded(rank):
    torch.manual_seed(0)
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
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(points[rank]) - targets[rank]).square().sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for level, wanted in zip(model.levels, expected, strict=True):
        torch.testing.assert_close(level.full_tensor(), wanted, rtol=0, atol=1e-5)
    late = VoxelPyramid((4, 8), 2, ((-1, -1, -1), (1, 1, 1)))
    late.enable_copies(torch.float16)
    fully_shard(late)
    with pytest.raises(ValueError, match=r"^features must be the parameters that enable_copies copied, got others"):
        late(points[rank])


def main(rank: int, store: str) -> None:
    """Runs every check."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rule = {"lr": 0.1, "eps": 1e-2}
    for kind in KINDS:
        for as_view in (False, True):
            check_data_parallel(rank, kind, lambda model: grid_adam(model, **rule), as_view, pieces=1)
        check_data_parallel(
            rank, kind, lambda model: torch.optim.Adam(model.parameters(), fused=True, **rule), False, pieces=2
        )
    check_sharded(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
