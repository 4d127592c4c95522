"""Backends that render whole images: a general one for every field, and kernels for some kinds of field."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield import ops
from voxelfield.fields.decoders import DeferredMLPDecoder, FusedMLPDecoder, SHDecoder
from voxelfield.fields.density import DensityActivation, ExponentialDensity
from voxelfield.fields.field import Field, RadianceField, warp_of
from voxelfield.foundation import constants
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.ops._internal.fields import (
    pack_sh_grid,
    pyramid_image_fits,
    render_baked_image,
    render_grid_image,
    render_pyramid_image,
)
from voxelfield.ops._table import Op
from voxelfield.rendering.bricks import bake, can_bake
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import View, render_view
from voxelfield.warps.warp import nested_box_args

_GRID_DTYPES = (torch.float32, torch.float16)
_MAX_VERTICES = 2**31 - 2

# Pixels that are shaded at once on the CPU, which limits the memory for large images.
_PIXELS_AT_ONCE = 1 << 19

Draw = Callable[[Cameras, int], View]
"""Renders the image of the camera with the given index; the cameras must be on the field's device."""


@dataclass(frozen=True, eq=False)
class ImageSource:
    """The inputs from which images are rendered, all on the field's device.

    The ``background`` is the colour (3,) float32 behind the scene, ``chunk`` the number of rays that a backend whose
    memory grows with it renders at once, and ``precision`` the autocast dtype for the decoder.
    """

    field: Field
    occupancy: OccupancyGrid
    settings: RenderSettings
    background: Tensor
    chunk: int
    precision: torch.dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype in which kernels read fields: float16 on CUDA, as 16-bit training does."""
        return torch.float16 if self.background.is_cuda else torch.float32


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
        scene = (source.occupancy, source.settings, source.background, source.chunk)

        def draw(cameras: Cameras, index: int) -> View:
            with torch.autocast(device_type, dtype, narrow, cache_enabled=False):
                return render_view(source.field, cameras, index, *scene)

        return draw


def _one_kernel(op: Op, source: ImageSource, finish: Callable[..., View] = View, **field: Any) -> Draw:
    """Returns a function that calls an op, which casts the rays itself, for a camera, and makes a view of its results.

    ``field`` describes the field.
    """
    distances, settings = source.occupancy.empty_distance, source.settings
    cells = {"occupied": distances, "resolution": distances.shape, "aabb_occupancy": source.occupancy.aabb}
    limits = {"step": settings.step, "min_transmittance": settings.min_transmittance, "min_weight": settings.min_weight}
    inputs = {**field, **cells, **limits}

    def draw(cameras: Cameras, index: int) -> View:
        width, height = cameras.size(index)
        lens = None if cameras.lens is None else cameras.lens.rows[index]
        camera = {"c2w": cameras.c2w[index], "intrinsics": cameras.intrinsics[index], "lens": lens}
        size = {"width": width, "height": height, "across": cameras.across}
        return finish(*op.by_name(**camera, **size, **inputs))

    return draw


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
            and all(parameter.dtype in _GRID_DTYPES for parameter in field.parameters())
        )

    @classmethod
    def prepare(cls, source: ImageSource) -> Draw:
        """See :class:`ImageBackend`. Coefficients are padded to whole 16-byte reads; densities are stored apart."""
        assert isinstance(source.field, RadianceField)
        grid, decoder, dtype = source.field.grid, source.field.decoder, source.stored_dtype
        assert isinstance(decoder, SHDecoder)
        assert isinstance(decoder.activation, DensityActivation)
        whole = grid.collapse(dtype) if isinstance(grid, VoxelPyramid) else grid.sampled_levels[0]
        features, density = pack_sh_grid(whole, decoder.degree, dtype)
        return _one_kernel(
            render_grid_image,
            source,
            background=source.background,
            grid=features,
            density=density,
            aabb_grid=grid.aabb.to(torch.float32),
            degree=decoder.degree,
            density_scale=decoder.activation.scale,
            density_shift=decoder.activation.shift,
        )


class PyramidImages(ImageBackend):
    """A single CUDA kernel for fields that have :meth:`RadianceField.pyramid_parts`.

    The decoder must have 16 geometry outputs and one to three hidden colour layers, and must not shade deferred.
    """

    name = "render_pyramid_image"

    @classmethod
    def serves(cls, field: Field) -> bool:
        """See :class:`ImageBackend`."""
        if not isinstance(field, RadianceField) or field.shade is not None or not _warp_has_kernel(field):
            return False
        parts = field.pyramid_parts()
        return (
            parts is not None
            and parts[1].density_network[-1].shape[0] == constants.MAX_GEOMETRY
            and len(parts[1].color_network) <= constants.MAX_FIELD_LAYERS
        )

    @classmethod
    def has_room(cls, field: Field, device: torch.device) -> bool:
        """See :class:`ImageBackend`. The widest hidden layer must fit in the shared memory of a block."""
        _, decoder, _ = cls._parts(field)
        networks = (decoder.density_network, decoder.color_network)
        width = max(weight.shape[0] for network in networks for weight in list(network)[:-1])
        return pyramid_image_fits(field.aabb, width)

    @classmethod
    def prepare(cls, source: ImageSource) -> Draw:
        """See :class:`ImageBackend`. The working copies of training are reused if they have the kernel's dtype."""
        pyramid, decoder, activation = cls._parts(source.field)
        dtype = source.stored_dtype
        levels = pyramid.active_levels(dtype)
        first, last = decoder.density_network
        # Inactive levels read zero, so their columns are dropped.
        weights = [first[:, : constants.LEVEL_CHANNELS * len(levels)], last]
        return _one_kernel(
            render_pyramid_image,
            source,
            background=source.background,
            levels=levels,
            aabb=pyramid.aabb,
            density_weights=[weight.detach().to(dtype).contiguous() for weight in weights],
            color_weights=[weight.detach().to(dtype) for weight in decoder.color_network],
            density_initial=activation.initial,
            degree=decoder.view_degree,
            blocks=pyramid.blocks[: len(levels)],
            boxes=nested_box_args(warp_of(source.field)),
        )

    @staticmethod
    def _parts(field: Field) -> tuple[VoxelPyramid, FusedMLPDecoder, ExponentialDensity]:
        parts = field.pyramid_parts() if isinstance(field, RadianceField) else None
        assert parts is not None, "the backend does not serve the field"
        return parts


