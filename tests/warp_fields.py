"""Fields over a warp of their own, for the tests of nested boxes and of normalised device coordinates."""

from __future__ import annotations

import torch

from voxelfield.fields.decoders import FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.field import RadianceField
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.ops import PackedSamples
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays
from voxelfield.warps.warp import Warp


def field_over(warp: Warp, cells: tuple[int, int, int], device: torch.device) -> tuple[RadianceField, OccupancyGrid]:
    """Returns a random pyramid over a warp, and an occupancy grid with seven tenths of the reachable cells."""
    pyramid = VoxelPyramid((8, 16, 24), 4, warp.warped_aabb, init_range=1.0)
    decoder = FusedMLPDecoder(pyramid.channels, 32, 16, 2, 2, ExponentialDensity(2.0))
    field = RadianceField(pyramid, decoder, warp).to(device)
    if device.type == "cuda":
        pyramid.enable_copies(torch.float16)
    occupancy = OccupancyGrid(cells, warp.warped_aabb)
    possible = warp.cells_in_use(cells, torch.device("cpu"))
    occupancy.restrict(possible & (torch.rand(cells) < 0.7), occupancy.aabb)
    return field, occupancy.to(device)


def placed(samples: PackedSamples) -> dict[tuple[int, float], list[float]]:
    """Returns the positions of samples by their ray and their distance along it."""
    keys = zip(samples.ray_index.tolist(), (round(t, 4) for t in samples.t.tolist()), strict=True)
    return dict(zip(keys, samples.positions.tolist(), strict=True))


def in_the_world(warp: Warp, samples: PackedSamples, rays: Rays) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions of samples in the world (M, 3), and their distances along their rays (M,)."""
    distances = warp.world_distances(samples, rays.origins, rays.directions)
    return rays.origins[samples.ray_index] + distances[:, None] * rays.directions[samples.ray_index], distances


class General(RadianceField):
    """The same kind of field, for which there is no kernel."""


def general(field: RadianceField) -> General:
    """Returns a field with the same grid and decoder that takes the general path."""
    return General(field.grid, field.decoder, field.warp)
