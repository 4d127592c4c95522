"""The compiled operators. Importing this compiles nothing; the first call finds or builds the kernels it needs."""

from voxelfield.ops._images import RenderedImage
from voxelfield.ops._packing import PackedSamples
from voxelfield.ops.accumulate import accumulate_trilinear_
from voxelfield.ops.append_view import append_view
from voxelfield.ops.blocks import active_blocks
from voxelfield.ops.cells import trilinear_interpolate
from voxelfield.ops.color_error import pixel_color_error, sample_color_error
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
from voxelfield.ops.empty_distance import empty_distance
from voxelfield.ops.grid import sample_trilinear
from voxelfield.ops.grid_adam import grid_adam_
from voxelfield.ops.march_visible import march_visible
from voxelfield.ops.marching import OccupancyBits, march_rays, pack_occupancy
from voxelfield.ops.mlp import mlp
from voxelfield.ops.pixel_colors import pixel_colors
from voxelfield.ops.pixel_rays import PixelRays, pixel_rays
from voxelfield.ops.pyramid import sample_pyramid
from voxelfield.ops.ray_sums import sum_along_rays
from voxelfield.ops.render_grid import RenderedRays, render_grid
from voxelfield.ops.render_grid_image import ShDisplayGrid, render_grid_image
from voxelfield.ops.render_pyramid import render_pyramid_image
from voxelfield.ops.selection import select_samples
from voxelfield.ops.total_variation import grid_total_variation_grad_

__all__ = [
    "Composite",
    "OccupancyBits",
    "PackedSamples",
    "PixelRays",
    "RenderedImage",
    "RenderedRays",
    "ShDisplayGrid",
    "accumulate_trilinear_",
    "active_blocks",
    "alpha_transmittance",
    "alpha_weights",
    "append_view",
    "composite",
    "composite_alphas",
    "empty_distance",
    "grid_adam_",
    "grid_sample",
    "grid_total_variation_grad_",
    "march_rays",
    "march_visible",
    "mlp",
    "pack_occupancy",
    "pixel_color_error",
    "pixel_colors",
    "pixel_rays",
    "ray_transmittance",
    "ray_weights",
    "render_grid",
    "render_grid_image",
    "render_pyramid_image",
    "sample_color_error",
    "sample_pyramid",
    "sample_trilinear",
    "select_samples",
    "sum_along_rays",
    "trilinear_interpolate",
]
