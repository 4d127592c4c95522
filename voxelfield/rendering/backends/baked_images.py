"""Pyramids with deferred shading, drawn from values that are stored at vertices."""

from __future__ import annotations

from dataclasses import asdict

import torch

from voxelfield.fields.field import Field, RadianceField
from voxelfield.ops._internal.render_baked_image import render_baked_image
from voxelfield.rendering.backends.backend import Draw, ImageBackend, ImageSource
from voxelfield.rendering.bricks import bake, can_bake
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import lens_rows
from voxelfield.rendering.render import View


class BakedImages(ImageBackend):
    """One kernel that reads :class:`voxelfield.rendering.bricks.Bricks`, and the network of deferred shading per pixel.

    Densities and values are interpolated between the vertices of the finest level after the first network instead of
    before, and values are rounded to 8 bits, so images differ slightly from those of ``render_view``.
    """

    name = "render_baked_image"

    @classmethod
    def serves(cls, field: Field) -> bool:
        """See :class:`ImageBackend`."""
        return can_bake(field) and (field.warp is None or bool(field.warp.op_arguments))  # type: ignore[attr-defined]

    @classmethod
    def prepare(cls, source: ImageSource) -> Draw:
        """See :class:`ImageBackend`. Evaluates the field at all vertices of occupied blocks."""
        field, occupancy = source.field, source.occupancy
        assert isinstance(field, RadianceField)
        bricks, shade, warp = bake(field, occupancy), field.shade, field.warp
        assert shade is not None
        clip = field.grid.aabb if warp is None else None
        boxes = [] if warp is None else warp.op_arguments
        cells = occupancy.empty_distance

        def draw(cameras: Cameras, index: int) -> View:
            width, height = cameras.size(index)
            sums, opacity, depth = render_baked_image(
                *(cameras.c2w[index], cameras.intrinsics[index], width, height, cells, occupancy.aabb),
                *(bricks.log_density, bricks.values, bricks.blocks, bricks.aabb),
                lens=lens_rows(cameras.lens, index),
                clip=clip,
                boxes=boxes,
                **asdict(source.settings),
            )
            directions = cameras.image_rays(index, field.aabb).directions
            means, weights = bricks.means(sums, opacity).flatten(0, 1), opacity.flatten()
            if sums.is_cuda:
                rgb = shade(means, directions)
            else:
                # Most of the time would go into pixels that show nothing; on CUDA, finding them would synchronise.
                shown = (weights != 0).nonzero()[:, 0]
                rgb = torch.zeros_like(directions)
                rgb[shown] = shade(means[shown], directions[shown])
            rgb = weights[:, None] * rgb + (1 - weights[:, None]) * source.background
            return View(rgb.view(height, width, 3), opacity, depth)

        return draw
