"""Densities that a single kernel can march through: a pyramid of grids followed by a small network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from voxelfield.fields.decoders import Decoder, FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.ops import _constants


@dataclass(frozen=True, eq=False)
class PyramidDensity:
    """The density of a pyramid followed by a network, in the form that the marching kernel reads.

    Attributes:
        levels: The tensors from which the active levels are read, each (X_l, Y_l, Z_l, 4).
        blocks: For each level, the block table if the level is sparse (:attr:`VoxelPyramid.blocks`), otherwise None.
        aabb: (2, 3) box of the levels, world units.
        weights: The density network's two matrices.
        initial: Density at a zero output, per world unit.
    """

    levels: list[Tensor]
    blocks: list[Tensor | None]
    aabb: Tensor
    weights: list[Tensor]
    initial: float


def is_pyramid_density(grid: VoxelGrid | VoxelPyramid, decoder: Decoder) -> bool:
    """Tells whether the density of a grid and a decoder can be expressed as a :class:`PyramidDensity`.

    This requires a pyramid of at most 8 levels, concatenated, with "border" padding, each of 4 channels and fewer than
    2^31 elements; and a fused network decoder with at most 16 geometry outputs and an exponential density. All
    parameters must be float32 or float16. Subclasses do not qualify, because they may compute something else.

    Args:
        grid: Features.
        decoder: Maps features to density.
    """
    if type(grid) is not VoxelPyramid or type(decoder) is not FusedMLPDecoder:
        return False
    return (
        type(decoder.activation) is ExponentialDensity
        and decoder.density_network[-1].shape[0] <= _constants.MAX_GEOMETRY
        and grid.reduce == "concat"
        and grid.active <= _constants.MAX_FIELD_LEVELS
        and all(level.padding == "border" and level.channels == _constants.LEVEL_CHANNELS for level in grid.grids)
        and all(level.numel() < 2**31 - 1 for level in grid.levels)  # the kernels count in 32 bits
        and all(
            parameter.dtype in (torch.float32, torch.float16) for parameter in (*grid.levels, *decoder.parameters())
        )
    )


def read_pyramid_density(grid: VoxelGrid | VoxelPyramid, decoder: Decoder) -> PyramidDensity | None:
    """Returns the density of a grid and a decoder for which :func:`is_pyramid_density` holds.

    None if, on CUDA, the grid is not read from float16 copies.

    Args:
        grid: Features.
        decoder: Maps features to density.
    """
    assert isinstance(grid, VoxelPyramid)
    assert isinstance(decoder, FusedMLPDecoder)
    assert isinstance(decoder.activation, ExponentialDensity)
    levels = grid.sampled_levels
    if levels[0].is_cuda and levels[0].dtype != torch.float16:
        return None
    first, last = decoder.density_network
    # Inactive levels read zero, so their columns of the first matrix have no effect.
    weights = [first[:, : _constants.LEVEL_CHANNELS * len(levels)], last]
    return PyramidDensity(levels, grid.blocks[: len(levels)], grid.aabb, weights, decoder.activation.initial)
