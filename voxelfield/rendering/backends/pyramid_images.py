"""Pyramids with networks, rendered by one kernel per image."""

from __future__ import annotations

from functools import partial

import torch

from voxelfield.fields.decoders import FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.field import Field, RadianceField
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.ops import _constants
from voxelfield.ops._internal.render_pyramid_image import pyramid_image_fits, render_pyramid_image
from voxelfield.rendering.backends.backend import Draw, ImageBackend, ImageSource, one_kernel, stored_dtype
from voxelfield.warps.warp import nested_box_args


class PyramidImages(ImageBackend):
    """A single CUDA kernel for fields for which :attr:`RadianceField.has_pyramid_density` is True.

    The decoder must have 16 geometry outputs and one to three hidden colour layers, and must not shade deferred.
    """

    name = "render_pyramid_image"

    @classmethod
    def serves(cls, field: Field) -> bool:
        """See :class:`ImageBackend`."""
        if not (isinstance(field, RadianceField) and field.has_pyramid_density) or field.shade is not None:
            return False
        if field.warp is not None and not field.warp.op_arguments:
            return False
        decoder = field.decoder
        assert isinstance(decoder, FusedMLPDecoder)
        return (
            decoder.density_network[-1].shape[0] == _constants.MAX_GEOMETRY
            and len(decoder.color_network) <= _constants.MAX_FIELD_LAYERS
        )

    @classmethod
    def has_room(cls, field: Field, device: torch.device) -> bool:
        """See :class:`ImageBackend`. The widest hidden layer must fit in the shared memory of a block."""
        assert isinstance(field, RadianceField)
        decoder = field.decoder
        assert isinstance(decoder, FusedMLPDecoder)
        networks = (decoder.density_network, decoder.color_network)
        width = max(weight.shape[0] for network in networks for weight in list(network)[:-1])
        return pyramid_image_fits(field.aabb, width)

    @classmethod
    def prepare(cls, source: ImageSource) -> Draw:
        """See :class:`ImageBackend`. The working copies of training are reused if they have the kernel's dtype."""
        assert isinstance(source.field, RadianceField)
        pyramid, decoder = source.field.grid, source.field.decoder
        assert isinstance(pyramid, VoxelPyramid)
        assert isinstance(decoder, FusedMLPDecoder)
        assert isinstance(decoder.activation, ExponentialDensity)
        dtype = stored_dtype(source.background.device)
        levels = pyramid.active_levels(dtype)
        first, last = decoder.density_network
        # Inactive levels read zero, so their columns are dropped.
        weights = [first[:, : _constants.LEVEL_CHANNELS * len(levels)], last]
        render = partial(
            render_pyramid_image,
            levels=levels,
            aabb=pyramid.aabb,
            density_weights=[weight.detach().to(dtype).contiguous() for weight in weights],
            color_weights=[weight.detach().to(dtype) for weight in decoder.color_network],
            density_initial=decoder.activation.initial,
            view_degree=decoder.view_degree,
            blocks=pyramid.blocks[: len(levels)],
            boxes=nested_box_args(source.field.warp),
        )
        return one_kernel(render, source)
