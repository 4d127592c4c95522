"""Rendering of many images of a fixed field: for evaluation, previews, videos and viewers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.fields.environment import Environment
from voxelfield.fields.field import Field, warp_of
from voxelfield.foundation.checks import check_at_least_one, check_choice, check_field, check_same_device
from voxelfield.foundation.errors import shown
from voxelfield.ops._internal.color import PIXEL_AVERAGING, pixel_colors
from voxelfield.rendering.backends import BACKENDS, GenericBackend, ImageBackend, ImageSource, fastest_backend
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import View

MAX_RAYS_ACROSS = 64
"""Largest number of rays along each side of a pixel."""


class FieldRenderer:
    """Renders images of a field with the fastest backend for its kind, see :func:`fastest_backend`.

    Equirectangular images and images of a rolling shutter are always rendered by ``render_view``.

    If a device has too little shared memory for that backend, ``render_view`` is used instead, with a warning. Every
    supported GPU has enough, unless ``VOXELFIELD_SHARED_MEMORY_LIMIT`` reduces it.

    The data that rendering needs besides the field are prepared once, at construction: the distances of empty cells to
    occupied ones, and copies of grids and networks, in float16 on CUDA (as 16-bit training reads them) and in float32
    elsewhere; with deferred shading, the field's values at many points, which takes seconds and up to gigabytes
    (:func:`voxelfield.rendering.bricks.bake`). Field and occupancy must therefore not change while a renderer is in
    use: create a new one after a change.

    Args:
        field: The field.
        occupancy: The occupied cells, on the field's device.
        settings: Sampling settings.
        background: (3,) float32 colour behind the scene, on the field's device; or colours of directions. Backends
            then draw over black, and the background is added to their images.
        supersampling: Number of rays along each side of a pixel, see
            :func:`voxelfield.rendering.cameras.points_in_pixels`. The pixel's colour is the mean of these rays' colours
            in linear light, its opacity their mean opacity, its depth their mean depth weighted by opacity.
        pixel_averaging: Values that are averaged over a pixel's rays: ``linear_light``, or the ``encoded`` values as
            they are. Only used with supersampling.
        chunk: Number of rays per chunk, to bound memory. Only for the backend ``render_view``.
        precision: Autocast dtype for the decoder. Only for the backend ``render_view``.
        backend: ``render_view``, which every field supports, for comparison; None for the fastest.
        backends: Backends to try before the general one; a package with a kernel for its own kind of field adds it
            here.

    Attributes:
        backend: Name of the backend, which is the name of the function that renders.
        device: Device of the field.

    Raises:
        TypeError: ``background`` is neither a float32 tensor nor an environment.
        ValueError: ``background`` has another shape, an argument is on another device than the field, a number is below
            1, ``pixel_averaging`` is not one of the choices, or ``backend`` does not support the field.

    Example:
        >>> renderer = FieldRenderer(field, occupancy, RenderSettings(step=0.01), torch.ones(3))
        >>> renderer.backend
        'render_grid_image'
        >>> renderer.view(cameras, 0).rgb.shape
        torch.Size([800, 800, 3])
    """

    def __init__(
        self,
        field: Field,
        occupancy: OccupancyGrid,
        settings: RenderSettings,
        background: Tensor | Environment,
        *,
        supersampling: int = 1,
        pixel_averaging: str = "linear_light",
        chunk: int = 1 << 16,
        precision: torch.dtype = torch.float32,
        backend: str | None = None,
        backends: Sequence[type[ImageBackend]] = BACKENDS,
    ) -> None:
        warp_of(field)  # refuses what is no field
        color: Tensor = background.maps[0].new_zeros(3) if isinstance(background, Environment) else background
        check_field("background", color, (3,), torch.float32, "field", field.aabb)
        check_same_device("occupancy", occupancy.aabb, "field", field.aabb)
        check_at_least_one("supersampling", supersampling)
        check_at_least_one("chunk", chunk)
        if supersampling > MAX_RAYS_ACROSS:
            raise ValueError(f"supersampling must be at most {MAX_RAYS_ACROSS}, got {shown(supersampling)}")
        check_choice("pixel_averaging", pixel_averaging, PIXEL_AVERAGING)
        chosen = fastest_backend(field, backends)
        if backend not in (None, chosen.name, GenericBackend.name):
            names = " or ".join(dict.fromkeys((chosen.name, GenericBackend.name)))
            raise ValueError(f"backend must be {names} for this field, or None, got {backend!r}")
        if backend == GenericBackend.name:
            chosen = GenericBackend
        elif backend is None and not chosen.has_room(field, color.device):
            warnings.warn(
                f"{chosen.name} does not fit the shared memory of {color.device}: using render_view, which is slower",
                stacklevel=2,
            )
            chosen = GenericBackend
        self.backend = chosen.name
        self.device = color.device
        self._supersampling, self._chunk = supersampling, chunk
        self._pixel_averaging = pixel_averaging
        self._background, self._aabb = background, field.aabb
        # Backends know one colour for all rays. Where there is another for each pixel, or the background belongs to
        # pixels and not to their rays, rays are rendered over black, and pixels are composited over the background.
        self._over_black = isinstance(background, Environment) or supersampling > 1
        behind = torch.zeros_like(color) if self._over_black else color
        source = ImageSource(field, occupancy, settings, behind, chunk, precision)
        self._fast, self._general = chosen.prepare(source), GenericBackend.prepare(source)

    @torch.no_grad()
    def view(self, cameras: Cameras, index: int) -> View:
        """Renders one camera's whole image, including the generation of rays.

        Args:
            cameras: Cameras. If they are on the field's device, rendering does not synchronise, except with the backend
                ``render_view``, which must learn the number of samples.
            index: Index of the camera.

        Returns:
            The image, on the field's device.

        Raises:
            TypeError: ``index`` is not an int.
            IndexError: There is no such camera.
        """
        if not isinstance(index, int):
            raise TypeError(f"index must be an int, got {type(index).__name__}")
        if not 0 <= index < len(cameras):
            raise IndexError(f"index must lie in [0, {len(cameras)}), got {shown(index)}")
        cameras = cameras.to(self.device)
        draw = self._fast if cameras.has_ray_kernel else self._general
        if not self._over_black:
            return draw(cameras, index)
        background = self._background
        if isinstance(background, Environment):
            chunks = cameras.image_chunks(index, self._aabb, self._chunk)
            background = torch.cat([background(rays.directions) for rays in chunks])
        side = self._supersampling
        rays = draw(replace(cameras.enlarged(side), across=side) if side > 1 else cameras, index)
        return _averaged(rays, side, background, self._pixel_averaging)


def _averaged(view: View, side: int, background: Tensor, pixel_averaging: str) -> View:
    """Averages squares of rays rendered over black into pixels over a background, (3,) or one for each pixel (P, 3)."""
    opacity, depth = F.avg_pool2d(torch.stack((view.opacity, view.depth * view.opacity)), side)
    # The rays of a pixel one after another: (H, side, W, side, 3) to (H, W, side, side, 3).
    rgb, weights = (
        x.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2) for x in (view.rgb, view.opacity)
    )
    pixels = pixel_colors(rgb.reshape(-1, 3), weights.reshape(-1), background, side**2, pixel_averaging=pixel_averaging)
    return View(pixels.view(*opacity.shape, 3), opacity, depth / opacity.clamp(min=1e-6))
