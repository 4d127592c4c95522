"""Balls of known radius, as plain functions and as a field of voxels."""

from __future__ import annotations

import math

import torch
from camera_poses import looking_at
from torch import Tensor

from voxelfield.fields.decoders import SHDecoder
from voxelfield.fields.density import DensityActivation
from voxelfield.fields.field import RadianceField
from voxelfield.grids.boxes import parse_box
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.warps.nested_boxes import NestedBoxes

# Far from the origin and of the size of a house, as a survey's coordinates may be.
BOX = ((280.0, -225.0, 30.0), (320.0, -175.0, 70.0))
CENTRE = torch.tensor([300.0, -200.0, 50.0])
RADIUS = 12.0
VOXELS = 40  # along the shortest edge
STEEPNESS = 12.0  # of the raw density, per world unit
DENSITY = 20.0  # that a raw density of 1 adds, per world unit
_FIRST_BAND = 0.5 / math.sqrt(math.pi)


def expected_colors(points: Tensor) -> Tensor:
    """The colours of the field below: each channel grows along its axis."""
    return torch.sigmoid((points - CENTRE) / RADIUS)


def radius_at(field: RadianceField, level: float) -> float:
    """Where the field below has a density."""
    activation = field.decoder.activation
    raw = math.log(math.expm1(level / activation.scale)) - activation.shift
    return RADIUS - raw / STEEPNESS


def ball_field(boxes: NestedBoxes | None = None) -> tuple[RadianceField, OccupancyGrid]:
    """A ball whose raw density falls linearly with the distance from its centre; all cells are occupied."""
    box = parse_box(BOX if boxes is None else boxes.warped_aabb)
    shape = [
        round((b - a) / (min(h - low for low, h in zip(*box, strict=True)) / VOXELS)) + 1
        for a, b in zip(*box, strict=True)
    ]
    grid = VoxelGrid(shape, 4, box)
    axes = [torch.linspace(a, b, n) for a, b, n in zip(*box, shape, strict=True)]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    points = places if boxes is None else boxes.to_world(places.view(-1, 3))[0].view(places.shape)
    unit = 1.0 if boxes is None else boxes.unit
    # In a warp of nested boxes, densities are per unit of warped coordinates, which is as long in each box.
    scale = DENSITY * unit
    distance = (points - CENTRE).norm(dim=-1, keepdim=True)
    with torch.no_grad():
        (level,) = grid.levels
        level.copy_(torch.cat((STEEPNESS * (RADIUS - distance), (points - CENTRE) / RADIUS / _FIRST_BAND), dim=-1))
    field = RadianceField(grid, SHDecoder(0, DensityActivation(scale, 1e-3 * scale)), boxes).requires_grad_(False)
    return field, OccupancyGrid(16, box)


def cameras_around(count: int, size: int, distance: float = 40.0) -> Cameras:
    """Cameras on a ring and above it that look at the ball's centre."""
    azimuth, height = 2.4 * torch.arange(count), 2 * (torch.arange(count) + 0.5) / count - 1
    level = (1 - height.square()).sqrt()
    back = torch.stack((level * azimuth.cos(), level * azimuth.sin(), height), dim=-1)
    intrinsics = torch.tensor([1.4 * size, 1.4 * size, size / 2, size / 2]).repeat(count, 1)
    return Cameras(looking_at(CENTRE, CENTRE + distance * back), intrinsics, size, size)
