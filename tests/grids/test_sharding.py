"""FSDP2: deferred initialisation, and what sharded grids refuse before anything is changed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from voxelfield import VoxelGrid, VoxelPyramid

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
SMALLER = ((-1.0, -1.0, -1.0), (0.0, 0.0, 0.0))


def fully_shard(module: nn.Module, **options):
    """Torch's, imported once it is used: that takes a second, in every process that collects tests."""
    return pytest.importorskip("torch.distributed.fsdp").fully_shard(module, **options)


@pytest.fixture
def mesh(tmp_path):
    """A mesh of one process on the CPU."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_grid_has_its_box_and_trains(mesh):
    box = [[-1.0, 0.0, -2.0], [1.0, 3.0, 2.0]]
    with torch.device("meta"):
        grid = VoxelGrid((5, 6, 7), 3, box, init_std=0.5)
    fully_shard(grid, mesh=mesh)
    grid.to_empty(device="cpu")
    torch.manual_seed(1)
    grid.reset_parameters()
    torch.manual_seed(1)
    expected = VoxelGrid((5, 6, 7), 3, box, init_std=0.5)
    torch.testing.assert_close(grid.aabb, torch.tensor(box))

    points = torch.rand(50, 3) * torch.tensor([2.0, 3.0, 4.0]) + torch.tensor(box[0])
    output = grid(points)
    torch.testing.assert_close(output, expected(points), rtol=0, atol=0)
    assert output.abs().sum() > 0
    output.square().sum().backward()
    expected(points).square().sum().backward()
    for sharded, whole in zip(grid.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


class Model(nn.Module):
    """A grid in a model that is sharded as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = VoxelGrid(5, 3, BOX, init_std=1.0)
        self.layer = nn.Linear(3, 2)

    def forward(self, points):
        return self.layer(self.grid(points))


def whole(features):
    return features.full_tensor() if hasattr(features, "full_tensor") else features.detach()


CHANGES = {
    "upsample": lambda grid: grid.upsample(9),
    "refit": lambda grid: grid.refit(SMALLER, 7),
    "enable_copies": lambda grid: grid.enable_copies(torch.float32),
}


@pytest.mark.parametrize("lent", [False, True], ids=["sharded", "lent whole"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_sharded_grid_refuses_to_change(mesh, name, lent):
    model = Model()
    before = model.grid.features.detach().clone()
    fully_shard(model, mesh=mesh)
    if lent:
        with torch.no_grad():
            model(torch.zeros(1, 3))
        assert type(model.grid.features) is nn.Parameter, "fully_shard has not lent the root's parameters"
    with pytest.raises(ValueError, match=rf"^features must be whole for {name}, got those of a grid that fully_shard"):
        CHANGES[name](model.grid)
    assert torch.equal(whole(model.grid.features), before)
    assert torch.equal(model.grid.aabb, torch.tensor(BOX))
    model(torch.zeros(1, 3)).sum().backward()
    assert whole(model.grid.features.grad).ne(0).any()


def test_a_grid_that_is_ignored_changes_as_ever(mesh):
    model = Model()
    fully_shard(model, mesh=mesh, ignored_params={model.grid.features})
    for change in CHANGES.values():
        change(model.grid)
    assert model.grid.resolution == (7, 7, 7)
    model(torch.zeros(1, 3)).sum().backward()
    assert model.grid.features.grad.shape == (7, 7, 7, 3)


def test_a_sharded_pyramid_refuses_to_change(mesh):
    pyramid = VoxelPyramid((4, 8), 2, BOX, init_range=1.0)
    before = [level.detach().clone() for level in pyramid.levels]
    fully_shard(pyramid.grids[1], mesh=mesh)  # the first level alone could change
    with pytest.raises(ValueError, match=r"^features must be whole for refit"):
        pyramid.resize(8, aabb=SMALLER)
    assert all(torch.equal(whole(level), old) for level, old in zip(pyramid.levels, before, strict=True))
    assert torch.equal(pyramid.aabb, torch.tensor(BOX))


def test_a_sharded_grid_loads_its_own_resolution_only(mesh):
    grid, other, finer = (VoxelGrid(size, 3, SMALLER, init_std=1.0) for size in (5, 5, 9))
    values, plain = other.features.detach().clone(), dict(finer.state_dict())
    for sharded in (grid, other, finer):
        fully_shard(sharded, mesh=mesh)
    grid.load_state_dict(other.state_dict())
    assert torch.equal(whole(grid.features), values)
    for state in (plain, finer.state_dict()):
        with pytest.raises(ValueError, match=r"^features must be whole for load_state_dict of another resolution"):
            grid.load_state_dict(state)
        assert torch.equal(whole(grid.features), values)
