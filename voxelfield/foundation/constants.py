"""The constants that C++ and Python share, as plain ints: ``constants.MAX_LEVELS`` and so on.

They are read from the compiled module when one of them is first used, so that importing voxelfield loads nothing.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from voxelfield import _library

# In the order of extension/module/library.cpp; extension/common/constants.h and extension/cameras/lens.h document them.
_NAMES = (
    "MAX_LEVELS",
    "MAX_LAYERS",
    "MAX_WIDTH",
    "MAX_FIELD_LEVELS",
    "LEVEL_CHANNELS",
    "MAX_FIELD_LAYERS",
    "MAX_GEOMETRY",
    "HIGHEST_RAW",
    "MAX_DEGREE",
    "BRICK_CELLS",
    "PART_RAYS",
    "PART_SEGMENTS",
    "MAX_PARTS",
    "STEP_RANGES",
    "TILE_X",
    "TILE_Y",
    "TILE_Z",
    "MAX_TILES_ALONG",
    "AUTOMATIC",
    "DETERMINISTIC",
    "BLOCK_VERTICES",
    "MAX_ATLAS_VERTICES",
    "LENS_NUMBERS",
    "LENS_MODELS",
)


def __getattr__(name: str) -> int:
    """Returns a constant; the first access turns all constants into attributes of the module."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _library.ensure_loaded("cpu")
    # Dispatch modes such as FakeTensorMode are thread-local, so a new thread runs the real op.
    with ThreadPoolExecutor(1) as executor:
        values = executor.submit(torch.ops.voxelfield.constants).result()
    globals().update(zip(_NAMES, values, strict=True))
    return globals()[name]
