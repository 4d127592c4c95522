"""State that all panels of the page share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from voxelfield.rendering.cameras import Cameras, up_direction
from voxelfield.viewer.drawing.photographs import Photographs
from voxelfield.viewer.drawing.viewpoint import Viewpoint, viewpoint_of
from voxelfield.viewer.page.poses import move_camera, viewpoint_of_camera
from voxelfield.viewer.scheduling.resolution import SMALLEST_SIDE
from voxelfield.viewer.scheduling.worker import RenderWorker, Request

DEFAULT_ROWS = 800


class Stage:
    """The scene as the page shows it, and the connected clients.

    Args:
        server: viser's server.
        worker: Draws.
        photographs: Photographs of the scene; there may be none.
        boxes: (2, 3) each on the CPU, the smallest first: what matters of the scene, and what is around, world units.
        reference: Camera of the first view if there are no photographs; None looks at the first box from outside.

    Attributes:
        box: The first of the boxes.
        rows: Height at which pictures are drawn at rest, at most, in pixels.
        comparing: Whether the photograph is laid over the picture where the camera stands where it was taken.
    """

    def __init__(
        self,
        server: Any,
        worker: RenderWorker,
        photographs: Photographs,
        boxes: Sequence[Tensor],
        reference: Cameras | None = None,
    ) -> None:
        self.server = server
        self.worker = worker
        self.photographs = photographs
        self.boxes = list(boxes)
        self._reference = reference
        self.box = self.boxes[0]
        self.rows = DEFAULT_ROWS
        self.comparing = False
        self._at: dict[int, int] = {}

    @property
    def extent(self) -> float:
        """Diagonal of the box, world units."""
        return float((self.box[1] - self.box[0]).norm())

    @property
    def cameras(self) -> Cameras | None:
        """Cameras of the first split with photographs, or None."""
        return self.photographs.camera(0)[0] if len(self.photographs) else None

    def up(self) -> Tensor:
        """Returns the direction (3,) that points up in the photographs or the reference camera; z without either."""
        cameras = self.cameras or self._reference
        return torch.tensor([0.0, 0.0, 1.0]) if cameras is None else up_direction(cameras).float().cpu()

    def home(self) -> Viewpoint:
        """Returns where a visitor starts: at the first photograph, the reference camera, or in front of the box."""
        if len(self.photographs):
            return viewpoint_of(*self.photographs.camera(0))
        if self._reference is not None:
            return viewpoint_of(self._reference, 0)
        middle = self.box.mean(dim=0)
        backward = torch.tensor([0.8, -0.8, 0.6])
        backward = backward / backward.norm()
        right = torch.linalg.cross(torch.tensor([0.0, 0.0, 1.0]), backward)
        right = right / right.norm()
        c2w = torch.eye(4)
        c2w[:3, :3] = torch.stack((right, torch.linalg.cross(backward, right), backward), dim=-1)
        c2w[:3, 3] = middle + 1.4 * self.extent * backward
        return Viewpoint.of(c2w, math.radians(45))

    def distance_ahead(self, viewpoint: Viewpoint) -> float:
        """Returns the distance from a camera to the point about which dragging rotates it, world units."""
        c2w = viewpoint.matrix
        ahead = float(-c2w[:3, 2] @ (self.box.mean(dim=0) - c2w[:3, 3]))
        return max(ahead, 0.1 * self.extent)

    def move(self, client: Any, viewpoint: Viewpoint) -> None:
        """Moves a client's camera."""
        move_camera(client, viewpoint, self.distance_ahead(viewpoint))

    def go_to_photograph(self, client: Any, number: int) -> None:
        """Moves a client's camera to where a photograph was taken, with all of it in view."""
        self._at[client.client_id] = number
        self.move(client, viewpoint_of(*self.photographs.camera(number), aspect=client.camera.aspect))

    def ask(self, client: Any) -> None:
        """Asks for the picture that a client's camera sees."""
        camera = client.camera
        viewpoint = viewpoint_of_camera(camera)
        height = min(camera.image_height, self.rows)
        width = max(SMALLEST_SIDE, round(height * camera.image_width / camera.image_height))
        self.worker.ask(client.client_id, Request(viewpoint, height, width, self._photo(client.client_id, viewpoint)))

    def ask_for_all(self) -> None:
        """Asks for every client's picture again, after a setting has changed that a request depends on."""
        for client in self.server.get_clients().values():
            self.ask(client)

    def is_connected(self, client: Any) -> bool:
        """Tells whether a client is still there."""
        return client.client_id in self.server.get_clients()

    def photograph_of(self, client: Any) -> int | None:
        """Returns the number of the photograph that a client went to last."""
        return self._at.get(client.client_id)

    def leave(self, client: Any) -> None:
        """Forgets a client."""
        self._at.pop(client.client_id, None)
        self.worker.forget(client.client_id)

    def _photo(self, who: int, viewpoint: Viewpoint) -> int | None:
        number = self._at.get(who)
        if not self.comparing or number is None:
            return None
        return number if self.photographs.seen_from(number, viewpoint.matrix, self.extent) else None
