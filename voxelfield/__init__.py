"""Voxel-grid radiance fields for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from voxelfield import ops
from voxelfield.display import FieldRenderer
from voxelfield.grids import VoxelGrid
from voxelfield.pyramid import VoxelPyramid

if TYPE_CHECKING:
    from voxelfield.loading import load as load

__version__ = "0.1.0"
__all__ = ["FieldRenderer", "VoxelGrid", "VoxelPyramid", "__version__", "ops"]


def __getattr__(name: str) -> Any:
    """Imports at their first use the names that need more packages than torch: ``pip install voxelfield[train]``."""
    if name == "load":
        from voxelfield.loading import load as load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
