"""One image after another of a field that stays as it is: for evaluation, previews, videos and viewers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from voxelfield.fields.decoders import FusedMLPDecoder, SHDecoder
from voxelfield.fields.density import DensityActivation, ExponentialDensity
from voxelfield.fields.field import Field, RadianceField
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.ops import _constants
from voxelfield.ops._checks import check_at_least_one, check_choice, check_dtype, check_same_device, check_tensor
from voxelfield.ops._internal.images import RenderedImage
from voxelfield.ops._internal.pixel_colors import TRANSFERS, pixel_colors
from voxelfield.ops._internal.render_grid_image import PackedSHGrid, render_grid_image
from voxelfield.ops._internal.render_pyramid_image import pyramid_image_fits, render_pyramid_image
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import View, render_view

__all__ = ["Backend", "FieldRenderer", "fastest_backend"]

Backend = Literal["render_pyramid_image", "render_grid_image", "render_view"]
"""The function that draws an image."""

_Draw = Callable[[Cameras, int], View]

_DTYPES = (torch.float32, torch.float16)


def fastest_backend(field: Field) -> Backend:
    """Tells which function renders images of a field; decided by the kind of field alone, the same on every device.

    - ``render_pyramid_image``, one kernel on CUDA: a :class:`VoxelPyramid` of 4 channels a level side by side, at most
      8 levels on, read by a :class:`FusedMLPDecoder` of 16 geometry numbers and one to three hidden layers of colour,
      with :class:`ExponentialDensity`.
    - ``render_grid_image``, one kernel: a :class:`VoxelGrid`, or a :class:`VoxelPyramid` that is a sum, read by
      an :class:`SHDecoder`. A sum is collapsed into one grid (:meth:`VoxelPyramid.collapse`), which loses nothing.
    - :func:`voxelfield.rendering.render.render_view`: every other field, of whatever class. Among them are those of the
      kinds above that are neither float32 nor float16, whose padding is not "border", that are too large (a level of
      2^31 numbers, a grid of 2^31 - 1 vertices), or that are of a subclass, which may compute something else.

    Args:
        field: The field.
    """
    if not isinstance(field, RadianceField):
        return "render_view"
    grid, decoder = field.grid, field.decoder
    if field.has_pyramid_density:
        assert isinstance(decoder, FusedMLPDecoder)
        outputs, layers = decoder.density_network[-1].shape[0], len(decoder.color_network)
        return (
            "render_pyramid_image"
            if outputs == _constants.MAX_GEOMETRY and layers <= _constants.MAX_FIELD_LAYERS
            else "render_view"
        )
    plain = type(field) is RadianceField and all(parameter.dtype in _DTYPES for parameter in field.parameters())
    if plain and type(decoder) is SHDecoder and (type(grid) is VoxelGrid or _is_sum(grid)):
        finest = grid.grids[grid.active - 1] if isinstance(grid, VoxelPyramid) else grid
        fits = (
            finest.padding == "border"
            and finest.features[..., 0].numel() < 2**31 - 1
            and type(decoder.activation) is DensityActivation
        )
        return "render_grid_image" if fits else "render_view"
    return "render_view"


class FieldRenderer:
    """Renders images of a field by the fastest backend that its kind allows, see :func:`fastest_backend`.

    On a CUDA device with too little shared memory for ``render_pyramid_image``, ``render_view`` draws instead, with a
    warning. Every supported GPU has enough, unless ``VOXELFIELD_SHARED_MEMORY_LIMIT`` reduces it.

    What rendering needs beside the field is made once, here: on CUDA float16 copies of grids and networks (what
    training in 16 bits reads anyway; those of :meth:`VoxelPyramid.keep_copies` are shared), elsewhere float32;
    spherical harmonics padded to whole 16-byte reads, with densities stored apart; and the distances of empty cells to
    occupied ones. So field and occupancy must stay as they are while a renderer is in use: after a change, make
    another.

    Args:
        field: The field.
        occupancy: Where to sample, on the field's device.
        settings: How to sample.
        background: (3,) float32 colour behind the scene, on the field's device.
        supersampling: Side of the square of rays that a pixel is made of. The pixel's colour is the mean light of these
            rays, its opacity their mean opacity, its depth their mean depth, weighted by opacity.
        transfer: How image values encode light, ``srgb`` or ``linear``. Only where there is supersampling.
        chunk: Rays at once, to bound memory. Only for the backend ``render_view``.
        precision: Of the decoder, by autocast. Only for the backend ``render_view``.
        backend: ``render_view``, which every field allows, to compare with it; None for the fastest.

    Attributes:
        backend: Which function draws the images.

    Raises:
        TypeError: ``background`` is not a float32 tensor.
        ValueError: ``background`` has another shape, something is on another device than the field, a number is
            below 1, or ``transfer`` is none of the choices; or the field's kind does not allow ``backend``.

    Example:
        >>> renderer = FieldRenderer(field, occupancy, RenderSettings(step=0.01), torch.ones(3))
        >>> renderer.backend
        'render_grid_image'
        >>> renderer.view(cameras, 0).rgb.shape
        torch.Size([800, 800, 3])
    """

    backend: Backend

    def __init__(
        self,
        field: Field,
        occupancy: OccupancyGrid,
        settings: RenderSettings,
        background: Tensor,
        *,
        supersampling: int = 1,
        transfer: str = "srgb",
        chunk: int = 1 << 16,
        precision: torch.dtype = torch.float32,
        backend: Backend | None = None,
    ) -> None:
        check_tensor("background", background, (3,))
        check_dtype("background", background, (torch.float32,))
        check_same_device("background", background, "field", field.aabb)
        check_same_device("occupancy", occupancy.aabb, "field", field.aabb)
        check_at_least_one("supersampling", supersampling)
        check_at_least_one("chunk", chunk)
        check_choice("transfer", transfer, TRANSFERS)
        fastest = fastest_backend(field)
        if backend not in (None, fastest, "render_view"):
            raise ValueError(f"backend must be {fastest} or render_view for this field, or None, got {backend!r}")
        self.backend = _backend_on(background, field, fastest) if backend is None else backend
        self._device = background.device
        self._supersampling = supersampling
        self._transfer = transfer
        self._background = background
        if supersampling > 1:
            # Rays show over black what they emit; pixels are composited once their rays have been put together.
            background = torch.zeros_like(background)
        self._draw: _Draw
        if self.backend == "render_pyramid_image":
            self._draw = _pyramid_images(field, occupancy, settings, background)
        elif self.backend == "render_grid_image":
            self._draw = _grid_images(field, occupancy, settings, background)
        else:
            self._draw = _views(field, occupancy, settings, background, chunk, precision)

    @torch.no_grad()
    def view(self, cameras: Cameras, index: int) -> View:
        """Renders one camera's whole image, rays included.

        Args:
            cameras: Cameras. On the field's device nothing waits for the device, but for the backend ``render_view``,
                which has to learn how many samples there are.
            index: Which of them.

        Returns:
            The image, on the field's device.

        Raises:
            IndexError: There is no such camera.
        """
        if not 0 <= index < len(cameras):
            raise IndexError(f"index must lie in [0, {len(cameras)}), got {index}")
        cameras = cameras.to(self._device)
        if self._supersampling == 1:
            return self._draw(cameras, index)
        rays = self._draw(cameras[index : index + 1].enlarged(self._supersampling), 0)
        return _averaged(rays, self._supersampling, self._background, self._transfer)


def _backend_on(like: Tensor, field: Field, fastest: Backend) -> Backend:
    """Returns the fastest backend that the device of ``like`` has room for."""
    if fastest != "render_pyramid_image":
        return fastest
    assert isinstance(field, RadianceField)
    decoder = field.decoder
    assert isinstance(decoder, FusedMLPDecoder)
    networks = (decoder.density_network, decoder.color_network)
    width = max(weight.shape[0] for network in networks for weight in list(network)[:-1])
    if pyramid_image_fits(like, width):
        return fastest
    warnings.warn(
        f"render_pyramid_image does not fit the shared memory of {like.device}: render_view draws, which is slower",
        stacklevel=3,
    )
    return "render_view"


def _pyramid_images(field: Field, occupancy: OccupancyGrid, settings: RenderSettings, background: Tensor) -> _Draw:
    assert isinstance(field, RadianceField)
    pyramid, decoder = field.grid, field.decoder
    assert isinstance(pyramid, VoxelPyramid)
    assert isinstance(decoder, FusedMLPDecoder)
    assert isinstance(decoder.activation, ExponentialDensity)
    dtype = _stored_dtype(background.device)
    levels = pyramid.active_levels(dtype)
    first, last = decoder.density_network
    # Levels that are off read zero: as if their columns were not there.
    weights = [first[:, : _constants.LEVEL_CHANNELS * len(levels)], last]
    render = partial(
        render_pyramid_image,
        levels=levels,
        aabb=pyramid.aabb,
        density_weights=[weight.detach().to(dtype).contiguous() for weight in weights],
        color_weights=[weight.detach().to(dtype) for weight in decoder.color_network],
        density_initial=decoder.activation.initial,
        view_degree=decoder.view_degree,
    )
    return _one_kernel(render, occupancy, settings, background)


def _grid_images(field: Field, occupancy: OccupancyGrid, settings: RenderSettings, background: Tensor) -> _Draw:
    assert isinstance(field, RadianceField)
    grid, decoder = field.grid, field.decoder
    assert isinstance(decoder, SHDecoder)
    assert isinstance(decoder.activation, DensityActivation)
    dtype = _stored_dtype(background.device)
    features = grid.collapse(dtype) if isinstance(grid, VoxelPyramid) else grid.features
    render = partial(
        render_grid_image,
        field=PackedSHGrid.pack(features, grid.aabb, decoder.degree, dtype),
        density_scale=decoder.activation.scale,
        density_shift=decoder.activation.shift,
    )
    return _one_kernel(render, occupancy, settings, background)


def _is_sum(grid: VoxelGrid | VoxelPyramid) -> bool:
    return type(grid) is VoxelPyramid and grid.reduce == "sum"


def _views(
    field: Field,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    background: Tensor,
    chunk: int,
    precision: torch.dtype,
) -> _Draw:
    def draw(cameras: Cameras, index: int) -> View:
        narrow = precision != torch.float32
        with torch.autocast(background.device.type, precision if narrow else None, narrow, cache_enabled=False):
            return render_view(field, cameras, index, occupancy, settings, background, chunk)

    return draw


def _one_kernel(
    render: Callable[..., RenderedImage], occupancy: OccupancyGrid, settings: RenderSettings, background: Tensor
) -> _Draw:
    scene = {"background": background, "occupied": occupancy.empty_distance, "aabb_occupancy": occupancy.aabb}
    prepared = partial(render, **scene, **asdict(settings))

    def draw(cameras: Cameras, index: int) -> View:
        return View(*prepared(cameras.c2w[index], cameras.intrinsics[index], cameras.width, cameras.height))

    return draw


def _stored_dtype(device: torch.device) -> torch.dtype:
    return torch.float16 if device.type == "cuda" else torch.float32


def _averaged(view: View, side: int, background: Tensor, transfer: str) -> View:
    """Makes pixels of squares of rays over black."""

    def squares(image: Tensor) -> Tensor:
        """Returns (H, W, side * side, ...)."""
        return image.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2).flatten(2, 3)

    rgb, weights, depth = (squares(image) for image in (view.rgb, view.opacity, view.depth))
    height, width, rays = weights.shape
    pixels = pixel_colors(rgb.reshape(-1, 3), weights.reshape(-1), background, rays, transfer=transfer)
    opacity = weights.mean(dim=2)
    return View(pixels.view(height, width, 3), opacity, (depth * weights).mean(dim=2) / opacity.clamp(min=1e-6))
