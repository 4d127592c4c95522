"""Voxel-grid radiance fields for PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from voxelfield.installed import VERSION, without_garbage_collection

if TYPE_CHECKING:
    from voxelfield import ops as ops
    from voxelfield.datasets.arrays import scene_from_arrays as scene_from_arrays
    from voxelfield.datasets.loading import load_scene as load_scene
    from voxelfield.datasets.scene import Scene as Scene
    from voxelfield.export.volume import load_volume as load_volume
    from voxelfield.fields.callbacks import CallbackField as CallbackField
    from voxelfield.fields.decoders import Decoder as Decoder
    from voxelfield.fields.field import Field as Field
    from voxelfield.fields.field import RadianceField as RadianceField
    from voxelfield.grids.adam import GridAdam as GridAdam
    from voxelfield.grids.pyramid import VoxelPyramid as VoxelPyramid
    from voxelfield.grids.voxel_grid import VoxelGrid as VoxelGrid
    from voxelfield.models.model import Model as Model
    from voxelfield.rendering.cameras import Cameras as Cameras
    from voxelfield.rendering.lens import Lens as Lens
    from voxelfield.rendering.march import Capacity as Capacity
    from voxelfield.rendering.march import RenderSettings as RenderSettings
    from voxelfield.rendering.occupancy import OccupancyGrid as OccupancyGrid
    from voxelfield.rendering.rays import Rays as Rays
    from voxelfield.rendering.render import render as render
    from voxelfield.rendering.renderer import FieldRenderer as FieldRenderer
    from voxelfield.runs.results import write_results as write_results
    from voxelfield.trained.loading import load as load
    from voxelfield.training.session import Session as Session

__version__ = VERSION

# Imported on first use, because some need more packages than torch (`pip install voxelfield[train]`), and because the
# command line must be able to handle Ctrl-C while torch is imported, which takes seconds.
_HOMES = {
    "CallbackField": "fields.callbacks",
    "Cameras": "rendering.cameras",
    "Capacity": "rendering.march",
    "Decoder": "fields.decoders",
    "Field": "fields.field",
    "FieldRenderer": "rendering.renderer",
    "GridAdam": "grids.adam",
    "Lens": "rendering.lens",
    "Model": "models.model",
    "OccupancyGrid": "rendering.occupancy",
    "RadianceField": "fields.field",
    "Rays": "rendering.rays",
    "RenderSettings": "rendering.march",
    "Scene": "datasets.scene",
    "Session": "training.session",
    "VoxelGrid": "grids.voxel_grid",
    "VoxelPyramid": "grids.pyramid",
    "load": "trained.loading",
    "load_scene": "datasets.loading",
    "load_volume": "export.volume",
    "render": "rendering.render",
    "scene_from_arrays": "datasets.arrays",
    "write_results": "runs.results",
}

__all__ = ["__version__", "ops", *_HOMES]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use and caches it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with without_garbage_collection():
        module = importlib.import_module(f"voxelfield.{_HOMES.get(name, name)}")
    value = globals()[name] = module if name == "ops" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
