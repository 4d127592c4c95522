"""Chooses the resolution of pictures while the camera moves."""

from __future__ import annotations

import math

SMALLEST_SIDE = 2
"""Pixels along a side of a picture: normals are differences of neighbours."""

_FEWEST = 64 * 64
# Drawing whose duration is within this factor of the wish keeps its size: one that changes in every frame flickers.
_TOLERANCE = 1.25
_LARGEST_CHANGE = 3.0


class ResolutionControl:
    """Chooses the size of pictures so that each takes as long as wished.

    Args:
        seconds: What a picture may take, sending included.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._pixels = float(_FEWEST)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width to draw an image in: at most those given, with the same aspect where it fits."""
        scale = min(1.0, math.sqrt(self._pixels / (height * width)))
        return max(SMALLEST_SIDE, round(height * scale)), max(SMALLEST_SIDE, round(width * scale))

    def record(self, pixels: int, seconds: float, full_size: int) -> None:
        """Records the size and duration of a picture.

        Args:
            pixels: Number of its pixels.
            seconds: Its duration.
            full_size: Number of pixels at full size.
        """
        factor = self.seconds / max(seconds, 1e-6)
        if 1 / _TOLERANCE < factor < _TOLERANCE:
            return
        factor = min(max(factor, 1 / _LARGEST_CHANGE), _LARGEST_CHANGE)
        # Growing goes half of the way, because a part of the duration does not depend on the size.
        self._pixels = min(max(pixels * (factor if factor < 1 else math.sqrt(factor)), _FEWEST), full_size)
