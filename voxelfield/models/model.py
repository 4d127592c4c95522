"""The model: a field, the cells in which it has matter, and how its rays are sampled."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField, warp_of
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.models.gridless import Gridless, grid_of
from voxelfield.models.model_config import ModelConfig
from voxelfield.rendering.march import Capacity, RenderSettings, Sampler, visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.render import Rendering, render
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.warps.warp import Warp

# Largest number of samples along the diagonal of a grid's box. Without nested boxes, a grid of 400^3 voxels and the
# presets' distance between samples have 866.
_MAX_SAMPLES = 32768


@dataclass(frozen=True)
class Sampling:
    """How rays are sampled and views are drawn, at any resolution of the grid.

    Attributes:
        voxels_per_step: Distance between samples, in voxels.
        min_transmittance: A ray stops once its transmittance falls below this.
        min_weight: Samples with a smaller compositing weight are dropped.
        precision: Autocast dtype of the field.
        supersampling: Number of rays along each side of a pixel of a view.
        pixel_averaging: Values that are averaged over a pixel's rays (:class:`voxelfield.FieldRenderer`).
        background: Colour behind views.
        chunk: Number of rays per chunk where views are rendered by :func:`voxelfield.rendering.render.render_view`.
    """

    voxels_per_step: float = 0.8
    min_transmittance: float = 1e-4
    min_weight: float = 1e-4
    precision: torch.dtype = torch.float32
    supersampling: int = 1
    pixel_averaging: str = "linear_light"
    background: Literal["white", "black"] = "white"
    chunk: int = 1 << 16


@dataclass(eq=False)
class Model:
    """One object above the field: the unit that is trained, rendered and saved.

    Attributes:
        field: The field, on its device.
        occupancy: The cells in which it has matter, on the same device.
        config: The settings that built the field.
        sampling: How its rays are sampled.
        grid: The grid of the field; a :class:`voxelfield.models.gridless.Gridless` if it has none.
    """

    field: RadianceField
    occupancy: OccupancyGrid
    config: ModelConfig
    sampling: Sampling = Sampling()
    grid: VoxelGrid | VoxelPyramid | Gridless = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.grid = grid_of(self.field) or Gridless(self.field.aabb, max(self.occupancy.occupied.shape))

    @property
    def device(self) -> torch.device:
        """Device of the field."""
        return self.field.aabb.device

    @property
    def warp(self) -> Warp | None:
        """The warp of the field's samples; None for the world frame."""
        return warp_of(self.field)

    @property
    def settings(self) -> RenderSettings:
        """The sampling settings at the grid's present resolution; synchronises with the device.

        Raises:
            ValueError: A ray could have more samples than can be rendered in a reasonable time.
        """
        low, high = self.grid.aabb
        voxel, diagonal = torch.stack((self.grid.voxel_size.min(), (high - low).norm())).tolist()
        step = self.sampling.voxels_per_step * voxel
        if not (math.isfinite(diagonal) and diagonal <= _MAX_SAMPLES * step):
            least = diagonal / max(_MAX_SAMPLES * voxel, 1e-30)
            raise ValueError(
                f"trainer.render.voxels_per_step must be at least {least:.3g}, so that no ray through the grid's box "
                f"has more than {_MAX_SAMPLES} samples, got {self.sampling.voxels_per_step:g}"
            )
        return RenderSettings(step, self.sampling.min_transmittance, self.sampling.min_weight)

    @property
    def background(self) -> Tensor:
        """Colour (3,) behind views, float32, on the field's device."""
        return torch.full((3,), 1.0 if self.sampling.background == "white" else 0.0, device=self.device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which the field is evaluated, in the precision of the sampling."""
        if self.sampling.precision == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.sampling.precision, cache_enabled=False)

    def render(
        self,
        rays: Rays,
        settings: RenderSettings | None = None,
        *,
        jitter: bool = False,
        capacity: Capacity | None = None,
        distortion: bool = False,
        sampler: Sampler = visible_samples,
    ) -> Rendering:
        """Renders rays, see :func:`voxelfield.rendering.render.render`.

        Args:
            rays: R rays, on the field's device.
            settings: Sampling settings; None for :attr:`settings`, which synchronises with the device.
            jitter: As for :func:`voxelfield.rendering.render.render`.
            capacity: As for :func:`voxelfield.rendering.render.render`.
            distortion: As for :func:`voxelfield.rendering.render.render`.
            sampler: As for :func:`voxelfield.rendering.render.render`.
        """
        settings = self.settings if settings is None else settings
        with self.autocast():
            return render(self.field, rays, self.occupancy, settings, jitter, capacity, distortion, sampler)

    def renderer(
        self, backend: str | None = None, *, supersampling: int | None = None, background: Tensor | None = None
    ) -> FieldRenderer:
        """Returns a renderer of views of the present state.

        Args:
            backend: As for :class:`voxelfield.FieldRenderer`.
            supersampling: As for :class:`voxelfield.FieldRenderer`; None for that of the sampling.
            background: (3,) float32 on the field's device; None for :attr:`background`.
        """
        return FieldRenderer(
            self.field,
            self.occupancy,
            self.settings,
            self.background if background is None else background,
            supersampling=self.sampling.supersampling if supersampling is None else supersampling,
            pixel_averaging=self.sampling.pixel_averaging,
            chunk=self.sampling.chunk,
            precision=self.sampling.precision,
            backend=backend,
            backends=self.config.image_backends,
        )

    def grid_losses(self, weights: Mapping[str, float]) -> dict[str, Tensor]:
        """Returns the loss terms on the grid itself, see :meth:`ModelConfig.grid_losses`."""
        return self.config.grid_losses(self.field, weights)

    def refresh_occupancy(self, step: float, threshold: float) -> None:
        """Updates the occupied cells from the field, see :meth:`ModelConfig.refresh_occupancy`.

        Args:
            step: Distance between samples along rays, in warped coordinates.
            threshold: Opacity of a single sample above which a cell counts as occupied.
        """
        with torch.no_grad(), self.autocast():
            self.config.refresh_occupancy(self.field, self.occupancy, step, threshold)

    def resize(
        self,
        resolution: int,
        box: Tensor | None,
        shown: Callable[[Sequence[int]], Tensor],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Enters a stage of training: allocates detail and resizes the grid, with the optimizer's state.

        Args:
            resolution: Cube root of the number of voxels.
            box: (2, 3) a smaller box to which the grid is refitted first, or None.
            shown: As for :meth:`ModelConfig.add_detail`.
            optimizer: The grid's optimizer.
        """
        if isinstance(self.grid, Gridless):
            self.grid.resize(resolution)
            return
        self.config.add_detail(self.field, resolution, shown, self.occupancy.aabb, optimizer)
        self.config.enter_stage(self.field, resolution, box, optimizer)

    def adopt_resolution(self, resolution: int) -> None:
        """Sets the resolution that a loaded state had; a grid has its own in its state already.

        Args:
            resolution: Cube root of the number of voxels.
        """
        if isinstance(self.grid, Gridless):
            self.grid.resize(resolution)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the field and of the occupied cells."""
        return {"field": self.field.state_dict(), "occupancy": self.occupancy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state that :meth:`state_dict` returned, among other entries."""
        self.field.load_state_dict(state["field"])
        self.occupancy.load_state_dict(state["occupancy"])
