"""The base class of models, which define how each kind of field is built and trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField, density_at_samples
from voxelfield.models import registry
from voxelfield.models.gridless import grid_of
from voxelfield.rendering.backends.backend import ImageBackend
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.warps.choice import CaptureFacts, WarpConfig, choose_warp
from voxelfield.warps.warp import Warp


@dataclass
class ModelConfig:
    """One kind of field: its settings, its construction, and the parts of training that are specific to it.

    A subclass is a dataclass whose fields are the keys of ``model`` in the configuration; their annotations define the
    valid values (:func:`voxelfield.config.parsing.parse`). It must define :meth:`build`. The other methods have
    defaults that work for every field and assume nothing about a decoder beyond its documented attributes.

    To make a model of another package available as ``model=NAME``, declare it there as an entry point::

        [project.entry-points."voxelfield.models"]
        NAME = "package.module:ClassName"

    Attributes:
        kind: The model's name; a subclass gives it a ``Literal`` type and a default.
        grid_terms: The loss terms on the grid itself that this kind supports, of ``tv_density`` and ``tv_color``.
        image_backends: Subclasses of :class:`voxelfield.rendering.backends.backend.ImageBackend` that may render images
            of this kind faster than the general path, in the order in which they are tried
            (:func:`voxelfield.rendering.renderer.fastest_backend`). Empty by default, because a subclass of a field or
            decoder may compute something other than the specialised kernel does.
    """

    kind: str

    grid_terms: ClassVar[tuple[str, ...]] = ()
    image_backends: ClassVar[tuple[type[ImageBackend], ...]] = ()

    @classmethod
    def choose(cls, values: Any, name: str) -> type[ModelConfig]:
        """Returns the model class selected by ``kind``, or the default model if there is no ``kind``.

        Args:
            values: A mapping, or a model.
            name: The key of the values in the configuration.

        Raises:
            ValueError: There is no model of that kind, or the entry point of another package is not a model.
        """
        if cls is not ModelConfig:
            return cls
        if isinstance(values, ModelConfig):
            return type(values)
        names = registry.model_names()
        kind = values.get("kind", names[0]) if isinstance(values, Mapping) else names[0]
        if kind not in names:
            raise ValueError(
                f"{name}.kind must be one of {', '.join(names)}, got {'null' if kind is None else repr(kind)}"
            )
        found = registry.load_model_config(kind)
        if not (isinstance(found, type) and issubclass(found, ModelConfig)):
            raise ValueError(
                f"{name}.kind={kind} must name a subclass of ModelConfig, but its entry point is {found!r}"
            )
        return found

    def check_resolution(self, finest: int, name: str) -> None:
        """Rejects settings that are incompatible with the finest resolution of training.

        Args:
            finest: The finest resolution, the cube root of the number of voxels.
            name: The model's key in the configuration.

        Raises:
            ValueError: The settings are incompatible; the message begins with the key.
        """

    def check_camera_refinement(self, finest: int, name: str) -> None:
        """Raises if the field has no gradient with respect to positions, by which cameras are refined.

        Every field has one by default.

        Args:
            finest: Resolution that training reaches, the cube root of the number of voxels.
            name: Name of this model in the configuration.

        Raises:
            ValueError: It has none; the message begins with the key.
        """

    def choose_warp(self, scene: CaptureFacts, settings: WarpConfig) -> Warp | None:
        """Chooses the warp of the field, by default as :func:`voxelfield.warps.choice.choose_warp` does.

        A run records the choice (:attr:`voxelfield.warps.warp.Warp.settings`), so it must be one of the package's
        warps.

        Args:
            scene: The facts of the scene.
            settings: The user's settings.

        Raises:
            ValueError: The settings contradict the scene.
        """
        return choose_warp(scene, settings)

    def build(self, aabb: Tensor, resolutions: Sequence[int], device: torch.device | str) -> RadianceField:
        """Builds the field in its state at the start of training.

        Args:
            aabb: (2, 3) the grid's box: the scene's, or that of warped coordinates.
            resolutions: Resolutions of the trainer's stages, in order.
            device: Device of the field; may be ``meta``, to find out shapes only.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build")

    def enter_stage(
        self, field: RadianceField, resolution: int, aabb: Tensor | None, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Resizes the field to a stage's resolution, together with the optimizer's state.

        Args:
            field: The field that :meth:`build` returned.
            resolution: Cube root of the number of voxels.
            aabb: (2, 3) a smaller box to which the field is refitted first, world units, or None.
            optimizer: The grids' optimizer.
        """
        field.grid.resize(resolution, optimizer, aabb=aabb)

    def add_detail(
        self,
        field: RadianceField,
        resolution: int,
        shown: Callable[[Sequence[int]], Tensor],
        aabb: Tensor,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Allocates detail where the training images show something; called before :meth:`enter_stage`.

        Does nothing by default.

        Args:
            field: The field that :meth:`build` returned.
            resolution: Resolution of the stage, the cube root of the number of voxels.
            shown: Takes numbers of cells X, Y, Z and returns an integer tensor (X, Y, Z): how much of the training
                images each cell shows. Expensive to call.
            aabb: (2, 3) the box that is divided into these cells, in the grid's frame.
            optimizer: The grids' optimizer.
        """

    def refresh_occupancy(self, field: RadianceField, occupancy: OccupancyGrid, step: float, threshold: float) -> None:
        """Updates the occupancy grid.

        If the densities at the vertices bound the density of the field, only the vertices are evaluated; otherwise
        random points are.

        Args:
            field: The field.
            occupancy: The occupancy grid to update, on the field's device.
            step: Distance between samples along rays, in the grid's frame.
            threshold: Opacity of a single sample above which a cell counts as occupied.
        """
        bounds = getattr(field, "vertex_density", None)  # which a field without a grid need not have
        density = None if bounds is None else bounds()
        if density is None:
            occupancy.update_from_samples(density_at_samples(field), step, threshold)
        else:
            occupancy.update_from_vertices(density, field.grid.aabb, step, threshold)

    def grid_losses(self, field: RadianceField, weights: Mapping[str, float]) -> dict[str, Tensor]:
        """Returns the loss terms on the grid itself, each a scalar tensor already multiplied by its weight.

        Args:
            field: The field.
            weights: Positive weights of some of :attr:`grid_terms`, by name.
        """
        return {}

    def count_features(self, field: RadianceField, finest: int) -> int:
        """Returns the number of grid elements at the finest resolution of training.

        Args:
            field: The field that :meth:`build` returned.
            finest: The finest resolution, the cube root of the number of voxels.
        """
        grid = grid_of(field)
        return 0 if grid is None else sum(level.numel() for level in grid.levels)

    def count_sparse_features(self, field: RadianceField) -> int:
        """Returns how many of the elements that :meth:`count_features` counts are in sparse levels; 0 by default.

        Args:
            field: The field that :meth:`build` returned.
        """
        return 0
