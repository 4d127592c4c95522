"""The photographs of a scene, and the panel of their cameras."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from voxelfield.datasets.scene import Scene, Split
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.images import composite_background
from voxelfield.rendering.pixels import to_uint8
from voxelfield.training.cameras.camera_refinement import RefinedCameras
from voxelfield.viewer.pictures import viewpoint_of
from voxelfield.viewer.state import ViewerState

_THUMBNAIL_SIDE = 96
_COLORS = {"train": (40, 110, 220), "test": (220, 120, 30)}
_OTHER_COLOR = (120, 120, 120)


class Photographs:
    """All photographs of some splits, numbered from 0.

    Args:
        splits: Splits by name, with cameras in the frame in which the field was trained.

    Attributes:
        names: Names such as ``train/r_0``.
    """

    def __init__(self, splits: Mapping[str, Split]) -> None:
        self._items = [(split, index) for split in splits.values() for index in range(len(split))]
        self.names = [f"{name}/{view}" for name, split in splits.items() for view in split.names]

    @classmethod
    def of(cls, scene: Scene, names: Iterable[str], refined: RefinedCameras | None) -> Photographs:
        """Returns those of a scene.

        Args:
            scene: The scene.
            names: Names of splits; those that the scene does not have are ignored.
            refined: Cameras that training has refined, which the splits' cameras are made to follow.
        """
        splits = {name: scene.splits[name] for name in names if name in scene.splits}
        if refined is not None:
            splits = {name: refined.follow_split(split) for name, split in splits.items()}
        return cls(splits)

    def __len__(self) -> int:
        return len(self.names)

    def camera(self, number: int) -> tuple[Cameras, int]:
        """Returns the cameras of a photograph's split, and its index among them."""
        split, index = self._items[number]
        return split.cameras, index

    def thumbnail(self, number: int, side: int, background: Tensor) -> Tensor:
        """Returns a small copy, (h, w, 3) uint8.

        Args:
            number: Index of the photograph.
            side: Pixels of the longer side.
            background: (3,) colour behind transparent pixels, on the CPU.
        """
        split, index = self._items[number]
        image = composite_background(split.image(index), background).permute(2, 0, 1)[None]
        factor = side / max(image.shape[-2:])
        size = [max(1, round(factor * length)) for length in image.shape[-2:]]
        return to_uint8(F.interpolate(image, size, mode="area")[0].permute(1, 2, 0))


class CamerasPanel:
    """Frusta with photographs, and moving to one.

    Args:
        state: The page.
        photographs: At least one photograph.
    """

    def __init__(self, state: ViewerState, photographs: Photographs) -> None:
        self._state = state
        self._photographs = photographs
        self._building = threading.Lock()
        # Of many cameras around a scene, neighbours do not overlap.
        self._scale = state.extent * min(0.04, 0.6 / math.sqrt(len(photographs)))
        gui = state.server.gui
        self.shown = gui.add_checkbox("Show cameras", False, hint="Click one to go there.")
        self.view = gui.add_dropdown("Go to", tuple(photographs.names), initial_value=photographs.names[0])
        self.shown.on_update(state.callback(lambda _: self._show(), long=True))
        self.view.on_update(state.callback(self._go))
        self.frusta: list[Any] = []

    def update_visibility(self) -> None:
        """Hides frusta around a browser's camera, which would cover its picture."""
        cameras = [client.camera.position for client in self._state.server.get_clients().values()]
        for frustum in self.frusta:
            near = any(float(np.linalg.norm(frustum.position - camera)) < 1.5 * self._scale for camera in cameras)
            visible = self.shown.value and not near
            if frustum.visible != visible:
                frustum.visible = visible

    def _show(self) -> None:
        with self._building:
            if self.shown.value and not self.frusta:
                self.frusta = [self._frustum(number) for number in range(len(self._photographs))]
        self.update_visibility()

    def _frustum(self, number: int) -> Any:
        cameras, index = self._photographs.camera(number)
        name, (width, height) = self._photographs.names[number], cameras.size(index)
        frustum = self._state.add_frustum(
            f"/cameras/{name}",
            viewpoint_of(cameras, index),
            width / height,
            scale=self._scale,
            color=_COLORS.get(name.partition("/")[0], _OTHER_COLOR),
            image=self._photographs.thumbnail(number, _THUMBNAIL_SIDE, self._state.background).numpy(),
            format="jpeg",
            visible=False,
        )
        frustum.on_click(self._state.callback(lambda client: self._select(client, number)))
        return frustum

    def _select(self, client: Any, number: int) -> None:
        self.view.value = self._photographs.names[number]
        self._move(client, number)

    def _go(self, client: Any) -> None:
        # Without a client the value was set by a click at a frustum.
        if client is not None:
            self._move(client, self._photographs.names.index(self.view.value))

    def _move(self, client: Any, number: int) -> None:
        self._state.move(client, viewpoint_of(*self._photographs.camera(number), aspect=client.camera.aspect))
