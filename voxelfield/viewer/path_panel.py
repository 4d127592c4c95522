"""The panel that records a camera path."""

from __future__ import annotations

import shlex
import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np

from voxelfield.viewer.camera_path import (
    DURATIONS,
    MOST_KEY_FRAMES,
    RATES,
    SIDES,
    PathSettings,
    interpolate,
    read_path,
    write_path,
)
from voxelfield.viewer.display import Viewpoint
from voxelfield.viewer.state import ViewerState, viewpoint_of_camera, wxyz_of

FILE_NAME = "camera_path.json"

_COLOR = (220, 50, 90)
_LINE_POINTS_PER_SPAN = 24
_STEP_SECONDS = 1 / 30
"""Time between camera poses while a path is played."""


class PathPanel:
    """Key frames, playback and the file.

    Args:
        state: The page.
        run: The run's path for the command line.
    """

    def __init__(self, state: ViewerState, run: str) -> None:
        self._state = state
        self.keys: list[Viewpoint] = []
        self._drawn: list[Any] = []
        self._playing = threading.Lock()
        self._stop = threading.Event()
        gui = state.server.gui
        self.count = gui.add_markdown("")
        self.add = gui.add_button("Add key frame", icon="plus", hint="At the current camera pose.")
        self.edit = gui.add_button_group("", ("Replace last", "Remove last", "Clear"))
        self.seconds = gui.add_number("Seconds", 6.0, min=DURATIONS[0], max=DURATIONS[1], step=0.1)
        self.fps = gui.add_number("Frames/s", 30, min=RATES[0], max=RATES[1], step=1)
        self.size = gui.add_vector2("Size", (1920, 1080), min=(SIDES[0],) * 2, max=(SIDES[1],) * 2, step=2)
        self.closed = gui.add_checkbox("Closed", False, hint="Returns to the first key frame.")
        self.play = gui.add_button("Play", icon="player-play")
        self.export = gui.add_button(f"Save {FILE_NAME}", icon="download")
        self.upload = gui.add_upload_button("Load a path", icon="upload", mime_type="application/json")
        # A text field, because Markdown would interpret the name of the run.
        command = f"voxelfield render {shlex.quote(run)} --path {FILE_NAME}"
        self.command = gui.add_text("Video", command, disabled=True, hint="Renders the video of a saved path.")
        self.add.on_click(state.callback(self._append))
        self.edit.on_click(state.callback(self._edit))
        self.closed.on_update(state.callback(lambda _: self._draw()))
        self.play.on_click(state.callback(self._toggle, long=True))
        self.export.on_click(state.callback(self._save))
        self.upload.on_upload(state.callback(lambda _: self._load()))
        self._draw()

    def settings(self) -> PathSettings:
        """Returns how the path is to be rendered."""
        width, height = (round(side) for side in self.size.value)
        return PathSettings(float(self.seconds.value), int(self.fps.value), height, width, self.closed.value)

    def _append(self, client: Any) -> None:
        if len(self.keys) >= MOST_KEY_FRAMES:
            raise ValueError(f"a path has at most {MOST_KEY_FRAMES} key frames")
        self.keys = [*self.keys, viewpoint_of_camera(client.camera)]
        self._draw()

    def _edit(self, client: Any) -> None:
        self.keys = [] if self.edit.value == "Clear" else self.keys[:-1]
        if self.edit.value == "Replace last":
            self._append(client)
        self._draw()

    def _draw(self) -> None:
        """Shows the path and the number of its key frames."""
        count = len(self.keys)
        self.count.content = f"{count} key frame{'' if count == 1 else 's'}"
        self.play.disabled = self.export.disabled = count == 0
        for handle in self._drawn:
            handle.remove()
        self._drawn = [self._frustum(number, key) for number, key in enumerate(self.keys)]
        if count > 1:
            line = interpolate(self.keys, _LINE_POINTS_PER_SPAN * count, closed=self.closed.value)
            points = [viewpoint.matrix[:3, 3].numpy() for viewpoint in (*line, *line[: self.closed.value])]
            self._drawn.append(
                self._state.server.scene.add_line_segments(
                    "/path/line",
                    points=np.asarray(list(pairwise(points))),
                    colors=_COLOR,
                    thickness=2.0,
                    thickness_units="screen",
                )
            )

    def _frustum(self, number: int, key: Viewpoint) -> Any:
        pose, settings = key.matrix, self.settings()
        frustum = self._state.server.scene.add_camera_frustum(
            f"/path/{number}",
            fov=key.fov,
            aspect=settings.width / settings.height,
            scale=0.05 * self._state.extent,
            thickness=2.0,
            thickness_units="screen",
            color=_COLOR,
            wxyz=wxyz_of(pose),
            position=pose[:3, 3].numpy(),
        )
        frustum.on_click(self._state.callback(lambda client: self._state.move(client, key)))
        return frustum

    def _toggle(self, client: Any) -> None:
        """Moves the camera of a client along the path, or stops a moving one."""
        if not self._playing.acquire(blocking=False):
            self._stop.set()
            return
        try:
            self._stop.clear()
            self.play.label = "Stop"
            settings = self.settings()
            frames = max(2, round(settings.seconds / _STEP_SECONDS))
            path = interpolate(self.keys, frames, closed=settings.closed)
            started, share = time.perf_counter(), 0.0
            while share < 1 and not self._stop.wait(_STEP_SECONDS) and self._state.is_connected(client):
                share = min((time.perf_counter() - started) / settings.seconds, 1.0)
                self._state.move(client, path[min(int(share * frames), frames - 1)])
        finally:
            self.play.label = "Play"
            self._playing.release()

    def _save(self, client: Any) -> None:
        client.send_file_download(FILE_NAME, write_path(self.keys, self.settings()), save_immediately=True)

    def _load(self) -> None:
        file = self.upload.value
        keys, settings = read_path(file.content, file.name)
        self.keys = keys
        self.seconds.value, self.fps.value, self.closed.value = settings.seconds, settings.fps, settings.closed
        self.size.value = (settings.width, settings.height)
        self._draw()
