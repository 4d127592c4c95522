"""The compiled operators. Importing this module compiles nothing; the first call loads or builds the kernels."""

from voxelfield.ops._packing import PackedSamples, offsets_from_ray_index, pack_info, ray_index_from_offsets
from voxelfield.ops.cells import trilinear_interpolate
from voxelfield.ops.compat import grid_sample
from voxelfield.ops.compositing import (
    Composite,
    alpha_transmittance,
    alpha_weights,
    composite,
    composite_alphas,
    ray_transmittance,
    ray_weights,
)
from voxelfield.ops.cubic import bspline_prefilter, sample_cubic
from voxelfield.ops.distances import FusedDepth, integrate_depth, marching_cubes, redistance, sample_distance
from voxelfield.ops.grid import sample_pyramid, sample_trilinear
from voxelfield.ops.importance import importance_sample
from voxelfield.ops.lines import backproject_rays, first_crossing, integrate_rays
from voxelfield.ops.march_levels import march_levels
from voxelfield.ops.marching import OccupancyBits, march_rays, pack_occupancy
from voxelfield.ops.mlp import mlp
from voxelfield.ops.ray_sums import exclusive_prod, exclusive_sum, inclusive_prod, inclusive_sum, sum_along_rays
from voxelfield.ops.render_grid import RenderedRays, render_grid
from voxelfield.ops.selection import select_samples
from voxelfield.ops.splat import splat_cubic, splat_trilinear
from voxelfield.ops.voxel_list import VoxelIndex, sample_voxels

__all__ = [
    "Composite",
    "FusedDepth",
    "OccupancyBits",
    "PackedSamples",
    "RenderedRays",
    "VoxelIndex",
    "alpha_transmittance",
    "alpha_weights",
    "backproject_rays",
    "bspline_prefilter",
    "composite",
    "composite_alphas",
    "exclusive_prod",
    "exclusive_sum",
    "first_crossing",
    "grid_sample",
    "importance_sample",
    "inclusive_prod",
    "inclusive_sum",
    "integrate_depth",
    "integrate_rays",
    "march_levels",
    "march_rays",
    "marching_cubes",
    "mlp",
    "offsets_from_ray_index",
    "pack_info",
    "pack_occupancy",
    "ray_index_from_offsets",
    "ray_transmittance",
    "ray_weights",
    "redistance",
    "render_grid",
    "sample_cubic",
    "sample_distance",
    "sample_pyramid",
    "sample_trilinear",
    "sample_voxels",
    "select_samples",
    "splat_cubic",
    "splat_trilinear",
    "sum_along_rays",
    "trilinear_interpolate",
]
