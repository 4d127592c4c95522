"""The state of the page, which its panels share."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxelfield.rendering.cameras import Cameras, overview, reference_camera, up_direction
from voxelfield.training.trained_model import TrainedModel
from voxelfield.viewer.pictures import Viewpoint, content_box, viewpoint_of
from voxelfield.viewer.worker import PictureRequest, RenderWorker

logger = logging.getLogger(__name__)

_OVERVIEW_SIZE = 512


class ViewerState:
    """The scene on the page, and the connected clients.

    Args:
        server: viser's server.
        worker: Draws pictures.
        run: The field, or its state at the beginning of a training.
        first: Cameras, and the index of the one from which the field is seen first; None without photographs.

    Attributes:
        box: (2, 3) the part of space that matters, world units, on the CPU.
        extent: Diagonal of the box, world units.
        background: (3,) colour behind the scene, on the CPU.
        home: The initial viewpoint: the first photograph, the reference camera, or obliquely above the box.
        up: (3,) the direction that points up in the photographs.
        mode: The quantity that all clients see.
        rows: Largest height of pictures at rest, pixels.
    """

    def __init__(
        self, server: Any, worker: RenderWorker, run: TrainedModel, first: tuple[Cameras, int] | None = None
    ) -> None:
        self.server = server
        self.worker = worker
        self.box = content_box(run)
        self.extent = float((self.box[1] - self.box[0]).norm())
        self.background = run.model.background.cpu()
        size = (_OVERVIEW_SIZE, _OVERVIEW_SIZE)
        cameras, index = (reference_camera(run.model.warp, *size), 0) if first is None else first
        self.up = torch.tensor([0.0, 0.0, 1.0]) if cameras is None else up_direction(cameras).float().cpu()
        self.home = viewpoint_of(overview(self.box, *size) if cameras is None else cameras, index)
        self.mode, self.rows = "rgb", 800
        self._lock = threading.RLock()

    def callback(self, work: Callable[[Any], None], *, long: bool = False) -> Callable[[Any], None]:
        """Returns a callback for a control, which viser runs in a thread of its pool.

        Args:
            work: Called with viser's handle of the client, or None if the value was set here. A ValueError is shown to
                the client.
            long: Whether it takes long; other callbacks run one at a time, because they share the page.
        """

        def call(event: Any) -> None:
            try:
                with contextlib.nullcontext() if long else self._lock:
                    work(event.client)
            except Exception as error:
                if event.client is not None and isinstance(error, ValueError):
                    event.client.add_notification("This is not possible", str(error), color="red")
                else:
                    logger.error("viewer: a browser's request failed: %s: %s", type(error).__name__, error)

        return call

    def place(self, camera: Any, viewpoint: Viewpoint) -> None:
        """Gives one of viser's cameras a position, a direction and a field of view."""
        c2w = viewpoint.matrix.double()
        position, ahead = c2w[:3, 3].numpy(), -c2w[:3, 2]
        # Dragging rotates the camera about the point that it looks at.
        distance = max(float(ahead @ (self.box.double().mean(dim=0) - c2w[:3, 3])), 0.1 * self.extent)
        camera.position = position
        camera.look_at = position + distance * ahead.numpy()
        camera.fov = viewpoint.fov

    def move(self, client: Any, viewpoint: Viewpoint) -> None:
        """Moves the camera of a client."""
        with client.atomic():
            self.place(client.camera, viewpoint)
            client.camera.wxyz = wxyz_of(viewpoint.matrix)
        client.flush()

    def add_frustum(
        self, name: str, viewpoint: Viewpoint, aspect: float, on_click: Callable[[Any], None], **options: Any
    ) -> Any:
        """Draws a camera; returns viser's handle."""
        frustum = self.server.scene.add_camera_frustum(
            name,
            fov=viewpoint.fov,
            aspect=aspect,
            thickness=1.5,
            thickness_units="screen",
            wxyz=wxyz_of(viewpoint.matrix),
            position=viewpoint.matrix[:3, 3].numpy(),
            **options,
        )
        frustum.on_click(self.callback(on_click))
        return frustum

    def request(self, client: Any) -> None:
        """Requests the picture for the camera of a client."""
        camera = client.camera
        height = min(camera.image_height, self.rows)
        width = max(1, round(height * camera.image_width / camera.image_height))
        request = PictureRequest(viewpoint_of_camera(camera), self.mode, height, width)
        self.worker.request(client.client_id, request)

    def request_all(self) -> None:
        """Requests the pictures of all clients again, after :attr:`mode` or :attr:`rows` has changed."""
        for client in self.server.get_clients().values():
            self.request(client)


def viewpoint_of_camera(camera: Any) -> Viewpoint:
    """Returns the viewpoint of a viser camera, whose axes are x right, y down, z forward."""
    from viser import transforms

    c2w = torch.eye(4, dtype=torch.float64)
    c2w[:3, :3] = torch.from_numpy(transforms.SO3(np.asarray(camera.wxyz)).as_matrix())
    c2w[:3, 1:3] *= -1
    c2w[:3, 3] = torch.from_numpy(np.asarray(camera.position, dtype=np.float64))
    return Viewpoint.of(c2w, camera.fov)


def wxyz_of(c2w: Tensor) -> np.ndarray:
    """Returns the quaternion of a pose (4, 4) in the axes of viser's cameras."""
    from viser import transforms

    rotation = c2w[:3, :3].double().clone()
    rotation[:, 1:] *= -1
    quaternion: np.ndarray = transforms.SO3.from_matrix(rotation.numpy()).wxyz
    return quaternion
