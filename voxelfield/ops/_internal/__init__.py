"""Ops that only voxelfield's own classes call. They may change without notice; `voxelfield.ops` has the public ones."""

from voxelfield.ops._internal.accumulate import accumulate_trilinear_
from voxelfield.ops._internal.append_view import append_view
from voxelfield.ops._internal.color_error import pixel_color_error, sample_color_error
from voxelfield.ops._internal.empty_distance import empty_distance
from voxelfield.ops._internal.grid_adam import grid_adam_
from voxelfield.ops._internal.lens import lens_points, lens_rays
from voxelfield.ops._internal.march_pieces import march_pieces
from voxelfield.ops._internal.march_visible import march_visible
from voxelfield.ops._internal.pixel_colors import pixel_colors
from voxelfield.ops._internal.pixel_rays import PixelBatch, pixel_rays
from voxelfield.ops._internal.render_baked_image import render_baked_image
from voxelfield.ops._internal.render_grid_image import PackedSHGrid, render_grid_image
from voxelfield.ops._internal.render_pyramid_image import render_pyramid_image
from voxelfield.ops._internal.sparse_grid import places_in_atlas, share_copies_
from voxelfield.ops._internal.tiles import active_tiles, pack_vertices, touched_vertices, unpack_vertices
from voxelfield.ops._internal.total_variation import grid_total_variation_grad_

__all__ = [
    "PackedSHGrid",
    "PixelBatch",
    "accumulate_trilinear_",
    "active_tiles",
    "append_view",
    "empty_distance",
    "grid_adam_",
    "grid_total_variation_grad_",
    "lens_points",
    "lens_rays",
    "march_pieces",
    "march_visible",
    "pack_vertices",
    "pixel_color_error",
    "pixel_colors",
    "pixel_rays",
    "places_in_atlas",
    "render_baked_image",
    "render_grid_image",
    "render_pyramid_image",
    "sample_color_error",
    "share_copies_",
    "touched_vertices",
    "unpack_vertices",
]
