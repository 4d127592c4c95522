"""What training has to know of a kind of field; every kind of field is one subclass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField, density_at_samples
from voxelfield.fields.recipes import registry
from voxelfield.rendering.backends.backend import ImageBackend
from voxelfield.rendering.occupancy import OccupancyGrid


@dataclass
class Recipe:
    """One kind of field: its settings, how it is built, and what training does differently for it.

    A subclass is a dataclass whose fields are the keys of ``model`` in the configuration; annotations say what is
    allowed (:func:`voxelfield.config.parsing.parse`). It must define :meth:`build`. The other methods have defaults
    that suit every field, and nothing is assumed of a decoder beyond what it says itself.

    To be found by name, ``model=NAME``, a recipe of another package is announced there as an entry point::

        [project.entry-points."voxelfield.fields.recipes"]
        NAME = "package.module:ClassName"

    Attributes:
        kind: The name; a subclass gives it a ``Literal`` type and a default.
        grid_terms: Which of the loss terms on the grid itself, ``tv_density`` and ``tv_color``, this kind has.
        image_backends: What may render images of this kind faster than the general path, in the order in which they
            are tried (:func:`voxelfield.rendering.renderer.fastest_backend`): subclasses of
            :class:`voxelfield.rendering.backends.backend.ImageBackend`. None by default, because a subclass of a field
            or decoder may compute something else than a kernel for it does.
    """

    kind: str

    grid_terms: ClassVar[tuple[str, ...]] = ()
    image_backends: ClassVar[tuple[type[ImageBackend], ...]] = ()

    @classmethod
    def choose(cls, values: Any, name: str) -> type[Recipe]:
        """Returns the recipe that values ask for by their ``kind``; what has none is of the default kind.

        Args:
            values: A mapping, or a recipe.
            name: Where the values stand in the configuration.

        Raises:
            ValueError: There is no recipe of that kind, or another package announces something that is none.
        """
        if cls is not Recipe:
            return cls
        if isinstance(values, Recipe):
            return type(values)
        names = registry.recipe_names()
        kind = values.get("kind", names[0]) if isinstance(values, Mapping) else names[0]
        if kind not in names:
            raise ValueError(
                f"{name}.kind must be one of {', '.join(names)}, got {'null' if kind is None else repr(kind)}"
            )
        found = registry.load_recipe(kind)
        if not (isinstance(found, type) and issubclass(found, Recipe)):
            raise ValueError(f"{name}.kind={kind} must name a subclass of Recipe, but its entry point is {found!r}")
        return found

    def check_resolution(self, finest: int, name: str) -> None:
        """Refuses settings that do not fit the resolution that training reaches.

        Args:
            finest: That resolution, the cube root of the number of voxels.
            name: Where this recipe stands in the configuration.

        Raises:
            ValueError: They do not fit; the message begins with the key.
        """

    def build(self, aabb: Tensor, resolutions: Sequence[int], device: torch.device | str) -> RadianceField:
        """Builds the field as training begins with it.

        Args:
            aabb: (2, 3) the scene's box, world units.
            resolutions: Those of the trainer's stages, in order.
            device: Where the field goes; it may be ``meta``, to learn shapes alone.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build")

    def enter_stage(
        self, field: RadianceField, resolution: int, aabb: Tensor | None, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Brings the field to a stage's resolution, with the optimizer's state.

        Args:
            field: What :meth:`build` returned.
            resolution: Cube root of the number of voxels.
            aabb: (2, 3) a smaller box to move to first, world units, or None.
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
        """Makes room for detail where the training images show something, before :meth:`enter_stage`.

        By default a field needs none of this.

        Args:
            field: What :meth:`build` returned.
            resolution: That of the stage, the cube root of the number of voxels.
            shown: Takes numbers of cells X, Y, Z and returns (X, Y, Z) bool: in which of them training images show
                something. Takes a while.
            aabb: (2, 3) the box that these cells divide, in the grid's frame.
            optimizer: The grids' optimizer.
        """

    def refresh_occupancy(self, field: RadianceField, occupancy: OccupancyGrid, step: float, threshold: float) -> None:
        """Finds out which cells are occupied.

        Where the field is nowhere denser than at its vertices, these are looked at; otherwise random points are.

        Args:
            field: The field.
            occupancy: What to update, on the field's device.
            step: Distance between samples along rays, in the grid's frame.
            threshold: Opacity of one sample from which a cell counts as occupied.
        """
        density = field.vertex_density()
        if density is None:
            occupancy.update_from_samples(density_at_samples(field), step, threshold)
        else:
            occupancy.update_from_vertices(density, field.grid.aabb, step, threshold)

    def grid_losses(self, field: RadianceField, weights: Mapping[str, float]) -> dict[str, Tensor]:
        """Returns loss terms on the grid itself, each a scalar tensor that its weight has been multiplied with.

        Args:
            field: The field.
            weights: Positive weights of some of :attr:`grid_terms`, by name.
        """
        return {}

    def count_features(self, field: RadianceField, finest: int) -> int:
        """Returns how many numbers the grids hold once training has reached its finest resolution.

        Args:
            field: What :meth:`build` returned.
            finest: That resolution, the cube root of the number of voxels.
        """
        return sum(level.numel() for level in field.grid.levels)
