"""The panel of the scene's cameras and photographs."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import numpy as np

from voxelfield.viewer.display import viewpoint_of
from voxelfield.viewer.state import ViewerState, wxyz_of

_THUMBNAIL_SIDE = 96
_COLORS = {"train": (40, 110, 220), "test": (220, 120, 30)}
_OTHER_COLOR = (120, 120, 120)
_SIZE_STEP = 0.005


class CamerasPanel:
    """Frusta with photographs, moving to one, and comparing with it.

    Args:
        state: The page, with at least one photograph.
    """

    def __init__(self, state: ViewerState) -> None:
        self._state = state
        self._names = state.photographs.names
        self._building = threading.Lock()
        gui = state.server.gui
        self.shown = gui.add_checkbox("Show cameras", False, hint="Click one to go there.")
        # Of many cameras around a scene, neighbours do not overlap.
        size = _SIZE_STEP * max(1, round(min(0.04, 0.6 / math.sqrt(len(self._names))) / _SIZE_STEP))
        self.size = gui.add_slider("Size", _SIZE_STEP, 0.3, _SIZE_STEP, size, hint="Fraction of the scene's extent.")
        self.view = gui.add_dropdown("View", tuple(self._names), initial_value=self._names[0])
        self.steps = gui.add_button_group("", ("Previous", "Go", "Next"))
        self.compare = gui.add_checkbox("Compare with photograph", False, hint="While the camera is at a view.")
        self.fraction = gui.add_slider("Photograph | render", 0.0, 1.0, 0.01, 0.5)
        self.shown.on_update(state.callback(lambda _: self._show(), long=True))
        self.size.on_update(state.callback(lambda _: self._resize()))
        self.view.on_update(state.callback(self._go))
        self.steps.on_click(state.callback(self._step))
        self.compare.on_update(state.callback(self._compare))
        self.fraction.on_update(state.callback(lambda _: self._set_fraction()))
        self.frusta: list[Any] = []

    def go(self, client: Any, number: int) -> None:
        """Selects a photograph, and moves the camera of a client there."""
        if self._names[number] != self.view.value:
            self.view.value = self._names[number]
        self._state.go_to_photograph(client, number)

    def update_visibility(self) -> None:
        """Hides frusta around a browser's camera, which would cover its picture."""
        reach = 1.5 * self.size.value * self._state.extent
        cameras = [client.camera.position for client in self._state.server.get_clients().values()]
        for frustum in self.frusta:
            near = any(float(np.linalg.norm(frustum.position - camera)) < reach for camera in cameras)
            visible = self.shown.value and not self.compare.value and not near
            if frustum.visible != visible:
                frustum.visible = visible

    def _show(self) -> None:
        with self._building:
            if self.shown.value and not self.frusta:
                self.frusta = [self._frustum(number) for number in range(len(self._names))]
        self.update_visibility()

    def _frustum(self, number: int) -> Any:
        cameras, index = self._state.photographs.camera(number)
        pose = cameras.c2w[index].cpu()
        width, height = cameras.size(index)
        frustum = self._state.server.scene.add_camera_frustum(
            f"/cameras/{self._names[number]}",
            fov=viewpoint_of(cameras, index).fov,
            aspect=width / height,
            scale=self.size.value * self._state.extent,
            thickness=1.5,
            thickness_units="screen",
            color=_COLORS.get(self._names[number].partition("/")[0], _OTHER_COLOR),
            image=self._state.photographs.thumbnail(number, _THUMBNAIL_SIDE, self._state.background).numpy(),
            format="jpeg",
            wxyz=wxyz_of(pose),
            position=pose[:3, 3].numpy(),
            visible=False,
        )
        frustum.on_click(self._state.callback(lambda client: self.go(client, number)))
        return frustum

    def _resize(self) -> None:
        for frustum in self.frusta:
            frustum.scale = self.size.value * self._state.extent
        self.update_visibility()

    def _go(self, client: Any) -> None:
        # Without a client the value was set by a click at a frustum or a button.
        if client is not None:
            self._state.go_to_photograph(client, self._names.index(self.view.value))

    def _step(self, client: Any) -> None:
        offset = {"Previous": -1, "Go": 0, "Next": 1}[self.steps.value]
        self.go(client, (self._names.index(self.view.value) + offset) % len(self._names))

    def _compare(self, client: Any) -> None:
        self._set_fraction()
        if client is not None and self.compare.value:
            self.go(client, self._names.index(self.view.value))
        self.update_visibility()

    def _set_fraction(self) -> None:
        fraction = self.fraction.value if self.compare.value else 0.0
        self._state.worker.display = replace(self._state.worker.display, photo_fraction=fraction)
        self._state.request_all()
