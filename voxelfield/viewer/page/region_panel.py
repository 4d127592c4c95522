"""The panel that leaves out parts of the scene, and cuts through it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from voxelfield.grids.boxes import parse_box
from voxelfield.viewer.drawing.look import AXES, Slice
from voxelfield.viewer.page.stage import Stage

_STEPS = 200
"""Of a slider, from one end of the box to the other."""


class RegionPanel:
    """Crop box and slice.

    Args:
        stage: What is shown. Its boxes say how far crop box and slice can go.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._reach = parse_box(stage.box)
        gui = stage.server.gui
        self.reach: Any = None
        if len(stage.boxes) > 1:
            names = tuple(str(number) for number in range(1, len(stage.boxes) + 1))
            hint = "Limits crop box and slice: 1 is the smallest of the nested boxes."
            self.reach = gui.add_dropdown("Crop and slice in box", names, initial_value="1", hint=hint)
            self.reach.on_update(lambda _: self._change_reach())
        with gui.add_folder("Crop box", expand_by_default=False):
            self.crop = gui.add_checkbox("Crop", False, hint="Rounded to whole cells of the occupancy grid.")
            self.sides = [
                gui.add_multi_slider(axis, low, high, (high - low) / _STEPS, (low, high))
                for axis, (low, high) in zip(AXES, self._limits, strict=True)
            ]
        with gui.add_folder("Slice through the density", expand_by_default=False):
            self.cut = gui.add_checkbox("Slice", False)
            self.axis = gui.add_dropdown("Axis", AXES, initial_value="z")
            low, high = self._limits[2]
            self.position = gui.add_slider("Position", low, high, (high - low) / _STEPS, (low + high) / 2)
            gui.add_markdown("Opacity of one sample: blue for empty, red for solid.")
        for side in self.sides:
            side.on_update(lambda _: self._apply_crop())
        self.crop.on_update(lambda _: self._apply_crop())
        self.cut.on_update(lambda _: self._apply_cut())
        self.axis.on_update(lambda _: self._change_axis())
        self.position.on_update(lambda _: self._apply_cut())
        self._outline: Any = None

    @property
    def _limits(self) -> list[tuple[float, float]]:
        """Lower and upper end along each axis, world units."""
        return list(zip(*self._reach, strict=True))

    def _change_reach(self) -> None:
        self._reach = parse_box(self._stage.boxes[int(self.reach.value) - 1])
        for side, (low, high) in zip(self.sides, self._limits, strict=True):
            _set_range(side, low, high, (low, high))
        self._change_axis()

    def _apply_crop(self) -> None:
        corners = [side.value for side in self.sides]
        # A side without extent would be no box.
        least = [(high - low) * 1e-3 for low, high in self._limits]
        low = [min(side) for side in corners]
        high = [max(max(side), min(side) + extent) for side, extent in zip(corners, least, strict=True)]
        box = parse_box((low, high)) if self.crop.value else None
        self._stage.worker.look = replace(self._stage.worker.look, crop=box)
        self._draw_outline(low, high)

    def _draw_outline(self, low: list[float], high: list[float]) -> None:
        if self._outline is not None:
            self._outline.remove()
            self._outline = None
        if self.crop.value:
            self._outline = self._stage.server.scene.add_box(
                "/crop",
                dimensions=tuple(b - a for a, b in zip(low, high, strict=True)),
                position=tuple((a + b) / 2 for a, b in zip(low, high, strict=True)),
                color=(255, 120, 40),
                wireframe=True,
            )

    def _change_axis(self) -> None:
        low, high = self._limits[AXES.index(self.axis.value)]
        _set_range(self.position, low, high, (low + high) / 2)
        self._apply_cut()

    def _apply_cut(self) -> None:
        cut = Slice(AXES.index(self.axis.value), self.position.value, self._reach) if self.cut.value else None
        self._stage.worker.look = replace(self._stage.worker.look, cut=cut)


def _set_range(slider: Any, low: float, high: float, value: Any) -> None:
    """Gives a slider other ends, and a value between them."""
    # Within both ranges while they change, whatever the order in which the page takes them.
    slider.min, slider.max = min(low, slider.min), max(high, slider.max)
    slider.value = value
    slider.min, slider.max, slider.step = low, high, (high - low) / _STEPS
