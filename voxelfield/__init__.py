"""Voxel-grid radiance fields for PyTorch."""

from voxelfield import ops
from voxelfield.grids import VoxelGrid
from voxelfield.pyramid import VoxelPyramid

__version__ = "0.1.0"
__all__ = ["VoxelGrid", "VoxelPyramid", "__version__", "ops"]
