"""Pyramids with networks, rendered by one kernel per image."""

from __future__ import annotations

from functools import partial

import torch

from voxelfield.fields.decoders import FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.field import Field, RadianceField, warp_of
from voxelfield.foundation import constants
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.ops._internal.render_pyramid_image import pyramid_image_fits, render_pyramid_image
from voxelfield.rendering.backends.backend import Draw, ImageBackend, ImageSource, one_kernel, stored_dtype
from voxelfield.warps.warp import nested_box_args


class PyramidImages(ImageBackend):
    """A single CUDA kernel for fields that have :meth:`RadianceField.pyramid_parts`.

    The decoder must have 16 geometry outputs and one to three hidden colour layers, and must not shade deferred.
    """

    name = "render_pyramid_image"

    @classmethod
    def serves(cls, field: Field) -> bool:
        """See :class:`ImageBackend`."""
        if not isinstance(field, RadianceField) or field.shade is not None:
            return False
        parts = field.pyramid_parts()
        if parts is None or (field.warp is not None and not field.warp.op_arguments):
            return False
        _, decoder, _ = parts
        return (
            decoder.density_network[-1].shape[0] == constants.MAX_GEOMETRY
            and len(decoder.color_network) <= constants.MAX_FIELD_LAYERS
        )

    @classmethod
    def has_room(cls, field: Field, device: torch.device) -> bool:
        """See :class:`ImageBackend`. The widest hidden layer must fit in the shared memory of a block."""
        _, decoder, _ = _parts(field)
        networks = (decoder.density_network, decoder.color_network)
        width = max(weight.shape[0] for network in networks for weight in list(network)[:-1])
        return pyramid_image_fits(field.aabb, width)

    @classmethod
    def prepare(cls, source: ImageSource) -> Draw:
        """See :class:`ImageBackend`. The working copies of training are reused if they have the kernel's dtype."""
        pyramid, decoder, activation = _parts(source.field)
        dtype = stored_dtype(source.background.device)
        levels = pyramid.active_levels(dtype)
        first, last = decoder.density_network
        # Inactive levels read zero, so their columns are dropped.
        weights = [first[:, : constants.LEVEL_CHANNELS * len(levels)], last]
        render = partial(
            render_pyramid_image,
            levels=levels,
            aabb=pyramid.aabb,
            density_weights=[weight.detach().to(dtype).contiguous() for weight in weights],
            color_weights=[weight.detach().to(dtype) for weight in decoder.color_network],
            density_initial=activation.initial,
            view_degree=decoder.view_degree,
            blocks=pyramid.blocks[: len(levels)],
            boxes=nested_box_args(warp_of(source.field)),
        )
        return one_kernel(render, source)


def _parts(field: Field) -> tuple[VoxelPyramid, FusedMLPDecoder, ExponentialDensity]:
    parts = field.pyramid_parts() if isinstance(field, RadianceField) else None
    assert parts is not None, "the backend does not serve the field"
    return parts
