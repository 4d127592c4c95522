"""The registry of models: the models of this package, and models that other packages declare as entry points."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

from voxelfield.foundation.extensions import load_entry

ENTRY_POINTS = "voxelfield.models"
"""The entry point group in which other packages declare models."""

_OWN = {
    "pyramid": ("voxelfield.models.pyramid", "PyramidConfig"),
    "sh": ("voxelfield.models.sh", "SHConfig"),
    "dense": ("voxelfield.models.dense", "DenseConfig"),
}


def model_names() -> tuple[str, ...]:
    """Returns the names of all models, the default one first, without importing them."""
    return *_OWN, *announced_models()


def announced_models() -> tuple[str, ...]:
    """Returns the names of the models of other packages, without importing them."""
    return tuple(sorted(_announced()))


def load_model_config(name: str) -> object:
    """Imports the model of a name.

    Raises:
        KeyError: There is no model of that name.
        ValueError: The package that declares it cannot be imported; the message says why.
    """
    if name in _OWN:
        module, attribute = _OWN[name]
        return getattr(importlib.import_module(module), attribute)
    try:
        return load_entry(_announced()[name])
    except ValueError as error:
        raise ValueError(f"model.kind={name} must name a model that can be imported, got {error}") from error


def _announced() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS) if entry.name not in _OWN}
