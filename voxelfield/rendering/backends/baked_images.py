"""Pyramids with deferred shading, drawn from values that are stored at vertices."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from voxelfield.fields.field import Field, RadianceField
from voxelfield.ops._internal.render_baked_image import render_baked_image
from voxelfield.rendering.backends.backend import Draw, ImageBackend, ImageSource
from voxelfield.rendering.bricks import bake, can_bake
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import lens_rows
from voxelfield.rendering.render import View
from voxelfield.warps.warp import nested_box_args

# Pixels that are shaded at once, which limits the memory for large images.
_PIXELS_AT_ONCE = 1 << 19


class BakedImages(ImageBackend):
    """One kernel that reads :class:`voxelfield.rendering.bricks.Bricks`, and the network of deferred shading per pixel.

    Densities and values are interpolated between these vertices after the first network instead of before it, and
    values are rounded to 8 bits, so images differ slightly from images of ``render_view``.
    """

    name = "render_baked_image"
    bakes = True

    @classmethod
    def serves(cls, field: Field) -> bool:
        """See :class:`ImageBackend`."""
        return can_bake(field) and (field.warp is None or bool(field.warp.op_arguments))

    @classmethod
    def prepare(cls, source: ImageSource) -> Draw:
        """See :class:`ImageBackend`. Evaluates the field at all vertices of occupied blocks."""
        field, occupancy = source.field, source.occupancy
        assert isinstance(field, RadianceField)
        bricks, shade, warp = bake(field, occupancy), field.shade, field.warp
        assert shade is not None
        clip = field.grid.aabb if warp is None else None
        boxes = nested_box_args(warp)
        cells = occupancy.empty_distance

        def colors(sums: Tensor, opacity: Tensor, directions: Tensor) -> Tensor:
            if sums.is_cuda:
                rgb = shade(bricks.means(sums, opacity), directions)
            else:
                # Most of the time would go into pixels that show nothing; on CUDA, finding them would synchronise.
                shown = (opacity != 0).nonzero()[:, 0]
                rgb = torch.zeros_like(directions)
                rgb[shown] = shade(bricks.means(sums[shown], opacity[shown]), directions[shown])
            return opacity[:, None] * rgb + (1 - opacity[:, None]) * source.background

        def draw(cameras: Cameras, index: int) -> View:
            width, height = cameras.size(index)
            sums, opacity, depth, directions = render_baked_image(
                *(cameras.c2w[index], cameras.intrinsics[index], width, height, cells, occupancy.aabb),
                *(bricks.log_density, bricks.values, bricks.blocks, bricks.aabb),
                lens=lens_rows(cameras.lens, index),
                clip=clip,
                boxes=boxes,
                **asdict(source.settings),
            )
            pixels = sums.flatten(0, 1), opacity.flatten(), directions.flatten(0, 1)
            parts = (colors(*part) for part in zip(*(x.split(_PIXELS_AT_ONCE) for x in pixels), strict=True))
            return View(torch.cat(list(parts)).view(height, width, 3), opacity, depth)

        return draw
