"""The registry of recipes: this package's own, and those that other packages declare as entry points."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

ENTRY_POINTS = "voxelfield.fields.recipes"
"""The entry point group in which other packages declare recipes."""

_OWN = {
    "pyramid": ("voxelfield.fields.recipes.pyramid", "PyramidRecipe"),
    "sh": ("voxelfield.fields.recipes.sh", "SHRecipe"),
    "mlp": ("voxelfield.fields.recipes.mlp", "MLPRecipe"),
}


def recipe_names() -> tuple[str, ...]:
    """Returns the names of all recipes, the default one first, without importing them."""
    return *_OWN, *announced_recipes()


def announced_recipes() -> tuple[str, ...]:
    """Returns the names of the recipes of other packages, without importing them."""
    return tuple(sorted(_announced()))


def load_recipe(name: str) -> object:
    """Imports the recipe of a name.

    Raises:
        KeyError: There is no recipe of that name.
    """
    if name in _OWN:
        module, attribute = _OWN[name]
        return getattr(importlib.import_module(module), attribute)
    return _announced()[name].load()


def _announced() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS) if entry.name not in _OWN}
