"""Random fields with deferred shading, cells to look through, and cameras to look from."""

from __future__ import annotations

import torch
from camera_poses import random_rotations

from voxelfield.fields.decoders import DeferredMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.field import RadianceField
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.warps.nested_boxes import NestedBoxes

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
NESTED = NestedBoxes(BOX, 3, near=0.1)
SETTINGS = RenderSettings(step=2 / 20, min_transmittance=1e-3, min_weight=1e-3)


def make_field(device: torch.device, warp: NestedBoxes | None, geometry: int = 8) -> RadianceField:
    box = BOX if warp is None else warp.warped_aabb
    pyramid = VoxelPyramid((4, 12), 4, box, init_range=2.0)
    decoder = DeferredMLPDecoder(8, 32, geometry, 1, 2, ExponentialDensity(0.5 if warp is None else 0.2))
    with torch.no_grad():
        decoder.density_network[-1].mul_(2)
        decoder.color_network[-1].mul_(2)
    return RadianceField(pyramid, decoder, warp=warp).to(device)


def half_empty(field: RadianceField) -> OccupancyGrid:
    """Occupied cells whose size has nothing to do with that of blocks; the same ones on every device."""
    occupancy = OccupancyGrid(9, field.grid.aabb.tolist())
    occupancy.occupied.copy_(torch.rand(occupancy.occupied.shape) < 0.5)
    return occupancy.to(field.aabb.device)


def look_at(device: torch.device) -> Cameras:
    """A camera beside the box, and one inside."""
    c2w = torch.eye(4).repeat(2, 1, 1)
    c2w[0, :3, 3] = torch.tensor([0.2, -0.1, 3.0])
    c2w[1, :3, :3] = random_rotations(1)
    return Cameras(c2w, torch.tensor([[30.0, 28.0, 15.0, 11.0]] * 2), 33, 21).to(device)
