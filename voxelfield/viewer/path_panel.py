"""The panel that records a camera path."""

from __future__ import annotations

import shlex
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from voxelfield.datasets.camera_path import camera_path_file
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.paths import through
from voxelfield.viewer.pictures import Viewpoint
from voxelfield.viewer.state import ViewerState, viewpoint_of_camera

FILE_NAME = "camera_path.json"

MOST_KEYS = 500

MOST_FRAMES = 36_000
"""Largest number of frames of a path: ten minutes at 60 frames per second."""

_COLOR = (220, 50, 90)
_LINE_POINTS_PER_SPAN = 24
_SECONDS_BETWEEN_FILES = 1.0


class PathPanel:
    """Key cameras, and the file of the path through them.

    Args:
        state: The page.
        run: The run's path for the command line.
    """

    def __init__(self, state: ViewerState, run: str) -> None:
        self._state = state
        self.keys: list[Viewpoint] = []
        self._drawn: list[Any] = []
        self._next_file = 0.0
        gui = state.server.gui
        self.count = gui.add_markdown("")
        self.add = gui.add_button("Add key camera", icon="plus", hint="At the current camera pose.")
        self.edit = gui.add_button_group("", ("Remove last", "Clear"))
        self.seconds = gui.add_number("Seconds", 6.0, min=0.1, max=3600.0, step=0.1)
        self.fps = gui.add_number("Frames/s", 30, min=1, max=240, step=1)
        self.size = gui.add_vector2("Size", (1920, 1080), min=(16, 16), max=(8192, 8192), step=2)
        self.export = gui.add_button(f"Save {FILE_NAME}", icon="download")
        # A text field, because Markdown would interpret the name of the run.
        command = f"voxelfield render {shlex.quote(run)} --path {FILE_NAME}"
        self.command = gui.add_text("Video", command, disabled=True, hint="Renders the video of a saved path.")
        self.add.on_click(state.callback(self._append))
        self.edit.on_click(state.callback(lambda _: self._edit()))
        self.export.on_click(state.callback(self._save))
        self._draw()

    def path(self, frames: int) -> Cameras:
        """Returns cameras on a smooth path through the key cameras, of which there is at least one."""
        width, height = (round(side) for side in self.size.value)
        keys = [key.cameras(height, width) for key in self.keys]
        c2w, intrinsics = (torch.cat([getattr(key, name) for key in keys]) for name in ("c2w", "intrinsics"))
        return through(Cameras(c2w, intrinsics, width, height), frames)

    def _append(self, client: Any) -> None:
        if len(self.keys) >= MOST_KEYS:
            raise ValueError(f"a path has at most {MOST_KEYS} key cameras")
        self.keys = [*self.keys, viewpoint_of_camera(client.camera)]
        self._draw()

    def _edit(self) -> None:
        self.keys = [] if self.edit.value == "Clear" else self.keys[:-1]
        self._draw()

    def _draw(self) -> None:
        """Shows the path and the number of its key cameras."""
        count = len(self.keys)
        self.count.content = f"{count} key camera{'' if count == 1 else 's'}"
        self.export.disabled = count == 0
        for handle in self._drawn:
            handle.remove()
        self._drawn = [self._frustum(number, key) for number, key in enumerate(self.keys)]
        if count > 1:
            points = self.path(_LINE_POINTS_PER_SPAN * (count - 1) + 1).c2w[:, :3, 3].numpy()
            line = {"colors": _COLOR, "thickness": 2.0, "thickness_units": "screen"}
            segments = np.asarray(list(pairwise(points)))
            self._drawn.append(self._state.server.scene.add_line_segments("/path/line", points=segments, **line))

    def _frustum(self, number: int, key: Viewpoint) -> Any:
        width, height = self.size.value
        scale = 0.05 * self._state.extent
        frustum = self._state.add_frustum(f"/path/{number}", key, width / height, scale=scale, color=_COLOR)
        frustum.on_click(self._state.callback(lambda client: self._state.move(client, key)))
        return frustum

    def _save(self, client: Any) -> None:
        seconds, fps = float(self.seconds.value), int(self.fps.value)
        frames = max(1, round(seconds * fps))
        if frames > MOST_FRAMES:
            raise ValueError(f"seconds times fps must be at most {MOST_FRAMES} frames, got {seconds:g} x {fps}")
        # A browser that does not read would make files pile up here.
        if time.monotonic() < self._next_file:
            raise ValueError("a path can be saved once per second")
        content = camera_path_file(self.path(frames), fps)
        self._next_file = time.monotonic() + _SECONDS_BETWEEN_FILES
        client.send_file_download(FILE_NAME, content, save_immediately=True)
