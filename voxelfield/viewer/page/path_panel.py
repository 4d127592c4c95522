"""The panel that records a camera path."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np

from voxelfield.viewer.drawing.viewpoint import Viewpoint
from voxelfield.viewer.page.poses import viewpoint_of_camera, wxyz_of
from voxelfield.viewer.page.stage import Stage
from voxelfield.viewer.path.key_frames import between
from voxelfield.viewer.path.nerfstudio import PathSettings, read_path, write_path

FILE_NAME = "camera_path.json"

_COLOR = (220, 50, 90)
_LINE_POINTS_PER_SPAN = 24
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
        self._drawn: list[Any] = []
        self._lock = threading.Lock()
        self._playing = threading.Event()
        gui = stage.server.gui
        self.count = gui.add_markdown("")
        self.add = gui.add_button("Add key frame", icon="plus", hint="At the current camera pose.")
        self.edit = gui.add_button_group("", ("Replace last", "Remove last", "Clear"))
        self.seconds = gui.add_number("Seconds", 6.0, min=0.1, max=3600.0, step=0.1)
        self.fps = gui.add_number("Frames/s", 30, min=1, max=240, step=1)
        self.size = gui.add_vector2("Size", (1920, 1080), min=(16, 16), max=(8192, 8192), step=2)
        self.closed = gui.add_checkbox("Closed", False, hint="Returns to the first key frame.")
        self.play = gui.add_button("Play", icon="player-play")
        self.export = gui.add_button(f"Save {FILE_NAME}", icon="download")
        self.upload = gui.add_upload_button("Load a path", icon="upload", mime_type="application/json")
        gui.add_markdown(f"`voxelfield render {run} --path {FILE_NAME}` renders the video.")
        self.add.on_click(lambda event: self._append(event.client))
        self.edit.on_click(self._edit)
        self.closed.on_update(lambda _: self._changed())
        self.play.on_click(lambda event: self._play(event.client))
        self.export.on_click(lambda event: self._save(event.client))
        self.upload.on_upload(lambda event: self._load(event.client))
        self._changed()

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
            self._keys.append(viewpoint_of_camera(client.camera))
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

    def _changed(self) -> None:
        """Tells and draws the path as it now is."""
        keys = self.keys
        self.count.content = f"{len(keys)} key frame{'' if len(keys) == 1 else 's'}"
        self.play.disabled = self.export.disabled = not keys
        scene = self._stage.server.scene
        for node in self._drawn:
            node.remove()
        self._drawn = []
        if not keys:
            return
        aspect = self.settings().width / self.settings().height
        for number, key in enumerate(keys):
            pose = key.matrix
            frustum = scene.add_camera_frustum(
                f"/path/{number}",
                fov=key.fov,
                aspect=aspect,
                scale=0.05 * self._stage.extent,
                thickness=2.0,
                thickness_units="screen",
                color=_COLOR,
                wxyz=wxyz_of(pose),
                position=pose[:3, 3].numpy(),
            )
            frustum.on_click(lambda event, key=key: self._stage.move(event.client, key))
            self._drawn.append(frustum)
        if len(keys) > 1:
            line = between(keys, _LINE_POINTS_PER_SPAN * len(keys), closed=self.closed.value)
            points = [station.matrix[:3, 3].tolist() for station in line]
            points += points[:1] if self.closed.value else []
            segments = [list(pair) for pair in pairwise(points)]
            self._drawn.append(
                scene.add_line_segments(
                    "/path/line",
                    points=np.asarray(segments, dtype=np.float32),
                    colors=_COLOR,
                    thickness=2.0,
                    thickness_units="screen",
                )
            )

    def _play(self, client: Any) -> None:
        """Moves a client's camera along the path; stops where it is told to play again."""
        if self._playing.is_set():
            self._playing.clear()
            return
        self._playing.set()
        self.play.label = "Stop"
        settings = self.settings()
        stations = between(self.keys, max(2, round(settings.seconds * _PLAYED_PER_SECOND)), closed=settings.closed)
        began = time.perf_counter()
        try:
            while self._playing.is_set() and client.client_id in self._stage.server.get_clients():
                share = (time.perf_counter() - began) / settings.seconds
                if share >= 1:
                    self._stage.move(client, stations[-1])
                    break
                self._stage.move(client, stations[int(share * len(stations))])
                time.sleep(1 / _PLAYED_PER_SECOND)
        finally:
            self._playing.clear()
            self.play.label = "Play"

    def _save(self, client: Any) -> None:
        client.send_file_download(FILE_NAME, write_path(self.keys, self.settings()), save_immediately=True)

    def _load(self, client: Any) -> None:
        file = self.upload.value
        try:
            keys, settings = read_path(file.content, file.name)
        except ValueError as error:
            client.add_notification("The path cannot be loaded", str(error), color="red")
            return
        with self._lock:
            self._keys = keys
        self.seconds.value, self.fps.value, self.closed.value = settings.seconds, settings.fps, settings.closed
        self.size.value = (settings.width, settings.height)
        self._changed()
