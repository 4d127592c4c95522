"""Densities that one kernel can march through: a pyramid of grids with a small network behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from voxelfield.fields.decoders import Decoder, FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.ops import _constants
from voxelfield.ops._internal.pyramid_field import MAX_NUMBERS


@dataclass(frozen=True, eq=False)
class PyramidDensity:
    """The density of a pyramid with a network behind it, in the form that the marching kernel reads.

    Attributes:
        levels: What the active levels are read from, each (X_l, Y_l, Z_l, 4).
        blocks: For each level the table of its blocks if it is sparse (:attr:`VoxelPyramid.blocks`), otherwise None.
        aabb: (2, 3) their box, world units.
        weights: The density network's two matrices.
        initial: Density of a zero output, per world unit.
    """

    levels: list[Tensor]
    blocks: list[Tensor | None]
    aabb: Tensor
    weights: list[Tensor]
    initial: float


def is_pyramid_density(grid: VoxelGrid | VoxelPyramid, decoder: Decoder) -> bool:
    """Tells whether the density that a decoder makes of a grid is of this kind.

    It is where the grid is a pyramid of at most 8 levels, each of 4 channels and less than 2^31 numbers, side by side
    and with "border" padding, the decoder a network of at most 16 geometry outputs with an exponential density, and all
    of it float32 or float16. Not for subclasses of any of these, which may compute something else.

    Args:
        grid: Features.
        decoder: Reads them.
    """
    if type(grid) is not VoxelPyramid or type(decoder) is not FusedMLPDecoder:
        return False
    return (
        type(decoder.activation) is ExponentialDensity
        and decoder.density_network[-1].shape[0] <= _constants.MAX_GEOMETRY
        and grid.reduce == "concat"
        and grid.active <= _constants.MAX_FIELD_LEVELS
        and all(level.padding == "border" and level.channels == _constants.LEVEL_CHANNELS for level in grid.grids)
        and all(level.numel() < MAX_NUMBERS for level in grid.levels)
        and all(
            parameter.dtype in (torch.float32, torch.float16) for parameter in (*grid.levels, *decoder.parameters())
        )
    )


def read_pyramid_density(grid: VoxelGrid | VoxelPyramid, decoder: Decoder) -> PyramidDensity | None:
    """Returns the density of a grid and a decoder for which :func:`is_pyramid_density` holds.

    None where, on CUDA, the grid is read from other than float16 copies.

    Args:
        grid: Features.
        decoder: Reads them.
    """
    assert isinstance(grid, VoxelPyramid)
    assert isinstance(decoder, FusedMLPDecoder)
    assert isinstance(decoder.activation, ExponentialDensity)
    levels = grid.sampled_levels
    if levels[0].is_cuda and levels[0].dtype != torch.float16:
        return None
    first, last = decoder.density_network
    # Levels that are off read zero: their columns of the first matrix do nothing.
    weights = [first[:, : _constants.LEVEL_CHANNELS * len(levels)], last]
    return PyramidDensity(levels, grid.blocks[: len(levels)], grid.aabb, weights, decoder.activation.initial)
