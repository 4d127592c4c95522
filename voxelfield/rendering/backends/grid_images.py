"""Grids of density and spherical harmonics, rendered by one kernel per image."""

from __future__ import annotations

from functools import partial

import torch

from voxelfield.fields.decoders import SHDecoder
from voxelfield.fields.density import DensityActivation
from voxelfield.fields.field import Field, RadianceField
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.ops._internal.render_grid_image import PackedSHGrid, render_grid_image
from voxelfield.rendering.backends.backend import Draw, ImageBackend, ImageSource, one_kernel, stored_dtype

_DTYPES = (torch.float32, torch.float16)
_MAX_VERTICES = 2**31 - 2


class GridImages(ImageBackend):
    """A single kernel for a :class:`VoxelGrid`, or a :class:`VoxelPyramid` that is a sum, with an :class:`SHDecoder`.

    A sum is collapsed into one grid (:meth:`VoxelPyramid.collapse`), which is lossless. Not supported are subclasses of
    these classes, which may compute something else; grids of more than 2^31 - 2 vertices; padding other than "border";
    ``align_corners=False``; fields with a warp; and dtypes other than float32 and float16.
    """

    name = "render_grid_image"

    @classmethod
    def serves(cls, field: Field) -> bool:
        """See :class:`ImageBackend`."""
        if type(field) is not RadianceField or field.warp is not None or type(field.decoder) is not SHDecoder:
            return False
        grid = field.grid
        if not (type(grid) is VoxelGrid or (type(grid) is VoxelPyramid and grid.reduce == "sum")):
            return False
        finest = grid.grids[grid.active - 1] if isinstance(grid, VoxelPyramid) else grid
        return (
            type(field.decoder.activation) is DensityActivation
            and finest.padding == "border"
            and finest.align_corners
            and finest.features[..., 0].numel() <= _MAX_VERTICES
            and all(parameter.dtype in _DTYPES for parameter in field.parameters())
        )

    @classmethod
    def prepare(cls, source: ImageSource) -> Draw:
        """See :class:`ImageBackend`. Coefficients are padded to whole 16-byte reads; densities are stored apart."""
        assert isinstance(source.field, RadianceField)
        grid, decoder = source.field.grid, source.field.decoder
        assert isinstance(decoder, SHDecoder)
        assert isinstance(decoder.activation, DensityActivation)
        dtype = stored_dtype(source.background.device)
        features = grid.collapse(dtype) if isinstance(grid, VoxelPyramid) else grid.sampled_levels[0]
        render = partial(
            render_grid_image,
            field=PackedSHGrid.pack(features, grid.aabb, decoder.degree, dtype),
            density_scale=decoder.activation.scale,
            density_shift=decoder.activation.shift,
        )
        return one_kernel(render, source)
