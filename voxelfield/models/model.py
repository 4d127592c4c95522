"""The model: a field, its occupied cells, and how its rays are sampled and trained."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from voxelfield import processes
from voxelfield.fields.environment import Environment, environment_of
from voxelfield.fields.field import RadianceField, density_at_samples, grid_of, warp_of
from voxelfield.grids.boxes import box_tensor
from voxelfield.grids.grid import Grid
from voxelfield.grids.voxel_grid import cubic_voxels
from voxelfield.models.batch import Batch, Outputs
from voxelfield.models.component import Component
from voxelfield.models.settings import Sampling, StageConfig, stage_at
from voxelfield.models.training import EmptyFieldError, MemoryEstimate, TrainingSetup, cells_with_views
from voxelfield.ops._internal.color import pixel_colors
from voxelfield.rendering.backends import BACKENDS, ImageBackend
from voxelfield.rendering.march import (
    MAX_VISIBLE_PER_RAY,
    Capacity,
    RenderSettings,
    Sampler,
    count_visible_samples,
    visible_samples,
)
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.render import Rendering, render
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.warps.warp import Warp

logger = logging.getLogger(__name__)

# Largest number of samples along the diagonal of a grid's box. Without nested boxes, a grid of 400^3 voxels and the
# presets' distance between samples have 866.
_MAX_SAMPLES = 32768

# Fine levels get blocks where a sample has at least this compositing weight in one of the examined pixels. There are
# this many of them along the shorter side of the training images.
_MIN_WEIGHT_WITH_DETAIL = 0.02
_PIXELS_LOOKED_AT = 160

# A field starts as a mist of equal density, which may be below the threshold of occupied cells everywhere. Where
# samples are close together, or an environment explains much of the photographs, few cells exceed it at the first
# update. With much less than 1, the mist may never become matter. Rounding must not empty a uniform field, as it could
# with 1.
_SHARE_OF_MEAN = 0.99

# Bytes of a float, and of a packed sample: position, t, dt and ray index.
_FLOAT = 4
_PACKED_SAMPLE = 12 + 4 + 4 + 8
# 16-bit numbers that the networks store at the same time per visible sample, in addition to its features and their
# gradient: inputs and outputs of both networks, and the gradients of all of these.
_DECODED_SAMPLE = 128


_DEFAULT = Sampling()


class Gridless(Grid):
    """The stand-in for the grid of a field that has none: a box of cubic cells, without features or parameters.

    The resolution of the trainer's stages then only defines the distance between samples.

    Args:
        aabb: (2, 3) the box, in world units or in the field's warped coordinates, on whose device :attr:`aabb` is.
        resolution: Cube root of the number of cells.
    """

    aabb: Tensor
    channels = 0

    def __init__(self, aabb: Tensor, resolution: int) -> None:
        super().__init__()
        self.aabb = aabb
        self._resolution = resolution

    @property
    def resolution(self) -> tuple[int, int, int]:
        """Number of cells along each axis."""
        x, y, z = cubic_voxels(self.aabb, self._resolution)
        return x, y, z

    @property
    def voxel_size(self) -> Tensor:
        """Size (3,) of a cell."""
        return self.aabb.diff(dim=0)[0] / self.aabb.new_tensor(self.resolution)


# Where both bases have a method, such as state_dict, it is the module's.
class Model(nn.Module, Component):  # type: ignore[misc]
    """One object above the field: the unit that is trained, rendered and saved.

    A model is also the first :class:`voxelfield.models.component.Component` of its own training. A subclass may
    override any method; its :class:`voxelfield.models.ModelConfig` returns it from ``build_model``. Further parameters,
    buffers and modules of a subclass are saved in checkpoints and model files, and trained: parameters outside of the
    grid and of :meth:`param_groups` with ``optimizer.network_lr``. A copy of a model is not in training.

    Args:
        field: The field, on its device.
        occupancy: The occupied cells, on the same device.
        sampling: How its rays are sampled.

    Attributes:
        field: As given, a child module.
        occupancy: As given, a child module.
        sampling: As given.
        resolution: Cube root of the number of voxels in the present stage of training; it only matters to a field
            without a grid.
        roulette: Weight below which training keeps samples at random (:class:`voxelfield.RenderSettings`).
        unit: Length, in world units, that the settings of densities, distortion and motions of cameras are measured in.
        image_backends: Subclasses of :class:`voxelfield.rendering.backends.ImageBackend` that may render images
            of this model faster than the general path, in the order in which they are tried
            (:func:`voxelfield.rendering.backends.fastest_backend`). By default the backends of this package, which do
            not serve subclasses of its fields and decoders, because these may compute something else.
    """

    image_backends: ClassVar[tuple[type[ImageBackend], ...]] = BACKENDS

    def __init__(self, field: RadianceField, occupancy: OccupancyGrid, sampling: Sampling = _DEFAULT) -> None:
        super().__init__()
        warp_of(field)  # refuses what is no field
        self.field = field
        self.occupancy = occupancy
        self.sampling = sampling
        self.roulette = 0.0
        self.resolution = max(occupancy.occupied.shape)
        self.unit = 1.0
        self._setup: TrainingSetup | None = None

    @property
    def grid(self) -> Grid:
        """The field's attribute ``grid``, or a :class:`Gridless` for a field without one."""
        return grid_of(self.field) or Gridless(self.field.aabb, self.resolution)

    @property
    def device(self) -> torch.device:
        """Device of the field."""
        return self.field.aabb.device

    @property
    def warp(self) -> Warp | None:
        """The warp of the field's samples; None if they are in world coordinates."""
        return warp_of(self.field)

    @property
    def content_box(self) -> Tensor:
        """Box (2, 3) of the part of space that matters most, world units, on the CPU; synchronises with the device.

        It is the smallest of nested boxes, or the box of the occupied cells.
        """
        if self.warp is not None:
            return box_tensor(self.warp.aabb, torch.device("cpu"))
        return (self.occupancy.bounds() if bool(self.occupancy.occupied.any()) else self.occupancy.aabb).cpu()

    @property
    def centre(self) -> Tensor:
        """Centre (3,) of the smallest of nested boxes, or else of the field's box, world units, on the CPU."""
        return (self.field.aabb.cpu() if self.warp is None else self.content_box).mean(dim=0)

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
        return RenderSettings(step, self.sampling.min_transmittance, self.sampling.min_weight, self.roulette)

    @property
    def background(self) -> Tensor:
        """Colour (3,) behind views, float32, on the field's device."""
        return torch.full((3,), 1.0 if self.sampling.background == "white" else 0.0, device=self.device)

    @property
    def environment(self) -> Environment | None:
        """Colours of directions, which views show in place of :attr:`background`; None if the field has none."""
        return environment_of(self.field)

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

    def forward(self, rays: Rays, settings: RenderSettings | None = None) -> Rendering:
        """Renders rays, as :meth:`render` does, for wrappers such as ``DistributedDataParallel``."""
        return self.render(rays, settings)

    def render_batch(
        self,
        batch: Batch,
        components: Sequence[Component],
        settings: RenderSettings,
        *,
        pixel_averaging: str,
        **options: Any,
    ) -> Outputs:
        """Renders the pixels of a batch as their images show them, with jittered samples.

        Args:
            batch: The batch.
            components: Prepare the batch, and adjust the colours of its rays, in this order.
            settings: Sampling settings.
            pixel_averaging: Values that are averaged over a pixel's rays, as for :class:`voxelfield.FieldRenderer`.
            options: Further arguments of :meth:`render`.
        """
        for component in components:
            component.prepare(batch)
        rendering = self.render(batch.rays, settings, jitter=True, **options)
        outputs = Outputs(rendering, rendering.rgb, rendering.rgb, batch.truth, self.field)
        for component in components:
            component.adjust(outputs, batch)
        outputs.pixels = pixel_colors(
            outputs.rgb, rendering.opacity, batch.background, batch.rays_per_pixel, pixel_averaging=pixel_averaging
        )
        return outputs

    def rays_of(self, batch: Batch) -> Rays:
        """Returns the rays of a batch with the values that the field asks for, such as the index of their image."""
        names = {*self.field.extra_inputs, *self.field.density_inputs}
        if not names:
            return batch.rays
        values = {name: batch.for_rays(batch.images if name == "image" else batch[name]) for name in names}
        return replace(batch.rays, values=values)

    def renderer(
        self,
        backend: str | None = None,
        *,
        supersampling: int | None = None,
        background: Tensor | None = None,
        few: bool = False,
    ) -> FieldRenderer:
        """Returns a renderer of views of the present state.

        Args:
            backend: As for :class:`voxelfield.FieldRenderer`.
            supersampling: As for :class:`voxelfield.FieldRenderer`; None for the sampling's.
            background: (3,) float32 on the field's device; None for :attr:`environment`, or else :attr:`background`.
            few: Only a few images will be rendered, for which no backend bakes the field.
        """
        default = self.background if self.environment is None else self.environment
        return FieldRenderer(
            self.field,
            self.occupancy,
            self.settings,
            default if background is None else background,
            supersampling=self.sampling.supersampling if supersampling is None else supersampling,
            pixel_averaging=self.sampling.pixel_averaging,
            chunk=self.sampling.chunk,
            precision=self.sampling.precision,
            backend=backend,
            backends=[kind for kind in self.image_backends if not (few and kind.bakes)],
        )

    def __getstate__(self) -> dict[str, Any]:
        # Otherwise a shallow copy would share the dicts of its children, and a deep copy would contain the optimizer.
        own = {name: dict(vars(self)[name]) for name in ("_parameters", "_buffers", "_modules")}
        return {**vars(self), **own, "_setup": None}

    def begin_training(self, setup: TrainingSetup) -> None:
        """Called once before training.

        Args:
            setup: Settings, training cameras and the grid's optimizer.
        """
        self._setup = setup

    @property
    def setup(self) -> TrainingSetup:
        """The argument of :meth:`begin_training`.

        Raises:
            RuntimeError: The model is not being trained.
        """
        if self._setup is None:
            raise RuntimeError("the model must be trained by a Session, which calls begin_training")
        return self._setup

    def before_step(self, step: int) -> None:
        """Enters the stage that begins at a step, and updates the occupied cells.

        Args:
            step: Number of steps done.
        """
        setup = self.setup
        config, stage = setup.occupancy, setup.stages[stage_at(setup.stages, step)]
        begins = stage.step == step
        updates = step >= config.start and (begins or (step - config.start) % config.every == 0)
        if begins:
            self.enter_stage(stage)
        if updates:
            self.refresh_occupancy()
            setup.optimizer.restrict()

    def enter_stage(self, stage: StageConfig) -> None:
        """Changes the grid's box and resolution.

        Args:
            stage: The stage that begins.

        Raises:
            EmptyFieldError: No cell is left.
        """
        if stage.step == 0:
            self.restrict_occupancy()
        # Only a grid in the world frame is cropped: the box of a warp is fixed.
        crop = stage.crop and self.warp is None
        if crop:
            self.occupied_fraction(stage.step)  # raises if no occupied cell is left to crop to
        self.resize(stage.resolution, self.occupancy.bounds() if crop else None)
        if crop:
            self.restrict_occupancy()
        self.setup.optimizer.attach()

    def resize(self, resolution: int, box: Tensor | None = None) -> None:
        """Adds detail and resizes the grid, with the optimizer's state; until the stage has begun, nothing samples it.

        Args:
            resolution: Cube root of the number of voxels.
            box: (2, 3) a smaller box to which the grid is cropped first, or None.
        """
        self.setup.optimizer.gather(self.resized(resolution, box))
        self.add_detail(resolution)
        self.resolution = resolution
        self.grid.resize(resolution, self.setup.optimizer.grid, aabb=box)

    def resized(self, resolution: int, box: Tensor | None) -> Sequence[nn.Parameter]:
        """Returns the levels that :meth:`resize` will change, given its arguments; by default all."""
        return self.grid.levels

    def add_detail(self, resolution: int) -> None:
        """Allocates detail where the training images show something; by default nothing.

        Args:
            resolution: Resolution of the stage that begins, the cube root of the number of voxels.
        """

    def count_shown(self, shape: Sequence[int]) -> Tensor:
        """Counts the visible samples of the training images in each cell; expensive, and a collective call.

        Args:
            shape: Number of cells X, Y, Z of the occupancy grid's box.

        Returns:
            (X, Y, Z) int32.
        """
        cameras, settings = self.setup.cameras, self.settings
        settings = replace(settings, min_weight=max(settings.min_weight, _MIN_WEIGHT_WITH_DETAIL))
        every = max(1, min(cameras.width, cameras.height) // _PIXELS_LOOKED_AT)
        with self.autocast():
            local = cameras[processes.rank() :: processes.count()]
            return processes.sum_of(
                count_visible_samples(self.field, self.occupancy, settings, local, shape, every=every)
            )

    def restrict_occupancy(self) -> None:
        """Excludes the cells of the present box that the training images show as transparent or do not show.

        Raises:
            EmptyFieldError: The images show nothing in the box.
        """
        setup, warp, aabb = self.setup, self.warp, self.grid.aabb
        x, y, z = self.occupancy.occupied.shape
        if warp is not None:
            # A visual hull needs transparent pixels, which photographs of surroundings do not have.
            allowed = warp.cells_in_use((x, y, z), aabb.device)
            if setup.reliable_poses:
                allowed &= cells_with_views(warp, setup.cameras, aabb, (x, y, z))
        elif setup.visual_hull is None:
            allowed = torch.ones_like(self.occupancy.occupied)
        else:
            allowed = setup.visual_hull(aabb, (x, y, z))
        self.occupancy.restrict(allowed, aabb)
        if warp is None and setup.visual_hull is not None and not bool(self.occupancy.occupied.any()):
            raise EmptyFieldError(
                f"the training images show nothing inside {aabb.tolist()}: check scene.aabb and that the poses are "
                "camera to world in OpenGL axes"
            )

    @property
    def is_marched_at_once(self) -> bool:
        """Whether one kernel can march the field and evaluate its density, which needs less memory for each ray."""
        return self.field.pyramid_density() is not None

    @torch.no_grad()
    def refresh_occupancy(self) -> None:
        """Updates the occupied cells from the field.

        If the densities at the vertices bound the density of the field, only the vertices are evaluated; otherwise
        random points are.
        """
        step, threshold = self.settings.step, self.setup.occupancy.threshold
        with self.autocast():
            density = self.field.vertex_density()
            if density is None:
                sampled = self.setup.divide(density_at_samples(self.field))
                self.occupancy.update_from_samples(sampled, step, threshold, share_of_mean=_SHARE_OF_MEAN)
            else:
                self.occupancy.update_from_vertices(
                    density, self.grid.aabb, step, threshold, share_of_mean=_SHARE_OF_MEAN
                )

    def occupied_fraction(self, step: int) -> float:
        """Returns the fraction of cells that are occupied; synchronises with the device.

        Args:
            step: Number of steps done, for the message.

        Raises:
            EmptyFieldError: No cell is occupied.
        """
        fraction = self.occupancy.fraction()
        if fraction == 0:
            raise EmptyFieldError(
                f"step {step}: the field has become empty everywhere. Lower trainer.occupancy.threshold or "
                "optimizer.grid_lr, raise model.density.initial, or check that scene.aabb contains the scene"
            )
        return fraction

    def losses(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the weighted terms on rendered rays, see :mod:`voxelfield.models.losses`."""
        return self.setup.losses.losses(outputs, batch)

    def count_features(self, finest: int) -> int:
        """Returns the number of grid elements at the finest resolution of training.

        Args:
            finest: The finest resolution, the cube root of the number of voxels.
        """
        return sum(level.numel() for level in self.grid.levels)

    def count_sparse_features(self) -> int:
        """Returns how many of the elements that :meth:`count_features` counts are in sparse levels; 0 by default."""
        return 0

    def estimate_memory(
        self,
        finest: int,
        *,
        rays: int,
        candidates: int,
        visible: int,
        copies: torch.dtype,
        moments: torch.dtype,
        feature_bytes: int = 0,
    ) -> MemoryEstimate:
        """Estimates the peak memory use of training steps, without the images: accurate up to allocator overhead.

        The model may be on the device ``meta``.

        Args:
            finest: The finest resolution, the cube root of the number of voxels.
            rays: Largest number of rays per step.
            candidates: Number of samples per step, visible or not, for which memory is allocated.
            visible: Number of visible samples per step.
            copies: Dtype of the grids' working copies.
            moments: Dtype of Adam's moments of the grids.
            feature_bytes: Bytes that components keep for each feature.
        """
        values, width, channels = self.count_features(finest), copies.itemsize, self.grid.channels
        if copies == torch.float16 and self.is_marched_at_once:
            # Distances that march_visible stores per ray, and lengths.
            marched = rays * MAX_VISIBLE_PER_RAY * _FLOAT * (2 if self.roulette > 0 else 1)
        else:
            marched = candidates * (_PACKED_SAMPLE + width * (channels + 16))
        estimate = MemoryEstimate(
            parameters=_FLOAT * values,
            gradients=_FLOAT * values,
            optimizer=2 * moments.itemsize * values,
            copies=0 if copies == torch.float32 else width * values,
            average=feature_bytes * values,
            images=0,
            samples=marched + visible * (_PACKED_SAMPLE + width * (2 * channels + _DECODED_SAMPLE)),
        )
        return replace(estimate, sparse=estimate.grids * self.count_sparse_features() // max(values, 1))
