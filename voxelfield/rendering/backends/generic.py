"""Any field, rendered in chunks of rays."""

from __future__ import annotations

import torch

from voxelfield.fields.field import Field
from voxelfield.rendering.backends.backend import Draw, ImageBackend, ImageSource
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.render import View, render_view


class GenericBackend(ImageBackend):
    """:func:`voxelfield.rendering.render.render_view`, the general path; synchronises with the device."""

    name = "render_view"

    @classmethod
    def serves(cls, field: Field) -> bool:
        """See :class:`ImageBackend`. Always True."""
        return True

    @classmethod
    def prepare(cls, source: ImageSource) -> Draw:
        """See :class:`ImageBackend`."""
        narrow = source.precision != torch.float32
        device_type, dtype = source.background.device.type, source.precision if narrow else None

        def draw(cameras: Cameras, index: int) -> View:
            with torch.autocast(device_type, dtype, narrow, cache_enabled=False):
                return render_view(
                    source.field,
                    cameras,
                    index,
                    source.occupancy,
                    source.settings,
                    source.background,
                    source.chunk,
                )

        return draw
