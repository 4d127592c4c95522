"""Scenes on disk: where they lie, how they are read, and the one type they become."""

from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.locate import SceneNotFoundError, find_scene
from voxelfield.datasets.scene import Scene, Split

__all__ = ["Scene", "SceneNotFoundError", "Split", "find_scene", "load_blender"]
