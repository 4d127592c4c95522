"""Voxel-grid radiance fields for PyTorch."""

from voxelfield import ops
from voxelfield.display import FieldRenderer
from voxelfield.grids import VoxelGrid
from voxelfield.pyramid import VoxelPyramid

__version__ = "0.1.0"
__all__ = ["FieldRenderer", "VoxelGrid", "VoxelPyramid", "__version__", "ops"]
