"""Voxel-grid radiance fields for PyTorch."""

from voxelfield import ops
from voxelfield.grids import VoxelGrid

__version__ = "0.1.0"
__all__ = ["VoxelGrid", "__version__", "ops"]
