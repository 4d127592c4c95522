"""The panel for display modes, resolution, screenshots and the crop box."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from io import BytesIO
from typing import Any

from voxelfield.grids.boxes import parse_box
from voxelfield.viewer.display import MODES, SMALLEST_SIDE
from voxelfield.viewer.maps import MANY_SAMPLES
from voxelfield.viewer.state import DEFAULT_ROWS, ViewerState, viewpoint_of_camera
from voxelfield.viewer.worker import Picture, PictureRequest

_MEANINGS = {
    "rgb": "Colours over the evaluation's background.",
    "depth": "Distance along the ray, from near (blue) to far (red).",
    "normal": "Orientation of the surface given by the depth: x, y, z as red, green, blue.",
    "opacity": "Opacity of the ray, from 0 (black) to 1 (white).",
    "samples per ray": f"Visible samples: white for none, red for {MANY_SAMPLES} or more.",
    "occupancy": "Cells in which rays are sampled, coloured along z.",
}
_KEYS = """
- **drag** to orbit, **right-drag** to move sideways, **scroll** to come closer
- **W A S D** to fly level, **Q** and **E** down and up, **arrow keys** to turn
"""
_LARGEST_SCREENSHOT = (4096, 8192)
"""Height and width, pixels."""

_EMPTY = "Only the background is visible: the field is empty, outside of the crop box, or elsewhere."
_SECONDS_BETWEEN_STATUS = 0.5
_SLIDER_STEPS = 200


class ViewPanel:
    """Display mode, resolution and screenshot.

    Args:
        state: The page.
    """

    def __init__(self, state: ViewerState) -> None:
        self._state = state
        self._status_shown = 0.0
        self._taking: set[int] = set()
        gui = state.server.gui
        self.mode = gui.add_dropdown("Show", MODES, initial_value="rgb")
        self.meaning = gui.add_markdown(_MEANINGS["rgb"])
        self.rows = gui.add_slider(
            "Rows at rest", 100, 2160, 20, DEFAULT_ROWS, hint="Picture height while the camera rests."
        )
        rate = round(state.worker.frames_per_second)
        hint = "While the camera moves, pictures are smaller."
        self.rate = gui.add_slider("Moving, frames/s", 1, 120, 1, rate, hint=hint)
        self.status = gui.add_markdown("Waiting for the first picture.")
        self.home = gui.add_button("Home", icon="home", hint="Returns to the initial view.")
        self.screenshot = gui.add_button("Screenshot", icon="camera", hint="Saves this view as a PNG at full quality.")
        self.scale = gui.add_slider("Screenshot scale", 1, 4, 1, 1, hint="Height relative to the page.")
        with gui.add_folder("Keys", expand_by_default=False, order=1e6):
            gui.add_markdown(_KEYS)
        self.mode.on_update(state.callback(lambda _: self._change_mode()))
        self.rows.on_update(state.callback(lambda _: self._change_rows()))
        self.rate.on_update(state.callback(lambda _: self._change_rate()))
        self.home.on_click(state.callback(lambda client: state.move(client, state.home)))
        self.screenshot.on_click(state.callback(self._take_screenshot, long=True))

    def show_status(self, picture: Picture) -> None:
        """Shows the drawing time of a sharp picture, and now and then of others."""
        now = time.perf_counter()
        if not picture.sharp and now - self._status_shown < _SECONDS_BETWEEN_STATUS:
            return
        self._status_shown = now
        height, width = picture.pixels.shape[:2]
        status = f"{width} x {height} in {1000 * picture.seconds:.0f} ms ({'at rest' if picture.sharp else 'moving'})"
        if picture.sharp and bool((picture.pixels == picture.pixels[0, 0]).all()):
            status += f"\n\n**{_EMPTY}**"
        self.status.content = status

    def _change_mode(self) -> None:
        self.meaning.content = _MEANINGS[self.mode.value]
        _change(self._state, mode=self.mode.value)

    def _change_rows(self) -> None:
        self._state.rows = self.rows.value
        self._state.request_all()

    def _change_rate(self) -> None:
        self._state.worker.frames_per_second = float(self.rate.value)

    def _take_screenshot(self, client: Any) -> None:
        from PIL import Image

        if client.client_id in self._taking:
            return
        self._taking.add(client.client_id)
        try:
            camera = client.camera
            size = (camera.image_height, camera.image_width)
            limits = (most / side for most, side in zip(_LARGEST_SCREENSHOT, size, strict=True))
            factor = min(self.scale.value, *limits)
            height, width = (max(SMALLEST_SIDE, round(side * factor)) for side in size)
            request = PictureRequest(viewpoint_of_camera(camera), height, width)
            pixels = self._state.worker.screenshot(request, lambda: self._state.is_connected(client))
        finally:
            self._taking.discard(client.client_id)
        if pixels is not None:
            buffer = BytesIO()
            Image.fromarray(pixels.numpy()).save(buffer, format="PNG")
            name = f"voxelfield_{datetime.now():%Y-%m-%d_%H-%M-%S}.png"
            client.send_file_download(name, buffer.getvalue(), save_immediately=True)


class RegionPanel:
    """The crop box.

    Args:
        state: The page.
    """

    def __init__(self, state: ViewerState) -> None:
        self._state = state
        self._limits = list(zip(*state.crop_limits, strict=True))
        self._outline: Any = None
        gui = state.server.gui
        with gui.add_folder("Crop box", expand_by_default=False):
            self.crop = gui.add_checkbox("Crop", False, hint="Rounded to whole cells of the occupancy grid.")
            self.sides = [
                gui.add_multi_slider(axis, low, high, (high - low) / _SLIDER_STEPS, (low, high))
                for axis, (low, high) in zip("xyz", self._limits, strict=True)
            ]
        for control in (self.crop, *self.sides):
            control.on_update(state.callback(lambda _: self._apply_crop()))

    def _apply_crop(self) -> None:
        if self._outline is not None:
            self._outline.remove()
            self._outline = None
        if not self.crop.value:
            _change(self._state, crop=None)
            return
        # A side must have an extent.
        ends = [
            (min(side.value), max(*side.value, min(side.value) + 1e-3 * (high - low)))
            for side, (low, high) in zip(self.sides, self._limits, strict=True)
        ]
        low, high = zip(*ends, strict=True)
        _change(self._state, crop=parse_box((low, high)))
        self._outline = self._state.server.scene.add_box(
            "/crop",
            dimensions=tuple(b - a for a, b in ends),
            position=tuple((a + b) / 2 for a, b in ends),
            color=(255, 120, 40),
            wireframe=True,
        )


def _change(state: ViewerState, **settings: Any) -> None:
    state.worker.display = replace(state.worker.display, **settings)
