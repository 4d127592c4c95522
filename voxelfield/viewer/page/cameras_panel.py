"""The panel of the scene's cameras and photographs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from voxelfield.viewer.drawing.viewpoint import viewpoint_of
from voxelfield.viewer.page.jobs import latest
from voxelfield.viewer.page.poses import wxyz_of
from voxelfield.viewer.page.stage import Stage

_THUMBNAIL = 96
_COLORS = {"train": (40, 110, 220), "test": (220, 120, 30)}
_OTHER_COLOR = (120, 120, 120)

# Of the scene's extent; of the distance between neighbouring cameras.
_SIZE_STEP, _LARGEST_AT_FIRST = 0.005, 0.04
_SHARE_OF_SPACING = 0.6


class CamerasPanel:
    """Frusta with their photographs, going to one, and comparing with it.

    Args:
        stage: What is shown, with at least one photograph.
        background: (3,) colour behind transparent photographs, on the CPU.
    """

    def __init__(self, stage: Stage, background: torch.Tensor) -> None:
        self._stage = stage
        self._background = background
        self._names = stage.photographs.names
        gui = stage.server.gui
        self.shown = gui.add_checkbox("Show cameras", False, hint="Click one to go there.")
        self.size = gui.add_slider(
            "Size", _SIZE_STEP, 0.3, _SIZE_STEP, _size(stage), hint="Share of the scene's extent."
        )
        self.view = gui.add_dropdown("View", tuple(self._names), initial_value=self._names[0])
        self.steps = gui.add_button_group("", ("Previous", "Go", "Next"))
        self.compare = gui.add_checkbox("Compare with photograph", False, hint="While the camera is at a view.")
        self.share = gui.add_slider("Photograph | render", 0.0, 1.0, 0.01, 0.5)
        show = latest(self._show)
        self.shown.on_update(lambda _: show())
        self.size.on_update(lambda _: self._resize())
        self.view.on_update(lambda event: self._go(event.client))
        self.steps.on_click(self._step)
        self.compare.on_update(lambda event: self._compare(event.client))
        self.share.on_update(lambda _: self._share())
        self.frusta: list[Any] = []

    def go(self, client: Any, number: int) -> None:
        """Moves a client to a photograph, which then is the chosen one."""
        if self._names[number] != self.view.value:
            self.view.value = self._names[number]
        self._stage.go_to_photograph(client, number)

    def clear_view(self) -> None:
        """Hides what a browser's camera stands in or right behind, which would cover its picture."""
        if not self.frusta:
            return
        cameras = [client.camera.position for client in self._stage.server.get_clients().values()]
        reach = 1.5 * self.size.value * self._stage.extent
        wanted = self.shown.value and not self.compare.value
        for frustum in self.frusta:
            near = any(float(np.linalg.norm(frustum.position - camera)) < reach for camera in cameras)
            visible = wanted and not near
            if frustum.visible != visible:
                frustum.visible = visible

    def _show(self) -> None:
        if self.shown.value and not self.frusta:
            self.frusta = [self._frustum(number) for number in range(len(self._names))]
        self.clear_view()

    def _frustum(self, number: int) -> Any:
        cameras, index = self._stage.photographs.camera(number)
        pose = cameras.c2w[index].cpu()
        width, height = cameras.size(index)
        frustum = self._stage.server.scene.add_camera_frustum(
            f"/cameras/{self._names[number]}",
            fov=viewpoint_of(cameras, index).fov,
            aspect=width / height,
            scale=self.size.value * self._stage.extent,
            thickness=1.5,
            thickness_units="screen",
            color=_COLORS.get(self._names[number].partition("/")[0], _OTHER_COLOR),
            image=self._stage.photographs.thumbnail(number, _THUMBNAIL, self._background).numpy(),
            format="jpeg",
            wxyz=wxyz_of(pose),
            position=pose[:3, 3].numpy(),
            visible=False,
        )
        frustum.on_click(lambda event: self.go(event.client, number))
        return frustum

    def _resize(self) -> None:
        for frustum in self.frusta:
            frustum.scale = self.size.value * self._stage.extent
        self.clear_view()

    def _go(self, client: Any) -> None:
        # Without a client the value was set here, by a click on a frustum or a button.
        if client is not None:
            self._stage.go_to_photograph(client, self._names.index(self.view.value))

    def _step(self, event: Any) -> None:
        offset = {"Previous": -1, "Go": 0, "Next": 1}[self.steps.value]
        self.go(event.client, (self._names.index(self.view.value) + offset) % len(self._names))

    def _compare(self, client: Any) -> None:
        self._stage.comparing = self.compare.value
        self._share()
        if client is not None and self.compare.value:
            self.go(client, self._names.index(self.view.value))
        self._stage.ask_for_all()
        self.clear_view()

    def _share(self) -> None:
        share = self.share.value if self.compare.value else 0.0
        self._stage.worker.look = replace(self._stage.worker.look, photo_share=share)


def _size(stage: Stage) -> float:
    """Returns the share of the scene's extent at which the frusta of neighbouring cameras stay apart."""
    apart = _SHARE_OF_SPACING * stage.photographs.spacing() / stage.extent
    return _SIZE_STEP * max(1, round(min(_LARGEST_AT_FIRST, apart) / _SIZE_STEP))
