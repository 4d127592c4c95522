"""Voxel-grid radiance fields for PyTorch."""

from voxelfield import ops

__version__ = "0.1.0"
__all__ = ["ops"]
