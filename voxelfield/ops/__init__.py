"""The compiled operators. Importing this compiles nothing; the first call finds or builds the kernels it needs."""

from voxelfield.ops.cells import trilinear_interpolate
from voxelfield.ops.grid import sample_trilinear

__all__ = ["sample_trilinear", "trilinear_interpolate"]
