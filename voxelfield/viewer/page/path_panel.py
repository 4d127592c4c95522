"""The panel that records a camera path."""

from __future__ import annotations

import shlex
import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np

from voxelfield.viewer.drawing.viewpoint import Viewpoint
from voxelfield.viewer.page.jobs import in_thread, job, latest
from voxelfield.viewer.page.markdown import code
from voxelfield.viewer.page.poses import viewpoint_of_camera, wxyz_of
from voxelfield.viewer.page.stage import Stage
from voxelfield.viewer.path.key_frames import between
from voxelfield.viewer.path.nerfstudio import (
    DURATIONS,
    MOST_FRAMES,
    MOST_KEY_FRAMES,
    RATES,
    SIDES,
    PathSettings,
    read_path,
    write_path,
)

FILE_NAME = "camera_path.json"

_COLOR = (220, 50, 90)
_LINE_POINTS_PER_SPAN, _MOST_LINE_POINTS = 24, 2400
_PLAYED_PER_SECOND = 30


class PathPanel:
    """Key frames, playing, and the file.

    Args:
        stage: What is shown.
        run: How the run is called on a command line.
    """

    def __init__(self, stage: Stage, run: str) -> None:
        self._stage = stage
        self._keys: list[Viewpoint] = []
        self._drawn: list[tuple[Viewpoint, Any]] = []
        self._line: Any = None
        self._changed = latest(self._draw)
        self._lock = threading.Lock()
        self._playing = False
        self._stop = threading.Event()
        gui = stage.server.gui
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
        gui.add_markdown(f"{code(f'voxelfield render {shlex.quote(run)} --path {FILE_NAME}')} renders the video.")
        self.add.on_click(lambda event: self._append(event.client))
        self.edit.on_click(self._edit)
        self.closed.on_update(lambda _: self._changed())
        self.play.on_click(self._toggle)
        self.export.on_click(job(self._save))
        self.upload.on_upload(job(self._load))
        self._draw()

    @property
    def keys(self) -> list[Viewpoint]:
        """The key frames so far."""
        with self._lock:
            return list(self._keys)

    def settings(self) -> PathSettings:
        """Returns how the path is to be rendered."""
        width, height = (round(side) for side in self.size.value)
        return PathSettings(float(self.seconds.value), int(self.fps.value), height, width, self.closed.value)

    def _append(self, client: Any) -> None:
        with self._lock:
            full = len(self._keys) >= MOST_KEY_FRAMES
            if not full:
                self._keys.append(viewpoint_of_camera(client.camera))
        if full:
            client.add_notification("This is not possible", f"A path has at most {MOST_KEY_FRAMES} key frames.")
            return
        self._changed()

    def _edit(self, event: Any) -> None:
        with self._lock:
            if self.edit.value == "Clear":
                self._keys.clear()
            elif self._keys:
                self._keys.pop()
                if self.edit.value == "Replace last":
                    self._keys.append(viewpoint_of_camera(event.client.camera))
        self._changed()

    def _draw(self) -> None:
        """Tells and draws the path as it now is."""
        keys = self.keys
        self.count.content = f"{len(keys)} key frame{'' if len(keys) == 1 else 's'}"
        self.play.disabled = self.export.disabled = not keys
        same = 0
        while same < min(len(keys), len(self._drawn)) and self._drawn[same][0] == keys[same]:
            same += 1
        for _, frustum in self._drawn[same:]:
            frustum.remove()
        self._drawn[same:] = [(keys[number], self._frustum(number, keys[number])) for number in range(same, len(keys))]
        if self._line is not None:
            self._line.remove()
        self._line = self._drawn_line(keys) if len(keys) > 1 else None

    def _frustum(self, number: int, key: Viewpoint) -> Any:
        settings, pose = self.settings(), key.matrix
        frustum = self._stage.server.scene.add_camera_frustum(
            f"/path/{number}",
            fov=key.fov,
            aspect=settings.width / settings.height,
            scale=0.05 * self._stage.extent,
            thickness=2.0,
            thickness_units="screen",
            color=_COLOR,
            wxyz=wxyz_of(pose),
            position=pose[:3, 3].numpy(),
        )
        frustum.on_click(lambda event: self._stage.move(event.client, key))
        return frustum

    def _drawn_line(self, keys: list[Viewpoint]) -> Any:
        closed = self.closed.value
        line = between(keys, min(_LINE_POINTS_PER_SPAN * len(keys), _MOST_LINE_POINTS), closed=closed)
        points = [station.matrix[:3, 3].tolist() for station in line]
        points += points[:1] if closed else []
        return self._stage.server.scene.add_line_segments(
            "/path/line",
            points=np.asarray([list(pair) for pair in pairwise(points)], dtype=np.float32),
            colors=_COLOR,
            thickness=2.0,
            thickness_units="screen",
        )

    def _toggle(self, event: Any) -> None:
        """Has the camera of whoever asks move along the path, or ends it where one moves."""
        with self._lock:
            begins = not self._playing
            self._playing = True
            if begins:
                self._stop.clear()
            else:
                self._stop.set()
        if begins:
            in_thread(lambda: self._play(event.client))

    def _play(self, client: Any) -> None:
        try:
            keys, settings = self.keys, self.settings()
            if not keys:
                return
            self.play.label = "Stop"
            frames = min(max(2, round(settings.seconds * _PLAYED_PER_SECOND)), MOST_FRAMES)
            stations = between(keys, frames, closed=settings.closed)
            began, share = time.perf_counter(), 0.0
            while share < 1 and not self._stop.wait(1 / _PLAYED_PER_SECOND) and self._stage.is_connected(client):
                share = (time.perf_counter() - began) / settings.seconds
                self._stage.move(client, stations[min(int(share * frames), frames - 1)])
        finally:
            self.play.label = "Play"
            with self._lock:
                self._playing = False

    def _save(self, client: Any) -> None:
        client.send_file_download(FILE_NAME, write_path(self.keys, self.settings()), save_immediately=True)

    def _load(self, _: Any) -> None:
        file = self.upload.value
        keys, settings = read_path(file.content, file.name)
        with self._lock:
            self._keys = keys
        self.seconds.value, self.fps.value, self.closed.value = settings.seconds, settings.fps, settings.closed
        self.size.value = (settings.width, settings.height)
        self._changed()
