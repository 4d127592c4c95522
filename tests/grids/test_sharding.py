"""FSDP2 with deferred initialisation: built on the meta device, sharded, allocated, then initialised."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from voxelfield import VoxelGrid

fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard


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
