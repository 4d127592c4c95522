"""The panel that says how the field is shown."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from io import BytesIO
from typing import Any

from voxelfield.viewer.drawing.look import MODES
from voxelfield.viewer.drawing.maps import MANY_SAMPLES
from voxelfield.viewer.page.jobs import job
from voxelfield.viewer.page.poses import viewpoint_of_camera
from voxelfield.viewer.page.stage import DEFAULT_ROWS, Stage
from voxelfield.viewer.scheduling.resolution import SMALLEST_SIDE
from voxelfield.viewer.scheduling.worker import Frame, Request

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
_LARGEST_STILL = (4096, 8192)
"""Height and width, pixels."""

_SECONDS_BETWEEN_STATUS = 0.5


class ViewPanel:
    """Mode, exposure, resolution, screenshot.

    Args:
        stage: What is shown.
        frames_per_second: Wished while a camera moves.
    """

    def __init__(self, stage: Stage, frames_per_second: int) -> None:
        self._stage = stage
        self._told = 0.0
        gui = stage.server.gui
        self.mode = gui.add_dropdown("Show", MODES, initial_value="rgb")
        self.meaning = gui.add_markdown(_MEANINGS["rgb"])
        self.exposure = gui.add_slider("Exposure", -4.0, 4.0, 0.1, 0.0, hint="In stops; affects colours only.")
        self.rows = gui.add_slider(
            "Rows at rest", 100, 2160, 20, DEFAULT_ROWS, hint="Picture height while the camera rests."
        )
        self.rate = gui.add_slider(
            "Moving, frames/s", 1, 120, 1, frames_per_second, hint="While the camera moves, pictures are smaller."
        )
        self.status = gui.add_markdown("Waiting for the first picture.")
        self.home = gui.add_button("Home", icon="home", hint="Returns to the initial view.")
        self.screenshot = gui.add_button("Screenshot", icon="camera", hint="Saves this view as a PNG at full quality.")
        self.scale = gui.add_slider("Screenshot scale", 1, 4, 1, 1, hint="Height relative to the page.")
        with gui.add_folder("Keys", expand_by_default=False, order=1e6):
            gui.add_markdown(_KEYS)
        self.mode.on_update(lambda _: self._change_mode())
        self.exposure.on_update(lambda _: self._change(exposure=self.exposure.value))
        self.rows.on_update(lambda _: self._change_rows())
        self.rate.on_update(lambda _: self._change_rate())
        self.home.on_click(lambda event: stage.move(event.client, stage.home()))
        self.screenshot.on_click(job(self._take))

    def tell(self, frame: Frame) -> None:
        """Shows now and then what drawing takes; always for a sharp picture."""
        now = time.perf_counter()
        if not frame.sharp and now - self._told < _SECONDS_BETWEEN_STATUS:
            return
        self._told = now
        height, width = frame.pixels.shape[:2]
        kind = "at rest" if frame.sharp else "moving"
        pace = f"{width} x {height} in {1000 * frame.seconds:.0f} ms ({kind})"
        self.status.content = f"{pace}\n\n**{frame.absence.capitalize()}.**" if frame.absence else pace

    def _change(self, **settings: Any) -> None:
        self._stage.worker.look = replace(self._stage.worker.look, **settings)

    def _change_mode(self) -> None:
        self.meaning.content = _MEANINGS[self.mode.value]
        self.exposure.disabled = self.mode.value != "rgb"
        self._change(mode=self.mode.value)

    def _change_rows(self) -> None:
        self._stage.rows = self.rows.value
        self._stage.ask_for_all()

    def _change_rate(self) -> None:
        self._stage.worker.frames_per_second = float(self.rate.value)

    def _take(self, client: Any) -> None:
        from PIL import Image

        camera = client.camera
        size = (camera.image_height, camera.image_width)
        factor = min(self.scale.value, *(most / side for most, side in zip(_LARGEST_STILL, size, strict=True)))
        height, width = (max(SMALLEST_SIDE, round(side * factor)) for side in size)
        still = self._stage.worker.still(client.client_id, Request(viewpoint_of_camera(camera), height, width))
        if not self._stage.is_connected(client):
            still.cancel()  # it left before there was anything to forget
        buffer = BytesIO()
        Image.fromarray(still.result().numpy()).save(buffer, format="PNG")
        name = f"voxelfield_{datetime.now():%Y-%m-%d_%H-%M-%S}.png"
        client.send_file_download(name, buffer.getvalue(), save_immediately=True)
