"""Names for the array types that the package passes around."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Triangles = NDArray[np.uint32]
Pixels = NDArray[np.uint8]
Point = tuple[float, float, float]
