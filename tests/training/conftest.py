from __future__ import annotations

import pytest
from small_sessions import LEGO

from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene


@pytest.fixture(scope="module")
def scene() -> Scene:
    """Lego's photographs, 25 x 25 pixels; files that need other photographs have a fixture of that name."""
    return load_blender(LEGO, LoadOptions(downscale=4, aabb=((-1.5,) * 3, (1.5,) * 3)))
