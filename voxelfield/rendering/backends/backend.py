"""The interface of image backends, and the general backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from voxelfield.fields.field import Field
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import lens_rows
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import View, render_view

Draw = Callable[[Cameras, int], View]
"""Renders the image of the camera with the given index; the cameras must be on the field's device."""


@dataclass(frozen=True, eq=False)
class ImageSource:
    """The inputs from which images are rendered.

    Attributes:
        field: The field.
        occupancy: The occupied cells, on the field's device.
        settings: Sampling settings.
        background: (3,) float32 colour behind the scene, on the field's device.
        chunk: Number of rays per chunk, for a backend whose memory grows with the number of rays.
        precision: Autocast dtype for the decoder.
    """

    field: Field
    occupancy: OccupancyGrid
    settings: RenderSettings
    background: Tensor
    chunk: int
    precision: torch.dtype


class ImageBackend(ABC):
    """A backend that renders images of some kinds of field.

    Attributes:
        name: Name of the backend for users: the name of the function that renders.
        bakes: Whether :meth:`prepare` evaluates the whole field, which takes as long as many images.
    """

    name: ClassVar[str]
    bakes: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def serves(cls, field: Field) -> bool:
        """Returns whether the backend renders fields of this kind; the result is the same on every device."""

    @classmethod
    def has_room(cls, field: Field, device: torch.device) -> bool:
        """Returns whether a device has enough shared memory for the backend; only for fields that it serves."""
        return True

    @classmethod
    @abstractmethod
    def prepare(cls, source: ImageSource) -> Draw:
        """Prepares the data that rendering needs besides the field, and returns the rendering function.

        Field and occupancy must not change while the returned function is in use.
        """


def one_kernel(render: Callable[..., tuple[Tensor, Tensor, Tensor]], source: ImageSource) -> Draw:
    """Returns a rendering function based on an op that generates the rays itself.

    Args:
        render: The op, with all arguments bound except those common to all such ops: occupancy, settings, background
            and camera.
        source: The source of the common arguments.
    """
    occupancy = source.occupancy
    scene = {"background": source.background, "occupied": occupancy.empty_distance, "aabb_occupancy": occupancy.aabb}
    prepared = partial(render, **scene, **asdict(source.settings))

    def draw(cameras: Cameras, index: int) -> View:
        camera = cameras.c2w[index], cameras.intrinsics[index], *cameras.size(index)
        return View(*prepared(*camera, lens=lens_rows(cameras.lens, index)))

    return draw


def stored_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype in which kernels read fields: float16 on CUDA, as 16-bit training does."""
    return torch.float16 if device.type == "cuda" else torch.float32


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
