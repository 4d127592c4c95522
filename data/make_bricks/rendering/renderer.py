"""Path tracing of single views with Mitsuba."""

from __future__ import annotations

from typing import Any

import numpy as np

from make_bricks.arrays import Array, Pixels
from make_bricks.cameras import CAMERA_ANGLE_X
from make_bricks.geometry.model import Model
from make_bricks.rendering.encoding import encode_rgba
from make_bricks.rendering.scene import build_scene


class Renderer:
    """Renders views of a model, which is loaded into Mitsuba once.

    Args:
        model: What to render.
        size: Side of the square images in pixels.
        spp: Samples per pixel; Mitsuba rounds the number up to suit its sampler.
    """

    def __init__(self, model: Model, size: int, spp: int) -> None:
        import drjit
        import mitsuba

        drjit.set_thread_count(1)
        mitsuba.set_variant("scalar_rgb")
        # Mitsuba's type stubs describe its other variants.
        self._mi: Any = mitsuba
        self._size, self._spp = size, spp
        self._scene = build_scene(mitsuba, model)

    def render(self, c2w: Array, seed: int) -> Pixels:
        """Renders one view.

        Args:
            c2w: Camera-to-world matrix (4, 4).
            seed: Seed of the samples.

        Returns:
            sRGB colour, not multiplied by alpha, and alpha, (size, size, 4).
        """
        sensor = self._mi.load_dict(
            {
                "type": "perspective",
                "fov": float(np.degrees(CAMERA_ANGLE_X)),
                "fov_axis": "x",
                # Mitsuba's cameras look along +z with x to the left.
                "to_world": self._mi.ScalarTransform4f(c2w @ np.diag([-1.0, 1.0, -1.0, 1.0])),
                "sampler": {"type": "multijitter", "sample_count": self._spp},
                "film": {
                    "type": "hdrfilm",
                    "width": self._size,
                    "height": self._size,
                    "pixel_format": "rgba",
                    "component_format": "float32",
                    "rfilter": {"type": "box"},
                },
            }
        )
        return encode_rgba(np.array(self._mi.render(self._scene, sensor=sensor, seed=seed)))
