"""The base class of models, which define how each kind of field is built and trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor

from voxelfield.config import Range
from voxelfield.fields.field import RadianceField
from voxelfield.foundation.extensions import load_entry
from voxelfield.models.model import Model
from voxelfield.models.settings import Sampling
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.warps.choice import CaptureFacts, WarpConfig, choose_warp
from voxelfield.warps.warp import Warp

MAX_DEGREE = 3
"""Largest degree of the compiled ops, repeated here because a configuration is checked before these are loaded."""

Degree: TypeAlias = Annotated[int, Range(0, MAX_DEGREE)]

ENTRY_POINTS = "voxelfield.models"
"""The entry point group in which other packages declare models."""

_OWN = {
    "pyramid": "voxelfield.models.pyramid:PyramidConfig",
    "sh": "voxelfield.models.sh:SHConfig",
    "dense": "voxelfield.models.dense:DenseConfig",
}


def announced_models() -> dict[str, EntryPoint]:
    """Returns the models of other packages by name, in the order of names, without importing them."""
    found = sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name)
    return {entry.name: entry for entry in found if entry.name not in _OWN}


def known_models() -> dict[str, EntryPoint]:
    """Returns all models by name, the default one first, without importing them."""
    own = {name: EntryPoint(name, value, ENTRY_POINTS) for name, value in _OWN.items()}
    return own | announced_models()


@dataclass
class ModelConfig:
    """The settings of one kind of model, and its construction.

    A subclass is a dataclass whose fields are the keys of ``model`` in the configuration; their annotations define the
    valid values (:func:`voxelfield.config.parse`). It must define :meth:`build`. The other methods have
    defaults that work for every field and assume nothing about a decoder beyond its documented attributes. How a model
    is trained is defined by the methods of :class:`voxelfield.Model`, of which :meth:`build_model` returns one.

    To make a model of another package available as ``model=NAME``, declare it there as an entry point::

        [project.entry-points."voxelfield.models"]
        NAME = "package.module:ClassName"

    Attributes:
        kind: The model's name; a subclass gives it a ``Literal`` type and a default.
        environment: What rays show with the transmittance that is left behind the field: ``none``, the background of
            the trainer; ``map``, colours of directions that are learned along with the field, for captures that show
            the sky (:class:`voxelfield.fields.environment.Environment`); or ``auto``, a map where the photographs agree
            on the colours of many directions (:func:`voxelfield.components.environment.choose_environment`).
    """

    kind: str
    environment: Literal["none", "map", "auto"] = "none"

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
        known = known_models()
        default, *_ = known
        kind = values.get("kind", default) if isinstance(values, Mapping) else default
        if kind not in list(known):
            raise ValueError(
                f"{name}.kind must be one of {', '.join(known)}, got {'null' if kind is None else repr(kind)}"
            )
        try:
            found = load_entry(known[kind])
        except ValueError as error:
            raise ValueError(f"{name}.kind={kind} must name a model that can be imported, got {error}") from error
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

    def in_unit(self, unit: float) -> ModelConfig:
        """Returns the settings with ``density.initial`` and ``density.scale``, if there are, per ``unit`` length."""
        density: Any = getattr(self, "density", None)
        values = {name: getattr(density, name) / unit for name in ("initial", "scale") if hasattr(density, name)}
        return replace(self, **{"density": replace(density, **values)}) if values and unit != 1 else self

    def build(self, aabb: Tensor, resolutions: Sequence[int], device: torch.device | str) -> RadianceField:
        """Builds the field in its state at the start of training.

        Args:
            aabb: (2, 3) the grid's box: the scene's box, or a box in warped coordinates.
            resolutions: Resolutions of the trainer's stages, in order.
            device: Device of the field. To find out shapes, ``meta`` is tried first, and if that fails because values
                are read, which tensors there do not have, another device.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build")

    def build_model(self, field: RadianceField, occupancy: OccupancyGrid, sampling: Sampling) -> Model:
        """Returns the model around a field that :meth:`build` returned; by default a :class:`voxelfield.Model`.

        Args:
            field: The field.
            occupancy: The occupied cells, on the same device.
            sampling: How its rays are sampled.
        """
        return Model(field, occupancy, sampling)