class BakedImages(ImageBackend):
    """One kernel that reads :class:`voxelfield.rendering.bricks.Bricks`, and the network of deferred shading per pixel.

    Densities and values are interpolated between these vertices after the first network instead of before it, and are
    quantised, so images differ slightly from images of ``render_view``.
    """

    name = "render_baked_image"
    bakes = True

    @classmethod
    def serves(cls, field: Field) -> bool:
        """See :class:`ImageBackend`."""
        return can_bake(field) and _warp_has_kernel(field)

    @classmethod
    def prepare(cls, source: ImageSource) -> Draw:
        """See :class:`ImageBackend`. Evaluates the field at all vertices of occupied blocks."""
        field, background = source.field, source.background
        assert isinstance(field, RadianceField)
        bricks, decoder = bake(field, source.occupancy), field.decoder
        assert isinstance(decoder, DeferredMLPDecoder)
        weights = [matrix.detach().to(source.stored_dtype) for matrix in decoder.color_network]
        weights[0] = shading_columns(decoder, weights[0], len(bricks.low))

        def shaded(rgb: Tensor, opacity: Tensor, depth: Tensor, inputs: Tensor) -> View:
            if inputs.is_cuda:
                specular = ops.mlp(inputs, weights)
            else:
                # Most of the time would go into pixels that show nothing; on CUDA, finding them would synchronise.
                shown = (opacity.flatten() != 0).nonzero()[:, 0]
                specular = inputs.new_zeros(len(inputs), 3)
                for part in shown.split(_PIXELS_AT_ONCE):
                    specular[part] = ops.mlp(inputs[part], weights)
            return View(torch.addcmul(rgb, opacity[..., None], specular.view_as(rgb).float()), opacity, depth)

        return _one_kernel(
            render_baked_image,
            source,
            shaded,
            **vars(bricks),
            background=background,
            degree=decoder.view_degree,
            clip=field.grid.aabb if field.warp is None else None,
            boxes=nested_box_args(field.warp),
        )


def shading_columns(decoder: DeferredMLPDecoder, first: Tensor, values: int) -> Tensor:
    """Returns the first matrix of a decoder's colour network for inputs that kernels write, (width, values + 16).

    The columns of values and harmonics that the decoder does not have are zeros.
    """
    own, harmonics = first.split((decoder.emitted, first.shape[1] - decoder.emitted), dim=1)
    bases = (constants.MAX_DEGREE + 1) ** 2
    return torch.cat((F.pad(own, (0, values - own.shape[1])), F.pad(harmonics, (0, bases - harmonics.shape[1]))), dim=1)


def _warp_has_kernel(field: Field) -> bool:
    """Returns whether kernels that render whole images support the field's warp."""
    warp = warp_of(field)
    return warp is None or bool(warp.op_arguments)


BACKENDS: tuple[type[ImageBackend], ...] = (PyramidImages, GridImages, BakedImages)
"""Backends that are faster than the general one, in the order in which they are tried."""


def fastest_backend(field: Field, backends: Sequence[type[ImageBackend]] = BACKENDS) -> type[ImageBackend]:
    """Returns the first of some backends that renders a field of this kind on any device, or else the general one."""
    return next((backend for backend in backends if backend.serves(field)), GenericBackend)
