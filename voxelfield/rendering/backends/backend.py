"""What a way of rendering images is."""

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
from voxelfield.rendering.lens import lens_arguments
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import View

Draw = Callable[[Cameras, int], View]
"""Renders the image of one of some cameras, all of them on the field's device."""


@dataclass(frozen=True, eq=False)
class ImageSource:
    """All that images are rendered from.

    Attributes:
        field: The field.
        occupancy: Where to sample, on the field's device.
        settings: How to sample.
        background: (3,) float32 colour behind the scene, on the field's device.
        chunk: Rays at once, for a backend that needs memory for each of them.
        precision: Of a decoder that autocast applies to.
    """

    field: Field
    occupancy: OccupancyGrid
    settings: RenderSettings
    background: Tensor
    chunk: int
    precision: torch.dtype


class ImageBackend(ABC):
    """A way of rendering images of some kinds of field.

    Attributes:
        name: How users name it: the function that renders.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def serves(cls, field: Field) -> bool:
        """Tells whether the backend renders fields of this kind; the same on every device."""

    @classmethod
    def has_room(cls, field: Field, device: torch.device) -> bool:
        """Tells whether a device has room for the backend; only for a field that it serves."""
        return True

    @classmethod
    @abstractmethod
    def prepare(cls, source: ImageSource) -> Draw:
        """Makes what rendering needs beside the field, and returns what renders.

        Field and occupancy stay as they are while the result is in use.
        """


def one_kernel(render: Callable[..., tuple[Tensor, Tensor, Tensor]], source: ImageSource) -> Draw:
    """Returns what renders by an op that makes the rays itself.

    Args:
        render: The op, which lacks what every such op takes: occupancy, settings, background, and the camera.
        source: Where these come from.
    """
    occupancy = source.occupancy
    scene = {"background": source.background, "occupied": occupancy.empty_distance, "aabb_occupancy": occupancy.aabb}
    prepared = partial(render, **scene, **asdict(source.settings))

    def draw(cameras: Cameras, index: int) -> View:
        camera = cameras.c2w[index], cameras.intrinsics[index], cameras.width, cameras.height
        return View(*prepared(*camera, **lens_arguments(cameras.lens, index)))

    return draw


def stored_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype that kernels read fields in: float16 on CUDA, as training in 16 bits does."""
    return torch.float16 if device.type == "cuda" else torch.float32
