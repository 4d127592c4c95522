"""The compiled operators. Importing this compiles nothing; the first call finds or builds the kernels it needs."""

from voxelfield.ops.cells import trilinear_interpolate
from voxelfield.ops.compat import grid_sample
from voxelfield.ops.compositing import Composite, composite, ray_weights
from voxelfield.ops.grid import sample_trilinear
from voxelfield.ops.marching import march_rays
from voxelfield.ops.pyramid import sample_pyramid

__all__ = [
    "Composite",
    "composite",
    "grid_sample",
    "march_rays",
    "ray_weights",
    "sample_pyramid",
    "sample_trilinear",
    "trilinear_interpolate",
]
