"""The compiled operators. Importing this compiles nothing; the first call finds or builds the kernels it needs."""

from voxelfield.ops._packing import PackedSamples
from voxelfield.ops.accumulate import accumulate_trilinear_
from voxelfield.ops.blocks import active_blocks
from voxelfield.ops.cells import trilinear_interpolate
from voxelfield.ops.compat import grid_sample
from voxelfield.ops.compositing import Composite, composite, ray_weights
from voxelfield.ops.grid import sample_trilinear
from voxelfield.ops.grid_adam import grid_adam_
from voxelfield.ops.marching import OccupancyBits, march_rays, pack_occupancy
from voxelfield.ops.mlp import mlp
from voxelfield.ops.pyramid import sample_pyramid
from voxelfield.ops.selection import select_samples
from voxelfield.ops.total_variation import grid_total_variation_grad_

__all__ = [
    "Composite",
    "OccupancyBits",
    "PackedSamples",
    "accumulate_trilinear_",
    "active_blocks",
    "composite",
    "grid_adam_",
    "grid_sample",
    "grid_total_variation_grad_",
    "march_rays",
    "mlp",
    "pack_occupancy",
    "ray_weights",
    "sample_pyramid",
    "sample_trilinear",
    "select_samples",
    "trilinear_interpolate",
]
